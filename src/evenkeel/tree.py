"""One order of addition: a binary tree over micro-batch ids, the same for any number of ranks.

Floating-point addition is not associative, so a sum depends on the order in which it is taken, and stock data
parallelism takes another order for each number of ranks. Here the order is a fact about the job. The leaves of the tree
are a step's micro-batches; each inner node is the sum of its two children:

    0   1   2   3   4   5   6        a step of 7 micro-batches
    +---+   +---+   +---+   |
      +-------+       +-----+        a missing leaf is no zero: its sibling simply moves up
          +-------------+

A rank has a contiguous run of leaves. It can compute the maximal subtrees within its run, whoever has the rest, and
everybody who has those of all ranks can compute the root. Which rank computed which node leaves no trace in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A place in the tree: it covers the leaves place * 2**level up to, not including, (place + 1) * 2**level."""

    level: int
    place: int

    @property
    def parent(self) -> Node:
        """The one above."""
        return Node(self.level + 1, self.place // 2)


def subtrees(run: range) -> Iterator[Node]:
    """The maximal subtrees within a run of leaves, from left to right; at most two for each level.

    Args:
        run: leaves start .. stop-1, step 1; may be empty.
    """
    start = run.start
    while start < run.stop:
        level = (run.stop - start).bit_length() - 1  # as large as there is room for,
        if start:
            level = min(level, (start & -start).bit_length() - 1)  # and as it may begin here
        yield Node(level, start >> level)
        start += 1 << level


class Fold(Generic[T]):
    """Sums up nodes that come from left to right: a binary counter, which holds one sum for each bit that is set.

    Args:
        add: (left, right) -> their sum. It may overwrite either.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.sums: list[tuple[Node, T]] = []
        """The maximal subtrees so far, from left to right."""

    def push(self, node: Node, value: T) -> None:
        """Take the next node, and merge it with its left sibling as often as that is there."""
        while self.sums and node.place % 2 and self.sums[-1][0] == (node.level, node.place - 1):
            _, left = self.sums.pop()
            value, node = self._add(left, value), node.parent
        self.sums.append((node, value))

    def root(self) -> T:
        """The sum of all, after the last: what has no right sibling moves up. Empties the fold."""
        _, value = self.sums.pop()
        while self.sums:
            _, left = self.sums.pop()
            value = self._add(left, value)
        return value
