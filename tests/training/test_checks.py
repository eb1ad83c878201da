"""What tasks get wrong: each works or is explained in a line, by real runs."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW, SparseAdam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

from evenkeel.common.errors import Ended, EndedByData, EndedHere, Refusal
from evenkeel.common.memory import is_out_of_memory
from evenkeel.data.batch import explain_samples
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import Step
from evenkeel.distributed.causes import is_mistake
from evenkeel.training.checks import (
    check_metrics,
    check_model,
    checked_loss,
    checked_losses,
    checked_optimizers,
    raise_explained,
)
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.freezing import freeze
from evenkeel.training.loss import ModelWithLoss
from evenkeel.training.optimization import Rates, rate_names
from evenkeel.training.side_effects import warn_of_sums
from evenkeel.training.state import State
from evenkeel.training.task import Task
from evenkeel.training.task_state import TaskState
from tests.support.processes import free_port
from tests.support.raised import line_of, refusal_of
from tests.support.steps import passes
from tests.training.test_gradients import ALONE, TinyTask


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_ddp_says_of_parameters_without_a_gradient(group: None) -> None:
    """The control: not in the step itself but in the next one, a paragraph that names numbers."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.used(self.frozen(x)).sum()

    model = Half()
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 2)).backward()
    with pytest.raises(RuntimeError) as stock:
        ddp(torch.ones(1, 2))
    assert "Expected to have finished reduction in the prior iteration" in str(stock.value)
    assert "spare" not in str(stock.value)
    with pytest.raises(
        Ended, match=r"^2 of the model's 4 parameters got no gradient.*: spare\.weight, spare\.bias; use"
    ):
        raise_explained(stock.value, model)
    raise_explained(RuntimeError("something else"), model)


def test_a_loss_that_is_a_vector_would_have_been_its_sum() -> None:
    """The control: weighted and with a gradient of ones, as a step does it, autograd has nothing against it."""
    weight = torch.ones(3, requires_grad=True)
    part = weight * 2 * 0.5
    part.backward(1 + 0 * part.detach())
    assert "of shape [3]" in line_of(Ended, checked_loss, weight * 2)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        (weight * 2).backward()
    assert checked_loss((weight * 2).sum()).dim() == 0
    assert checked_loss((weight * 2)[:1]).shape == (1,), "as good as a scalar"


def test_metrics_are_the_same_for_all_batches() -> None:
    rows = torch.zeros(2)
    check_metrics({"a": rows, "b": torch.zeros(2, 5, 5)}, 2, {})
    check_metrics({}, 2, {})
    with pytest.raises(Ended, match=r"other names for one batch than for another \(b\)"):
        check_metrics({"a": rows, "b": rows}, 2, {"a": [rows[0]]})
    with pytest.raises(Ended, match=r"a tensor of shape \[3\] as 'a' for a batch of 2"):
        check_metrics({"a": torch.zeros(3)}, 2, {})


def model_and(make: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model, make(model)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda m: None, "optimizers() returned None: it must return a list of torch.optim.Optimizer"),
        (lambda m: iter(()), "optimizers() returned a tuple_iterator: it must return a list"),
        (lambda m: [SGD(m.parameters())] * 2, "0.weight is in optimizers()[0] and in optimizers()[1]: both would"),
        (lambda m: ([SGD(m.parameters())], []), "optimizers()[0] is a list: it must be a torch.optim.Optimizer"),
        (lambda m: [LBFGS(m.parameters())], "optimizers()[0] is a LBFGS, whose step() needs a closure"),
        (
            lambda m: [AdamW(m.parameters(), lr=np.float64(0.1))],
            "optimizers()[0] has lr = np.float64(0.1), a NumPy number",
        ),
        (lambda m: [SparseAdam(m.parameters())], "optimizers()[0] is a SparseAdam, and ranks add up dense gradients"),
        (lambda m: [SGD(m[0].parameters()), SGD(m[1].parameters(), lr=torch.tensor(0.1))], None),
        (lambda m: SGD(m.parameters()), None),
    ],
)
def test_optimizers(make: Callable[[Any], Any], expected: str | None) -> None:
    model, returned = model_and(make)
    if expected is None:
        assert checked_optimizers(returned, model) == (returned if isinstance(returned, list) else [returned])
        return
    assert refusal_of(checked_optimizers, returned, model).startswith(expected)


