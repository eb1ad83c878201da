"""The commands on the files of a sharded run of two ranks: they answer as of a run that is not divided."""

from pathlib import Path

import pytest

from tests.support import needs
from tests.support.processes import evenkeel, read
from tests.support.small_runs import evaluation_of, job_of, trained, weights_of

pytestmark = [needs.sharding, pytest.mark.slow]

SHAPE = "--epochs 2 --batch-size 20 --micro-batch 3 --reduce tree --checkpoint-every 2 --keep 3 --log-every 1"
job = job_of("sharded_task.py:Predicted", SHAPE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with the same bits: divided among 2 and 3 ranks, and not divided; 6 steps."""
    made = tmp_path_factory.mktemp("runs")
    for ranks, name, shard in ((2, "two", "on"), (3, "three", "on"), (1, "whole", "off")):
        trained(ranks, job(made / name, "--shard", shard))
    return made


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["compare", "two", "three"], "the weights at the end, step 6, are equal"),
        (["checkpoint", "list", "two"], "6  checkpoint"),
        (["checkpoint", "inspect", "two"], "state-1-of-2.pt"),
        (["checkpoint", "verify", "two"], "step-00000006: ok"),
        (["status", "two"], "finished"),
        (["replay", "two", "--step", "5"], "agrees in every digit of the logged loss"),
    ],
    ids=lambda it: "-".join(it) if isinstance(it, list) else "",
)
def test_a_command_says_what_is_expected(folder: Path, words: list[str], expected: str) -> None:
    needs.command(words[0])
    said = evenkeel(*(folder / word if word in ("two", "three") else word for word in words)).stdout
    assert expected in said


def test_two_runs_on_other_ranks_have_no_difference(folder: Path) -> None:
    needs.command("bisect")
    assert "no difference" in evenkeel("bisect", folder / "two", folder / "three").stdout


def test_files_made_of_it_are_those_of_a_run_that_is_not_divided(folder: Path) -> None:
    assert weights_of(folder / "two") == weights_of(folder / "whole")
    needs.command("predict")
    needs.command("checkpoint")
    found: dict[str, list[bytes]] = {"predict": [], "export": []}
    for name in ("two", "whole"):
        csv, exported = folder / f"{name}.csv", folder / f"{name}.pt"
        evenkeel("predict", folder / name, "--set", "test", "-o", csv)
        evenkeel("checkpoint", "export", folder / name, "-o", exported)
        found["predict"].append(csv.read_bytes())
        found["export"].append(exported.read_bytes())
    for of_two, of_whole in found.values():
        assert of_two == of_whole


@pytest.mark.parametrize(("ranks", "more"), [(2, ["--shard", "on"]), (1, ["--shard", "off"])])
def test_its_weights_are_evaluated_as_in_the_run(folder: Path, tmp_path: Path, ranks: int, more: list) -> None:
    expected = read(folder / "two")["metrics"]
    own = evaluation_of(trained(ranks, job(folder / "two", "--eval-only", *more))[0])
    taken = evaluation_of(trained(ranks, job(tmp_path / "new", "--eval-only", "--init-from", folder / "two", *more))[0])
    assert own["metrics"] == taken["metrics"] == expected, "bit for bit"
