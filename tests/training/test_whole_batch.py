"""Losses over all samples of a step, beside plain autograd on the whole batch."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenkeel.common.errors import EndedHere
from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.data.randomness import derive, seed_computation
from evenkeel.data.sampler import Step
from evenkeel.training.arrivals import BACKWARD, FORWARD, LOADING, WAITING, Arrivals
from evenkeel.training.classification import Classification
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.oom import explained
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.precision import Scaler
from evenkeel.training.state import State
from evenkeel.training.task import Task
from evenkeel.training.whole_batch import WholeBatch, _packed, _unpacked, has_batch_loss, refuse_unfit
from evenkeel.training.whole_batch_evaluation import evaluation_of
from tests.support.raised import refusal_of
from tests.support.steps import passes
from tests.support.whole_batch_task import Plain, nt_xent
from tests.training.test_gradients import ALONE

SAMPLES = 26
PLAN = Plan(SAMPLES, global_batch=16, micro_batch=5, epochs=1)  # 5+5+5+1, then 5+5
X = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
LABELS = torch.arange(SAMPLES) % 2


def network(*between: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 16), *between, nn.Tanh(), nn.Linear(16, 4))


class Clip(nn.Module):
    """Two networks, and a temperature that is learned (Radford et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = network(), network()
        self.scale = nn.Parameter(torch.tensor(2.0))


def views(model: Any, batch: Any) -> Any:
    return model(torch.cat([batch[0], batch[0].flip(1)], 1).view(len(batch[0]), 2, 6))


def of_clip(model: Any, batch: Any) -> Any:
    scale = model.scale.expand(len(batch[0]))
    return {"image": model.image(batch[0]), "text": model.text(batch[0] ** 2), "scale": scale}


def clip(found: Any) -> Any:
    image, text = (F.normalize(found[name], dim=1) for name in ("image", "text"))
    scores = found["scale"].mean().exp() * image @ text.T
    target = torch.arange(len(scores))
    return F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)


def whitening(z: Tensor) -> Any:
    """Covariance and variance, as VICReg's (Bardes et al., 2022), as parts."""
    centred = z - z.mean(0)
    covariance = centred.T @ centred / (len(z) - 1)
    spread = F.relu(1 - covariance.diag().sqrt()).mean()
    mixed = (covariance - covariance.diag().diag()).square().sum()
    return spread + mixed, {"spread": spread, "mixed": mixed, "samples": len(z)}


def auc(found: Any) -> Tensor:
    """A smooth area under the curve: all pairs of a positive and a negative sample."""
    positive, negative = (found["score"][found["label"] == label] for label in (1, 0))
    return torch.sigmoid(negative[None] - positive[:, None]).mean()


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], Callable[..., Any]]] = {
    "simclr": (network, views, lambda z: nt_xent(z[:, 0], z[:, 1])),
    "clip": (Clip, of_clip, clip),
    "whitening, with parts": (network, lambda model, batch: model(batch[0]), whitening),
    "auc": (network, lambda m, batch: {"score": m(batch[0]).sum(1), "label": batch[1]}, auc),
    "in float64": (lambda: network().double(), lambda m, batch: m(batch[0].double()), lambda z: z.std(0).log().sum()),
}


def batches(plan: Plan, step: int) -> list[Any]:
    return [[part[m.start : m.start + m.size].clone() for part in (X, LABELS)] for m in plan.micro_batches(step)]


def taken(model: nn.Module, embed: Any, batch_loss: Any, plan: Plan = PLAN, step: int = 0, **more: Any) -> Any:
    """The passes of a step; afterwards the gradient is in ``.grad``."""
    learner = DistributedLoss(WholeBatch(embed, batch_loss), State(model, [], **more), ALONE, plan)
    passes(learner, step, plan.micro_batches(step), batches(plan, step))
    return learner


def exact(model: nn.Module, embed: Any, batch_loss: Any, plan: Plan = PLAN, step: int = 0) -> Any:
    """Plain autograd: all graphs at once, each micro-batch with its random numbers. The loss, and its parts."""
    parts = []
    for m, batch in zip(plan.micro_batches(step), batches(plan, step), strict=True):
        seed_computation(derive(0, "micro-batch", step, m.id), ALONE.devices)
        parts.append(embed(model, batch))
    whole = {n: torch.cat([p[n] for p in parts]) for n in parts[0]} if isinstance(parts[0], dict) else torch.cat(parts)
    seed_computation(derive(0, "batch_loss", step), ALONE.devices)
    found = batch_loss(whole)
    (found[0] if isinstance(found, tuple) else found).backward()
    return found


