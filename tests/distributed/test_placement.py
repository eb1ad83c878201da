"""Models on several devices: what goes where, that data follows, and that nothing else changes.

Without GPUs the devices are fake ones (`fake_devices`), which tell where tensors of two devices would meet.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evenkeel.common.errors import Refusal
from evenkeel.config import Config, devices_per_rank
from evenkeel.data.plan import Plan
from evenkeel.distributed import placement
from evenkeel.distributed.devices import explain_devices
from evenkeel.distributed.placement import Placement, balanced, cut, named
from evenkeel.distributed.world import World
from evenkeel.run.weights import read_weights
from evenkeel.tasks.classify import Classify
from evenkeel.training import side_effects
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.nonfinite import Verdict
from evenkeel.training.optimization import clip_grad_norm
from evenkeel.training.precision import Scaler
from evenkeel.training.state import State
from tests.support.fake_devices import DEVICES, MEET, fake, spread
from tests.support.raised import refusal_of
from tests.support.steps import passes

CPU = torch.device("cpu")


def of_torchvision(name: str) -> nn.Module:
    """Without data."""
    from torchvision import models

    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some want to change their first weights
        if name == "densenet":
            return models.DenseNet(32, (2, 2, 2, 2))  # as densenet121, with a ninth of its layers
        return models.get_model(name, weights=None)  # type: ignore[no-any-return]


def bytes_by_device(model: nn.Module, found: Placement, parts: int) -> list[int]:
    sizes = [0] * parts
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        sizes[found.tensors[name]] += tensor.nbytes
    return sizes


@pytest.mark.parametrize(
    ("name", "parts", "largest"),
    [
        ("resnet18", 2, 0.55),
        ("resnet50", 3, 0.40),
        ("vit_b_16", 3, 0.34),
        ("vgg11", 2, 0.85),  # one layer has three quarters of it
        ("mobilenet_v3_small", 2, 0.60),
        ("densenet", 2, 0.58),
        ("inception_v3", 2, 0.58),
        ("swin_t", 2, 0.53),
    ],
)
def test_a_cut_network_of_torchvision_computes_where_its_parts_are(name: str, parts: int, largest: float) -> None:
    """Forward and backward on fake devices; and the control, where inputs do not follow."""
    net = of_torchvision(name)
    names = list(net.state_dict())
    found = cut(net, parts)
    sizes = bytes_by_device(net, found, parts)
    assert max(sizes) <= largest * sum(sizes)
    assert min(sizes) > 0
    with fake():
        spread(net, found)
        images = torch.rand(2, 3, *([299] * 2 if name == "inception_v3" else [224] * 2), device=DEVICES[0])
        with pytest.raises(RuntimeError, match=MEET):
            net(images)
        found.connect(net, DEVICES)
        out = net(images)
        outputs = [out] if isinstance(out, Tensor) else [each for each in out if each is not None]
        assert {each.device for each in outputs} == {DEVICES[0]}
        sum(each.sum() for each in outputs).backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad.device == parameter.device == DEVICES[found.tensors[name]]
        assert net.eval()(images).device == DEVICES[0]
    assert list(net.state_dict()) == names


def test_a_cut_that_the_flow_forbids_is_an_error_on_these_devices() -> None:
    """So they would tell: in the middle of a residual block, whose input is added to its output."""
    net = of_torchvision("resnet18")
    wrong = Placement({name: int(name >= "layer3.1.conv2") for name, _ in net.named_parameters()}, {}, [])
    wrong.tensors |= {name: int(name >= "layer3.1.conv2") for name, _ in net.named_buffers()}
    wrong.arrivals = {"layer3.1.conv2": 1, "layer4": 1, "bn1": 0}
    for name in wrong.tensors:
        if name.split(".")[0] in ("conv1", "bn1", "layer1", "layer2", "fc"):
            wrong.tensors[name] = 0
    wrong.arrivals["fc"] = 0
    with fake():
        spread(net, wrong)
        wrong.connect(net, DEVICES)
        images = torch.rand(2, 3, 64, 64, device=DEVICES[0])
        with pytest.raises(RuntimeError, match=MEET):
            net(images)


class Forked(nn.Module):
    """An input that is needed again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale + x


