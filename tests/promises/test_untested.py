"""A task without test data: trained and resumed as any other, without evaluations, a best checkpoint or metrics."""

import re
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.processes import evenkeel, read, records
from tests.support.small_runs import OWN, interrupt, job, own_task, refusal, starts, the_line, trained, weights_of

UNTESTED = """
best = ("loss", "min")

def test_dataset(self):
    return None
"""


def untested(folder: Path, run_dir: Path, *more: object) -> list[str]:
    words = job(run_dir, "--reduce", "tree", *more)
    return [*words, "--task", own_task(folder, UNTESTED)]  # the last of an option counts


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OWN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_it_is_killed_and_finished_on_another_number_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    """Also in mid-epoch, and after the step at which an evaluation would be due."""
    run_dir, hold = tmp_path / "run", tmp_path / "hold"
    words = untested(tmp_path, run_dir, "--pause", 0.05, "--hold", hold, "--eval-every", 4, "--checkpoint-every", 2)
    interrupt(2, run_dir, words, step=9, slow=hold)
    trained(1, words)
    assert starts(run_dir)[1] >= 8
    assert (read(run_dir)["state"], read(run_dir)["metrics"], read(run_dir)["step"]) == ("finished", {}, 27)
    assert not records(run_dir, "eval")
    assert len(list(run_dir.glob("checkpoints/step-*"))) == 2, "the newest two, and no best one"
    done = trained(0, untested(tmp_path, tmp_path / "plain"))
    assert re.search(r"finished in [^:]*  -> ", done[0].stdout), done[0].stdout
    assert weights_of(run_dir) == weights_of(tmp_path / "plain")

    assert "nothing to evaluate on" in refusal([*words, "--eval-only"])
    needs.command("predict")
    told = evenkeel("predict", run_dir, "--set", "test", "--output", tmp_path / "out.csv", expect=2)
    assert "--set test: the task has no such set; it has train" in the_line(told.stderr)


@pytest.mark.parametrize("option", ["--patience 3", "--eval-only"])
def test_what_needs_an_evaluation_is_refused_in_a_line(tmp_path: Path, option: str) -> None:
    line = refusal(untested(tmp_path, tmp_path / "run", *option.split()))
    assert line.startswith(f"{option}: there is nothing to evaluate on, because test_dataset() returned None; ")
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_with_a_share_of_the_training_data_it_is_validated(tmp_path: Path, run_dir: Path) -> None:
    trained(0, untested(tmp_path, run_dir, "--validation", 0.2, "--patience", 9))
    assert read(run_dir)["metrics"].keys() == {"validation/loss"}
