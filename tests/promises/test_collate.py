"""A task's own collate function: the same bits on any ranks and loader processes, over a stop, in all commands."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import pytest

from tests.processes.test_check import rows_of
from tests.support.processes import ROOT, TRAIN, fork, finish, checked, fork_ranks, read, records, run_forked
from tests.support.readme import blocks
from tests.support.small_runs import SUPPORT, options, signal_ranks_at, the_line, trained, weights_of

TASKS = SUPPORT / "ragged_task.py"
SHOWN = [block for block in blocks("python", (ROOT / "docs" / "tasks.md").read_text()) if "def collate(" in block]


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


@pytest.mark.parametrize("name", ["Boxes", "Texts", "Mixed", "Nested"])
def test_ranks_loader_processes_a_stop_and_a_resize_change_no_bit(tmp_path: Path, name: str) -> None:
    slow, run_dir, plain = tmp_path / "slow", tmp_path / "run", tmp_path / "undisturbed"
    slow.touch()
    ranks = fork_ranks(2, TRAIN, *job(name, run_dir, "--slow", slow, "--num-workers", 2))
    signal_ranks_at(2, run_dir, ranks, signal.SIGKILL, victims=1)
    slow.unlink()
    trained(3, job(name, run_dir, "--slow", slow))
    trained(0, job(name, plain))
    assert weights_of(run_dir) == weights_of(plain)
    ends = [records(folder, "eval")[-1] for folder in (run_dir, plain)]
    assert ends[0]["test/loss"] == ends[1]["test/loss"]
    assert ends[0]["validation/loss"] == ends[1]["validation/loss"]
    assert len(records(run_dir, "start")) == 2
