"""--shard on: only rank 0 has memory for the whole model, and all ranks have its values."""

import re
import signal
from pathlib import Path

import pytest
import torch

from tests.support import needs
from tests.support.processes import ROOT, TRAIN, checked, finish, start, torchrun
from tests.support.small_runs import ended, job_of, results_of, the_line, trained, weights_of

pytestmark = needs.sharding

SHAPE = "--epochs 1 --batch-size 20 --micro-batch 3 --reduce tree --shard on --lr 0.02"
job = job_of("built_task.py:Built", SHAPE)
SMALL = 15e6


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
    monkeypatch.setenv("DEVICES", str(tmp_path))


def devices(folder: Path, ranks: int) -> list[str]:
    """On which device each rank's weights were before they were divided."""
    return [(folder / str(rank)).read_text() for rank in range(ranks)]


@pytest.mark.parametrize("ema", [0, pytest.param(0.9, marks=pytest.mark.slow)])
def test_other_ranks_than_0_have_their_rows_and_a_block_in_memory(tmp_path: Path, ema: float) -> None:
    found = results_of(3, "memory_worker.py", tmp_path, "start", ema, "meta")
    most = found["model"] / 3 * (2 if ema else 1) + found["block"] + SMALL
    first, *others = found["growth"]
    assert max(others) < most
    assert first < found["model"] + found["block"] + SMALL
    control = results_of(3, "memory_worker.py", tmp_path, "start", ema, "real")
    assert min(control["growth"]) > most, "the control: each rank builds all of it"


@pytest.mark.parametrize(
    "more",
    [
        ["--ema", 0.9],
        pytest.param(["--checkpoint-activations", "--freeze", "blocks.1.up"], marks=pytest.mark.long),
        pytest.param(["--precision", "bf16", "--optimizer", "sgd"], marks=pytest.mark.long),
    ],
)
@pytest.mark.slow
def test_all_have_rank_0_s_values(tmp_path: Path, more: list) -> None:
    """By torchrun, whose ranks do not order sets alike."""
    for ranks in (1, 3):
        ended(start(torchrun(ranks, TRAIN, *job(tmp_path / f"run-{ranks}", *more))))
    assert devices(tmp_path, 3) == ["cpu", "meta", "meta"]
    assert weights_of(tmp_path / "run-3") == weights_of(tmp_path / "run-1")


def test_so_has_a_run_that_begins_with_weights_of_a_file(tmp_path: Path) -> None:
    trained(1, job(tmp_path / "before", "--seed", 1))
    for ranks in (1, 2):
        trained(ranks, job(tmp_path / f"run-{ranks}", "--init-from", tmp_path / "before" / "model.pt"))
    trained(1, job(tmp_path / "random"))
    assert devices(tmp_path, 2) == ["cpu", "meta"]
    assert weights_of(tmp_path / "run-2") == weights_of(tmp_path / "run-1")
    assert weights_of(tmp_path / "random") != weights_of(tmp_path / "run-1"), "the control"


@pytest.mark.slow
def test_what_only_rank_0_refuses_ends_all_in_a_line(tmp_path: Path) -> None:
    torch.save({"other": torch.ones(3)}, tmp_path / "file.pt")
    words = torchrun(2, TRAIN, *job(tmp_path / "run", "--init-from", tmp_path / "file.pt"))
    said = checked(finish(start(words)), -signal.SIGALRM).stderr.splitlines()
    noise = "[c10d] The hostname of the client socket"  # torch, without a resolver
    lines = [line for line in said if noise not in line]
    assert the_line("\n".join(lines)).startswith("--init-from ")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("Read", "Tensor.item() cannot be called on meta tensors"),
        pytest.param("Drawn", "random numbers are drawn on the CPU", marks=pytest.mark.slow),
        pytest.param("Attribute", "a tensor of shape [34] is no parameter or buffer", marks=pytest.mark.long),
        pytest.param("Choosy", "Tensor.item() cannot be called on meta tensors", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_built_without_values_is_built_by_all(tmp_path: Path, task: str, reason: str) -> None:
    # with auto it is divided before the logs are open
    more = ["--micro-batch", "auto", "--batch-size", 1, "--max-steps", 3] if task == "Choosy" else []
    for ranks in (1, 2):
        trained(ranks, job(tmp_path / f"run-{ranks}", *more, task=task))
    assert devices(tmp_path, 2) == ["cpu", "cpu"]
    assert weights_of(tmp_path / "run-2") == weights_of(tmp_path / "run-1")
    log = next((tmp_path / "run-2").glob("logs/*/rank-0.log")).read_text()
    assert re.search(rf"WARNING.*each process has all 0\.1 MB of the weights.*{re.escape(reason)}", log)
