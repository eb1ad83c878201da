"""The gradient of a step is that of the mean over the global batch, at any world size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evenkeel.data import InMemory
from evenkeel.gradients import Gradients, clip
from evenkeel.plan import Plan
from evenkeel.state import State
from evenkeel.tasks import Classification
from evenkeel.world import World

from . import processes

WORKER = Path(__file__).with_name("gradient_worker.py")
ALONE = World(0, 0, 1, 1, torch.device("cpu"), launched=False)


class TinyNet(nn.Module):
    """BatchNorm and an infinite constant among the buffers, which must stay what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TinyTask(Classification):
    def data(self, samples: int) -> InMemory:
        generator = torch.Generator().manual_seed(3)
        return InMemory(torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))

    def train_dataset(self) -> InMemory:
        return self.data(26)

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return TinyNet()


def step_gradient(plan: Plan, step: int, model: nn.Module) -> Tensor:
    """What `backward` gives for one step in one process."""
    task = TinyTask()
    data = task.train_dataset()
    micro_batches = plan.micro_batches(step)
    batches = [data.__getitems__(list(range(m.start, m.start + m.size))) for m in micro_batches]
    state = State(model, [])
    done = Gradients(task, state, ALONE, plan).of_step(step, micro_batches, batches)
    state.commit(done.buffers, clip(model.parameters(), 0.0))
    loss = done.loss
    assert loss.dim() == 0
    assert not loss.requires_grad
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("step", [0, 1], ids=["full step", "short tail"])
def test_uneven_micro_batches_give_the_gradient_of_the_mean(step: int) -> None:
    plan = Plan(samples=26, global_batch=16, micro_batch=5, epochs=1)  # 5+5+5+1, then 5+5
    model = nn.Linear(6, 3)
    got = step_gradient(plan, step, model)

    images, labels = TinyTask().train_dataset()[slice(step * 16, step * 16 + plan.step_samples(step))]
    model.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    torch.testing.assert_close(got, torch.cat([p.grad.flatten() for p in model.parameters()]))


def test_batchnorm_statistics_move_once_a_step_by_the_mean_of_the_micro_batches() -> None:
    plan = Plan(samples=26, global_batch=16, micro_batch=8, epochs=1)
    model = TinyTask().model()
    before = model.layers[1].running_mean.clone()
    features = model.layers[0](TinyTask().train_dataset()[slice(0, 16)][0]).detach()
    step_gradient(plan, 0, model)
    expected = 0.9 * before + 0.1 * torch.stack([features[:8].mean(0), features[8:].mean(0)]).mean(0)
    torch.testing.assert_close(model.layers[1].running_mean, expected)
    assert model.layers[1].num_batches_tracked == 1
    assert model.mask.tolist() == [0.0, float("-inf")]


def test_an_exception_in_mid_step_leaves_the_buffers_of_the_last_step() -> None:
    class Breaks(TinyTask):
        calls = 0

        def loss(self, model: nn.Module, batch: object) -> Tensor:
            loss = super().loss(model, batch)
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("a peer died")
            return loss

    task, plan = Breaks(), Plan(samples=26, global_batch=16, micro_batch=8, epochs=1)
    model = task.model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    data = task.train_dataset()
    batches = [data.__getitems__(list(range(i, i + 8))) for i in (0, 8)]
    gradients = Gradients(task, State(model, []), ALONE, plan)
    with pytest.raises(RuntimeError, match="a peer died"):
        gradients.of_step(0, plan.micro_batches(0), batches)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_dropout_depends_on_the_micro_batch_and_not_on_what_ran_before() -> None:
    plan = Plan(samples=26, global_batch=16, micro_batch=4, epochs=1)

    def gradient(disturb: int) -> Tensor:
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        torch.manual_seed(disturb)
        return step_gradient(plan, 0, model)

    assert torch.equal(gradient(1), gradient(2))


def test_the_norm_does_not_depend_on_where_a_gradient_begins_in_memory() -> None:
    """On a GPU that is `test_gpu`'s; here it is why the CPU's need no copies."""
    found = []
    for shift in range(4):
        model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Linear(333, 111), nn.Linear(5, 1))
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            memory = torch.empty(parameter.numel() + shift)[shift:]
            assert bool(memory.data_ptr() % 16) == bool(shift)
            parameter.grad = memory.view(parameter.shape).copy_(torch.randn(parameter.shape, generator=generator))
        norm = clip(model.parameters(), 1.0)
        found.append(
            torch.cat([norm.reshape(1), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])
        )
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.multiprocess
def test_any_world_size_agrees_with_one_process_and_a_naive_loop_does_not(tmp_path: Path) -> None:
    """Weights and losses after 12 steps at W = 1, 2, 3, 4, 6 with BatchNorm, dropout, a tail and idle ranks."""
    results = {}
    for ranks in (1, 2, 3, 4, 6):
        path = tmp_path / f"{ranks}.json"
        processes.finish_all(processes.fork_ranks(ranks, WORKER, path))
        results[ranks] = json.loads(path.read_text())
    for ranks, result in results.items():
        assert result["ranks_agree"], f"weights differ between the {ranks} ranks"
        for name in ("weights", "losses", "statistics"):
            assert distance(result["ours"][name], results[1]["ours"][name]) < 1e-5, (ranks, name)
        # the control: batches cut by rank, as in most tutorials, agree with one process only on one process
        assert (distance(result["naive"]["weights"], results[1]["naive"]["weights"]) < 1e-5) == (ranks == 1)


def distance(got: list[float], expected: list[float]) -> float:
    """Relative distance of two vectors, in the 2-norm."""
    one, other = torch.tensor(got), torch.tensor(expected)
    return float((one - other).norm() / other.norm())


@pytest.mark.multiprocess
def test_a_resume_on_as_many_ranks_is_exact_in_every_bit_and_with_stock_ddp_it_is_not(tmp_path: Path) -> None:
    """Four ranks, because with two the order of an addition does not matter."""
    processes.finish_all(processes.fork_ranks(4, WORKER.with_name("resume_worker.py"), tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == {"ours": True, "stock": False}


@pytest.mark.multiprocess
def test_each_step_of_several_micro_batches_a_rank_is_reduced(tmp_path: Path) -> None:
    """DDP's `static_graph` has silently stopped to in the third one, beside `no_sync`."""
    processes.finish_all(processes.fork_ranks(2, WORKER.with_name("reduced_worker.py"), tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found == {"ours": [True] * 4, "control": [True, True, False, True]}


@pytest.mark.multiprocess
def test_collectives_of_a_rank_come_in_an_order_and_their_errors_reach_the_user(tmp_path: Path) -> None:
    """What would dead-lock NCCL, or hide an error, and shows without a GPU."""
    processes.finish_all(processes.fork_ranks(3, WORKER.with_name("collectives_worker.py"), tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["threads"] == 1, "the tree, where parameters may be unused"
    assert found["threads, control"] == 2
    assert found["not waited for"] == 0, "BatchNorm gathers while DDP reduces, in another group"
    assert found["not waited for, control"] > 0
    assert "gloo:all_to_all" in found["recorded"]
    assert found["failure"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
