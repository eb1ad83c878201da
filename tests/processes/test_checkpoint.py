"""The state on disk: whole or absent, whatever happens while it is written."""

import contextlib
import socket
import sys
from pathlib import Path

from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance
from tests.promises import test_shard
from tests.run.test_checkpoint import (
    disk,  # noqa: F401  (a fixture)
    steps,
)
from tests.support import needs
from tests.support.needs import small_disk
from tests.support.processes import TRAIN, read, records, run
from tests.support.small_runs import failed, trained


def test_a_run_on_a_full_disk_goes_on_loudly_and_does_not_finish(tmp_path: Path) -> None:
    """There is room for one checkpoint and not for two."""
    with small_disk(tmp_path / "disk", "600k") as folder:
        run_dir = folder / "run"
        options = ["--run-dir", run_dir, "--max-steps", 40, "--checkpoint-every", 10, "--wandb", "disabled"]
        done = run([sys.executable, TRAIN, *options], expect=None)
        reported = [line for line in done.stderr.splitlines() if "NO CHECKPOINT at step" in line]
        assert reported[0] == (
            "evenkeel: ERROR: NO CHECKPOINT at step 20: [Errno 28] No space left on device; "
            "training goes on, the last one is at step 10; "
            f"the disk of {run_dir / 'checkpoints'} is full: none can be written until you free space"
        )
        assert len(reported) == 1, "and then every ten minutes"
        assert [record["step"] for record in records(run_dir, "train")] == [10, 20, 30, 40]
        assert [record["step"] for record in records(run_dir, "checkpoint_failed")][:2] == [20, 23]
        assert records(run_dir, "eval")[-1]["step"] == 40
        checkpoints = Checkpoints(run_dir / "checkpoints", keep=2, provenance=Provenance(("test/accuracy", "max")))
        assert steps(checkpoints) == [10]
        assert (checkpoints.load_newest() or {})["step"] == 10, "it keeps what it had"
        # it cannot save its end, and says so in a line
        assert done.returncode not in (0, 2, 75)
        assert "No space left on device" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert read(run_dir, "status.json")["state"] == "failed"
        assert not [name for name in ("summary.json", "model.pt") if (run_dir / name).exists()]


def test_a_run_that_finds_no_room_for_its_end_is_not_trained_again(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "300k") as folder:
        options = ["--run-dir", folder / "run", "--max-steps", 5, "--checkpoint-every", 0, "--wandb", "disabled"]
        launcher = [sys.executable, "launch/single_node.py", "-g", "1", "--max-restarts", "2", "--"]
        said = run([*launcher, *options], expect=2).stderr
        assert said.count("not finished: step 5 cannot be written: [Errno 28]") == 1
        assert len(records(folder / "run", "start")) == 1


@needs.sharding
def test_no_rank_of_a_sharded_run_ends_by_a_traceback_if_its_last_checkpoint_finds_no_room(tmp_path: Path) -> None:
    with small_disk(tmp_path, "140k") as folder:
        printed = "".join(rank.stderr for rank in failed(2, test_shard.job(folder / "run")))
        assert "evenkeel: not finished: step 6 cannot be written: [Errno 28]" in printed
        assert "Traceback" not in printed


def test_a_start_on_a_full_disk_ends_in_a_line_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path, "2m") as folder:
        run_dir = folder / "run"
        options = ["--run-dir", run_dir, "--wandb", "disabled", "--schedule", "constant", "--width", 2]
        trained(2, [*options, "--max-steps", 2])
        with (folder / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        ended = failed(2, [*options, "--max-steps", 4])
        (line,) = "".join(rank.stderr for rank in ended).splitlines()
        assert line == (
            f"evenkeel: --run-dir {run_dir}: cannot be written on {socket.gethostname()}: No space left on device; "
            "free space or fix that, and run the same command again"
        )
        launcher = [sys.executable, "launch/single_node.py", "-g", "1", "--max-restarts", "2", "--"]
        said = run([*launcher, *options, "--max-steps", 4], expect=2).stderr
        assert said.count("cannot be written on") == 1, "not tried again"
        (folder / "filler").unlink()
        trained(2, [*options, "--max-steps", 4])
        assert read(run_dir)["step"] == 4
        assert records(run_dir, "start")[-1]["step"] == 2


def test_why_a_start_failed_is_recorded(tmp_path: Path) -> None:
    """It says "running" since `Attempt.begin`, and without a reason the next starts would blame the memory."""
    run_dir = tmp_path / "run"
    options = ["--run-dir", run_dir, "--wandb", "disabled", "--max-steps", 2]
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "attempt-0001").touch()
    (ended,) = failed(0, options)
    status = read(run_dir, "status.json")
    assert (status["state"], f"evenkeel: {status['reason']}\n") == ("failed", ended.stderr)
    assert "cannot be written on" in ended.stderr
