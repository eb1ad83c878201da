"""The sum of the ranks' gradients with --shard: each rank gets the sum of its own rows, in the order of `tree`.

FSDP2 reduces the gradient of each block as soon as backward has computed it, in each micro-batch. Its own
reduce-scatter adds in the order of the ranks, and `.grad` adds up in the order of a rank's micro-batches; both depend
on the number of ranks. Here micro-batches are dealt round-robin, so ranks compute consecutive ones at the same time:
round j has those from j * W on. An all-to-all brings each micro-batch's gradient of a row to the row's owner, who folds
them as they come. It stores at most log2(M) + 1 partial sums of its rows.

With --shard S each S consecutive ranks are a replica, and the S owners of all rows are in each. An owner adds up what
the tree adds up within its replica's micro-batches of the round: one subtree if S is a power of two. Then the owners of
the same rows in all R replicas exchange these subtrees; each folds one R-th of the rows. After the last round they
gather the sum.

A pass is a collective of all ranks. A rank that has no micro-batch in the last round repeats the step's first one, and
sends nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultAllocMixin

from .collectives import no_collectives
from .reduction import Reduction
from .tree import Fold, Node, subtrees
from .world import World


class ShardedReduction(Reduction):
    """Counts the rounds of a step for the reductions of all blocks.

    Args:
        world: who takes part; each rank owns some rows of each parameter.
    """

    by_fsdp = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.ddp_reduces = False  # FSDP2 reduces in each backward pass
        self.parameters: list[nn.Parameter] = []
        """Those of the model, as FSDP2 has made them."""
        self.micro_batches = 0
        """M of the present step."""
        self.round = 0
        """How many micro-batches this rank has finished."""
        self.apart = False
        """Whether this rank computes by itself, see :meth:`trial`."""
        self.folds: list[Fold[Tensor]] = []
        """Of all blocks."""

    @contextmanager
    def trial(self, micro_batches: int) -> Iterator[None]:
        """One round of a step of so many micro-batches, in which this rank takes as much memory but exchanges nothing:
        it uses its own part in place of all others. If a pass fails on one rank, no other rank waits for it."""
        self.micro_batches, self.round, self.apart = min(micro_batches, self.world.world_size), 0, True
        try:
            yield
        finally:
            self.apart = False
            for fold in self.folds:  # a pass that failed has left sums
                fold.sums.clear()

    @property
    def present(self) -> range:
        """The micro-batches of this round: that of rank r is the r-th; further ranks repeat the step's first one."""
        first = self.round * self.world.world_size
        return range(first, min(first + self.world.world_size, self.micro_batches))

    def of_replicas(self, size: int) -> list[range]:
        """Those of each replica, of so many consecutive ranks."""
        return [self.present[first : first + size] for first in range(0, self.world.world_size, size)]

    @property
    def is_last_round(self) -> bool:
        """Whether the sum is complete after this round."""
        return self.present.stop == self.micro_batches

    def begin_step(self, shares: Sequence[range]) -> None:
        """Begin a step, of which only the number of micro-batches counts."""
        super().begin_step(shares)
        self.micro_batches, self.round = max(run.stop for run in shares), 0

    def repeats(self, micro_batch_id: int) -> bool:
        """Whether this rank only repeats a micro-batch, because it has none of its own in this round."""
        return micro_batch_id != self.round * self.world.world_size + self.world.rank

    def accumulate(self, micro_batch_id: int) -> None:
        """Begin the next round. The reductions have stored the gradient; what is in ``.grad`` is no sum yet."""
        for parameter in self.parameters:
            parameter.grad = None
        self.round += 1

    def sum_small(self, fold: Fold[Tensor], numel: int) -> Callable[[], Tensor]:
        """Add up in the order of the tree; each rank has single micro-batches, and gathers those of all."""
        ranks = self.world.world_size
        if ranks == 1:
            return fold.root
        rounds = -(-self.micro_batches // ranks)
        mine = torch.zeros(rounds, numel, dtype=torch.float64, device=self.world.device)
        for row, (_, value) in zip(mine, fold.sums, strict=False):
            row.copy_(value)
        every = mine.new_empty(ranks, rounds, numel)
        work = dist.all_gather_into_tensor(every.view(-1), mine.view(-1), async_op=True)

        def wait() -> Tensor:
            if work:
                work.wait()
            total = Fold[Tensor](torch.add)
            for number, row in enumerate(every.transpose(0, 1).reshape(-1, numel)[: self.micro_batches]):
                total.push(Node(0, number), row)
            return total.root()

        return wait


class Weights(DefaultAllGather):
    """The stock all-gather of a block's weights, allowed within a task's methods, which call no collectives."""

    def __init__(self, steps: ShardedReduction) -> None:
        self._steps = steps

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather this rank's part, [n], of all ranks, [W * n]."""
        if self._steps.apart:
            for rank, part in enumerate(output_tensor.view(group.size(), -1)):
                if rank != group.rank():  # that one is the input itself
                    part.copy_(input_tensor)
            return None
        with no_collectives(""):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class TreeReduceScatter(DefaultAllocMixin, ReduceScatter):
    """In place of FSDP2's reduce-scatter, for one block: the gradient of each micro-batch goes to the owners of its
    rows, who fold. The result of any round but the last is not used.

    Args:
        steps: of all blocks.
        owners: the ranks of all replicas that own the same rows; None: there is one replica.
    """

    def __init__(self, steps: ShardedReduction, owners: dist.ProcessGroup | None = None) -> None:
        self._steps, self._owners = steps, owners
        self._fold = Fold[Tensor](lambda left, right: right.add_(left))
        steps.folds.append(self._fold)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Exchange the flat gradient of this rank's micro-batch, [S * n], and put this rank's sums, [n], out if this is
        the last round."""
        if (ranks := group.size()) == 1:  # torch 2.9 calls this with one rank too
            output_tensor.copy_(input_tensor)
            return
        replicas, size = self._steps.of_replicas(ranks), output_tensor.numel()
        present = replicas[0 if self._steps.apart else self._steps.world.rank // ranks]
        mine = group.rank() < len(present)
        received = input_tensor.new_empty(len(present), size)
        sizes = [size] * len(present) + [0] * (ranks - len(present))
        sent = input_tensor if mine else input_tensor[:0]
        if self._steps.apart:
            received.copy_(input_tensor.view(ranks, size)[group.rank()])
        else:
            dist.all_to_all_single(received.flatten(), sent, sizes, [size * mine] * ranks, group=group)
        if self._owners:
            self._add_replicas(received, present, replicas, output_tensor)
        else:
            self._add(received, _leaves(present), output_tensor)

    def _add_replicas(self, rows: Tensor, present: range, replicas: Sequence[range], output: Tensor) -> None:
        """Send the subtrees of this replica's micro-batches, and fold those of all in one part of the rows."""
        ranks, size = len(replicas), output.numel()
        part = -(-size // ranks)
        here = Fold[Tensor](lambda left, right: right.add_(left))
        for node, row in zip(_leaves(present), rows, strict=True):
            here.push(node, row)
        sums = rows.new_zeros(len(here.sums), ranks * part)
        for padded, (_, value) in zip(sums, here.sums, strict=True):
            padded[:size] = value
        sent = sums.view(-1, ranks, part).transpose(0, 1).flatten()
        nodes = [list(subtrees(each)) for each in replicas]
        received = rows.new_empty(sum(map(len, nodes)), part)
        sizes = [len(each) * part for each in nodes]
        if self._steps.apart:
            received.copy_(sent[:part])
        else:
            dist.all_to_all_single(received.flatten(), sent, sizes, [len(sums) * part] * ranks, group=self._owners)
        mine = rows.new_empty(part)
        self._add(received, list(chain(*nodes)), mine)
        if self._steps.is_last_round:
            every = rows.new_empty(ranks * part)
            if self._steps.apart:
                every.view(ranks, part).copy_(mine)
            else:
                dist.all_gather_into_tensor(every, mine, group=self._owners)
            output.copy_(every[:size])

    def alone(self, output: Tensor) -> None:
        """FSDP2's all-reduce hook, in which one rank adds up: newer versions of torch call no reduce-scatter then."""
        if self._steps.world.world_size == 1:
            self._add(output.clone().view(1, -1), _leaves(self._steps.present), output)

    def _add(self, rows: Tensor, nodes: Sequence[Node], output: Tensor) -> None:
        for node, row in zip(nodes, rows, strict=True):
            self._fold.push(node, row)
        if self._steps.is_last_round:
            output.copy_(self._fold.root())
            return
        # partial sums are views of what was received in this round: copied, so that its memory can be freed
        of_this_round = rows.untyped_storage().data_ptr()
        self._fold.sums = [
            (node, value.clone() if value.untyped_storage().data_ptr() == of_this_round else value)
            for node, value in self._fold.sums
        ]


def _leaves(micro_batches: range) -> list[Node]:
    return [Node(0, number) for number in micro_batches]
