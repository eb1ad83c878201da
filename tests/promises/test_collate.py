"""A task's own collate function: the same bits on any ranks and loader processes, over a stop; and its mistakes."""

import textwrap
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.components import has
from tests.support.processes import ROOT, TRAIN, finish_all, fork_ranks, records, run_forked
from tests.support.readme import blocks
from tests.support.small_runs import SUPPORT, evaluation_of, interrupt, options, refusal, trained, weights_of

TASKS = SUPPORT / "ragged_task.py"
SHOWN = [block for block in blocks("python", (ROOT / "docs" / "tasks.md").read_text()) if "def collate(" in block]

LOSSES = ("test/loss", "validation/loss")


def task(name: str, folder: Path) -> str:
    """The value of --task; `Boxes` and `Texts` get the function that docs/tasks.md shows."""
    if name not in ("Boxes", "Texts"):
        return f"{TASKS}:{name}"
    detection, texts = SHOWN
    body = textwrap.indent(detection if name == "Boxes" else texts, "    ")
    imports = "import torch\nfrom torch.nn.utils.rnn import pad_sequence\nfrom tests.support import ragged_task\n"
    (folder / "shown.py").write_text(f"{imports}\n\nclass {name}(ragged_task.{name}):\n{body}")
    return f"{folder / 'shown.py'}:{name}"


def job(name: str, run_dir: Path, *more: object) -> list[str]:
    shape = ["--epochs", 2, "--batch-size", 12, "--micro-batch", 3, "--reduce", "tree", "--log-every", 1]
    return options(task(name, run_dir.parent), run_dir, *shape, "--validation", 0.1, *more)


@pytest.mark.parametrize("name", ["Boxes", "Nested", *(needs.slow(name) for name in ("Texts", "Mixed"))])
def test_ranks_loader_processes_a_stop_and_a_resize_change_no_bit(tmp_path: Path, name: str) -> None:
    slow, run_dir, plain = tmp_path / "slow", tmp_path / "run", tmp_path / "undisturbed"
    interrupt(2, run_dir, job(name, run_dir, "--slow", slow, "--num-workers", 2), step=2, victims=1, slow=slow)
    trained(3, job(name, run_dir, "--slow", slow))
    trained(0, job(name, plain))
    assert weights_of(run_dir) == weights_of(plain)
    one, other = (records(folder, "eval")[-1] for folder in (run_dir, plain))
    assert [one[name] for name in LOSSES] == [other[name] for name in LOSSES]
    assert len(records(run_dir, "start")) == 2


@pytest.mark.parametrize("name", ["Boxes", "Texts", "Nested"])
def test_the_control_the_default_fails_in_a_line(tmp_path: Path, name: str) -> None:
    own = "from evenkeel.tasks import Task\nfrom tests.support import ragged_task\n\n\n"
    (tmp_path / "own.py").write_text(f"{own}class {name}(ragged_task.{name}):\n    collate = Task.collate\n")
    line = refusal(options(f"{tmp_path / 'own.py'}:{name}", tmp_path / "run", "--batch-size", 12), code=1)
    assert line.startswith("the data set's samples cannot be collated: part [")
    assert line.endswith("or define collate(samples) in the task, as DataLoader's collate_fn")


def test_mistakes_are_told_in_a_line(tmp_path: Path) -> None:
    place = next(i for i, line in enumerate(TASKS.read_text().splitlines(), start=1) if line.endswith("# HERE"))
    for workers in (0, 1):
        line = refusal(job("Wrong", tmp_path / "run", "--num-workers", workers), code=1)
        assert line.startswith(f"the task's collate() fails at {TASKS}:{place}: RuntimeError: stack expects each")
    assert refusal(job("Silent", tmp_path / "silent"), code=1).startswith("the task's collate() returned None")
    line = refusal(job("Mixed", tmp_path / "dp", "--strategy", "dp", "--reduce", "ring"))
    assert line.startswith("--strategy dp: divides a batch among GPUs by its samples")
    assert not (tmp_path / "dp").exists()


@pytest.mark.skipif(not has("predict"), reason="this copy has left it out")
def test_predict_and_eval_only_collate_as_training_does(tmp_path: Path, run_dir: Path) -> None:
    trained(0, job("Boxes", run_dir, "--limit-batches", 2))
    for ranks in (0, 3):
        words = ["-m", "evenkeel", "predict", run_dir, "--set", "test", "--output", tmp_path / f"{ranks}.csv"]
        finish_all(fork_ranks(ranks, *words))
    rows = (tmp_path / "0.csv").read_text()
    assert rows == (tmp_path / "3.csv").read_text()
    losses = [float(row.split(",")[1]) for row in rows.splitlines()[1:]]
    found = records(run_dir, "eval")[-1]["test/loss"]
    assert sum(losses) / len(losses) == pytest.approx(found, rel=1e-4)
    said = run_forked(TRAIN, *job("Boxes", run_dir, "--limit-batches", 2, "--eval-only"))
    assert evaluation_of(said)["metrics"]["test/loss"] == found
