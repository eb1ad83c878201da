"""The schedule of faults, and the disk that is filled."""

import errno
import os
import shutil
import tempfile
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from evenkeel.cli.chaos.faults import KINDS, Fault, Missed, fill_disk, schedule, strike
from evenkeel.cli.chaos.job import Job
from tests.support.chaos import free

FIRST = 200


def first(seed: int, count: int = FIRST, kinds: tuple[str, ...] = KINDS, every: float = 20) -> list[Fault]:
    return list(islice(schedule(kinds, every, seed), count))


def test_the_same_seed_gives_the_same_faults_in_the_same_order() -> None:
    assert first(7) == first(7)
    assert first(7)[:9] == first(7, count=9)
    assert first(7) != first(8)


def test_all_kinds_come_at_intervals_around_the_asked_one() -> None:
    faults = first(0)
    assert set(Counter(fault.kind for fault in faults)) == set(KINDS)
    assert all(10 <= fault.after <= 30 for fault in faults)
    assert 18 < sum(fault.after for fault in faults) / FIRST < 22
    assert all(0 <= fault.victim < 1 and 0 <= fault.amount < 1 for fault in faults)


def test_what_there_is_to_hit_does_not_change_what_comes_next(tmp_path: Path) -> None:
    """A fault that finds nothing is missed, and says what is missing."""
    job = Job(["true"])
    expected = {"truncate": "checkpoint", "kill": "rank", "term": "rank", "stop": "rank", "agent": "agent"}
    for kind, missing in expected.items():
        with pytest.raises(Missed, match=missing):
            strike(Fault(kind, 0, 0.5, 0.5), job, tmp_path, print)


@pytest.mark.parametrize("amount", [0.0, 0.5, 0.99])
def test_truncate_cuts_the_newest_complete_checkpoint(tmp_path: Path, amount: float) -> None:
    for name in ("step-00000002", "step-00000010", ".step-00000011.tmp", "damaged-step-00000012-1"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "state.pt").write_bytes(bytes(1000))
    said: list[str] = []
    strike(Fault("truncate", 0, 0, amount), Job(["true"]), tmp_path, said.append)
    sizes = {path.parent.name: path.stat().st_size for path in tmp_path.glob("checkpoints/*/state.pt")}
    assert sizes.pop("step-00000010") == int(1000 * amount)
    assert set(sizes.values()) == {1000}
    assert said == [f"step-00000010, 1000 bytes to {int(1000 * amount)}"]
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000002")
    with pytest.raises(Missed, match="no two checkpoints yet"):  # the run could not go on without it
        strike(Fault("truncate", 0, 0, amount), Job(["true"]), tmp_path, said.append)


def test_a_filled_disk_takes_nothing_more_and_is_as_before_when_the_file_is_closed(small_disk: Path) -> None:
    before = free(small_disk)
    assert before > 7 << 20
    with tempfile.TemporaryFile(dir=small_disk) as file:
        fill_disk(file.fileno())
        assert free(small_disk) == 0
        assert list(small_disk.iterdir()) == [], "it has no name that could stay behind"
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (small_disk / "more").write_bytes(bytes(5000))
    (small_disk / "more").unlink()
    assert free(small_disk) == before