class Undecided(nn.Module):
    """What it does depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) if x.sum() > 0 else x


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    return net


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(4, 4), "Linear can be cut at 0 of the 0 places between its modules with weights"),
        (Forked, "Forked can be cut at 0 of the 1 places"),
        (tied, "Sequential can be cut at 0 of the 1 places"),
        (Undecided, "Undecided cannot be cut, because torch.fx cannot trace it (TraceError: "),
    ],
)
def test_what_cannot_be_cut_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    assert refusal_of(cut, make(), 2).startswith(f"--model-parallel 2: {message}")


def test_a_part_beyond_tracing_is_taken_as_a_whole() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Undecided(), nn.Linear(4, 4))
    found = cut(net, 3)
    assert {name.split(".")[0]: number for name, number in found.tensors.items()} == {"0": 0, "1": 1, "2": 2}


def test_a_loose_parameter_is_where_it_is_used() -> None:
    class Late(Forked):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)) * self.scale

    assert cut(Late(), 2).tensors == {
        "scale": 1, "first.weight": 0, "first.bias": 0, "second.weight": 1, "second.bias": 1
    }  # fmt: skip


def test_parts_are_balanced() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        size = int(torch.randint(3, 8, (), generator=generator))
        weights = torch.randint(0, 9, (size,), generator=generator).tolist()
        allowed = [i for i in range(1, size) if torch.rand((), generator=generator) < 0.8]
        if len(allowed) < 2:
            continue

        def heaviest(a: int, b: int, weights: list[int] = weights) -> int:
            return max(sum(weights[:a]), sum(weights[a:b]), sum(weights[b:]))

        best = min(heaviest(a, b) for a in allowed for b in allowed if a < b)
        a, b = balanced(weights, allowed, 3)
        assert heaviest(a, b) == best
        assert a < b
        assert {a, b} <= set(allowed)


@pytest.mark.parametrize("net", ["resnet18", "vit"])
def test_a_cut_network_computes_the_same_in_every_bit_and_its_checkpoints_do_not_know(net: str, tmp_path: Path) -> None:
    from torchvision.models import VisionTransformer, resnet18

    def make() -> nn.Module:
        torch.manual_seed(0)
        return resnet18(num_classes=7) if net == "resnet18" else VisionTransformer(32, 8, 3, 4, 32, 64, 0.1)

    whole, parts = make(), make()
    line = placement.place(parts, Config(model_parallel=2), [CPU, CPU])
    assert line.startswith("--model-parallel 2: ")
    assert line.endswith("; there is no GPU, so everything is on the CPU")
    found = []
    for model in (whole, parts):
        torch.manual_seed(1)
        out = model(torch.rand(4, 3, 32, 32))
        F.cross_entropy(out, torch.tensor([1, 2, 3, 4])).backward()
        found.append([out, *(p.grad for p in model.parameters()), *model.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    torch.save(parts.state_dict(), tmp_path / "cut.pt")
    assert "all" in read_weights(make(), tmp_path / "cut.pt")[1]


HOW: dict[str, Callable[[nn.Module], Placement]] = {
    "placed": lambda model: named(model, {"segmenter": 0, "discriminator": 1}),
    "placed the other way round": lambda model: named(model, {"segmenter": 1, "discriminator": 0}),
    "one named": lambda model: named(model, {"discriminator": 2}),
    "cut": lambda model: cut(model, 2),
}


@pytest.mark.parametrize(
    ("how", "reduce"),
    [*((how, "ring") for how in HOW), ("placed", "tree"), ("cut", "tree")],
)
def test_a_step_of_two_networks_on_several_devices(how: str, reduce: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradient, clipping, commit of the buffers, the empty pass of an idle rank and the evaluation's metrics."""
    # the one thing that a fake tensor cannot tell the host: a number
    monkeypatch.setattr(Verdict, "pop", lambda _: False)
    monkeypatch.setattr(side_effects, "on_host", lambda _: {})
    task = pytest.importorskip("evenkeel.tasks.segment").Segment(backbone="small", canvas=32, digit_size=16)
    with torch.device("meta"):
        model = task.model()
    found = HOW[how](model)
    plan = Plan(16, 8, 4, 1)
    with fake():
        spread(model, found)
        found.connect(model, DEVICES)
        # no optimizer, because those for fake tensors ask whether a step is finite
        scaler = Scaler(DEVICES[0]) if reduce == "ring" else None
        state = State(model, [], scaler=scaler, ema=0.9)
        world = World(0, 0, 1, 1, DEVICES[0], False, tuple(DEVICES[1:]))
        gradients = DistributedLoss(task.loss, state, world, plan, Config(reduce=reduce))
        batches = [(torch.rand(4, 1, 32, 32), torch.zeros(4, 32, 32, dtype=torch.int64)) for _ in range(2)]
        passes(gradients, 0, plan.micro_batches(0), batches)
        norm = clip_grad_norm(model.parameters(), 1.0)
        devices = {p.device for p in model.parameters()}
        assert len(devices) == 2
        assert all(p.grad is not None and p.grad.device == p.device for p in model.parameters())
        assert {name: view.device for name, view in state.buffers.committed.items()} == {
            name: buffer.device for name, buffer in model.named_buffers()
        }
        gradients.step(norm)
        assert state.step == 1
        assert {number.device for number in state._seqlock.done} == devices | ({DEVICES[0]} if scaler else set())
        assert [p.device for p in state.best_model.parameters()] == [p.device for p in model.parameters()]
        model.zero_grad()
        gradients.module(None).backward()
        images, masks = (values.to(DEVICES[0]) for values in batches[0])
        for evaluated in (model.eval(), state.best_model):
            metrics = task.metrics(evaluated, (images, masks))
            assert {name: value.device for name, value in metrics.items()} == dict.fromkeys(
                ["confusion", "loss", "adversarial"], DEVICES[0]
            )


