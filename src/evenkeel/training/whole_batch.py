"""Losses over all samples of a step (SimCLR, CLIP, whitening, AUC), in the memory of one micro-batch.

Such a loss is not a mean over micro-batches: it compares each sample with all others. Its gradient is exact if a batch
is embedded twice (GradCache: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
2021, arXiv 2101.06983):

1. each rank embeds its micro-batches, one after another, and drops the activations;
2. one exchange gives all ranks the embeddings of the whole step, in the order of its samples;
3. each rank computes the loss over all of them, and its gradient by each embedding: the same on all ranks;
4. each micro-batch is embedded again, with the same random numbers, and that gradient is backpropagated.

The loss of the last pass is the inner product of the embeddings with their gradient. So the gradients of micro-batches
and ranks are summed, not averaged, in the same order as for any other loss.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..common.errors import Ended, EndedHere, Refusal, seen_at
from ..common.phases import COMPUTING, DATA, REDUCTION, activity
from ..config import Config
from ..data.batch import with_parts
from ..data.plan import MicroBatch, Plan
from ..data.randomness import derive, seed_computation
from ..data.sampler import Step
from ..distributed.collectives import no_collectives
from ..distributed.world import World
from .checks import checked_embeddings, checked_losses, takes
from .oom import note_batch
from .task import Losses, Task, defines

Layout: TypeAlias = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
"""Name, dtype and shape of each embedding of a sample. A tensor that is not in a dict has the name ""."""

FirstPass: TypeAlias = Callable[[MicroBatch, Any], dict[str, Tensor]]
"""(micro-batch, its batch) -> its embeddings by name, of shape [samples, ...]."""

NO_GRADIENT = (
    "embed() returned embeddings without a gradient: they do not depend on the model's parameters, or were made under "
    "torch.no_grad() or from .detach(), or batch_loss() uses only those that require none"
)


def has_batch_loss(task: Task) -> bool:
    """Whether a task's loss is over all samples of a step.

    Raises:
        Refusal: it defines neither `loss` nor `embed` and `batch_loss`, or only one of these two, or all.
    """
    name = type(task).__name__
    loss, embed, batch_loss = (defines(type(task), method) for method in ("loss", "embed", "batch_loss"))
    if loss and (embed or batch_loss):
        other = "embed()" if embed else "batch_loss()"
        raise Refusal(f"{name} defines loss() and {other}: define either loss(), or embed() and batch_loss()")
    if embed != batch_loss:
        has, lacks = ("embed()", "batch_loss()") if embed else ("batch_loss()", "embed()")
        raise Refusal(f"{name} defines {has} and must define {lacks} too: a loss of whole batches needs both")
    if not (loss or embed):
        raise Refusal(f"{name} must define loss(), or embed() and batch_loss()")
    return embed


def refuse_unfit(task: Task, config: Config) -> None:
    """Refuse a task without a loss, as :func:`has_batch_loss`, and options that whole-batch losses do not support."""
    if not has_batch_loss(task):
        return
    name = type(task).__name__
    if config.strategy == "dp":
        raise Refusal(f"--strategy dp: divides each micro-batch, and {name} has a batch_loss() over all; use ddp")
    if config.micro_batch == "auto":
        raise Refusal(
            f"--micro-batch auto: tries the loss of one micro-batch, and {name} has a batch_loss() over a whole step; "
            "give a number"
        )


class WholeBatch:
    """A loss over all samples of a step, as a loss function for `DistributedLoss`.

    Called with a micro-batch in the second pass, it returns the loss of the whole step, with the gradient of the
    micro-batch's part.

    Args:
        embed: (model, batch) -> tensors of shape [samples, ...], one or a dict: a task's `embed`.
        batch_loss: (embeddings of all samples) -> the loss, perhaps with its parts: a task's `batch_loss`. With a
            parameter `step` it gets the step's number.
    """

    def __init__(self, embed: Callable[..., Any], batch_loss: Callable[..., Losses]) -> None:
        self._embed, self._batch_loss = embed, batch_loss
        self._takes_step = takes(batch_loss, "step")
        self._layout: Layout | None = None
        self._agreed = False  # whether the ranks have exchanged the layout
        self._rows = slice(0)  # the samples, within the step, of the micro-batch in its second pass
        self._gradients: dict[str, Tensor] = {}  # of the loss by all embeddings
        self._found: tuple[Tensor, dict[str, Tensor]] = torch.zeros(()), {}  # the loss, and its parts

    def embed(self, model: nn.Module, batch: Any, samples: int) -> dict[str, Tensor]:
        """A micro-batch's embeddings by name, a row per sample; raises EndedHere if they have another type or shape."""
        found = checked_embeddings(self._embed(model, batch), samples)
        layout = tuple((name, value.dtype, tuple(value.shape[1:])) for name, value in found.items())
        self._layout = self._layout or layout
        if layout != self._layout:
            raise _differ(self._layout, layout, EndedHere)
        if not any(value.requires_grad for value in found.values()):
            raise EndedHere(NO_GRADIENT)
        return found

    def __call__(self, model: nn.Module, batch: Any) -> Losses:
        """The second pass of a micro-batch: the loss of the whole step, and its parts."""
        products = [
            (value * self._gradients[name][self._rows].to(value.device)).sum()
            for name, value in self.embed(model, batch, self._rows.stop - self._rows.start).items()
            if value.requires_grad and name in self._gradients
        ]
        if not products:
            raise EndedHere(NO_GRADIENT)
        product = torch.stack([each.to(products[0].device) for each in products]).sum()
        loss, parts = self._found
        return loss.to(product.device) + (product - product.detach()), parts

    def embed_all(
        self, step: Step, shares: tuple[range, ...], plan: Plan, world: World, seed: int, first_pass: FirstPass
    ) -> Iterator[Any]:
        """Embed this rank's micro-batches of a step, and compute the loss over all ranks', which must call it too.

        `shares`: numbers of the micro-batches of each rank.

        `first_pass` is :meth:`embed` on the device, with a micro-batch's random numbers. It computes with autograd, and
        the graph is dropped: without it, other kernels and compiled graphs may draw other dropout, or round otherwise.

        Returns:
            The batches again, for the second pass. They stay on the host until then.
        """
        batches: deque[Any] = deque()
        rows: list[Tensor] = []
        for micro_batch, batch in zip(step.micro_batches, step.batches, strict=True):
            batches.append(batch)
            # on the CPU the batch is not copied, and a task may change it
            again = cloned(batch) if world.device.type == "cpu" else batch
            rows.append(_packed(first_pass(micro_batch, again)).to(world.device))
            activity.enter(DATA)
        activity.enter(REDUCTION)
        layout, everyones = self._agreed_layout(world), plan.micro_batches(step.number)
        sizes = [sum(everyones[number].size for number in share) for share in shares]  # of each rank
        everything = _unpacked(_gathered(rows, sizes, layout, world), layout)
        activity.enter(COMPUTING)
        self._differentiate(everything, step.number, seed, world)
        return self._second_pass(step, batches, sum(sizes[: world.rank]))

    def _second_pass(self, step: Step, batches: deque[Any], first: int) -> Iterator[Any]:
        for micro_batch in step.micro_batches:
            self._rows = slice(first, first + micro_batch.size)
            first += micro_batch.size
            yield batches.popleft()

    def _agreed_layout(self, world: World) -> Layout:
        """The layout, which the ranks exchange once: a rank without a micro-batch does not know it."""
        if not self._agreed:
            told = [layout for layout in world.all_gather(self._layout) if layout]
            for layout in told:
                if layout != told[0]:
                    raise _differ(told[0], layout, Ended)
            self._layout, self._agreed = told[0], True
        assert self._layout
        return self._layout

    def _differentiate(self, embeddings: dict[str, Tensor], step: int, seed: int, world: World) -> None:
        """Compute the loss in float32, and its gradient by each embedding."""
        for name, value in embeddings.items():
            if value.is_floating_point():
                embeddings[name] = in_float32(value).requires_grad_()
        given = embeddings[""] if "" in embeddings else dict(embeddings)
        learning = {name: value for name, value in embeddings.items() if value.requires_grad}
        seed_computation(derive(seed, "batch_loss", step), world.devices)
        try:
            with torch.enable_grad(), no_collectives("batch_loss()"):
                returned = self._batch_loss(given, **({"step": step} if self._takes_step else {}))
                with seen_at(self._batch_loss):
                    loss, parts = checked_losses(returned, of="batch_loss()")
                found = torch.autograd.grad(loss, list(learning.values()), allow_unused=True)
        except Exception as error:
            note_batch(error, list(embeddings.values()), "batch_loss() has all samples of a step: lower --batch-size")
            raise
        self._found = loss.detach().reshape(()), parts
        self._gradients = {name: slope for name, slope in zip(learning, found, strict=True) if slope is not None}