class Odd(nn.Module):
    """With a buffer that training treats in a way of its own, or a parameter of its own kind."""

    def __init__(self, way: str = "", parameter: Any = None) -> None:
        super().__init__()
        self.way, self.layer = way, nn.Linear(2, 1)
        self.register_buffer("queue", torch.eye(2).to_sparse() if way == "sparse" else torch.zeros(1))
        self.parameter = parameter

    def forward(self, x: Any) -> Any:
        if self.way == "grows":
            self.queue.resize_(4).fill_(1)
        elif self.way == "is longer":
            self.queue = torch.cat([self.queue, x[0]])
        elif self.way == "is another":
            self.queue = self.queue + 1
        else:
            self.queue += 1
        return self.layer(x).sum()


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        ("grows", "buffer queue changes its shape in training, from [1] to [4]: give it its final shape in model()"),
        ("is longer", "buffer queue changes its shape in training, from [1] to [3]: give it"),
        ("is another", "buffer queue is replaced by another tensor in training, which is not saved: change it"),
        ("in place", ""),
    ],
)
def test_a_buffer_that_the_state_would_lose_ends_the_first_step(way: str, expected: str) -> None:
    model = Odd(way)
    state, plan = State(model, []), Plan(4, global_batch=4, micro_batch=2, epochs=1)
    learner = DistributedLoss(lambda network, batch: network(batch), state, ALONE, plan)
    with pytest.raises(Ended) if expected else nullcontext() as ended:
        passes(learner, 0, plan.micro_batches(0), [torch.ones(2, 2)] * 2)
        learner.step()
    assert state.step == (not expected)
    assert expected in str(ended and ended.value)


def test_a_replaced_buffer_does_not_hide_an_error_of_the_model() -> None:
    class Broken(Odd):
        def forward(self, x: Any) -> Any:
            super().forward(x)
            raise ValueError("my own")

    model = Broken("is another")
    state, plan = State(model, []), Plan(4, global_batch=4, micro_batch=2, epochs=1)
    learner = DistributedLoss(lambda network, batch: network(batch), state, ALONE, plan)
    with pytest.raises(ValueError, match="my own"):
        passes(learner, 0, plan.micro_batches(0), [torch.ones(2, 2)] * 2)


@pytest.mark.parametrize(
    ("change", "steps"),
    [
        (lambda own, other: other.lerp_(own, 0.5), 1),  # in the first step it is still the copy that it began as
        (lambda own, other: setattr(other, "data", other.lerp(own, 0.5)), 1),
        (lambda own, other: nn.functional.embedding(torch.tensor([0]), other, max_norm=0.1), 0),
        (lambda own, other: own.norm(), 2),
    ],
)
def test_a_loss_that_changes_weights_ends_the_run(change: Callable[[Any, Any], object], steps: int) -> None:
    def loss(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            change(model[0].weight, model[1].weight)
        return (model[0](batch) - model[1](batch)).mean()

    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False).requires_grad_(False)])
    model[1].load_state_dict(model[0].state_dict())
    state, plan = State(model, [SGD(model[0].parameters(), lr=0.1)]), Plan(4, global_batch=4, micro_batch=2, epochs=2)
    learner = DistributedLoss(loss, state, ALONE, plan)
    with pytest.raises(Ended) if steps < 2 else nullcontext() as ended:
        for step in range(2):
            passes(learner, step, plan.micro_batches(step), [torch.ones(2, 2)] * 2)
            learner.step()
    assert state.step == steps
    assert ended is None or "changes 1.weight: each rank would" in str(ended.value)


