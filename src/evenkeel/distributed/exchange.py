"""The exchange of `reduction.TreeReduction`: sums over all ranks in the order of `tree`.

A bucket of n numbers is cut into one chunk for each rank:

1. a rank folds its micro-batches into the maximal subtrees of its run (one, if all have the same power of two);
2. an all-to-all brings each chunk of these to the chunk's owner;
3. the owner folds them into the root;
4. a second all-to-all brings all roots to all ranks.

With one subtree per rank that moves as many bytes as a ring.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .tree import Fold, Node, subtrees
from .world import World


class Scratch:
    """Flat tensors that are allocated once, by a key, and reused in each step; one that is too small is replaced."""

    def __init__(self) -> None:
        self._tensors: dict[Any, Tensor] = {}

    def get(self, key: Any, numel: int, like: Tensor) -> Tensor:
        """Memory for so many numbers, of the dtype and on the device of another tensor."""
        memory = self._tensors.get(key)
        if memory is None or memory.numel() < numel:
            memory = self._tensors[key] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return memory[:numel]


class Exchange:
    """Sums of a flat tensor of n numbers over all ranks, in the tree's order; reuses its memory in each step."""

    def __init__(self, world: World, numel: int, like: Tensor) -> None:
        self.world, self._memory = world, Scratch()
        self._like = like.new_empty(0)  # not `like` itself, which would never be freed
        self._shares: Sequence[range] = ()
        self._nodes: list[Node] = []
        self._subtree_counts: list[int] = []
        ends = [numel * (rank + 1) // world.world_size for rank in range(world.world_size)]
        self.chunk_sizes = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
        """How many of the n numbers each rank owns."""

    def send_chunks(self, sums: Sequence[Tensor], shares: Sequence[range]) -> Any:
        """Begin to send each rank its chunk of this rank's partial `sums`, each of shape [n]; returns a handle."""
        my_size = self.chunk_sizes[self.world.rank]
        if shares is not self._shares:  # nearly all steps pass the same; for a thousand ranks this takes milliseconds
            nodes = [list(subtrees(leaves)) for leaves in shares]
            self._shares, self._subtree_counts = shares, [len(of_rank) for of_rank in nodes]
            self._nodes = [node for of_rank in nodes for node in of_rank]
        self._received = self._memory.get("received", len(self._nodes) * my_size, self._like)
        sent = sums[0] if len(sums) == 1 else self._interleaved(sums)
        received_sizes = [number * my_size for number in self._subtree_counts]
        sent_sizes = [len(sums) * size for size in self.chunk_sizes]
        return dist.all_to_all_single(self._received, sent, received_sizes, sent_sizes, async_op=True)

    def send_sums(self, out: Tensor) -> Any:
        """Fold the chunks that this rank got, and begin to send the total of its chunk to all. The total of all chunks
        will be in `out`, [n]."""
        my_size, ranks = self.chunk_sizes[self.world.rank], self.world.world_size
        sent = self._memory.get("sent", ranks * my_size, self._like)
        if my_size:
            fold = Fold[Tensor](lambda left, right: right.add_(left))
            for node, row in zip(self._nodes, self._received.view(-1, my_size), strict=True):
                fold.push(node, row)
            sent.view(ranks, my_size).copy_(fold.root())
        return dist.all_to_all_single(out, sent, self.chunk_sizes, [my_size] * ranks, async_op=True)

    def _interleaved(self, sums: Sequence[Tensor]) -> Tensor:
        """All sums' first chunks, then all second ones, and so on, as an all-to-all sends them."""
        sent = self._memory.get("interleaved", len(sums) * sum(self.chunk_sizes), self._like)
        if sums:
            by_sum = [torch.split(each, self.chunk_sizes) for each in sums]
            torch.cat([chunk for of_rank in zip(*by_sum, strict=True) for chunk in of_rank], out=sent)
        return sent


class FullBucket(NamedTuple):
    """A bucket with this rank's sums; on a GPU it is filled at the event `ready`."""

    exchange: Exchange
    sums: list[Tensor]
    shares: Sequence[range]
    bucket: Tensor
    ready: torch.cuda.Event | None
    future: Future[Tensor]
    last: bool


class UnderWay(NamedTuple):
    """A bucket whose chunks, or whose sums, are being sent."""

    job: FullBucket
    handle: Any


class Pipeline:
    """A thread that runs the exchanges of a backward pass: at any time the sums of a bucket and the chunks of the next
    are under way.

    The order of collectives must be the same on all ranks, whenever their buckets are ready; so it follows from the
    buckets' numbers alone, turn by turn:

        turn              1    2    3    4    ..
        send chunks of    0    1    2    3
        fold, send sums        0    1    2
        give back                   0    1
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        # a separate stream on each GPU, because the computing one is busy with the rest of backward
        gpus = [device for device in devices if device.type == "cuda"]
        self._streams = [torch.cuda.Stream(device) for device in gpus]  # type: ignore[no-untyped-call]
        self._jobs: queue.SimpleQueue[FullBucket] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, job: FullBucket) -> None:
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
            taken: list[FullBucket] = []
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

    def _one_pass(self, taken: list[FullBucket]) -> None:
        """Exchange the buckets of one backward pass, which ends with the last one; each is appended to `taken`."""
        chunks: UnderWay | None = None
        sums: UnderWay | None = None
        while chunks or sums or not taken:  # in the first turn nothing is under way
            next_chunks = next_sums = None
            if not (taken and taken[-1].last):
                taken.append(job := self._jobs.get())
                if job.ready:
                    job.ready.wait(torch.cuda.current_stream(job.bucket.device))
                next_chunks = UnderWay(job, job.exchange.send_chunks(job.sums, job.shares))
            if chunks:
                chunks.handle.wait()
                next_sums = UnderWay(chunks.job, chunks.job.exchange.send_sums(chunks.job.bucket))
            if sums:
                sums.handle.wait()
                sums.job.future.set_result(sums.job.bucket)
            chunks, sums = next_chunks, next_sums
