"""The sum of the ranks' gradients: the stock all-reduce, or a sum whose order does not depend on the ranks.

`Ring` is DDP's default; its last bits depend on the number of ranks. `Tree` adds the gradients of the
micro-batches in the order of `tree`. Both have a DDP communication hook, called for each bucket of gradients as soon as
backward has filled it, so that the exchange overlaps the rest of backward. Where micro-batches may leave parameters
unused, the tree exchanges all gradients after backward, without DDP: DDP's own collective about used parameters and
those of the tree's thread could run in different orders, which breaks NCCL.

The tree's exchange of a bucket of n numbers, cut into one chunk for each rank:

1. a rank folds its micro-batches into the maximal subtrees of its run (one, where W and M / W are powers of two);
2. an all-to-all brings each chunk of these to the chunk's owner;
3. the owner folds them into the root;
4. a second all-to-all brings all roots to all ranks.

With one subtree per rank that moves as many bytes as a ring.
"""

# no `from __future__ import annotations` here: DDP compares a communication hook's annotations with real types
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from .tree import Fold, Node, subtrees
from .world import World


class Ring:
    """Adds up the gradients of a step's micro-batches: linear sums on each rank, and the stock all-reduce.

    Args:
        world: who takes part.
        compressed: ranks exchange float32 gradients in bfloat16, as torch's `bf16_compress_hook` does.
    """

    def __init__(self, world: World, compressed: bool = False) -> None:
        self.world = world
        self._compressed = compressed and world.world_size > 1
        self.hooked = world.launched
        """Whether DDP reduces the gradients, by :meth:`hook`; otherwise :meth:`end` does."""
        self.complete = False
        """Whether DDP has passed all buckets of the step to the hook."""
        self.arrived: Callable[[], None] = lambda: None
        """Called when DDP passes the last one: this rank has nothing more to compute."""
        self.tap: Callable[[Sequence[Tensor], list[Tensor]], None] | None = None
        """Called with parameters and this rank's gradients of them, as views, before DDP reduces them."""
        self._under_way: list[dist.Work] = []

    def begin(self, runs: Sequence[range]) -> None:
        """Begin a step with these micro-batches of each rank; DDP has waited for the last one's collectives."""
        self.complete = False
        self._under_way.clear()

    def repeats(self, micro_batch: int) -> bool:
        """Whether this rank computes a micro-batch that counts on another rank, as with --shard an idle rank does."""
        return False

    def keep(self, micro_batch: int) -> None:
        """Store the gradient of a micro-batch, which is in ``.grad``; another micro-batch of this rank follows."""

    def end(self) -> None:
        """Finish the step after the last backward pass; raises what went wrong in a thread of the reduction."""

    def catch_up(self) -> None:
        """Wait for the hook's collectives so far, because two NCCL communicators might wait for each other."""
        while self._under_way:
            self._under_way.pop().wait()

    def _note(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        if self.tap:
            self.tap(bucket.parameters(), _views(bucket.buffer(), bucket.parameters()))
        if bucket.is_last():
            self.complete = True
            self.arrived()

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """DDP's communication hook. Here: all-reduce a bucket without dividing, because the loss has the weights."""
        self._note(bucket)
        buffer = bucket.buffer()
        compressed = self._compressed and buffer.dtype == torch.float32
        work = dist.all_reduce(buffer.bfloat16() if compressed else buffer, async_op=True)
        self._under_way.append(work)
        return work.get_future().then(lambda done: buffer.copy_(done.value()[0]) if compressed else done.value()[0])

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """Begin to add up small vectors over all ranks, after the backward passes; all ranks must call it.

        Takes the fold of this rank's, in float64 and of shape [numel]. Returns a function that waits for the sum. Here
        its last bits depend on the number of ranks.
        """
        total = fold.root() if fold.sums else torch.zeros(numel, dtype=torch.float64, device=self.world.device)
        work = dist.all_reduce(total, async_op=True) if self.world.world_size > 1 else None

        def wait() -> Tensor:
            if work:
                work.wait()
            return total

        return wait


class Tree(Ring):
    """Sums in the order of the tree, in place of the ring's.

    With `unused`, micro-batches may leave parameters without a gradient. Missing gradients count as +0.0; a parameter
    that no micro-batch of a step uses has none afterwards.
    """

    def __init__(self, model: nn.Module, world: World, unused: bool) -> None:
        super().__init__(world)
        self.hooked &= not unused
        self.unused = unused
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._place: dict[Tensor, int] = {parameter: i for i, parameter in enumerate(self.parameters)}
        self._runs: Sequence[range] = []
        self._so_far = Fold(_add)
        self._used: set[int] = set()
        self._memory: dict[Any, Tensor] = {}
        self._exchanges: dict[Any, Exchange] = {}
        self._pipeline = _Pipeline(world.devices)

    def begin(self, runs: Sequence[range]) -> None:
        """Begin a step."""
        super().begin(runs)
        self._runs, self._so_far, self._used = runs, Fold(_add), set()

    def keep(self, micro_batch: int) -> None:
        """Move the gradient from ``.grad`` into the fold."""
        gradients = self._taken()
        if self.unused:
            torch._foreach_add_(gradients, 0.0)  # makes -0.0 +0.0
        self._so_far.push(Node(0, micro_batch), gradients)

    def end(self) -> None:
        """Without DDP, fold in the last micro-batch and add up over the ranks."""
        if self.hooked:
            self._pipeline.check()
            return
        fold = self._fold(self._taken() if self._runs[self.world.rank] else [], self._so_far.sums)
        used = [place in self._used for place in range(len(self.parameters))]
        total, used = self._sum_over_ranks(fold, used) if self.world.world_size > 1 else (fold.root(), used)
        for parameter, gradient, is_used in zip(self.parameters, total, used, strict=True):
            parameter.grad = gradient if is_used else None

    def _taken(self) -> list[Tensor]:
        """Take the gradients out of ``.grad``; zeros where there is none."""
        used = {place for place, parameter in enumerate(self.parameters) if parameter.grad is not None}
        self._used = used | (self._used if self.unused else set())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        return gradients

    def _sum_over_ranks(self, fold: Fold[list[Tensor]], used: list[bool]) -> tuple[list[Tensor], list[bool]]:
        """The sum of each parameter over all ranks, and whether any rank has used it."""
        uses = torch.tensor(used)
        asked = dist.all_reduce(uses, dist.ReduceOp.MAX, async_op=True)  # by gloo, without waiting for a GPU
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self.parameters:
            kinds.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        totals: dict[Tensor, Tensor] = {}
        for kind, parameters in kinds.items():
            flat = self._reused(kind, parameters[0], sum(p.numel() for p in parameters))
            sums = [[gradients[self._place[p]] for p in parameters] for _, gradients in fold.sums]
            exchange = self._exchange(kind, flat)
            exchange.scatter(self._rows(kind, flat, parameters, sums), self._runs).wait()
            exchange.gather(flat).wait()
            totals.update(zip(parameters, _views(flat, parameters), strict=True))
        asked.wait()
        return [totals[parameter] for parameter in self.parameters], uses.tolist()

    def hook(self, _state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Fold this rank's gradients, and let the pipeline exchange them."""
        self._note(bucket)
        buffer = bucket.buffer()
        future: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        if not self._runs:  # the empty pass before the first step
            future.set_result(buffer)
            return future
        parameters = bucket.parameters()
        places = [self._place[parameter] for parameter in parameters]
        sums = [(node, [gradients[i] for i in places]) for node, gradients in self._so_far.sums]
        fold = self._fold(_views(buffer, parameters), sums)
        if self.world.world_size == 1:
            fold.root()  # in the bucket, because `_add` adds to the right operand
            future.set_result(buffer)
            return future
        key = bucket.index(), buffer.numel()
        rows = self._rows(key, buffer, parameters, [values for _, values in fold.sums])
        ready = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        exchange = self._exchange(key, buffer)
        self._pipeline.put(_Job(exchange, rows, self._runs, buffer, ready, future, bucket.is_last()))
        return future

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """Add up in the order of the tree."""
        if self.world.world_size == 1:
            return fold.root
        total = torch.empty(numel, dtype=torch.float64, device=self.world.device)
        exchange = self._exchange("small", total)
        handle = exchange.scatter([value for _, value in fold.sums], self._runs)

        def wait() -> Tensor:
            handle.wait()
            exchange.gather(total).wait()
            return total

        return wait

    def _fold(self, last: list[Tensor], earlier: Sequence[tuple[Node, list[Tensor]]]) -> Fold[list[Tensor]]:
        """This rank's nodes with the last micro-batch's gradients; none on an idle rank."""
        fold, run = Fold(_add), self._runs[self.world.rank]
        if run:
            if self.unused:
                torch._foreach_add_(last, 0.0)
            fold.sums = list(earlier)
            fold.push(Node(0, run[-1]), last)
        return fold

    def _rows(self, key: Any, flat: Tensor, parameters: Sequence[Tensor], sums: Sequence[list[Tensor]]) -> list[Tensor]:
        """Lay out each of the sums in a flat tensor; the last one in `flat`, where a bucket has it already."""
        rows = [self._reused((key, depth), flat, flat.numel()) for depth in range(len(sums) - 1)] + [flat] * bool(sums)
        for row, values in zip(rows, sums, strict=True):
            if values[0].data_ptr() != row.data_ptr():
                torch._foreach_copy_(_views(row, parameters), values)
        return rows

    def _reused(self, key: Any, like: Tensor, numel: int) -> Tensor:
        """Flat memory that is reused in each step."""
        if key not in self._memory:
            self._memory[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return self._memory[key]

    def _exchange(self, key: Any, like: Tensor) -> "Exchange":
        if key not in self._exchanges:
            self._exchanges[key] = Exchange(self.world, like.numel(), like)
        return self._exchanges[key]


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """View flat memory as gradients laid out as by DDP: in each parameter's order of memory, which
    `GradBucket.gradients` ignores."""
    views, offset = [], flat.storage_offset()
    for parameter in parameters:
        strides = parameter.stride() if _dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
        views.append(flat.as_strided(parameter.shape, strides, offset))
        offset += parameter.numel()
    return views


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill a piece of memory without gaps, in any order."""
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
    """Sums of a flat tensor of n numbers over all ranks, in the tree's order; reuses its memory in each step."""

    def __init__(self, world: World, numel: int, like: Tensor) -> None:
        self.world, self.dtype, self.device = world, like.dtype, like.device
        self._memory: dict[str, Tensor] = {}
        self._runs: Sequence[range] = ()
        self._nodes: list[Node] = []
        self._counts: list[int] = []
        ends = [numel * (rank + 1) // world.world_size for rank in range(world.world_size)]
        self.chunks = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        """How many of the n numbers each rank owns."""

    def scatter(self, rows: Sequence[Tensor], runs: Sequence[range]) -> Any:
        """Begin to send each rank its chunk of this rank's sums (`rows`, each of shape [n]); returns a handle."""
        mine = self.chunks[self.world.rank]
        if runs is not self._runs:  # few differ between steps, and on a thousand ranks this takes milliseconds
            nodes = [list(subtrees(run)) for run in runs]
            self._runs, self._counts = runs, [len(of_rank) for of_rank in nodes]
            self._nodes = [node for of_rank in nodes for node in of_rank]
        received = self._reused("received", len(self._nodes) * mine)
        sent = rows[0] if len(rows) == 1 else self._interleaved(rows)
        sizes = [len(rows) * chunk for chunk in self.chunks]
        return dist.all_to_all_single(received, sent, [count * mine for count in self._counts], sizes, async_op=True)

    def gather(self, out: Tensor) -> Any:
        """Fold this rank's chunk, after the scatter, and begin to send it to all; the sum will be in `out`, [n]."""
        mine, ranks = self.chunks[self.world.rank], self.world.world_size
        sent = self._reused("sent", ranks * mine)
        if mine:
            fold = Fold[Tensor](lambda left, right: right.add_(left))
            received = self._reused("received", len(self._nodes) * mine)
            for node, row in zip(self._nodes, received.view(-1, mine), strict=True):
                fold.push(node, row)
            sent.view(ranks, mine).copy_(fold.root())
        return dist.all_to_all_single(out, sent, self.chunks, [mine] * ranks, async_op=True)

    def _interleaved(self, rows: Sequence[Tensor]) -> Tensor:
        """All rows' first chunks, then all second ones, and so on, as an all-to-all sends them."""
        sent = self._reused("interleaved", len(rows) * sum(self.chunks))
        if rows:
            by_row = [torch.split(row, self.chunks) for row in rows]
            torch.cat([chunk for of_rank in zip(*by_row, strict=True) for chunk in of_rank], out=sent)
        return sent

    def _reused(self, name: str, numel: int) -> Tensor:
        memory = self._memory.get(name)
        if memory is None or memory.numel() < numel:
            memory = self._memory[name] = torch.empty(numel, dtype=self.dtype, device=self.device)
        return memory[:numel]


class _Job(NamedTuple):
    """A bucket with this rank's sums; on a GPU it is filled at the event `ready`."""

    exchange: Exchange
    rows: list[Tensor]
    runs: Sequence[range]
    bucket: Tensor
    ready: torch.cuda.Event | None
    future: Future[Tensor]
    last: bool


class _Pipeline:
    """A thread that runs the exchanges of a backward pass: while one bucket is gathered, the next is scattered.

    The order of collectives must be the same on all ranks, whenever their buckets are ready; so it follows from the
    buckets alone: scatter 0, scatter 1, gather 0, scatter 2, gather 1, ..., gather of the last.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # a separate stream on each GPU, because the computing one is busy with the rest of backward
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
        """Raise an error of the thread. A future cannot carry it: DDP takes any value for a tensor."""
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
            except BaseException as error:  # of any type, because backward waits for the futures
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
        under_way: list[Iterator[bool]] = []  # the newest first
        while under_way or not taken:
            if not (taken and taken[-1].last):
                taken.append(self._jobs.get())
                under_way.insert(0, self._stages(taken[-1]))
            under_way = [stages for stages in under_way if next(stages, False)]

    @staticmethod
    def _stages(job: _Job) -> Iterator[bool]:
        if job.ready:
            job.ready.wait(torch.cuda.current_stream(job.bucket.device))
        handle = job.exchange.scatter(job.rows, job.runs)
        yield True
        handle.wait()
        handle = job.exchange.gather(job.bucket)
        yield True
        handle.wait()
        job.future.set_result(job.bucket)