def test_numbers_that_a_loss_changes_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Annealed:
        def __init__(self) -> None:
            self.passes, self.baseline, self.unchanged = 0, torch.zeros(()), 5

        def loss(self, model: Any, batch: Any) -> Any:
            self.passes += 1
            self.cached = 1  # not there before the first step
            model.seen += len(batch)
            model.kept += 1
            model.lost += 1
            model.filled.fill_(1)
            model.grown = torch.zeros(len(model.grown) + 1)
            loss = model(batch).mean()
            self.baseline = self.baseline + loss.detach()
            return loss

    model, plan = nn.Linear(2, 1), Plan(4, global_batch=4, micro_batch=2, epochs=4)
    model.seen = 0  # type: ignore[assignment]
    for name in ("kept", "lost", "filled", "grown"):
        model.register_buffer(name, torch.zeros(2), persistent=name == "kept")
    model.register_buffer("turned", torch.ones(2, dtype=torch.complex64).conj(), persistent=False)  # of no use to it
    model.register_buffer("packed", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), persistent=False)
    model.freed = torch.zeros(1)
    model.freed.untyped_storage().resize_(0)  # as FSDP2 does
    learner = DistributedLoss(Annealed().loss, State(model, []), ALONE, plan)
    for step in range(4):
        passes(learner, step, plan.micro_batches(step), [torch.ones(2, 2)] * 2)
    first, second = (record.message for record in caplog.records)
    assert first.startswith("loss() changes self.passes, self.baseline, model.seen: no checkpoint has that, and")
    assert second.startswith("loss() changes model.lost [2]: no checkpoint has that, and each rank has its own")


def test_numbers_of_a_class_and_in_its_lists_and_dicts_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Annealed:
        passes, seen, counts, table = 0, [0, 0], {"samples": 0, "kept": 1}, [*range(1000)]

        def loss(self, model: Any, batch: Any) -> Any:
            Annealed.passes += 1
            self.seen[1] += 1
            self.counts["samples"] += len(batch)
            self.counts["new"] = 1  # not there before, as in a cache
            self.table[0] += 1
            return model(batch).mean()

    plan = Plan(2, global_batch=2, micro_batch=2, epochs=1)
    learner = DistributedLoss(Annealed().loss, State(nn.Linear(2, 1), []), ALONE, plan)
    passes(learner, 0, plan.micro_batches(0), [torch.ones(2, 2)])
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("loss() changes self.passes, self.seen[1], self.counts['samples']: no checkpoint has that")