def cloned(batch: Any) -> Any:
    """A copy of a batch, because a task may change it."""
    if isinstance(batch, Tensor):
        return batch.clone()
    # the parts of an object with its own `to` are not known
    return copy.deepcopy(batch) if callable(getattr(batch, "to", None)) else with_parts(batch, cloned)


def in_float32(value: Tensor) -> Tensor:
    """An embedding of low precision in float32; others as they are."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _packed(embeddings: Mapping[str, Tensor]) -> Tensor:
    """Bytes, of shape [samples, bytes of a sample]: one exchange for all dtypes, and one layout in memory."""
    rows = [value.detach().reshape(len(value), math.prod(value.shape[1:])) for value in embeddings.values()]
    # cloned, because one sample of an expanded tensor counts as contiguous but has no stride of one
    dense = [row.clone(memory_format=torch.contiguous_format) for row in rows]
    return torch.cat([row.view(torch.uint8).to(dense[0].device) for row in dense], 1)


def _unpacked(rows: Tensor, layout: Layout) -> dict[str, Tensor]:
    embeddings, at = {}, 0
    for name, dtype, shape in layout:
        width = math.prod(shape) * dtype.itemsize
        part = rows[:, at : at + width].clone(memory_format=torch.contiguous_format)  # as in `_packed`
        embeddings[name] = part.view(dtype).view(len(rows), *shape)
        at += width
    return embeddings


def _gathered(mine: list[Tensor], sizes: list[int], layout: Layout, world: World) -> Tensor:
    """The rows of all ranks, [samples of the step, bytes], in the order of samples, which is also the order of
    ranks."""
    if world.world_size == 1:
        return torch.cat(mine)
    width = sum(math.prod(shape) * dtype.itemsize for _, dtype, shape in layout)
    padded = torch.zeros(max(sizes), width, dtype=torch.uint8, device=world.device)
    if mine:
        padded[: sizes[world.rank]] = torch.cat(mine)
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return torch.cat([rows[:size] for rows, size in zip(everyone, sizes, strict=True)])


def _differ(known: Layout, other: Layout, kind: type[Ended]) -> Ended:
    def shown(layout: Layout) -> str:
        told = (f"{name} {list(shape)} {dtype}".strip().replace("torch.", "") for name, dtype, shape in layout)
        return ", ".join(told)

    return kind(
        f"embed() returned rows of {shown(known)} for one batch and of {shown(other)} for another: it must return the "
        "same names, dtypes and shapes for all"
    )
