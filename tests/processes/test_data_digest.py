"""A few samples of each data set, compared among ranks and with the run: what must be noticed, and what must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import needs
from tests.support.processes import TRAIN, read, records, run_forked
from tests.support.small_runs import failed, odd_job, the_line, trained


@needs.no_gpu
def test_ranks_that_split_on_import_are_told_so_and_those_with_own_dice_go_on(tmp_path: Path) -> None:
    for task in ("Drawn", "DrawnAtEachRead"):
        first, _ = trained(2, odd_job(task, tmp_path / task, "--max-steps", 1))
        assert ("the training and test data differs each time" in first.stderr) == (task == "DrawnAtEachRead")
        first, _ = trained(2, odd_job(task, tmp_path / task, "--max-steps", 1))  # it is finished
        assert "--fresh starts over" in first.stdout
        assert len(read(tmp_path / task, "status.json")["digests"]) == (0 if task == "DrawnAtEachRead" else 2)
    refused, _ = failed(2, odd_job("DrawnOnImport", tmp_path / "run"), code=2)
    assert "the training data of rank 1 differs from rank 0's, although it has as many" in the_line(refused.stderr)
    assert not (tmp_path / "run" / "status.json").exists()


def test_what_is_another_at_each_read_is_known_at_each_start_beside_a_set_that_is_not(tmp_path: Path) -> None:
    for steps in (1, 2):
        options = ["--max-steps", steps, "--schedule", "constant"]
        done = run_forked(TRAIN, *odd_job("TrainingDrawnAtEachRead", tmp_path / "run", *options))
        assert "the training data differs each time" in done.stderr
        assert [*read(tmp_path / "run", "status.json")["digests"]] == ["test"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_with_its_data_or_with_other_data_that_is_meant(tmp_path: Path, workers: int) -> None:
    def attempt(task: str, steps: int, *more: object, expect: int = 0) -> str:
        options = ["--max-steps", steps, "--schedule", "constant", "--num-workers", workers, *more]
        return run_forked(TRAIN, *odd_job(task, tmp_path / "run", *options), expect=expect).stderr

    attempt("DrawnOnImport", 1)
    known = read(tmp_path / "run", "status.json")
    refused = the_line(attempt("DrawnOnImport", 2, expect=2))
    assert refused.startswith(f"--run-dir {tmp_path / 'run'}: the training data has changed, although it has")
    assert refused.endswith("add --other-data")
    assert read(tmp_path / "run", "status.json") == known, "nothing has been touched"
    assert "WARNING: --other-data: the training data has changed" in attempt("DrawnOnImport", 2, "--other-data")
    assert read(tmp_path / "run", "status.json")["digests"] != known["digests"]
    attempt("DrawnOnImport", 3, "--fresh")
    # of an earlier version
    status = tmp_path / "run" / "status.json"
    status.write_text(status.read_text().replace('"digests"', '"unknown"'))
    attempt("DrawnOnImport", 4)
    assert read(tmp_path / "run", "status.json")["digests"]


CHANGED = "samples of the training data are not what they were when the job began"


@needs.no_gpu
@pytest.mark.parametrize(("ranks", "workers"), [(0, 0), (0, 1), (2, 1)])
def test_data_that_the_loss_changes_ends_the_run(tmp_path: Path, ranks: int, workers: int) -> None:
    job = odd_job("Fills", tmp_path / "run", "--num-workers", workers)
    first, *others = failed(ranks, job)
    assert the_line(first.stderr).startswith(CHANGED)
    assert not any(done.stderr for done in others)
    assert read(tmp_path / "run", "status.json")["step"] == 1


def test_the_control_such_a_result_depends_on_the_loader_processes(tmp_path: Path) -> None:
    """Which is accepted with --other-data, with one warning."""
    losses = set()
    for workers in (0, 1):
        options = ["--num-workers", workers, "--other-data", "--log-every", 1]
        done = run_forked(TRAIN, *odd_job("Fills", tmp_path / str(workers), *options))
        assert [line for line in done.stderr.splitlines() if CHANGED in line] == [
            f"evenkeel: WARNING: --other-data: {CHANGED}"
        ]
        losses.add(records(tmp_path / str(workers), "train")[-1]["train/loss"])
    assert len(losses) == 2