@pytest.mark.parametrize("saved", [(), ("weight",), ("queue",)])
def test_what_after_step_changes_and_does_not_save_is_named_once(
    saved: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    class Annealed(TinyTask):
        weight, queue = torch.ones(1), torch.zeros(3)

        def after_step(self, model: nn.Module, step: int, losses: dict[str, float]) -> None:
            self.weight, self.queue = self.weight * 0.9, self.queue + step

        def state_dict(self) -> dict[str, Any]:
            return {name: getattr(self, name) for name in saved}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            vars(self).update(state)

    task = Annealed()
    task.weight = torch.ones(1)
    own = TaskState(task, 0, ALONE)
    for step in range(8):
        own.commit(nn.Linear(1, 1), step + 1)
    found = [record.message for record in caplog.records]
    assert [line.partition(":")[0] for line in found] == [
        f"after_step() changes self.{name}, which state_dict() does not save" for name in ("weight", "queue [3]")
    ] * (not saved), "a task that saves something is trusted"


@pytest.mark.skipif(any(Path("/dev").glob("nvidia*")), reason="this machine has a GPU")
def test_a_loss_that_moves_its_batch_to_a_gpu_that_is_not_there_is_named_in_a_line_and_not_tried_again() -> None:
    learner = DistributedLoss(
        lambda model, batch: model(batch.cuda()).mean(), State(nn.Linear(2, 1), []), ALONE, Plan(2, 2, 2, 1)
    )
    with pytest.raises(EndedHere, match=rf"uses a GPU at {__file__}:\d+, and there is none: leave that") as raised:
        passes(learner, 0, learner.plan.micro_batches(0), [torch.ones(2, 2)])
    assert is_mistake(raised.value)
    assert not raised.value.__cause__


def test_a_loss_that_ends_the_evaluation_mode_of_frozen_parts_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model.train()(batch).mean()

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    freeze(model, ["1"])
    plan = Plan(4, global_batch=4, micro_batch=2, epochs=2)
    learner = DistributedLoss(loss, State(model, []), ALONE, plan)
    for step in range(2):
        passes(learner, step, plan.micro_batches(step), [torch.ones(2, 2)] * 2)
    (line,) = (record.message for record in caplog.records)
    assert line.startswith("loss() sets model.1.training from evaluation to training mode, which --freeze or model()")


def contrastive(model: nn.Module, batch: Any) -> Any:
    scores = model(batch["x"]) @ model(batch["x"]).T
    return F.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda model, batch: model(batch["x"]).square().sum(), "loss"),
        (lambda model, batch: model(batch["x"]).sum() / 12, "loss"),
        (lambda model, batch: (model(batch["x"]).mean(), {"kl": batch["x"].norm().square()}), "kl"),
        (lambda model, batch: {"rows": model(batch["x"]), "right": torch.tensor(len(batch["text"]))}, "right"),
        (lambda model, batch: model(batch["x"]).square().mean(), ""),
        (lambda model, batch: model(batch["x"]).sum() + 1, ""),
        (lambda model, batch: model(batch["x"]).sum() * torch.rand(()), ""),
        (lambda model, batch: 0 * model(batch["x"]).sum(), ""),
        (lambda model, batch: model(batch["x"]).square().sum() / 0, ""),
        (lambda model, batch: model(batch["x"]).reshape(12, 3).sum(), ""),
        (contrastive, ""),
        (lambda model, batch: torch.cdist(model(batch["x"]), model(batch["x"])).sum(), ""),
    ],
)
def test_a_sum_over_the_batch_is_warned_of_and_leaves_no_trace(
    compute: Any, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The controls: means, a loss that compares samples, one that draws, one that takes no other batch, infinity."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), torch.randn(12, 2)
    generator, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    task = type("Own", (), {"loss": staticmethod(compute)})()
    warn_of_sums("loss", task, x.device, 12, model, {"x": x, "text": ["a"] * 12})
    warn_of_sums("loss", task, x.device, 2, model, {"x": x[:2], "text": ["a"] * 2})  # too few
    lines = [record.message for record in caplog.records]
    assert [line.partition("),")[0] for line in lines] == [
        f"loss() returns the sum over the batch's samples ({name}" for name in [expected] if name
    ]
    assert all(module.training for module in model.modules())
    assert all(map(torch.equal, buffers, model.buffers()))
    assert torch.equal(generator, torch.get_rng_state())


class Counting:
    def __init__(self, value: Any) -> None:
        self.value, self.calls = value, [0] if value == "list" else 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += [1] if isinstance(self.calls, list) else 1
        if isinstance(self.value, torch.Generator):
            torch.rand(1, generator=self.value)
        return model(batch).sum()

    def __getstate__(self) -> Any:
        if self.value == "no copy":
            raise TypeError("cannot be copied")
        return vars(self)


@pytest.mark.parametrize(
    ("value", "probed"),
    [
        (None, True),
        ((1, (2.0, "a", Path("b"))), True),
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), False),
        (torch.Generator(), False),
        ((1, [2.0]), False),
        ("list", False),
        ("no copy", False),
        ("no device", False),
    ],
)
def test_a_sum_is_looked_for_only_where_no_trace_is_left(
    value: Any, probed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy of the task shares what it holds, and a task that cannot be copied trains as well."""
    task = Counting(value)
    then = value.get_state() if isinstance(value, torch.Generator) else None
    batch = Immovable() if value == "no device" else torch.ones(12, 2)
    warn_of_sums("loss", task, torch.device("cpu"), 12, nn.Linear(2, 1), batch)
    assert len(caplog.records) == probed
    assert task.calls in (0, [0])
    assert then is None or torch.equal(then, value.get_state())


class Immovable:
    def to(self, device: torch.device) -> None:
        raise RuntimeError(f"no {device}")


@pytest.mark.parametrize("calls", [0, 2])
def test_a_loop_passes_each_micro_batch_backward_once(calls: int) -> None:
    """loss.backward() would not weight the micro-batch; a second pass would not be reduced over the ranks."""
    plan, state = Plan(4, global_batch=4, micro_batch=2, epochs=1), State(nn.Linear(2, 1), [])
    learner = DistributedLoss(lambda network, batch: network(batch).mean(), state, ALONE, plan)
    stream = learner.micro_batches(Step(0, plan.micro_batches(0), iter([torch.ones(2, 2)] * 2)))
    batch = next(stream)
    for loss in [learner(batch) for _ in range(calls)]:
        learner.backward(loss)
    learner(batch).backward()
    with pytest.raises(Ended, match=rf"^model.backward\(loss\) was called {calls} times for a micro-batch: call it"):
        next(stream)


def test_complex_parameters_and_sparse_buffers_are_refused_where_they_learn() -> None:
    complex_one = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    for model, expected in (
        (Odd(parameter=complex_one), "an Odd whose parameter is a complex parameter, whose gradients cannot be"),
        (
            Odd("sparse"),
            "an Odd whose state_dict() has queue, a Tensor, but checkpoints have dense tensors only: register",
        ),
    ):
        check_model(model, learns=False)
        assert expected in refusal_of(check_model, model)
    check_model(Odd(parameter=nn.Parameter(complex_one.data, requires_grad=False)))


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_a_sparse_embedding_is_refused_where_it_learns(make: Callable[..., nn.Module]) -> None:
    model = nn.ModuleDict({"users": make(4, 2, sparse=True), "head": nn.Linear(2, 1)})
    optimizers = [SGD(model.parameters())]
    with pytest.raises(Refusal, match=rf"^users is an {make.__name__} with sparse=True, and ranks add up dense"):
        checked_optimizers(optimizers, model)
    model["users"].requires_grad_(False)
    model["head"].sparse = True  # a word that others use for other things
    assert checked_optimizers(optimizers, model) == optimizers


def test_a_number_in_place_of_a_loss_is_blamed_on_the_loss() -> None:
    for trains in (True, False):
        with pytest.raises(Ended, match=r"^loss\(\) returned a float: .*; leave out \.item\(\) or float\(\), which"):
            checked_losses((0.5, {"a": 1.0}), trains)


def test_a_loss_that_calls_backward_is_named_and_gradients_from_before_are_not() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        (found := model(batch).sum()).backward(retain_graph=True)
        return found

    network, batch = nn.Linear(2, 1), torch.ones(1, 2)
    assert line_of(Ended, ModelWithLoss(network, loss), batch).startswith("loss() calls backward(): leave that out")
    ModelWithLoss(network, lambda model, batch: model(batch).sum())(batch)  # as if model() had trained it


def test_a_loss_calls_collectives_only_if_it_may() -> None:
    def loss(model: nn.Module, batch: Any) -> Any:
        return model(batch).sum() / dist.get_world_size()

    network, batch = nn.Linear(2, 1), torch.ones(1, 2)
    assert line_of(Ended, ModelWithLoss(network, loss), batch).startswith(
        "loss() calls get_world_size of torch.distributed at "
    )
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        ModelWithLoss(network, loss, collectives=True)(batch)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([["a", "b"]], ["lr"]),
        ([["a"], ["b"]], ["lr", "lr_b"]),
        ([["a"], ["b"], ["c"]], ["lr", "lr_b", "lr_c"]),
        ([["a"], ["b", "c"]], ["lr", "lr_1"]),
        ([["0"], ["2"], ["1", "3"]], ["lr", "lr_1", "lr_2"]),
        ([], []),
    ],
)
def test_each_optimizers_rate_has_a_name_of_its_own(parts: list[list[str]], expected: list[str]) -> None:
    model = nn.ModuleDict({name: nn.Linear(1, 1) for names in parts for name in names})
    optimizers = [SGD([p for name in names for p in model[name].parameters()]) for names in parts]
    assert rate_names(optimizers, model) == expected
    halves = [SGD([parameter]) for parameter in nn.ModuleDict({"a": nn.Linear(1, 1)}).parameters()]
    assert rate_names(halves, nn.ModuleDict()) == ["lr", "lr_1"]


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_rates_are_set_and_others_are_told_once(kind: Callable[[float], Any], caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = model_and(lambda m: AdamW(m.parameters(), lr=kind(0.5)))
    rates = Rates([optimizer])
    for factor in (1, 0.5, np.float64(0.25), torch.tensor(0.25), [np.float32(0.25)]):
        rates.set(factor)
    group = optimizer.param_groups[0]
    assert float(group["lr"]) == 0.125
    assert type(group["lr"]) in (float, torch.Tensor), "nothing of NumPy's"
    assert not caplog.records
    for _ in range(2):
        group["lr"] = kind(0.1)
        rates.set(1)
        assert float(group["lr"]) == 0.5
        told = "something other than rates() sets a learning rate,"
        assert [record.getMessage()[:50] for record in caplog.records] == [told]
    for odd in (None, -1, float("nan"), float("inf"), "1", [1, 1], [], torch.ones(2), iter([1])):
        with pytest.raises(Ended, match=r"^rates\(\) returned .*: it must return one factor"):
            rates.set(odd)  # type: ignore[arg-type]


def test_a_scheduler_is_seen_when_it_is_made(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = model_and(lambda m: AdamW(m.parameters()))
    LambdaLR(optimizer, lambda step: 0.1)
    Rates([optimizer], begun=True)
    assert not caplog.records, "in a run that goes on, the peak is kept there"
    Rates([optimizer])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(1, [2, 3]), (1, [2])], "part [1] of a sample: RuntimeError: each element in list of batch should be of"),
        (
            [{"a": {"b": torch.zeros(2)}}, {"a": {"b": torch.zeros(3)}}],
            "part ['a']['b'] of a sample: its sizes differ: [2] at entry 0 and [3] at entry 1; return tensors",
        ),
        ([object(), object()], "a sample: its type is object; return tensors, arrays"),
        ([None, None], "a sample: it is None (does __getitem__ return it?); return tensors"),
        ([(torch.zeros(3), 1), None], "a sample: it is None (does __getitem__ return it?); return tensors"),
        ([{"a": 1}, {"b": 1}], "a sample: KeyError: 'a'; return tensors, arrays, numbers, strings"),
        ([np.array([object()])] * 2, "a sample: TypeError: default_collate: batch must"),
    ],
)
def test_samples_that_make_no_batch(samples: list[Any], expected: str) -> None:
    with pytest.raises((TypeError, RuntimeError, KeyError)) as stock:
        default_collate(samples)
    assert explain_samples(samples, stock.value).startswith(f"the data set's samples cannot be collated: {expected}")


def test_the_traceback_of_a_loading_process_is_taken_off() -> None:
    text = "Caught EndedByData in DataLoader process 0.\nOriginal:\n  ...\nevenkeel.common.errors.EndedByData: why\n"
    assert str(EndedByData(text)) == str(EndedByData("why")) == "why"


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), True),
        (lambda: bytearray(1 << 60), True),
        (lambda: np.empty(1 << 60, dtype=np.uint8), True),
        (lambda: torch.zeros(2) @ torch.zeros(3), False),
        (lambda: [][1], False),
    ],
)
def test_which_errors_are_for_want_of_memory(fails: Callable[[], object], expected: bool) -> None:
    with pytest.raises((RuntimeError, MemoryError, IndexError)) as caught:
        fails()
    assert is_out_of_memory(caught.value) == expected
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


def test_the_loss_decides_only_while_a_task_and_its_parents_have_no_metrics() -> None:
    class Bare(Task):
        def metrics(self, model: nn.Module, batch: Any) -> Any: ...

    class Loss(Task): ...

    class Metrics(Loss):
        def metrics(self, model: nn.Module, batch: Any) -> Any: ...

    class Said(Loss):
        best = ("loss", "min")

        def metrics(self, model: nn.Module, batch: Any) -> Any: ...

    assert [it.best for it in (Bare, Loss, Metrics, Said)] == [Task.best, ("loss", "min"), Task.best, ("loss", "min")]