def test_what_cannot_be_meant_is_refused() -> None:
    model = nn.ModuleDict({"segmenter": nn.Linear(2, 2), "discriminator": nn.Linear(2, 2)})
    assert "no network 'segmentor'; it has segmenter, discriminator" in refusal_of(named, model, {"segmentor": 0})
    assert "device 0 has no network" in refusal_of(named, model, {"segmenter": 1, "discriminator": 1})
    both = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    both["b"].weight = both["a"].weight
    with pytest.raises(Refusal, match=r"a\.weight and b\.weight are the same tensor and must be on one device"):
        named(both, {"a": 0, "b": 1})


def test_parts_of_one_network_can_be_placed_too() -> None:
    net = Classify().model()
    found = named(net, {"features": 0, "classifier": 1})
    with fake():
        spread(net, found)
        found.connect(net, DEVICES)
        assert net(torch.rand(2, 1, 8, 8, device=DEVICES[0])).device == DEVICES[0], "where the labels are"
    with fake():  # the last part is named by nobody, so it is on the first device
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
        found = named(net, {"1": 1})
        spread(net, found)
        found.connect(net, DEVICES)
        assert net(torch.rand(2, 8, device=DEVICES[0])).device == net[2].weight.device == DEVICES[0]


def test_how_many_devices_a_rank_has() -> None:
    assert devices_per_rank(Config()) == 1
    assert devices_per_rank(Config(model_parallel=3)) == 3
    assert devices_per_rank(Config(place=" a = 0, b=1,c=1")) == 2
    assert placement.place(Classify().model(), Config(), [CPU]) == ""


def test_a_local_rank_has_consecutive_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    ranks = {"RANK": 3, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    assert World.from_environment(2).devices == (torch.device("cuda", 2), torch.device("cuda", 3))
    assert World.from_environment().devices == (torch.device("cuda", 1),)
    assert current == [torch.device("cuda", 2), torch.device("cuda", 1)], "a task's .cuda() is on its own, not on 0"
    with pytest.raises(Refusal) as caught:
        World.from_environment(3)
    assert str(caught.value) == explain_devices(2, 4, 3)
    said = str(caught.value)
    assert "2 processes on this node with 3 GPUs each (--place or --model-parallel) but 4 visible GPUs" in said
    assert "local rank 1 -> cuda:3 (GPU 7) and none and none; start at most 1 " in str(caught.value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert World.from_environment(2).devices == (CPU, CPU)


def test_ranks_that_share_gpus_begin_with_the_first_again_and_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [torch.device("cuda", number) for number in range(2)]
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    alone = World.from_environment(3, share_gpu=True)
    assert alone.devices == (gpus[0], gpus[1], gpus[0]), "a network in three parts"
    common = {"WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    worlds = []
    for rank in range(3):
        for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, str(value))
        worlds.append(World.from_environment(share_gpu=True))
        with pytest.raises(Refusal, match=r"rank 2 -> none; start at most 2 .* or let .* --share-gpu, which is"):
            World.from_environment()
    assert [world.device for world in worlds] == current[1:] == [gpus[0], gpus[1], gpus[0]]
    assert {world.backend for world in worlds} == {"gloo"}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert World.from_environment().backend == "cpu:gloo,cuda:nccl", "the control"
    assert World.from_environment(share_gpu=True).backend == "gloo", "for another node may have fewer GPUs"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert World.from_environment(share_gpu=True).devices == (CPU,), "any number of ranks may share a CPU"
