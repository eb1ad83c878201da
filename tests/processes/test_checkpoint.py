"""The state on disk: whole or absent, whatever happens while it is written."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.run.checkpoint import Checkpoints
from tests.run.test_checkpoint import (
    disk,  # noqa: F401  (a fixture)
    steps,
)
from tests.support.needs import small_disk
from tests.support.processes import TRAIN, finish, finish_all, fork_ranks, read, records, run


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.CompletedProcess[str], Path]]:
    """A run on a disk with room for one checkpoint and not for two."""
    with small_disk(tmp_path_factory.mktemp("disk"), "600k") as folder:
        run_dir = folder / "run"
        options = ["--run-dir", run_dir, "--max-steps", 40, "--checkpoint-every", 10, "--wandb", "disabled"]
        yield run([sys.executable, str(TRAIN), *map(str, options)], expect=None), run_dir


def test_a_run_on_a_full_disk_goes_on_loudly_and_keeps_what_it_had(full_disk: Any) -> None:
    done, run_dir = full_disk
    reported = [line for line in done.stderr.splitlines() if "NO CHECKPOINT at step" in line]
    assert reported[0] == (
        "evenkeel: ERROR: NO CHECKPOINT at step 20: [Errno 28] No space left on device; "
        "training goes on, the last one is at step 10"
    )
    assert "NO CHECKPOINT at step 30" in reported[2]
    assert [record["step"] for record in records(run_dir, "train")] == [10, 20, 30, 40]
    assert [record["step"] for record in records(run_dir, "checkpoint_failed")][:2] == [20, 23]
    assert records(run_dir, "eval")[-1]["step"] == 40
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=2, best=("accuracy", "max"))
    assert steps(checkpoints) == [10]
    found = checkpoints.load_newest()
    assert found
    assert found["step"] == 10


def test_a_start_on_a_full_disk_ends_in_a_line_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path, "2m") as folder:
        run_dir = folder / "run"
        options = ["--run-dir", run_dir, "--wandb", "disabled", "--schedule", "constant", "--width", 2]
        finish_all(fork_ranks(2, TRAIN, *options, "--max-steps", 2))
        with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        ended = [finish(rank) for rank in fork_ranks(2, TRAIN, *options, "--max-steps", 4)]
        assert [rank.returncode for rank in ended] == [1, 1]
        (line,) = "".join(rank.stderr for rank in ended).splitlines()
        assert line == (
            f"evenkeel: --run-dir {run_dir}: cannot be written on {socket.gethostname()}: No space left on device; "
            "make room or mend that, and run the same command again"
        )
        (folder / "filler").unlink()
        finish_all(fork_ranks(2, TRAIN, *options, "--max-steps", 4))
        assert read(run_dir)["step"] == 4
        assert records(run_dir, "start")[-1]["step"] == 2


def test_a_run_that_cannot_save_its_end_is_not_finished(full_disk: Any) -> None:
    done, run_dir = full_disk
    assert done.returncode not in (0, 2, 75)
    assert "No space left on device" in done.stderr.splitlines()[-1]
    assert read(run_dir, "status.json")["state"] != "finished"
    assert not (run_dir / "summary.json").exists()
    assert not (run_dir / "model.pt").exists()


def test_a_run_that_cannot_save_its_end_says_so_in_a_line(full_disk: Any) -> None:
    done, run_dir = full_disk
    assert "Traceback" not in done.stderr
    assert read(run_dir, "status.json")["state"] == "failed"