def off(one: nn.Module, other: nn.Module) -> float:
    """Relative distance of two gradients."""
    a, b = (torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (one, other))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("step", [0, 1], ids=["full step", "short tail"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_the_whole_batch(kind: str, step: int) -> None:
    make, embed, batch_loss = KINDS[kind]
    ours, theirs = make(), make()
    learner = taken(ours, embed, batch_loss, step=step)
    found = exact(theirs, embed, batch_loss, step=step)
    loss, parts = found if isinstance(found, tuple) else (found, {})
    assert off(ours, theirs) < 1e-5
    assert learner.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert {name: part.item() for name, part in learner.parts.items()} == pytest.approx(
        {name: torch.as_tensor(part).item() for name, part in parts.items()}, rel=1e-6
    )
    clip_grad_norm(ours.parameters(), 0.0)


def test_the_control_the_mean_over_micro_batches_is_something_else() -> None:
    make, embed, batch_loss = KINDS["simclr"]
    whole = make()
    exact(whole, embed, batch_loss)
    parts = make()
    learner = DistributedLoss(lambda m, b: batch_loss(embed(m, b)), State(parts, []), ALONE, PLAN)
    passes(learner, 0, PLAN.micro_batches(0), batches(PLAN, 0))
    assert off(parts, whole) > 0.1


def test_both_passes_draw_the_same_numbers_and_the_control_other_dice_give_another_gradient() -> None:
    own = torch.Generator().manual_seed(0)

    def embed(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0] + torch.randn_like(batch[0]))

    def own_dice(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0] + torch.randn(batch[0].shape, generator=own))

    def loss(z: Tensor) -> Any:
        return whitening(z * (torch.rand(len(z), 1) > 0.2))

    ours, theirs = network(nn.Dropout(0.5)), network(nn.Dropout(0.5))
    taken(ours, embed, loss)
    exact(theirs, embed, loss)
    assert off(ours, theirs) < 1e-5
    control, first = network(), network()
    taken(control, own_dice, whitening)
    own.manual_seed(0)
    exact(first, own_dice, whitening)
    assert off(control, first) > 1e-2


def test_batchnorm_has_the_statistics_of_a_micro_batch_and_moves_once_a_step() -> None:
    plan = Plan(SAMPLES, global_batch=16, micro_batch=8, epochs=1)
    make, embed = lambda: network(nn.BatchNorm1d(16)), lambda m, batch: m(batch[0])
    ours, theirs = make(), make()
    learner = taken(ours, embed, whitening, plan)
    learner.step(clip_grad_norm(learner.state.parameters, 0.0))
    exact(theirs, embed, whitening, plan)
    assert off(ours, theirs) < 1e-5
    features = make()[0](X[:16]).detach()
    expected = 0.1 * torch.stack([features[:8].mean(0), features[8:].mean(0)]).mean(0)
    torch.testing.assert_close(ours[1].running_mean, expected)
    assert ours[1].num_batches_tracked == 1


class Counted(torch.autograd.Function):
    """The identity; counts the graphs that are alive."""

    alive, most = 0, 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Token:
    def __init__(self) -> None:
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self) -> None:
        Counted.alive -= 1


def test_one_micro_batch_has_a_graph_at_a_time_and_in_the_control_all_have() -> None:
    def embed(model: nn.Module, batch: Any) -> Tensor:
        return model(Counted.apply(model[0](batch[0])) @ torch.ones(16, 6))

    for way, expected in ((taken, 1), (exact, 4)):
        Counted.alive = Counted.most = 0
        way(network(), embed, whitening)
        assert Counted.most == expected


def test_the_second_pass_gets_the_batch_as_it_was_loaded() -> None:
    def embed(model: nn.Module, batch: Any) -> Tensor:
        found = model(batch[0].clone())
        batch[0].zero_()
        return found

    ours, theirs = network(), network()
    taken(ours, embed, whitening)
    exact(theirs, lambda m, batch: m(batch[0]), whitening)
    assert off(ours, theirs) < 1e-5


