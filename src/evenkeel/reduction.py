"""How the ranks' gradients become one: the stock all-reduce, or a sum whose order does not depend on the ranks.

`Ring` is what DDP does by itself: the last bits depend on the number of ranks. `Tree` adds the gradients of the
micro-batches in the order of `tree`, so that all bits are the same on any number of ranks. Both have a DDP
communication hook, which is called for each bucket of gradients as soon as backward has filled it, so that the
exchange of a bucket overlaps the rest of backward. Where micro-batches may leave parameters unused, the tree does
without DDP and exchanges all after backward: DDP would ask all ranks what they have used, by a collective of its own at
a time of its own, and beside those of the tree's thread their order could differ between ranks, which NCCL does not
survive.

The tree's exchange of a bucket of n numbers, cut into one chunk for each rank:

1. a rank folds its own micro-batches into the maximal subtrees of its run (a single one where W divides M and
   both are powers of two);
2. an all-to-all brings each chunk of each of these to the chunk's owner;
3. the owner folds them into the root;
4. a second all-to-all brings all roots to all ranks.

With one subtree for each rank that moves as many bytes as a ring does.
"""

# no `from __future__ import annotations` here: DDP compares a communication hook's annotations with real types
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from .tree import Fold, Node, subtrees
from .world import World


class Reduction(Protocol):
    """What becomes of the gradients of the micro-batches of a step."""

    hooked: bool
    """Whether it is DDP that has gradients reduced, by the hook. If not, :meth:`end` does it."""
    complete: bool
    """Whether DDP has had all buckets of the step reduced, which it does in their order."""

    def begin(self, runs: Sequence[range]) -> None:
        """A step begins.

        Args:
            runs: the micro-batches of each rank.
        """

    def keep(self, micro_batch: int) -> None:
        """The gradient of a micro-batch stands in ``.grad``, and another one of this rank follows."""

    def end(self) -> None:
        """The last backward pass is over, and with DDP its hook has been called for all buckets.

        Raises:
            Exception: what went wrong in a thread of the reduction.
        """

    def catch_up(self) -> None:
        """Let the stream that computes wait for the hook's collectives so far, before those of another group: at the
        same time two NCCL communicators might each wait for the other."""

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook."""

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """Begin to add up something small over all ranks, after the backward passes of the step. All must call it.

        Args:
            fold: of this rank's micro-batches, flat tensors of shape [numel] in float64.
            numel: needed on an idle rank.

        Returns:
            Waits for the sum, the same on all ranks.
        """


class Ring:
    """Linear sums on each rank, and the stock all-reduce."""

    def __init__(self, world: World) -> None:
        self.world, self.hooked = world, world.launched
        self.complete = False
        self._under_way: list[dist.Work] = []

    def begin(self, runs: Sequence[range]) -> None:
        """Forget the last step, for whose collectives DDP has waited."""
        self.complete = False
        self._under_way.clear()

    def keep(self, micro_batch: int) -> None:
        """Autograd adds the next gradient to the one that is there."""

    def end(self) -> None:
        """All is in ``.grad``."""

    def catch_up(self) -> None:
        """Wait for the all-reduces of the buckets that are full."""
        while self._under_way:
            self._under_way.pop().wait()

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Stock all-reduce without the division, for the weights already are in the loss."""
        self.complete |= bucket.is_last()
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        self._under_way.append(work)
        return work.get_future().then(lambda done: done.value()[0])

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """This rank's in the order of the tree, and an all-reduce, whose last bits depend on the number of ranks."""
        total = fold.root() if fold.sums else torch.zeros(numel, dtype=torch.float64, device=self.world.device)
        work = dist.all_reduce(total, async_op=True) if self.world.world_size > 1 else None

        def wait() -> Tensor:
            if work:
                work.wait()
            return total

        return wait


