"""`bisect` of two runs that should be the same: the step, the tensor and the operation at which they part."""

import json
import random
import signal
from pathlib import Path

import pytest

from evenkeel.data.sampler import ElasticSampler
from tests.support.processes import ROOT, TRAIN, bytes_of, finish_all, fork_ranks, records, run_forked
from tests.support.small_runs import options, signal_ranks_at
from tests.time_travel.part_task import RARE

TASK = f"{ROOT / 'tests' / 'time_travel' / 'part_task.py'}:Parting"
BATCH, MICRO, STEPS = 10, 4, 40
SHAPE = f"--batch-size {BATCH} --micro-batch {MICRO} --epochs 2 --reduce tree --log-every 1 --eval-every 1".split()


def job(folder: Path, name: str, *more: object) -> list[str]:
    return options(TASK, folder / name, *SHAPE, "--keep-every", 8, *more)


def bisect(a: Path, b: Path, *more: object, expect: int = 1) -> dict:
    done = run_forked("-m", "evenkeel", "bisect", a, b, "--json", *more, expect=expect)
    return json.loads(done.stdout)


def rare_step() -> int:
    """The first step, counted from 1, that uses the rare sample."""
    sampler = ElasticSampler(range(200), BATCH, MICRO, num_replicas=1, rank=0)
    return next(number for number, part in enumerate(sampler) if RARE in part) // -(-BATCH // MICRO) + 1


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_forked(TRAIN, *job(folder, "a"))
    return folder / "a"


@pytest.mark.promise
def test_one_bit_of_one_weight(usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flipped = random.Random(3).randrange(10, 30)
    monkeypatch.setenv("FLIP", str(flipped))
    run_forked(TRAIN, *job(tmp_path, "b", "--keep-every", 1))
    monkeypatch.delenv("FLIP")
    before = bytes_of(usual), bytes_of(tmp_path)
    found = bisect(usual, tmp_path / "b")
    assert (bytes_of(usual), bytes_of(tmp_path)) == before, "nothing in the runs changes"
    assert (found["suspect"], found["since"], found["step"]) == (str(tmp_path / "b"), flipped - 1, flipped)
    assert found["tensors"] == "1 of 16 tensors differ:\n  model.3.weight"
    assert found["segments"] <= 2 + 2
    text = run_forked("-m", "evenkeel", "bisect", usual, tmp_path / "b", expect=1).stdout
    assert f"{tmp_path / 'b'} has recorded another state after step {flipped}; its memory, its GPU or" in text
    # the control: their logged losses do not show it at that step, if at all
    first, second = ({it["step"]: it["train/loss"] for it in records(it, "train")} for it in (usual, tmp_path / "b"))
    assert next((step for step in first if first[step] != second[step]), STEPS) > flipped


def test_another_option_is_found_at_the_step_and_operation_where_it_first_counts(usual: Path, tmp_path: Path) -> None:
    run_forked(TRAIN, *job(tmp_path, "b", "--scale", 1.001))
    found = bisect(usual, tmp_path / "b")
    assert (found["since"], found["step"]) == (rare_step() - 1, rare_step())
    assert found["operation"].startswith("the output of 3 (Linear) in micro-batch ")
    assert found["causes"] == ["  --scale: 1.0 | 1.001"]
    assert found["segments"] == 4
    assert found["suspect"] == ""


def test_equal_runs_need_one_comparison(usual: Path, tmp_path: Path) -> None:
    ranks = fork_ranks(3, TRAIN, *job(tmp_path, "b", "--keeper", "off"))
    signal_ranks_at(5, tmp_path / "b", ranks, signal.SIGKILL)
    finish_all(fork_ranks(2, TRAIN, *job(tmp_path, "b")))
    found = bisect(usual, tmp_path / "b", expect=0)
    assert (found["equal"], found["compared"], found["segments"]) == (True, 1, 0)
    done = run_forked("-m", "evenkeel", "bisect", usual, tmp_path / "b")
    both = "the last that both have recorded (1 recorded state compared)"
    assert done.stdout == f"no difference at step {STEPS}, {both}\n"


def test_what_cannot_be_compared_is_refused_in_a_line(usual: Path, tmp_path: Path) -> None:
    run_forked(TRAIN, *options(TASK, tmp_path / "b", *SHAPE, "--max-steps", 3))
    for other, line in {
        tmp_path / "none": f"{tmp_path / 'none'}: is not a run directory",
        tmp_path / "b": f"{usual} {tmp_path / 'b'}: no state of the same step is recorded; train with --keep-every N",
    }.items():
        done = run_forked("-m", "evenkeel", "bisect", usual, other, expect=2)
        assert line in done.stderr
        assert done.stdout == ""
