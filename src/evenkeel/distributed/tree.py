"""A fixed order of addition: a binary tree over micro-batch ids, the same for any number of ranks.

Floating-point sums depend on the order of addition, and stock data parallelism has another order for each number of
ranks. Here the leaves of the tree are a step's micro-batches, and each inner node is the sum of its two children:

    0   1   2   3   4   5   6        a step of 7 micro-batches
    +---+   +---+   +---+   |
      +-------+       +-----+        a missing leaf is no zero: its sibling moves up
          +-------------+

A rank has a contiguous run of leaves and computes the maximal subtrees within it. Those of all ranks give the root.
No bit depends on which rank has computed a node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree. It covers the leaves from number * 2**level to (number + 1) * 2**level, exclusive."""

    level: int
    number: int


def subtrees(leaves: range) -> Iterator[Node]:
    """Yield the maximal subtrees within a run of leaves, from left to right; at most two for each level."""
    start = leaves.start
    while start < leaves.stop:
        level = (leaves.stop - start).bit_length() - 1  # the largest that fits
        if start:
            level = min(level, (start & -start).bit_length() - 1)  # and that may begin here
        yield Node(level, start >> level)
        start += 1 << level


class Fold(Generic[T]):
    """Adds up nodes from left to right, like a binary counter with one sum for each bit that is set.

    Args:
        add: (left, right) -> their sum. It may overwrite either.
    """

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self.sums: list[tuple[Node, T]] = []
        """The maximal subtrees so far, from left to right."""

    def push(self, node: Node, value: T) -> None:
        """Add the next node, and merge it with its left sibling as long as there is one."""
        while self.sums and node.number % 2 and self.sums[-1][0] == (node.level, node.number - 1):
            _, left = self.sums.pop()
            value, node = self._add(left, value), Node(node.level + 1, node.number // 2)
        self.sums.append((node, value))

    def root(self) -> T:
        """Return the sum of all and empty the fold; a node without a right sibling moves up."""
        _, value = self.sums.pop()
        while self.sums:
            _, left = self.sums.pop()
            value = self._add(left, value)
        return value