class Tree:
    """Sums in the order of the tree.

    Args:
        model: whose gradients they are.
        world: who takes part.
        unused: whether a micro-batch may leave parameters without a gradient. That counts as a zero, and as a
            positive one, whether it is a rank's last or not; only if all of a step do, there is none afterwards.
    """

    def __init__(self, model: nn.Module, world: World, unused: bool) -> None:
        self.world, self.unused = world, unused
        self.hooked = world.launched and not unused
        self.complete = False
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._place: dict[Tensor, int] = {parameter: i for i, parameter in enumerate(self.parameters)}
        self._runs: Sequence[range] = []
        self._kept = Fold(_add)
        self._used: set[int] = set()
        self._memory: dict[Any, Tensor] = {}
        self._exchanges: dict[Any, Exchange] = {}
        self._small: Exchange | None = None
        self._pipeline = _Pipeline(world.devices)

    def begin(self, runs: Sequence[range]) -> None:
        """Forget the last step."""
        self.complete = False
        self._runs = runs
        self._kept = Fold(_add)
        self._used = set()

    def keep(self, micro_batch: int) -> None:
        """Move the gradient out of autograd's reach, into the fold."""
        gradients = self._taken()
        if self.unused:
            torch._foreach_add_(gradients, 0.0)  # makes positive zeros of negative ones
        self._kept.push(Node(0, micro_batch), gradients)

    def end(self) -> None:
        """Without DDP, whose hook has done it otherwise: fold in the last micro-batch, and sum over the ranks."""
        if self.hooked:
            self._pipeline.check()
            return
        fold = self._fold(self._taken(), self._kept.sums) if self._runs[self.world.rank] else Fold(_add)
        used = [place in self._used for place in range(len(self.parameters))]
        total, used = self._sum_over_ranks(fold, used) if self.world.world_size > 1 else (fold.root(), used)
        for parameter, gradient, is_used in zip(self.parameters, total, used, strict=True):
            parameter.grad = gradient if is_used else None

    def catch_up(self) -> None:
        """Nothing here could wait for the other thread without a dead-lock; `synchronise` refuses this on GPUs."""

    def _taken(self) -> list[Tensor]:
        """The gradient of the last micro-batch, which autograd forgets; zeros where there is none."""
        used = {place for place, parameter in enumerate(self.parameters) if parameter.grad is not None}
        self._used = used | (self._used if self.unused else set())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def _sum_over_ranks(self, fold: Fold[list[Tensor]], used: list[bool]) -> tuple[list[Tensor], list[bool]]:
        """For each parameter the sum over all ranks, and whether any has used it.

        Args:
            fold: this rank's sums; empty if it is idle.
            used: whether this rank has used a parameter.
        """
        uses = torch.tensor(used)
        asked = dist.all_reduce(uses, dist.ReduceOp.MAX, async_op=True)  # by gloo: no GPU is waited for
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self.parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        views: dict[Tensor, Tensor] = {}
        for kind, parameters in kinds.items():
            flat = self._kept_like(kind, parameters[0], sum(p.numel() for p in parameters))
            rows = []
            for depth, (_, values) in enumerate(fold.sums):
                row = self._kept_like((kind, depth), flat, flat.numel()) if depth else flat
                torch._foreach_copy_(_views(row, parameters), [values[self._place[p]] for p in parameters])
                rows.append(row)
            exchange = self._exchange(kind, flat)
            exchange.scatter(rows, self._runs).wait()
            exchange.gather(flat).wait()
            views.update(zip(parameters, _views(flat, parameters), strict=True))
        asked.wait()
        return [views[parameter] for parameter in self.parameters], uses.tolist()

    def _exchange(self, key: Any, like: Tensor) -> "Exchange":
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(self.world, like.numel(), like)
        return self._exchanges[key]

    def _kept_like(self, key: Any, like: Tensor, numel: int) -> Tensor:
        """Flat memory that is the same in each step."""
        if key not in self._memory:
            self._memory[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return self._memory[key]

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Fold this rank's gradients, and let the pipeline do the rest."""
        self.complete |= bucket.is_last()
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self._runs:  # the empty pass before the first step
            future.set_result(buffer)
            return future
        fold = self._folded(bucket)
        if self.world.world_size == 1:
            fold.root()  # is in the bucket, because the right one of two is what is added to
            future.set_result(buffer)
            return future
        rows = [self._flat(bucket, depth, values) for depth, (_, values) in enumerate(fold.sums)]
        exchange = self._exchange((bucket.index(), buffer.numel()), buffer)
        ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        self._pipeline.put(_Job(exchange, rows, self._runs, buffer, ready, future, bucket.is_last()))
        return future

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """In the order of the tree."""
        if self.world.world_size == 1:
            return fold.root
        if self._small is None:
            like = torch.empty(0, dtype=torch.float64, device=self.world.device)
            self._small = Exchange(self.world, numel, like)
        exchange, total = self._small, torch.empty(numel, dtype=torch.float64, device=self.world.device)
        handle = exchange.scatter([value for _, value in fold.sums], self._runs)

        def wait() -> Tensor:
            handle.wait()
            exchange.gather(total).wait()
            return total

        return wait

    def _folded(self, bucket: Any) -> Fold[list[Tensor]]:
        places = [self._place[parameter] for parameter in bucket.parameters()]
        kept = [(node, [gradients[i] for i in places]) for node, gradients in self._kept.sums]
        if not self._runs[self.world.rank]:
            return Fold(_add)  # an idle rank's bucket holds zeros that nobody asks for
        return self._fold(_views(bucket.buffer(), bucket.parameters()), kept)

    def _fold(self, last: list[Tensor], kept: Sequence[tuple[Node, list[Tensor]]]) -> Fold[list[Tensor]]:
        """This rank's nodes, the last micro-batch's gradients included; what is kept stays as it is."""
        if self.unused:
            torch._foreach_add_(last, 0.0)
        fold = Fold(_add)
        fold.sums = list(kept)
        fold.push(Node(0, self._runs[self.world.rank][-1]), last)
        return fold

    def _flat(self, bucket: Any, depth: int, values: list[Tensor]) -> Tensor:
        """Gradients laid out as in the bucket."""
        buffer: Tensor = bucket.buffer()
        if values[0].data_ptr() == buffer.data_ptr():
            return buffer
        row = self._kept_like((bucket.index(), buffer.numel(), depth), buffer, buffer.numel())
        torch._foreach_copy_(_views(row, bucket.parameters()), values)
        return row


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """A bucket's memory as gradients, laid out as DDP does it: in the order of memory of each parameter, which
    `GradBucket.gradients` ignores."""
    views, offset = [], flat.storage_offset()
    for parameter in parameters:
        strides = parameter.stride() if _dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
        views.append(flat.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return views


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a piece of memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _add(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(right, left)
    return right


class Exchange:
    """Sums of one flat tensor over the nodes of all ranks, in the tree's order. Its memory is kept between steps.

    Args:
        world: who takes part; more than one rank.
        numel: n.
        like: a tensor of the same type on the same device.
    """

    def __init__(self, world: World, numel: int, like: Tensor) -> None:
        self.world, self.like = world, like
        self._memory: dict[str, Tensor] = {}
        self._runs: Sequence[range] = ()
        self._nodes: list[Node] = []
        self._counts: list[int] = []
        ends = [numel * (rank + 1) // world.world_size for rank in range(world.world_size)]
        self.chunks = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        """How many of the n numbers each rank owns."""

    def scatter(self, rows: Sequence[Tensor], runs: Sequence[range]) -> Any:
        """Begin to send each rank its chunk of this rank's sums.

        Args:
            rows: the sums of the maximal subtrees of this rank's run, each of shape [n].
            runs: the micro-batches of each rank.

        Returns:
            A handle to wait for.
        """
        mine = self.chunks[self.world.rank]
        if runs is not self._runs:  # there are few different ones, and on a thousand ranks it takes milliseconds
            nodes = [list(subtrees(run)) for run in runs]
            self._runs, self._counts = runs, [len(of_rank) for of_rank in nodes]
            self._nodes = [node for of_rank in nodes for node in of_rank]
        received = self._kept("received", len(self._nodes) * mine)
        sent = rows[0] if len(rows) == 1 else self._interleaved(rows)
        sizes = [len(rows) * chunk for chunk in self.chunks]
        taken = [count * mine for count in self._counts]
        return dist.all_to_all_single(received, sent, taken, sizes, async_op=True)

    def gather(self, out: Tensor) -> Any:
        """After the above: fold this rank's chunk, and begin to send it to all.

        Args:
            out: where the sum will be, of shape [n].

        Returns:
            A handle to wait for.
        """
        mine, ranks = self.chunks[self.world.rank], self.world.world_size
        sent = self._kept("sent", ranks * mine)
        if mine:
            fold = Fold[Tensor](lambda left, right: right.add_(left))
            received = self._kept("received", len(self._nodes) * mine)
            for node, row in zip(self._nodes, received.view(-1, mine), strict=True):
                fold.push(node, row)
            sent.view(ranks, mine).copy_(fold.root())
        return dist.all_to_all_single(out, sent, self.chunks, [mine] * ranks, async_op=True)

    def _interleaved(self, rows: Sequence[Tensor]) -> Tensor:
        """All rows' first chunks, then all second ones, and so on: what all-to-all sends must be in order of ranks."""
        sent = self._kept("interleaved", len(rows) * sum(self.chunks))
        if rows:
            by_row = [torch.split(row, self.chunks) for row in rows]
            torch.cat([chunk for of_rank in zip(*by_row, strict=True) for chunk in of_rank], out=sent)
        return sent

    def _kept(self, name: str, numel: int) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < numel:
            memory = self._memory[name] = torch.empty(numel, dtype=self.like.dtype, device=self.like.device)
        return memory[:numel]


class _Job(NamedTuple):
    """A bucket that holds all that this rank has to give to it."""

    exchange: Exchange
    rows: list[Tensor]
    runs: Sequence[range]
    bucket: Tensor
    ready: torch.cuda.Event | None
    """When the bucket is filled, on a GPU."""
    future: Future[Tensor]
    last: bool


class _Pipeline:
    """A thread that runs the exchanges of a backward pass, two at a time: while one bucket is gathered, the next is
    scattered.

    The order of the collectives must be the same on all ranks, whenever their buckets are ready; so it follows from the
    buckets alone: scatter 0, scatter 1, gather 0, scatter 2, gather 1, ..., gather of the last.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # on each GPU a stream of its own, for the one that computes is still busy with the rest of backward
        gpus = [device for device in devices if device.type == "cuda"]
        self._streams = [torch.cuda.Stream(device) for device in gpus]  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, job: _Job) -> None:
        """Take over a bucket."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tree", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def check(self) -> None:
        """Raise what has gone wrong in the thread. A future cannot carry it: DDP takes any value for a tensor."""
        if self._error:
            raise self._error

    def _run(self) -> None:
        while True:
            taken: list[_Job] = []
            try:
                with ExitStack() as stack:
                    for stream in self._streams:
                        stack.enter_context(torch.cuda.stream(stream))
                    self._one_pass(taken)
            except BaseException as error:  # whatever it is, backward waits for the futures
                self._error = error
                while not (taken and taken[-1].last):
                    taken.append(self._jobs.get())
                for job in taken:
                    if not job.future.done():
                        try:
                            job.future.set_result(job.bucket)
                        except RuntimeError as broken:  # a GPU that has failed takes no event to wait for
                            job.future.set_exception(broken)  # type: ignore[arg-type]

    def _one_pass(self, taken: list[_Job]) -> None:
        scattered: tuple[_Job, Any] | None = None
        gathered: tuple[_Job, Any] | None = None
        while not (taken and taken[-1].last):
            job = self._jobs.get()
            taken.append(job)
            if job.ready:
                job.ready.wait(torch.cuda.current_stream(job.bucket.device))
            handle = job.exchange.scatter(job.rows, job.runs)
            gathered = self._advance(scattered, gathered)
            scattered = job, handle
        gathered = self._advance(scattered, gathered)
        self._advance(None, gathered)

    def _advance(
        self, scattered: tuple[_Job, Any] | None, gathered: tuple[_Job, Any] | None
    ) -> tuple[_Job, Any] | None:
        """Begin the gather of one bucket, and come to the end of that of the one before."""
        begun = None
        if scattered:
            job, handle = scattered
            handle.wait()
            begun = job, job.exchange.gather(job.bucket)
        if gathered:
            job, handle = gathered
            handle.wait()
            job.future.set_result(job.bucket)
        return begun
