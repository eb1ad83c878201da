"""Steps of bounded tokens: each sample once an epoch, the bound, and no dependence on the number of ranks."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from evenkeel.common.errors import Refusal
from evenkeel.config import Config, validate
from evenkeel.data.order import by_tokens, token_batches
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import ElasticSampler
from evenkeel.data.streams import Streams
from evenkeel.data.token_batches import TokenBatches
from evenkeel.tasks import buckets
from evenkeel.training.task_data import training_set
from tests.data.test_loader import patient
from tests.support.ordered_task import Own
from tests.training.test_gradients import TinyTask, step_gradient

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)
TOKENS, SAMPLES, PARTS = 960, 64, 4


def lists(*_: object) -> Any:
    """A data set of 400 samples."""
    cut = {"tokens": TOKENS, "samples": SAMPLES, "parts": PARTS, "seed": 0}
    return by_tokens(range(400), LENGTHS, 400, None, **cut)


def steps_of(dataset: Any, world_size: int, epoch: int, first: int = 0) -> list[list[list[int]]]:
    """The micro-batches of each step, those of rank 0 first."""
    found: dict[int, list[list[int]]] = {}
    for rank in range(world_size):
        sampler = ElasticSampler(dataset, SAMPLES, 16, num_replicas=world_size, rank=rank, micro_batches=PARTS)
        sampler.set_epoch(epoch, first)
        for indices in sampler:
            found.setdefault(indices.micro_batch.step, []).append(list(indices))
    return [found[step] for step in sorted(found)]


@patient
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=200),
    tokens=st.integers(160, 2000), samples=st.integers(4, 100), parts=st.integers(1, 4), epoch=st.integers(0, 50),
)  # fmt: skip
def test_samples_once_and_steps_bounded(lengths: list[int], tokens: int, samples: int, parts: int, epoch: int) -> None:
    of = np.array(lengths)
    batches = TokenBatches(of, tokens, samples, parts, seed=3)
    plan = Plan(len(of), samples, -(-samples // parts), epochs=99, fixed_micro_batches=parts, batches=batches)
    order = batches.shuffled(np.arange(len(of), dtype=np.uint64), 3, epoch)
    assert sorted(order.tolist()) == list(range(len(of)))
    at = 0
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        pieces = plan.micro_batches(step)
        assert plan.step_samples(step) == sum(piece.size for piece in pieces) <= samples + parts
        assert plan.samples_seen(step) == epoch * len(of) + at
        assert 1 <= len(pieces) <= parts
        for piece in pieces:
            assert piece.start == at
            at += piece.size
            assert piece.size * of[order[piece.start : at].astype(int)].max() <= tokens // parts
            assert piece.size <= plan.micro_batch
    assert at == len(of)


def test_another_number_of_micro_batches_is_another_order() -> None:
    """Although each of them is the same: a step then begins elsewhere, so a run may not go on so."""
    lengths = np.arange(500) % 20 + 1
    one, other = (TokenBatches(lengths, tokens=1024, samples=128, parts=parts, seed=0) for parts in (41, 42))
    assert one.sizes.tolist() == other.sizes.tolist()
    assert one.bounds(0, 5)[0] != other.bounds(0, 5)[0]
    assert one.name != other.name


def test_any_number_of_ranks_reads_the_same_steps_from_any_of_them_on() -> None:
    dataset = lists()
    whole = steps_of(dataset, 1, epoch=2)
    sizes = [sum(map(len, step)) for step in whole]
    assert len(set(sizes)) > 5, "steps have different numbers of samples"
    for world_size in (2, 3, 7):
        assert steps_of(dataset, world_size, epoch=2, first=5) == whole[5:]
    epochs = [steps_of(dataset, 1, epoch) for epoch in (0, 1)]
    assert [len(epoch) for epoch in epochs] == [len(whole)] * 2, "so that a schedule knows the length of the run"
    groups = [{frozenset(part) for step in epoch for part in step} for epoch in epochs]
    assert len(groups[0] & groups[1]) < len(groups[0]) / 2, "samples of one length are mixed in each epoch"
    assert epochs[0] != epochs[1]


def test_the_control_steps_that_each_rank_cuts_for_itself_depend_on_the_ranks() -> None:
    """The usual way: every rank has its part of the order, as DistributedSampler gives it, and fills its own bound."""

    def cut(world_size: int) -> list[list[set[int]]]:
        order, found = np.random.default_rng(0).permutation(400), []
        for rank in range(world_size):
            steps: list[set[int]] = [set()]
            for sample in order[rank::world_size].tolist():
                if sum(LENGTHS[it] for it in steps[-1]) + LENGTHS[sample] > TOKENS // world_size:
                    steps.append(set())
                steps[-1].add(sample)
            found.append(steps)
        return found

    one, three = cut(1), cut(3)
    assert len({len(steps) for steps in three}) > 1, "ranks have different numbers of steps: the last would wait"
    assert set.union(*(steps[0] for steps in three)) != one[0][0], "and a step has other samples"


def test_padding_is_small_and_a_fixed_number_of_samples_pads_or_overflows() -> None:
    batches = token_batches(lists())
    assert batches.padded.sum() / LENGTHS.sum() < 1.08
    assert batches.padded.max() <= TOKENS // PARTS
    number = round(400 / len(batches.sizes))  # as many samples each, also of like lengths
    np.random.seed(0)
    order = buckets(LENGTHS, number)
    padded = [LENGTHS[order[at : at + number]].max() * number for at in range(0, 400, number)]
    assert max(padded) > 1.3 * TOKENS // PARTS, "the control: buckets of a fixed size have no bound"


def test_validation_takes_its_samples_with_their_lengths() -> None:
    config = Config(batch_size=12, batch_tokens=132, micro_batches=4, validation=0.2)
    batches = token_batches(training_set(Own(way="tokens"), config))
    assert batches.length == 40


def test_a_step_has_the_gradient_of_the_mean_over_all_its_samples() -> None:
    lengths = np.array([5] * 3 + [9] * 10 + [20] * 13)
    batches = TokenBatches(lengths, tokens=240, samples=16, parts=3, seed=1)
    plan = Plan(26, 16, 6, epochs=1, fixed_micro_batches=3, batches=batches)
    sizes = [[piece.size for piece in plan.micro_batches(step)] for step in range(plan.steps_per_epoch)]
    assert any(len(set(parts)) > 1 for parts in sizes), sizes
    data, model = TinyTask().train_dataset(), nn.Linear(6, 3)
    for step, (start, end) in enumerate(pairwise([*map(plan.samples_seen, range(len(sizes))), 26])):
        got = step_gradient(plan, step, model)
        images, labels = data[slice(start, end)]
        model.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        torch.testing.assert_close(got, torch.cat([p.grad.flatten() for p in model.parameters()]))


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a sample that is too long": (
        lambda: by_tokens(range(3), [5, 80, 70], 3, None, tokens=120, samples=8, parts=2, seed=0),
        "sample 1 has 80 tokens, and a micro-batch at most 60; shorten it, or give --batch-tokens 160",
    ),
    "none": (
        lambda: training_set(Own(way="weights"), Config(batch_size=8, batch_tokens=99, micro_batches=2)),
        "the task has sample_weights",
    ),
    "no lengths": (lambda: by_tokens(range(3), None, 3, None, seed=0), "sample_lengths.. returned None"),
    "too few": (
        lambda: by_tokens(range(3), [1, 2], 3, None, seed=0),
        r"list of shape \[2\]; return the tokens of each",
    ),
    "zero": (lambda: by_tokens(range(2), [0, 2], 2, None, seed=0), "integers from 1 on"),
    "a stream": (lambda: by_tokens(StreamStub, [1], 1, None, seed=0), "the data is a stream"),
    "no number": (lambda: validate(Config(batch_tokens=99)), "--batch-tokens 99: needs a number of micro-batches: add"),
    "drop-last": (
        lambda: validate(Config(batch_tokens=99, micro_batches=2, drop_last=True)),
        "--batch-tokens 99 --drop-last: needs steps of one size",
    ),
}
StreamStub = type("StreamStub", (), {"first_samples": Streams.__init__})


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_meant_is_refused_in_a_line(case: tuple[Callable[[], Any], str]) -> None:
    call, line = case
    with pytest.raises(Refusal, match=line) as refused:
        call()
    assert "\n" not in str(refused.value)