@pytest.mark.parametrize("scale", [1024.0, 2.0**120], ids=["fits", "overflows"])
def test_the_loss_scale_of_float16_goes_through_the_second_pass(scale: float) -> None:
    make, embed, batch_loss = KINDS["simclr"]
    ours, theirs = make(), make()
    learner = taken(ours, embed, lambda z: batch_loss(z) * 1e4, scaler=Scaler(ALONE.device, scale))
    exact(theirs, embed, lambda z: batch_loss(z) * 1e4)
    norm = clip_grad_norm(learner.state.parameters, 0.0)
    assert norm.isfinite() == (scale == 1024)
    if scale == 1024:
        assert off(ours, theirs) < 1e-5
    learner.step(norm)
    assert learner.loss.isfinite(), "which says that the scale is to blame"
    assert float(learner.state.scaler.overflows) == (scale != 1024)


def test_a_loss_that_is_not_finite_makes_the_norm_so() -> None:
    learner = taken(network(), lambda m, batch: m(batch[0]), lambda z: z.sum() * 0 + float("inf"))
    assert not clip_grad_norm(learner.state.parameters, 0.0).isfinite()


def test_other_rows_in_a_later_step_are_refused() -> None:
    """Only the first is compared between ranks."""
    learner = taken(network(), lambda m, b: first(m, b)[:, : int(b[0].sum() > 100) + 2], whitening)
    bad = [[torch.full((m.size, 6), 99.0), LABELS[: m.size]] for m in PLAN.micro_batches(1)]
    with pytest.raises(EndedHere, match=r"rows of \[2\] float32 for one batch and of \[3\] float32 for another"):
        passes(learner, 1, PLAN.micro_batches(1), bad)


