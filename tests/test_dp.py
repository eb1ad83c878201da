"""`--strategy dp`: uneven shares of a micro-batch in one process have the result of DDP."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.data import InMemory, divide, samples_in
from evenkeel.devices import replicas
from evenkeel.gradients import Gradients, Loss, Parallel, Share
from evenkeel.plan import Plan, chunks
from evenkeel.state import State
from evenkeel.tasks import Classification
from evenkeel.world import World

from .processes import ROOT, TRAIN, checked, finish, finish_all, fork_ranks, kill_group, read, run, run_forked

DIGITS = ["--max-steps", "12", "--batch-size", "30", "--dropout", "0", "--optimizer", "sgd", "--wandb", "disabled"]


class Forty(Classification):
    """The documents' example: 40 samples, which are a batch of 30 and one of 10."""

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(2)
        return InMemory(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def test_the_shares_are_those_of_torch() -> None:
    for samples in range(1, 41):
        for devices in range(1, 10):
            expected = [len(part) for part in torch.arange(samples).chunk(devices)]
            assert chunks(samples, devices) == expected, (samples, devices)
    assert (chunks(30, 4), chunks(10, 4)) == ([8, 8, 8, 6], [3, 3, 3, 1])


def test_plan_prints_the_shares_of_the_gpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from evenkeel.planning import PlanCommand

    monkeypatch.setattr(sys, "path", list(sys.path))
    task = ["--task", f"{__name__}:Forty"]
    PlanCommand(world_size=4)([*task, "--strategy", "dp", "--batch-size", "30"])
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "40 samples, global batch 30, micro-batch 30 (the whole batch): 2 steps an epoch, 40 in all; "
        "each micro-batch is divided among the GPUs",
        "every full step, 30 samples:",
        *[f"  GPU {gpu}: {size} samples" for gpu, size in enumerate([8, 8, 8, 6])],
        "an epoch's last step, 10 samples:",
        *[f"  GPU {gpu}: {text}" for gpu, text in enumerate(["3 samples", "3 samples", "3 samples", "1 sample"])],
    ]
    PlanCommand(world_size=2)([*task, "--strategy", "dp", "--batch-size", "30", "--micro-batch", "15"])
    assert "  GPU 0: 16 samples as 8 + 8\n  GPU 1: 14 samples as 7 + 7\n" in capsys.readouterr().out
    PlanCommand(world_size=3)([*task, "--batch-size", "30", "--micro-batch", "auto"])
    out = capsys.readouterr().out
    assert "micro-batch 10 (auto, if that fits): " in out
    assert "  rank 2: 10 samples\n" in out
    # one process, whose probe begins with the whole batch
    PlanCommand(world_size=3)([*task, "--batch-size", "30", "--micro-batch", "auto", "--strategy", "dp"])
    out = capsys.readouterr().out
    assert "micro-batch 30 (auto, if that fits): " in out
    assert "  GPU 2: 10 samples\n" in out


def by_hand(model: nn.Module, task: Classification, batch: Any, devices: int) -> Tensor:
    """What `Parallel` does, with copies of the module on the CPU instead of on GPUs."""
    parts = divide(batch, chunks(samples_in(batch), devices))
    return torch.cat([Share(Loss(model, task))(part) for part in parts]).sum() / samples_in(batch)


@pytest.mark.parametrize("samples", [30, 10, 5, 1])
def test_uneven_shares_count_by_their_samples(samples: int) -> None:
    task = Forty()
    model = task.model()
    batch = task.train_dataset().__getitems__(list(range(samples)))
    whole = Loss(model, task)(batch)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    divided = by_hand(model, task, batch, 4)
    torch.testing.assert_close(divided, whole)
    found = torch.autograd.grad(divided, list(model.parameters()))
    torch.testing.assert_close(found, expected)
    # the control: DataParallel's users take the mean of the GPUs' means, which is another thing where shares are uneven
    parts = divide(batch, chunks(samples, 4))
    naive = torch.stack([Loss(model, task)(part) for part in parts]).mean()
    even = len(set(chunks(samples, 4))) == 1
    assert torch.allclose(naive, whole, rtol=1e-4) == even


