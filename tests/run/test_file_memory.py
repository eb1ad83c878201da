"""Whole weights of a sharded run: no process needs memory for more than about one tensor."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel.cli.checkpoint import ExportModel, InspectCheckpoint, VerifyCheckpoints
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import load
from evenkeel.run.sharded_checkpoint import write_rows
from evenkeel.run.weights import read_weights
from evenkeel.training.file_memory import SMALL, on_disk
from evenkeel.training.staging import named_tensors
from evenkeel.training.state_dicts import sha256
from tests.support import needs
from tests.support.anonymous import growth
from tests.support.small_runs import results_of

FORK = multiprocessing.get_context("fork")
LAYERS, WIDTH, RANKS = 8, 2000, 3
TENSOR = 4 * WIDTH**2


@needs.sharding
def test_model_pt_is_written_with_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    found = results_of(2, "gathering_worker.py", tmp_path, "ours")
    assert found["right"]
    assert found["growth"] < 3.5 * found["largest"], "it is gathered, joined, and copied"
    assert [path.name for path in tmp_path.iterdir() if path.name != "gathering_worker.py-2.json"] == ["model.pt"]
    control = results_of(2, "gathering_worker.py", tmp_path, "control")
    assert control["right"]
    assert control["growth"] > 0.9 * control["model"]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks: 128 MB of weights, and twice as much for the optimizer."""
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run") / "checkpoints", keep=1)
    model = {name: tensor.detach() for name, tensor in network().named_parameters()}
    moments = {number: {"exp_avg": it, "exp_avg_sq": it**2} for number, it in enumerate(model.values())}
    state = {"model": model, "optimizers": [{"state": moments, "param_groups": []}]}
    of = dict.fromkeys(named_tensors(state), WIDTH)
    for rank in range(RANKS):
        rows = {"rank": rank, "ranks": RANKS, "of": of}
        mine: Any = torch.utils._pytree.tree_map(lambda it: torch.chunk(it, RANKS)[rank].clone(), state)  # noqa: B023
        write_rows(checkpoints, {"step": 1, **mine, "rows": rows}, {}, "checkpoint", "token")
    return checkpoints.folder / "step-00000001"


def bytes_of(act: Callable[[], object]) -> int:
    """By how much the memory of a fork grows while it does something."""
    receiver, sender = FORK.Pipe(duplex=False)

    def measured() -> None:
        with growth() as most:
            result = act()  # stays until the end
        sender.send((most[0], bool(result)))

    process = FORK.Process(target=measured)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return int(receiver.recv()[0])


@pytest.mark.parametrize("form", ["bare", "safetensors"])
def test_export_takes_the_memory_of_a_tensor(step: Path, tmp_path: Path, form: Any) -> None:
    output = tmp_path / form
    assert bytes_of(lambda: ExportModel(step, output, form=form)([])) < 2 * TENSOR
    model = network()
    read_weights(model, output)
    assert sha256(model.state_dict()) == sha256(network().state_dict())


@pytest.mark.parametrize(
    "act",
    [
        lambda step: read_weights(network(), step),
        lambda step: VerifyCheckpoints(step)(),
        lambda step: InspectCheckpoint(step)(),
    ],
    ids=["init-from", "verify", "inspect"],
)
def test_so_do_other_readers_besides_their_model(step: Path, act: Callable[[Path], object]) -> None:
    assert bytes_of(lambda: act(step)) < (LAYERS + 2) * TENSOR


@needs.sharding
def test_a_run_that_goes_on_without_shards_has_the_state_once(step: Path) -> None:
    """The control of the others: this is what they took, and before that the files as well."""
    state = 3 * LAYERS * TENSOR
    assert 0.9 * state < bytes_of(lambda: load(step)) < 1.2 * state


def test_without_a_file_it_is_ordinary_memory(tmp_path: Path) -> None:
    for folder, size in ((tmp_path, SMALL), (tmp_path, 3), (tmp_path / "missing", SMALL)):
        found = on_disk((size, 2), torch.bfloat16, folder)
        found[:] = torch.arange(2)
        assert found.shape == (size, 2)
        assert found.sum() == size
    assert on_disk((), torch.float32, tmp_path).shape == ()
    assert not list(tmp_path.iterdir())
