"""One order of addition for any number of ranks: in the tree itself, in whole trainings, and through kills."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenkeel.data.plan import contiguous_part
from evenkeel.distributed.tree import Fold, Node, subtrees


def serial(leaves: list[Tensor]) -> Tensor:
    """The tree's definition: the left half is the largest power of two that leaves something for the right one."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return serial(leaves[:half]) + serial(leaves[half:])


def over_ranks(leaves: list[Tensor], runs: list[range]) -> Tensor:
    """Each rank folds its own run, and an owner folds what all of them have."""
    owner = Fold[Tensor](lambda left, right: left + right)
    for leaves_of_rank in runs:
        rank = Fold[Tensor](lambda left, right: left + right)
        for leaf in leaves_of_rank:
            rank.push(Node(0, leaf), leaves[leaf])
        assert [node for node, _ in rank.sums] == list(subtrees(leaves_of_rank)), "what the other ranks expect of it"
        for node, value in rank.sums:
            owner.push(node, value)
    return owner.root()


def touchy(count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Numbers of which nearly every order of addition gives another sum."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 8, (count, 64), generator=generator)
    return list((torch.randn(count, 64, generator=generator) * 2.0**exponents).to(dtype))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 70), st.data(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_partition_gives_the_serial_tree(count: int, data: st.DataObject, dtype: torch.dtype) -> None:
    leaves = touchy(count, dtype, data.draw(st.integers(0, 1000)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=12)))  # equal cuts make idle ranks
    runs = [range(begin, end) for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
    assert torch.equal(over_ranks(leaves, runs), serial(leaves))
    world_size = data.draw(st.integers(1, 20))
    runs = [contiguous_part(count, rank, world_size) for rank in range(world_size)]
    assert torch.equal(over_ranks(leaves, runs), serial(leaves))


def test_the_control_other_orders_give_other_sums() -> None:
    leaves = touchy(12, torch.float32, 0)
    linear = torch.stack(leaves).cumsum(0)[-1]
    by_rank = sum(torch.stack(leaves[i : i + 3]).cumsum(0)[-1] for i in range(0, 12, 3))
    tree = serial(leaves)
    assert not torch.equal(linear, tree)
    assert not torch.equal(by_rank, tree)
    assert not torch.equal(by_rank, linear)


def test_a_missing_leaf_is_no_zero() -> None:
    minus_zero = torch.tensor([-0.0])
    leaves = [minus_zero] * 3
    assert torch.signbit(over_ranks(leaves, [range(2), range(2, 3)])).all()
    assert not torch.signbit(serial([*leaves, torch.zeros(1)])).any(), "a zero in its place would show"