def test_batches_of_all_kinds_are_divided() -> None:
    batch = {"x": torch.arange(5), "more": (torch.arange(10).view(5, 2), ["a", "b", "c", "d", "e"]), "scale": 3}
    first, second = divide(batch, [3, 2])
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1, 2], [3, 4])
    assert (first["more"][1], second["more"][1]) == (["a", "b", "c"], ["d", "e"])
    assert (second["more"][0].tolist(), second["scale"]) == ([[6, 7], [8, 9]], 3)
    assert samples_in(batch) == 5
    pair = [torch.arange(2), torch.arange(2)]
    assert [part[1].tolist() for part in divide(pair, [1, 1])] == [[0], [1]], "a list of tensors is not one of samples"


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it")
def test_the_weights_are_ddps_up_to_rounding_and_the_strategy_may_change(tmp_path: Path) -> None:
    done = run_forked(TRAIN, *DIGITS, "--run-dir", tmp_path / "dp", "--strategy", "dp")
    assert "--strategy dp has one device here, and nothing to divide; ddp is the default because" in done.stderr
    finish_all(fork_ranks(2, TRAIN, *DIGITS, "--run-dir", tmp_path / "ddp", "--micro-batch", 15))
    got, expected = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("dp", "ddp"))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)

    more = ["--schedule", "constant", "--run-dir", tmp_path / "both"]
    run_forked(TRAIN, *DIGITS, *more, "--strategy", "dp", "--max-steps", 3)
    done = run_forked(TRAIN, *DIGITS, *more, "--max-steps", 5, "--micro-batch", 3)
    assert "from step 3 on micro-batches are of 3 instead of a whole step" in done.stderr
    assert (read(tmp_path / "both")["step"], read(tmp_path / "both")["bits_void_from"]) == (5, 3)


@pytest.mark.multiprocess
def test_dp_is_one_process(tmp_path: Path) -> None:
    first, second = fork_ranks(2, TRAIN, *DIGITS, "--run-dir", tmp_path / "run", "--strategy", "dp")
    refused = checked(finish(first), 2)
    kill_group(second)  # as torchrun would, for it lets the first one speak
    second.wait()
    assert refused.stderr.startswith("evenkeel: --strategy dp: is one process with all visible GPUs")
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
    launcher = [sys.executable, str(ROOT / "launch" / "single_node.py")]
    refused = run([*launcher, "-g", "2", "--dry-run", "--", "--strategy", "dp"], expect=2)
    assert "and this job has 2 processes; start one" in refused.stderr
    for divided in ("--place=a=0,b=1", "--model-parallel=2"):
        refused = run([*launcher, "--dry-run", "--", "--strategy", "dp", divided], expect=2)
        assert "gives each GPU a copy of the whole network" in refused.stderr
    shown = run([*launcher, "--dry-run", "--", "--strategy", "dp"])
    assert "--nproc-per-node 1 " in shown.stdout


def train_by(world: World, strategy: Any, batches: Sequence[Any], plan: Plan) -> Any:
    task = Forty()
    model = copy.deepcopy(task.model()).to(world.device)
    state = State(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    gradients = Gradients(task, state, world, plan, strategy=strategy)
    losses = []
    for step, batch in enumerate(batches):
        state.clear_gradients()
        done = gradients.of_step(step, plan.micro_batches(step), [batch])
        losses.append(done.loss.item())
        state.optimizers[0].step()
    return gradients, losses, [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_several_gpus_it_is_the_plain_module_up_to_rounding() -> None:
    data, plan = Forty().train_dataset(), Plan(40, 30, 30, 1)
    batches = [data.__getitems__(list(range(30))), data.__getitems__(list(range(30, 40)))]
    world = World(0, 0, 1, 1, torch.device("cuda", 0), launched=False)
    gradients, losses, weights = train_by(world, "dp", batches, plan)
    assert isinstance(gradients.wrapped, Parallel)
    assert len(replicas("dp", world.device)) >= 2
    _, expected_losses, expected = train_by(world, "ddp", batches, plan)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for found, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-5)
