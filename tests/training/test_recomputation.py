"""--checkpoint-activations: the same bits in less memory, whatever a block has; the control checkpoints naively."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from evenkeel.common.errors import Ended, Refusal
from evenkeel.tasks.transformer import Decoder
from evenkeel.training import flops as flops_module
from evenkeel.training.checks import raise_explained
from evenkeel.training.classification import Classification
from evenkeel.training.recomputation import recompute, repeated_blocks, without_recomputation
from evenkeel.training.task import constants
from tests.support.raised import line_of, refusal_of

WIDTH = 8


class Odd(nn.Module):
    """What torch's checkpoint alone does not repeat: numbers of Python and NumPy, a buffer that is read and changed, a
    mode; and an input in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, given: dict[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        x = self.drop(self.norm(self.linear(given["x"]).tanh()))
        x = x * float(self.calls) * (random.random() + np.random.rand())
        return {"x": given["x"] + x.sigmoid() * scale * (2 if self.training else 1)}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(Odd() for _ in range(4)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        given = {"x": x}
        for block in self.blocks:
            given = block(given, scale=x.mean())
        return self.out(given["x"])


def mlp() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(12)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def naive(model: nn.Module) -> None:
    """The control, as scripts do it."""
    for block in repeated_blocks(model):
        plain = block.forward
        block.forward = lambda *args, plain=plain, **kwargs: checkpoint(  # type: ignore[method-assign]
            plain, *args, use_reentrant=False, **kwargs
        )


def ours(model: nn.Module) -> None:
    recompute(model, repeated_blocks(model))


def trained(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """Everything after a backward pass: gradients, buffers, and the next random number."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    value = loss(model)
    value.backward()  # type: ignore[no-untyped-call]
    found = {"loss": value.detach(), "next": torch.rand(1), "host": torch.tensor([random.random(), np.random.rand()])}
    found |= {f"{name}.grad": it.grad for name, it in model.named_parameters() if it.grad is not None}
    return found | dict(model.named_buffers())


def both(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor], change: Callable[[nn.Module], None] = ours
) -> list[dict[str, Tensor]]:
    """Without and with recomputation."""
    found = []
    for changed in (False, True):
        torch.manual_seed(0)
        model = make()
        names = list(model.state_dict())
        if changed:
            change(model)
        assert list(model.state_dict()) == names
        found.append(trained(model, loss))
    return found


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


X = torch.linspace(-1, 1, 6 * WIDTH).view(6, WIDTH)


def plainly(model: nn.Module) -> Tensor:
    return model(X).square().mean()  # type: ignore[no-any-return]


def twice(model: nn.Module) -> Tensor:
    """Two passes through the same buffers, as for two views."""
    return plainly(model) + model(X.flip(0)).mean()  # type: ignore[no-any-return]


def in_autocast(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plainly(model)


def of_an_adversary(model: nn.Module) -> Tensor:
    """Through the model as a constant, which other weights stand in for when the backward pass begins."""
    x = X.clone().requires_grad_()
    score = functional_call(model, constants(model), (x,)).mean() + model(X).mean()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score + slope.square().sum()


def in_another_mode(model: nn.Module) -> Tensor:
    value = plainly(model.train())
    return value + plainly(model.eval())


@pytest.mark.parametrize("loss", [plainly, twice, in_autocast, of_an_adversary, in_another_mode])
@pytest.mark.parametrize("make", [Deep, mlp])
def test_the_bits_are_the_same(make: Callable[[], nn.Module], loss: Callable[[nn.Module], Tensor]) -> None:
    assert not different(*both(make, loss))


def test_the_control_a_naive_checkpoint_moves_the_running_statistics_twice() -> None:
    found = different(*both(Deep, plainly, naive))
    assert {"blocks.0.norm.running_mean", "blocks.0.norm.num_batches_tracked", "blocks.0.linear.weight.grad"} <= found


def test_compiled_networks_are_refused() -> None:
    model = mlp()
    model.compile()
    assert "compiler itself decides" in refusal_of(recompute, model, [model[0]])


def saved_bytes(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> int:
    """Of the tensors that a backward pass needs, without those that exist anyway."""
    known = {it.data_ptr() for it in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            found[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = loss(model)
    kept.backward()  # type: ignore[no-untyped-call]
    return sum(found.values())


@pytest.mark.parametrize("make", [mlp, lambda: Decoder(10, 16, 2, 6, 0.1, None)], ids=["mlp", "lm"])
def test_it_takes_less_than_a_third_of_the_memory(make: Callable[[], nn.Module]) -> None:
    model = make()
    inputs = torch.zeros(4, 32, dtype=torch.long) if isinstance(model, Decoder) else torch.ones(64, WIDTH)
    without = saved_bytes(model, lambda network: network(inputs).mean())
    ours(model)
    assert saved_bytes(model, lambda network: network(inputs).mean()) * 3 < without


def test_a_copy_recomputes_its_own_weights_and_can_stop() -> None:
    """The control: with a `forward` of its own, a copy computes with the weights of the first one."""
    model = mlp()
    ours(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0][0].weight.zero_()
    assert not torch.equal(twin(X), model(X))
    twin(X).mean().backward()
    assert model[0][0].weight.grad is None
    assert twin[0][0].weight.grad is not None
    assert type(model[0]).__name__ == "Sequential"
    assert type(without_recomputation(twin)[0]) is nn.Sequential  # type: ignore[index]
    naive(first := mlp())
    again = copy.deepcopy(first)
    again(X).mean().backward()
    assert first[0][0].weight.grad is not None


def test_mfu_does_not_count_what_is_computed_again() -> None:
    class Mine(Classification):
        train_dataset = test_dataset = model = None  # type: ignore[assignment]

    batch = (torch.zeros(4, WIDTH), torch.zeros(4, dtype=torch.long))
    model = mlp()
    before = flops_module.flops(Mine(), model, batch)
    ours(model)
    assert flops_module.flops(Mine(), model, batch) == before


def test_blocks_are_what_is_repeated_and_has_parts() -> None:
    assert len(repeated_blocks(mlp())) == 12
    assert len(repeated_blocks(Deep())) == 4
    assert not repeated_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)))
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 3, enable_nested_tensor=False)
    found = repeated_blocks(nn.ModuleDict({"a": layers}))
    assert [type(it).__name__ for it in found] == ["TransformerEncoderLayer"] * 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet50", {"Bottleneck": 16}),
        ("vit_b_32", {"EncoderBlock": 12}),
        ("convnext_tiny", {"CNBlock": 18, "Sequential": 3}),
        ("vgg11", {}),
    ],
)
def test_torchvision_s_networks_have_blocks(name: str, expected: dict[str, int]) -> None:
    with torch.device("meta"):
        found = repeated_blocks(torchvision.models.get_model(name))
    kinds = [type(it).__name__ for it in found]
    assert {kind: kinds.count(kind) for kind in kinds} == expected


def on_two_devices() -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, device="meta"))


def patched(model: nn.ModuleDict) -> nn.ModuleDict:
    """As libraries do that change a model they have not written."""
    model["one"].forward = torch.relu  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        (lambda _: [], "has no repeated blocks in an nn.Sequential or nn.ModuleList; define blocks"),
        (lambda _: None, "returned None: it must return a list"),
        (lambda _: [nn.Linear(1, 1)], r"blocks\(\)\[0\] is a Linear, and no module of the model"),
        (lambda _: ["a"], r"blocks\(\)\[0\] is a str, and no module"),
        (lambda model: [model["list"]], "list is a ModuleList, which is never called"),
        (lambda model: [model["two"]], "--model-parallel cuts two in two"),
        (lambda model: [patched(model)["one"]], r"one has a forward\(\) that was assigned to the module itself"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(blocks: Any, why: str) -> None:
    model = nn.ModuleDict({"list": nn.ModuleList(), "two": on_two_devices(), "one": nn.Linear(1, 1)})
    with pytest.raises(Refusal, match=f"^--checkpoint-activations: .*{why}"):
        recompute(model, blocks(model))


class Remembers(nn.Linear):
    wide = False

    def forward(self, x: Tensor) -> Tensor:
        self.wide = not self.wide
        return super().forward(torch.cat([x, x]) if self.wide else x).sigmoid()


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Remembers(WIDTH, WIDTH), "a block computed something else in the backward pass"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)), "the input of a block is changed in place"),
    ],
)
def test_a_block_that_cannot_be_repeated_ends_the_run_in_a_line(block: nn.Module, why: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block)
    recompute(model, [block])
    with pytest.raises(RuntimeError) as caught:
        model(X).mean().backward()
    assert line_of(Ended, raise_explained, caught.value, model).startswith(f"--checkpoint-activations: {why}")
