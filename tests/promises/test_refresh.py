"""Data that the model makes is made again at a resume in mid-epoch, on any number of ranks."""

import os
import signal
from pathlib import Path

import pytest

from evenkeel.run.manifest import load, step_folders
from tests.support import needs
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, records, run_forked, start, torchrun, wait_until
from tests.support.small_runs import SUPPORT, ended, failed, interrupt, options, trained, weights_of

EPOCHS, STEPS = 3, 9
"""Steps of an epoch."""


def job(name: str, run_dir: Path, *more: object) -> list[str]:
    shape = ["--epochs", EPOCHS, "--batch-size", 12, "--micro-batch", 3, "--reduce", "tree", "--log-every", 1]
    return options(f"{SUPPORT / 'refreshed_task.py'}:{name}", run_dir, *shape, *more)


def read_in(folder: Path) -> set[str]:
    """All that was read for the training, as "epoch sample target"."""
    return {line for path in folder.iterdir() for line in path.read_text().splitlines()}


def recorded(name: str, tmp_path: Path, *more: object) -> list[str]:
    (tmp_path / f"{name} read").mkdir()
    return job("Refreshed", tmp_path / name, "--record", tmp_path / f"{name} read", *more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `Refreshed` in one process, in "alone", and what it has read, in "alone read"."""
    folder = tmp_path_factory.mktemp("refreshed")
    trained(0, recorded("alone", folder))
    return folder


@pytest.mark.slow
def test_killed_in_mid_epoch_it_goes_on_with_the_same_data_on_any_ranks(tmp_path: Path, alone: Path) -> None:
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    words = recorded("run", tmp_path, "--slow", slow, "--keeper", "off", "--num-workers", 1)
    interrupt(2, run_dir, words, STEPS + 4, victims=1, slow=slow)
    interrupt(3, run_dir, words, 2 * STEPS + 3, signal.SIGTERM, slow=slow)
    trained(0, words)
    _, second, third = runs.starts(run_dir)
    assert STEPS < second < 2 * STEPS < third < 3 * STEPS, "in the middle of epochs"
    read = read_in(tmp_path / "run read")
    assert read == read_in(alone / "alone read")
    assert len(read) == EPOCHS * 101
    assert weights_of(run_dir) == weights_of(alone / "alone")
    found, expected = (load(step_folders(folder / "checkpoints")[-1]) for folder in (run_dir, alone / "alone"))
    assert str(found["refresh"]) == str(expected["refresh"])


@pytest.mark.slow
@pytest.mark.parametrize("way", [needs.long(("--place", "0=0,3=1")), ("--model-parallel", 2)], ids=["placed", "cut"])
def test_a_model_on_several_devices_makes_the_same_data(tmp_path: Path, alone: Path, way: tuple[object, ...]) -> None:
    """refresh() gets a copy of it, whose networks must be on the same devices."""
    trained(2, recorded("placed", tmp_path, *way))
    assert read_in(tmp_path / "placed read") == read_in(alone / "alone read")
    assert weights_of(tmp_path / "placed") == weights_of(alone / "alone")


@pytest.mark.slow
def test_the_control_made_from_the_present_weights_it_is_other_data(tmp_path: Path) -> None:
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    words = job("OfPresentWeights", run_dir, "--slow", slow, "--keeper", "off")
    interrupt(1, run_dir, words, STEPS + 4, signal.SIGTERM, slow=slow)
    trained(0, job("OfPresentWeights", tmp_path / "alone"))
    line = "evenkeel: refresh() made other data for epoch 1 than when that epoch began; make it of the model, the epoch"
    assert line in failed(2, words)[0].stderr
    trained(2, [*words, "--other-data"])
    assert weights_of(run_dir) != weights_of(tmp_path / "alone")


@pytest.mark.slow
def test_ranks_that_start_again_in_place_find_it_in_memory(tmp_path: Path, alone: Path) -> None:
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    slow.touch()
    process = start(torchrun(2, TRAIN, *job("Refreshed", run_dir, "--slow", slow, "--keeper", "on")))
    runs.wait_for_step(run_dir, STEPS + 3, process)
    os.kill(runs.workers_of(process)[1], signal.SIGKILL)
    runs.wait_for_start(run_dir, 2)
    slow.unlink()
    ended(process)
    assert "which was in memory" in "".join(path.read_text() for path in (run_dir / "logs").rglob("*.log"))
    assert weights_of(run_dir) == weights_of(alone / "alone")


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_is_made_again_costs_nothing(tmp_path: Path) -> None:
    """The other one saves the task's state of the present step, although refresh() gets that of the epoch's first."""
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    hold, held = Path(f"{slow}.hold"), Path(f"{slow}.held-0")
    slow.touch()
    process = start(torchrun(2, TRAIN, *job("Summing", run_dir, "--slow", slow, "--keeper", "on")))
    runs.wait_for_step(run_dir, STEPS + 3, process)
    hold.touch()
    with runs.locked(run_dir):  # a slow disk, which does not have the step yet
        os.kill(runs.workers_of(process)[1], signal.SIGKILL)
        wait_until(held.exists, "refresh() of the second attempt")
        os.kill(runs.workers_of(process)[1], signal.SIGKILL)
        wait_until(lambda: len(records(run_dir, "stop") + records(run_dir, "failure")) == 2, "its end")
    hold.unlink()
    slow.unlink()
    ended(process)
    assert runs.starts(run_dir)[1] == runs.starts(run_dir)[2] > STEPS
    trained(0, job("Summing", tmp_path / "alone"))
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("ByRank", "refresh() made other data for epoch 0 on rank 1 than on rank 0; make it of the model, the epoch"),
        ("Short", "refresh() returned 100 samples and train_dataset() has 101: all epochs of a run have one length"),
    ],
)
def test_data_that_does_not_fit_ends_the_run_in_a_line(tmp_path: Path, name: str, line: str) -> None:
    assert f"evenkeel: {line}" in failed(2, job(name, tmp_path / "run"))[0].stderr
    assert runs.told_step(tmp_path / "run") == 0


def test_a_run_without_it_gets_it_at_the_next_epoch_and_loses_it_in_none(tmp_path: Path) -> None:
    def train(base: str, steps: int, expect: int = 0) -> str:
        (tmp_path / "own.py").write_text(f"from tests.support import refreshed_task as r\n\nOwn = r.{base}\n")
        words = ["--batch-size", 12, "--schedule", "constant", "--max-steps", steps, "--log-every", 1]
        return run_forked(TRAIN, *options(f"{tmp_path / 'own.py'}:Own", tmp_path / "run", *words), expect=expect).stderr

    train("Plain", 4)
    assert "older than the task's refresh(): it is called from the next epoch on" in train("Refreshed", 20)
    plain = options(f"{SUPPORT / 'refreshed_task.py'}:Plain", tmp_path / "plain", "--batch-size", 12)
    trained(0, [*plain, "--schedule", "constant", "--max-steps", 20, "--log-every", 1])
    losses = [[it["train/loss"] for it in records(tmp_path / name, "train")] for name in ("run", "plain")]
    assert losses[0][:STEPS] == losses[1][:STEPS]
    assert losses[0][STEPS:] != losses[1][STEPS:]
    assert "made by refresh(), which the task no longer has; restore it" in train("Plain", 22, expect=1)