def first(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


WRONG: list[tuple[Any, Any, str]] = [
    (lambda m, b: first(m, b).mean(0), whitening, r"^embed\(\) returned a tensor of shape \[4\] for a batch of 5 "),
    (
        lambda m, b: {"z": first(m, b)[:2]},
        whitening,
        r"of shape \[2, 4\] as 'z' for .* row for each sample, \[5, ...\]",
    ),
    (lambda m, b: [first(m, b)], whitening, r"embed\(\) returned a list: it must return a dict of tensors"),
    (lambda m, b: first(m, b).to(torch.complex64), whitening, r"it must be a tensor of real numbers"),
    (lambda m, b: first(m, b).detach(), whitening, r"embed\(\) returned embeddings without a gradient: they do not"),
    (lambda m, b: first(m, b)[:, : len(b[0])], whitening, r"rows of \[4\] float32 for one batch and of \[1\] float32"),
    (lambda m, b: {"z": first(m, b), "x": b[0]}, lambda e: e["x"].sum(), "or batch_loss.. uses only those that"),
    (first, lambda z: z.sum(1), r"batch_loss\(\) returned a tensor of shape \[16\]: it must return a scalar"),
    (first, lambda z: z.detach().sum(), r"batch_loss\(\) returned a tensor without a gradient"),
    (first, lambda z: (z.sum(), {"lr": 1.0}), r"batch_loss\(\) returned a part named 'lr'"),
    (first, lambda z: torch.distributed.all_reduce(z), r"batch_loss\(\) calls all_reduce of torch.distributed"),
    (lambda m, b: m[0](b[0]), whitening, r"2 of the model's 4 parameters got no gradient.*: 2.weight, 2.bias"),
]


@pytest.mark.parametrize(("embed", "batch_loss", "expected"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_said_in_a_line(embed: Any, batch_loss: Any, expected: str) -> None:
    with pytest.raises(EndedHere, match=expected) as ended:
        taken(network(), embed, batch_loss)
    assert "\n" not in str(ended.value)


def test_memory_that_runs_out_in_batch_loss_has_a_remedy_of_its_own() -> None:
    def all_pairs(z: Tensor) -> Tensor:
        return z.sum() + torch.empty(1 << 60).sum()

    with pytest.raises(RuntimeError) as caught:
        taken(network(), first, all_pairs)
    text = explained(caught.value, ALONE.device, Config(batch_size=16, micro_batch=5))
    assert "the batch was [16, 4] float32" in text
    assert "batch_loss() has all samples of a step: lower --batch-size" in text
    assert "--micro-batch" not in text


def test_a_step_is_given_to_batch_loss_and_batches_are_loaded_once() -> None:
    seen, loaded = [], []

    def loss(z: Tensor, step: int) -> Tensor:
        seen.append(step)
        return z.square().sum()

    learner = DistributedLoss(WholeBatch(first, loss), State(network(), []), ALONE, PLAN)
    micro_batches = PLAN.micro_batches(1)
    stream = (loaded.append(m.id) or batch for m, batch in zip(micro_batches, batches(PLAN, 1), strict=True))
    for batch in learner.micro_batches(Step(1, micro_batches, stream)):
        learner.backward(learner(batch))
    assert (seen, loaded) == ([1], [0, 1])


def test_the_wait_for_other_ranks_between_the_passes_is_not_a_ranks_own_time() -> None:
    arrivals, begun = Arrivals(replace(ALONE, world_size=2)), time.perf_counter()
    arrivals.begin_step(PLAN.micro_batches(0)[:1])
    for part in (LOADING, FORWARD, WAITING, FORWARD, BACKWARD):
        time.sleep(0.2 * (part == WAITING))
        arrivals.lap(part)
    total = time.perf_counter() - begun
    arrivals._add_up()
    assert sum(arrivals._row[:3]) <= total - 0.2
    assert arrivals._row[3:] == [1, 5, 1], "micro-batches, samples, steps"


def task(name: str, *methods: str, base: type = Task) -> Any:
    """A task of this name with these methods, and those that all have."""
    methods = ("train_dataset", "test_dataset", "model", "metrics", *methods)
    return type(name, (base,), {"best": None} | dict.fromkeys(methods, lambda *_: None))()


WHOLE, MEAN = task("Whole", "embed", "batch_loss"), task("Mean", "loss")


def test_a_task_has_a_loss_or_embeddings_and_their_loss() -> None:
    assert has_batch_loss(WHOLE)
    assert not has_batch_loss(MEAN)
    both = "define either loss(), or embed() and batch_loss()"
    for odd, expected in (
        (task("Data"), "Data must define loss(), or embed() and batch_loss()"),
        (task("Half", "embed"), "Half defines embed() and must define batch_loss() too"),
        (task("Other", "batch_loss"), "Other defines batch_loss() and must define embed() too"),
        (task("Both", "loss", "embed", "batch_loss"), f"Both defines loss() and embed(): {both}"),
        (task("OfALabel", "embed", base=Classification), f"OfALabel defines loss() and embed(): {both}"),
    ):
        assert refusal_of(has_batch_loss, odd).startswith(expected)


def test_what_such_a_task_cannot_have_is_refused() -> None:
    refuse_unfit(WHOLE, Config())
    refuse_unfit(MEAN, Config(strategy="dp", micro_batch="auto"))
    for config, expected in (
        (Config(strategy="dp"), "--strategy dp: divides each micro-batch, and Whole has a batch_loss() over"),
        (Config(micro_batch="auto"), "--micro-batch auto: tries the loss of one micro-batch, and Whole has"),
    ):
        assert refusal_of(refuse_unfit, WHOLE, config).startswith(expected)


@pytest.mark.parametrize(("micro_batch", "batch"), [(3, 4), (5, 5), (2, 10), (4, 8)])
def test_without_metrics_the_evaluation_has_the_loss_of_each_batch(micro_batch: int, batch: int) -> None:
    """Of ten test samples; the control is the mean over micro-batches, another number."""
    task, config = Deterministic(dropout=0.0), Config(batch_size=batch, micro_batch=min(micro_batch, batch))
    model, data = task.model(), task.test_dataset()
    evaluation = evaluation_of(task, model, data, config, ALONE, "test")
    found = evaluation()
    model.eval()
    parts = [data.__getitems__(list(range(at, min(at + batch, 10)))) for at in range(0, 10, batch)]
    with torch.no_grad():
        losses = [(float(whitening(model(part[0]))[0]), len(part[0])) for part in parts]
        small = [float(whitening(model(data.__getitems__(list(range(at, at + 2)))[0]))[0]) for at in range(0, 10, 2)]
    assert found["loss"] == pytest.approx(sum(loss * samples for loss, samples in losses) / 10)
    assert found["labels"] == pytest.approx(0.9)
    assert found["loss"] != pytest.approx(sum(small) / 5, rel=1e-2)
    assert evaluation.rehearse() is not None


class Deterministic(Plain):
    """Without random numbers."""

    def embed(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"z": model(batch[0]), "label": batch[1]}

    def batch_loss(self, embeddings: dict[str, Tensor], step: int = 0) -> Any:
        return whitening(embeddings["z"])[0], {"labels": embeddings["label"].double().mean()}


def test_a_single_row_of_several_dtypes_is_unpacked() -> None:
    values = {"x": torch.randn(1, 3), "y": torch.tensor([7])}
    layout = tuple((name, it.dtype, tuple(it.shape[1:])) for name, it in values.items())
    found = _unpacked(_packed(values), layout)
    assert all(torch.equal(found[name], it) for name, it in values.items())
