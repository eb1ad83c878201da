"""The sum of the ranks' gradients: the stock all-reduce, or a sum whose order does not depend on the ranks.

`AllReduce` (`--reduce ring`) is DDP's default; its last bits depend on the number of ranks. `TreeReduction` adds the
micro-batches' gradients in the order of `tree`. DDP calls the hook of a `Reduction` for each bucket of gradients as
soon as backward has filled it, so that the exchange overlaps the rest of backward. Where micro-batches may leave
parameters unused, the tree exchanges all gradients after backward, without DDP: DDP's own collective about used
parameters and those of the tree's thread could run in different orders, which breaks NCCL.
"""

# no `from __future__ import annotations` here: DDP compares a communication hook's annotations with real types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from .exchange import Exchange, FullBucket, Pipeline, Scratch
from .tree import Fold, Node
from .world import World


class Reduction:
    """Adds up the gradients of a step's micro-batches over all ranks (`world`).

    `DistributedLoss` calls, for each step: `begin_step`; after each backward pass but the last `accumulate`; in the
    last one DDP calls `hook` for each bucket; then `end`, and `sum_small`.
    """

    by_fsdp = False
    """Whether FSDP2 reduces the gradients."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ddp_reduces = world.launched
        """Whether DDP reduces the gradients, by :meth:`hook`; otherwise :meth:`end` does."""
        self.all_buckets_ready = False
        """Whether DDP has passed all buckets of the step to the hook."""
        self.on_last_bucket: Callable[[], None] = lambda: None
        """Called when DDP passes the last bucket: this rank has nothing more to compute."""
        self.before_reduction: Callable[[Sequence[Tensor], list[Tensor]], None] | None = None
        """Called with parameters and this rank's gradients of them, as views, before DDP reduces them."""

    def begin_step(self, shares: Sequence[range]) -> None:
        """Begin a step with these micro-batches of each rank. The collectives of the previous step are over."""
        self.all_buckets_ready = False

    def repeats(self, micro_batch_id: int) -> bool:
        """Whether a micro-batch counts on another rank: with --shard an idle rank only repeats one."""
        return False

    def accumulate(self, micro_batch_id: int) -> None:
        """Add a micro-batch's gradient to this rank's sum, where ``.grad`` does not add up itself (the tree)."""

    def end(self) -> None:
        """Finish the step after the last backward pass; raises what went wrong in a thread of the reduction."""

    def catch_up(self) -> None:
        """Wait for the collectives that the hook has begun. --sync-batchnorm calls this before it exchanges statistics
        in backward, because two NCCL communicators at work at once might wait for each other."""

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook: add up a bucket without dividing, because the loss has the weights."""
        raise NotImplementedError

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """Begin to add up small vectors over all ranks, after the backward passes; all ranks must call it.

        Takes this rank's fold of them, in float64 and of shape [numel]. Returns a function that waits for the sum.
        """
        raise NotImplementedError

    def _bucket_ready(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        if self.before_reduction:
            self.before_reduction(bucket.parameters(), _views(bucket.buffer(), bucket.parameters()))
        if bucket.is_last():
            self.all_buckets_ready = True
            self.on_last_bucket()


class AllReduce(Reduction):
    """DDP's own sum: ``.grad`` adds up on each rank, and the stock all-reduce adds up over the ranks.

    With `compressed`, ranks exchange float32 gradients in bfloat16, as torch's `bf16_compress_hook` does.
    """

    def __init__(self, world: World, compressed: bool = False) -> None:
        super().__init__(world)
        self._compressed = compressed and world.world_size > 1
        self._under_way: list[dist.Work] = []

    def begin_step(self, shares: Sequence[range]) -> None:
        """Begin a step."""
        super().begin_step(shares)
        self._under_way.clear()

    def catch_up(self) -> None:
        """Wait for the all-reduces so far."""
        while self._under_way:
            self._under_way.pop().wait()

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """All-reduce a bucket."""
        self._bucket_ready(bucket)
        buffer = bucket.buffer()
        compressed = self._compressed and buffer.dtype == torch.float32
        work = dist.all_reduce(buffer.bfloat16() if compressed else buffer, async_op=True)
        self._under_way.append(work)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0]) if compressed else done.value()[0])

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """Add up by an all-reduce: the last bits depend on the number of ranks."""
        total = fold.root() if fold.sums else torch.zeros(numel, dtype=torch.float64, device=self.world.device)
        work = dist.all_reduce(total, async_op=True) if self.world.world_size > 1 else None

        def wait() -> Tensor:
            if work:
                work.wait()
            return total

        return wait


class TreeReduction(Reduction):
    """Sums in the order of the tree: the same bits on any number of ranks.

    With `unused_parameters`, micro-batches may leave parameters without a gradient. Missing gradients count as +0.0; a
    parameter that no micro-batch of a step uses has none afterwards. `collectives`: the loss calls some, so
    the tree's thread must call none meanwhile.

    Memory: the last micro-batch's gradients are in DDP's bucket. `_add` adds into its right operand, and the last
    subtree ends with the last micro-batch; so the last sum is in the bucket already, and only earlier ones are copied.
    """

    def __init__(self, model: nn.Module, world: World, unused_parameters: bool, collectives: bool = False) -> None:
        super().__init__(world)
        self.ddp_reduces &= not (unused_parameters or collectives)
        self.unused_parameters = unused_parameters
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._index: dict[Tensor, int] = {parameter: i for i, parameter in enumerate(self.parameters)}
        self._shares: Sequence[range] = []
        self._so_far = Fold(_add)
        self._used: set[int] = set()
        self._memory = Scratch()
        self._exchanges: dict[Any, Exchange] = {}
        self._pipeline = Pipeline(world.devices)

    def begin_step(self, shares: Sequence[range]) -> None:
        """Begin a step."""
        super().begin_step(shares)
        self._shares, self._so_far, self._used = shares, Fold(_add), set()

    def accumulate(self, micro_batch_id: int) -> None:
        """Move the gradient from ``.grad`` into the fold."""
        gradients = self._taken()
        if self.unused_parameters:
            torch._foreach_add_(gradients, 0.0)  # makes -0.0 +0.0
        self._so_far.push(Node(0, micro_batch_id), gradients)

    def end(self) -> None:
        """Fold in the last micro-batch and add up over the ranks, if DDP does not."""
        if self.ddp_reduces:
            self._pipeline.check()
            return
        fold = self._with_last(self._taken() if self._shares[self.world.rank] else [], self._so_far.sums)
        used = [index in self._used for index in range(len(self.parameters))]
        total, used = self._sum_over_ranks(fold, used) if self.world.world_size > 1 else (fold.root(), used)
        for parameter, gradient, is_used in zip(self.parameters, total, used, strict=True):
            parameter.grad = gradient if is_used else None

    def _taken(self) -> list[Tensor]:
        """Take the gradients out of ``.grad``; zeros where there is none."""
        used = {index for index, parameter in enumerate(self.parameters) if parameter.grad is not None}
        # otherwise only the last micro-batch counts: as with DDP, it must have a gradient of each parameter
        self._used = self._used | used if self.unused_parameters else used
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def _sum_over_ranks(self, fold: Fold[list[Tensor]], used: list[bool]) -> tuple[list[Tensor], list[bool]]:
        """The sum of each parameter over all ranks, and whether any rank has used it."""
        uses = torch.tensor(used)
        pending = dist.all_reduce(uses, dist.ReduceOp.MAX, async_op=True)  # by gloo, without waiting for a GPU
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self.parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        totals: dict[Tensor, Tensor] = {}
        for kind, parameters in kinds.items():
            flat = self._memory.get(kind, sum(p.numel() for p in parameters), parameters[0])
            sums = [[gradients[self._index[p]] for p in parameters] for _, gradients in fold.sums]
            exchange = self._exchange_for(kind, flat)
            exchange.send_chunks(self._flat(kind, flat, parameters, sums), self._shares).wait()
            exchange.send_sums(flat).wait()
            totals.update(zip(parameters, _views(flat, parameters), strict=True))
        pending.wait()
        return [totals[parameter] for parameter in self.parameters], uses.tolist()

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Fold this rank's gradients, and let the pipeline exchange them."""
        self._bucket_ready(bucket)
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self._shares:  # the empty pass before the first step
            future.set_result(buffer)
            return future
        parameters = bucket.parameters()
        indices = [self._index[parameter] for parameter in parameters]
        sums = [(node, [gradients[i] for i in indices]) for node, gradients in self._so_far.sums]
        fold = self._with_last(_views(buffer, parameters), sums)
        if self.world.world_size == 1:
            fold.root()  # in the bucket
            future.set_result(buffer)
            return future
        key = bucket.index(), buffer.numel()
        flat_sums = self._flat(key, buffer, parameters, [values for _, values in fold.sums])
        ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        exchange = self._exchange_for(key, buffer)
        self._pipeline.put(FullBucket(exchange, flat_sums, self._shares, buffer, ready, future, bucket.is_last()))
        return future

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """Add up in the order of the tree."""
        if self.world.world_size == 1:
            return fold.root
        total = torch.empty(numel, dtype=torch.float64, device=self.world.device)
        exchange = self._exchange_for("small", total)
        handle = exchange.send_chunks([value for _, value in fold.sums], self._shares)

        def wait() -> Tensor:
            handle.wait()
            exchange.send_sums(total).wait()
            return total

        return wait

    def _with_last(self, last: list[Tensor], earlier: Sequence[tuple[Node, list[Tensor]]]) -> Fold[list[Tensor]]:
        """This rank's nodes with the last micro-batch's gradients; none on an idle rank."""
        fold, leaves = Fold(_add), self._shares[self.world.rank]
        if leaves:
            if self.unused_parameters:
                torch._foreach_add_(last, 0.0)
            fold.sums = list(earlier)
            fold.push(Node(0, leaves[-1]), last)
        return fold

    def _flat(self, key: Any, flat: Tensor, parameters: Sequence[Tensor], sums: Sequence[list[Tensor]]) -> list[Tensor]:
        """The sums as flat tensors: the last one is `flat`, others are scratch memory."""
        if not sums:
            return []
        found = [*(self._memory.get((key, depth), flat.numel(), flat) for depth in range(len(sums) - 1)), flat]
        for into, values in zip(found, sums, strict=True):
            if values[0].data_ptr() != into.data_ptr():
                torch._foreach_copy_(_views(into, parameters), values)
        return found

    def _exchange_for(self, key: Any, like: Tensor) -> Exchange:
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(self.world, like.numel(), like)
        return self._exchanges[key]


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """View flat memory as gradients laid out as by DDP: in each parameter's order of memory, which
    `GradBucket.gradients` ignores."""
    views, offset = [], flat.storage_offset()
    for parameter in parameters:
        strides = parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
        views.append(flat.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return views


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a piece of memory without gaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Add up in the memory of the right operand."""
    torch._foreach_add_(right, left)
    return right
