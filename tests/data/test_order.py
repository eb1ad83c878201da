"""A task's own order: what is drawn, what is listed, and that positions are dealt as those of the usual order."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, WeightedRandomSampler

from evenkeel.cli.plan import PlanCommand
from evenkeel.common.errors import EndedHere, Refusal
from evenkeel.config import Config
from evenkeel.data.dataset import chosen_of, limited, split
from evenkeel.data.loader import Seeded, make_loader
from evenkeel.data.order import Draws, Ordered, call_seeded, order_of, ordered, positions_in
from evenkeel.data.plan import MicroBatch, Plan
from evenkeel.data.sampler import ElasticSampler, Indices, by_step
from evenkeel.data.streams import Numbered, Streams
from evenkeel.tasks import balanced, buckets
from evenkeel.training.task_data import training_set
from tests.data.test_loader import dealt, patient
from tests.support.processes import ROOT
from tests.support.readme import blocks
from tests.support.recording_task import Recorded

CPU = torch.device("cpu")


def none(*_epoch: int) -> None:
    """What a task without a wish returns."""


def with_order(size: int, order: Callable[[int], Any], seed: int = 0) -> Any:
    """A data set of so many samples with a task's order()."""
    return ordered(range(size), size, None, none, order, seed)


def weighted(weights: Any, size: int | None = None) -> Any:
    return ordered(range(size or len(weights)), size or len(weights), None, lambda: weights, none, 0)


def drawn(draws: Draws, count: int, epoch: int = 0, seed: int = 0) -> Any:
    return draws.shuffled(np.arange(count, dtype=np.uint64), seed, epoch)


def chi_square(counts: Any, expected: Any) -> float:
    """How many standard deviations the statistic is above its mean, by Wilson and Hilferty's approximation."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    kept = expected > 0
    assert not counts[~kept].any(), "what has no weight is never drawn"
    free = int(kept.sum()) - 1
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    spread = 2 / (9 * free)
    return ((statistic / free) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


WEIGHTS = np.array([0, 1, 2, 3, 0, 5, 0.5, 40, 7, 0, 1])
DRAWS = 40_000


def test_samples_are_drawn_in_proportion_to_their_weights_and_independently() -> None:
    size, expected = len(WEIGHTS), DRAWS * WEIGHTS / WEIGHTS.sum()
    for seed in range(5):
        found = drawn(Draws(WEIGHTS), DRAWS, seed=seed)
        assert abs(chi_square(np.bincount(found, minlength=size), expected)) < 4
        across = [int(drawn(Draws(WEIGHTS), 1, epoch, seed)[0]) for epoch in range(4000)]
        assert abs(chi_square(np.bincount(across, minlength=size), expected / 10)) < 4, "of one position, by epoch"
        for apart in (1, 2, 8):
            pairs = np.bincount(found[:-apart] * np.uint64(size) + found[apart:], minlength=size * size)
            both = np.outer(WEIGHTS, WEIGHTS).ravel() / WEIGHTS.sum() ** 2 * (DRAWS - apart)
            assert abs(chi_square(pairs, both)) < 4, f"positions {apart} apart"


def test_the_largest_uniform_number_is_below_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenkeel.data.order.mixed", lambda positions, _: np.full_like(positions, 2**64 - 1))
    for total in (1.0, 3.0, 0.1, 1e300, 5e-324, math.nextafter(1, 2)):
        assert drawn(Draws(np.array([total, 0.0])), 3).tolist() == [0, 0, 0]


def test_the_control_other_ways_to_draw_are_found() -> None:
    size, expected = len(WEIGHTS), DRAWS * WEIGHTS / WEIGHTS.sum()
    ends = WEIGHTS.cumsum()
    equidistant = np.searchsorted(ends, np.arange(DRAWS) / DRAWS * ends[-1], side="right")
    assert abs(chi_square(np.bincount(equidistant, minlength=size), expected)) > 4, "too even"
    other = drawn(Draws(WEIGHTS**1.05), DRAWS)
    assert abs(chi_square(np.bincount(other, minlength=size), expected)) > 4, "of other weights"
    again = np.repeat(drawn(Draws(WEIGHTS), DRAWS // 2), 2)
    pairs = np.bincount(again[:-1] * np.uint64(size) + again[1:], minlength=size * size)
    both = np.outer(WEIGHTS, WEIGHTS).ravel() / WEIGHTS.sum() ** 2 * (DRAWS - 1)
    assert abs(chi_square(pairs, both)) > 4, "each twice in a row"


@patient
@given(
    st.lists(st.floats(0, 1e300, allow_subnormal=True), min_size=1, max_size=30).filter(lambda it: 0 < sum(it) < 1e308),
    st.integers(0, 2**63 - 1),
)
def test_what_has_no_weight_is_never_drawn_whatever_the_weights(weights: list[float], seed: int) -> None:
    found = drawn(Draws(np.array(weights)), 200, seed=seed)
    assert all(weights[int(number)] > 0 for number in found)


def test_torchs_sampler_repeats_its_draws_after_a_resume_and_ours_goes_on() -> None:
    """The control: a generator that is made anew at each start, as most scripts do it, begins from its beginning."""

    def torchs() -> Iterator[list[int]]:
        sampler = WeightedRandomSampler(WEIGHTS.tolist(), 60, generator=torch.Generator().manual_seed(0))
        while True:
            yield list(sampler)

    undisturbed, resumed = list(islice(torchs(), 2)), next(torchs())
    assert resumed == undisturbed[0] != undisturbed[1], "epoch 1 after a resume has the draws of epoch 0"

    def ours(epoch: int) -> list[Indices]:
        sampler = ElasticSampler(weighted(WEIGHTS), 6, 3, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        return list(sampler)

    whole = [ours(0), ours(1)]
    assert ours(1) == whole[1] != whole[0]


def test_balanced_weights_draw_every_class_equally_often() -> None:
    labels = ["rare"] * 3 + ["common"] * 900 + ["some"] * 97
    for given_ in (labels, np.array(labels), torch.tensor([{"rare": 5, "common": 7, "some": 9}[it] for it in labels])):
        found = drawn(Draws(balanced(given_)), 30_000)
        counts = Counter(labels[int(number)] for number in found)
        assert abs(chi_square([counts[it] for it in ("rare", "common", "some")], [10_000] * 3)) < 4
    plain = Counter(labels[int(number)] for number in drawn(Draws(np.ones(1000)), 30_000))
    assert plain["rare"] < 200, "the control: without weights the rare class is rare"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Any, int, int, bool, int]:
    """(data set with an order, global batch, micro-batch, drop_last, seed)."""
    size, seed = draw(st.integers(1, 40)), draw(st.integers(0, 2**63 - 1))
    if draw(st.booleans()):
        dataset = ordered(range(size), size, None, lambda: np.arange(size) + 1.0, none, seed)
    else:
        length = draw(st.integers(1, 50))
        dataset = with_order(size, lambda epoch: np.random.randint(0, size, length), seed)
    batch = draw(st.integers(1, positions_in(dataset)))
    return dataset, batch, draw(st.integers(1, batch)), draw(st.booleans()), seed


@patient
@given(jobs(), st.lists(st.tuples(st.integers(1, 7), st.integers(1, 4)), min_size=1, max_size=4))
def test_stops_and_resizes_leave_no_trace(job: tuple[Any, int, int, bool, int], schedule: Sequence[Any]) -> None:
    """Each position of two epochs once, in its step, on any number of ranks; without the end with drop_last."""
    dataset, batch, micro, drop_last, seed = job
    length = positions_in(dataset)
    for epoch in range(2):
        done: list[list[int]] = []
        steps = length // batch if drop_last else -(-length // batch)
        attempts = iter(list(schedule) * (steps + 1))
        while len(done) < steps:
            ranks, at_most = next(attempts)
            samplers = [
                ElasticSampler(dataset, batch, micro, num_replicas=ranks, rank=rank, seed=seed, drop_last=drop_last)
                for rank in range(ranks)
            ]
            done += [[*chain(*step)] for step in islice(dealt(samplers, epoch, len(done)), at_most)]
        everything = order_of(dataset).shuffled(np.arange(length, dtype=np.uint64), seed, epoch).tolist()
        assert [len(step) for step in done[:-1]] == [batch] * (len(done) - 1)
        assert list(chain.from_iterable(done)) == everything[: steps * batch if drop_last else length]


def test_the_plan_knows_what_is_left_out() -> None:
    config = Config(batch_size=12, micro_batch=3, epochs=2, drop_last=True)
    plan = Plan.of(config, 101)
    assert (plan.samples, plan.left_out, plan.length) == (96, 5, 101)
    assert (plan.steps_per_epoch, plan.total_steps, plan.samples_seen(9)) == (8, 16, 96 + 12)
    assert {plan.step_samples(step) for step in range(16)} == {12}
    assert Plan.of(config, plan.length) == plan
    whole = Plan.of(replace(config, drop_last=False), 101)
    assert (whole.samples, whole.steps_per_epoch, whole.left_out) == (101, 9, 0)


def test_with_drop_last_the_usual_order_leaves_other_samples_out_in_each_epoch() -> None:
    assert [*ElasticSampler(range(3), 4, 2, num_replicas=1, rank=0, drop_last=True)] == []
    sampler = ElasticSampler(range(10), 4, 2, num_replicas=1, rank=0, drop_last=True)
    left = []
    for epoch in range(20):
        sampler.set_epoch(epoch)
        seen = [sample for micro in sampler for sample in micro]
        assert len(seen) == len(set(seen)) == 8
        left.append(frozenset(range(10)) - set(seen))
    assert len(set(left)) > 10


def test_order_is_asked_with_seeded_generators_which_keep_their_state() -> None:
    def order(epoch: int) -> Any:
        assert epoch in range(4)
        return torch.randperm(30) if epoch % 2 else np.random.permutation(30).tolist()

    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second, other = (with_order(30, order, seed) for seed in (1, 1, 2))
    epochs = [order_of(first).digest(epoch) for epoch in range(4)]
    assert torch.equal(torch.rand(2), expected), "what is drawn after a call is what it was without"
    assert len(set(epochs)) == 4
    for epoch in (2, 0, 3, 1):  # in any sequence
        assert order_of(second).digest(epoch) == epochs[epoch]
    assert order_of(other).digest(0) != epochs[0]
    assert order_of(first).name == f"an order of 30 samples by order() ({epochs[0]})"


def test_an_array_that_is_shuffled_in_place_is_copied() -> None:
    kept = np.arange(12)

    def order(epoch: int) -> Any:
        kept[:] = np.roll(np.arange(12), epoch)
        return kept

    listed: Any = order_of(with_order(12, order))
    positions = np.arange(12, dtype=np.uint64)
    assert listed.shuffled(positions, 0, 1)[0] == 11
    assert listed.shuffled(positions, 0, 0)[0] == 0


class Stage:
    """An order with a generator of its own, whose state is that of the process."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def order(self, epoch: int) -> Any:
        return self.generator.permutation(20)


WRONG = {
    "weights of another length": (lambda: weighted([1.0, 2.0], 5), r"list of shape \[2\], but train_dataset.* 5 sam"),
    "no numbers": (lambda: weighted("abc", 3), r"returned a str of shape \[\]"),
    "a table": (lambda: weighted(np.ones((3, 1))), r"of shape \[3, 1\]"),
    "below 0": (lambda: weighted([1, -2.5, 1]), "sample 1 has the weight -2.5; it must be 0 or more"),
    "NaN": (lambda: weighted([1, 2, math.nan]), "sample 2 has the weight nan"),
    "nothing to draw": (lambda: weighted([0, 0]), "all weights are 0"),
    "both": (lambda: ordered(range(2), 2, None, lambda: [1, 1], lambda _: [0, 1], 0), "the task has both sample_w"),
    "fractions": (lambda: with_order(3, lambda _: [0.0, 1.0]), r"order\(0\) returned a list of shape .* float64; ret"),
    "flags": (lambda: with_order(3, lambda _: np.ones(3, bool)), "and type bool"),
    "nothing": (lambda: with_order(3, lambda _: []), r"order\(0\) returned a list"),
    "ragged": (lambda: with_order(3, lambda _: [[0], [1, 2]]), "of no numbers"),
    "too large": (lambda: with_order(3, lambda _: [0, 3]), "sample 3 at position 1, but train.* numbers from 0 to 2"),
    "below 0 in an order": (lambda: with_order(3, lambda _: [0, -1]), "sample -1 at position 1"),
    "a state of its own": (lambda: with_order(20, Stage().order), "another order at each call"),
}


@pytest.mark.parametrize(("make", "line"), WRONG.values(), ids=WRONG)
def test_what_would_be_silently_wrong_is_refused_in_a_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(Refusal, match=line):
        make()


@pytest.mark.parametrize(("later", "line"), [([0, 1], "has 2 samples and order"), (None, "returned None"), ([9], "9")])
def test_a_later_epoch_is_checked_as_well(later: Any, line: str) -> None:
    dataset = with_order(3, lambda epoch: later if epoch else [2, 1, 0])
    with pytest.raises(EndedHere, match=rf"order\(1\) .*{line}"):
        order_of(dataset).shuffled(np.arange(3, dtype=np.uint64), 0, 1)


@pytest.mark.parametrize("wish", [{"weights": lambda: [1.0]}, {"order": lambda _: [0]}])
def test_a_stream_has_its_own_order(wish: dict[str, Any]) -> None:
    stream = Numbered(Streams(lambda k, turn: range(3), 1), 2)
    methods = {"weights": none, "order": none} | wish
    with pytest.raises(Refusal, match="a stream, which has its own order"):
        ordered(stream, len(stream), None, methods["weights"], methods["order"], 0)


def test_numbers_mean_the_data_set_that_the_task_has_returned_whatever_is_left_of_it() -> None:
    assert [len(part) for part in split(Subset(range(9), []), 0.2, seed=4)] == [0, 0], "refused later, in a line"
    whole = Subset(range(1000), range(100, 200))
    train, _ = split(whole, 0.2, seed=4)
    left = limited(train, 30)
    chosen = chosen_of(whole, left)
    assert [left[i] for i in range(30)] == [whole[number] for number in chosen], "the control"
    weights = np.zeros(100)
    weights[chosen[7]], weights[next(iter(set(range(100)) - set(chosen)))] = 1, 50
    found: Any = ordered(left, 100, chosen, lambda: weights, none, 0)
    assert {int(it) for it in drawn(found.order, 50)} == {7}, "the other sample is not left"
    backwards: Any = ordered(left, 100, chosen, none, lambda _: np.arange(100)[::-1], 0)
    order = backwards.order.shuffled(np.arange(30, dtype=np.uint64), 0, 0)
    assert [left[int(number)] for number in order] == sorted((left[i] for i in range(30)), reverse=True)
    assert (len(backwards), positions_in(backwards)) == (30, 30)
    assert chosen_of(whole, whole) is None


def test_the_options_leave_the_right_weights_and_the_right_order() -> None:
    class Rising(Recorded):
        def order(self, epoch: int) -> Any:
            return np.arange(101)

    class Heavy(Recorded):
        def sample_weights(self) -> Any:
            return np.arange(101) >= 50

    config = Config(batch_size=10, validation=0.3, limit_batches=4)
    for task in (Rising(), Heavy()):
        dataset: Any = training_set(task, config)
        order = dataset.order.shuffled(np.arange(dataset.order.length, dtype=np.uint64), 0, 0)
        numbers = [dataset[int(number)][1] for number in order]  # a sample is (features, its number)
        if isinstance(task, Rising):
            assert numbers == sorted(set(numbers)) == sorted(dataset[number][1] for number in range(40))
        else:
            assert min(numbers) >= 50 > min(dataset[number][1] for number in range(40))
    assert not isinstance(training_set(Heavy(), config, unchanged=True), Ordered), "for predict: in its own order"


def test_an_order_of_which_nothing_or_another_length_is_left_is_refused() -> None:
    with pytest.raises(Refusal, match="only samples that --validation or --limit-batches removes"):
        ordered(range(2), 5, [0, 1], none, lambda _: [3, 4], 0)
    with pytest.raises(Refusal, match="of the samples left by --validation and --limit-batches are 0"):
        ordered(range(2), 5, [0, 1], lambda: [0, 0, 1, 1, 1], none, 0)
    listed: Any = order_of(ordered(range(2), 5, [0, 1], none, lambda epoch: [0, epoch], 0))
    with pytest.raises(EndedHere, match=r"order\(2\) has 1 samples and order\(0\) has 2 after --validation"):
        listed.digest(2)


@patient
@given(st.lists(st.integers(1, 500), min_size=1, max_size=300), st.integers(1, 9))
def test_buckets_have_every_sample_once_and_only_the_last_group_is_smaller(lengths: list[int], size: int) -> None:
    order = buckets(lengths, size)
    assert sorted(order.tolist()) == list(range(len(lengths)))


def test_samples_of_like_length_stand_together_and_groups_change_with_the_epoch() -> None:
    lengths, size = np.random.RandomState(0).lognormal(5, 1, 5003).astype(int), 16

    def order(epoch: int) -> Any:
        return buckets(lengths, size)

    def padding(order: Any) -> float:
        batches = [lengths[order[at : at + size]] for at in range(0, len(order), size)]
        return float(sum(len(it) * it.max() for it in batches) / lengths.sum() - 1)

    first, second = (call_seeded(order, 0, epoch) for epoch in (0, 1))
    plain = np.random.RandomState(1).permutation(len(lengths))
    assert padding(first) < 0.2 < 1 < padding(plain), "the control: tokens of padding for each token, at random"
    groups = [{frozenset(it[at : at + size]) for at in range(0, len(it), size)} for it in (first, second)]
    assert not groups[0] & groups[1]
    heads = lengths[first][: 5003 // size * size].reshape(-1, size).mean(1)
    assert abs(np.corrcoef(heads[:-1], heads[1:])[0, 1]) < 0.2, "the groups are shuffled"


class Told(Dataset[Any]):
    """Samples of (number, the epoch that it was told, a random number)."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return index, self.epochs[-1], torch.rand(())


def test_a_sample_that_comes_twice_in_an_epoch_has_two_augmentations() -> None:
    def noise(dataset: Any, start: int) -> list[float]:
        numbers, _, values = Seeded(dataset, 0, "train").__getitems__(Indices([5, 5], 0, MicroBatch(0, 0, start, 2)))
        assert numbers.tolist() == [5, 5]
        return list(values.tolist())

    usual, own = Told(), Ordered(Told(), Draws(np.ones(12)))
    assert len(set(noise(usual, 0))) == 1
    assert len(set(noise(own, 0) + noise(own, 2))) == 4
    assert noise(own, 1)[0] == noise(own, 0)[1], "a position's, wherever micro-batches are cut"


def test_readers_that_share_a_data_set_each_tell_it_their_epoch() -> None:
    """An evaluation of a part of the same data, or a look at its samples, between two steps of epoch 3."""
    whole = Told()
    train, test = Seeded(Subset(whole, range(8)), 0, "train"), Seeded(Subset(whole, [8, 9]), 0, "test")
    for reader, epoch in ((train, 3), (test, 0), (train, 3), (train, 3)):
        told = reader.__getitems__(Indices([0, 1], epoch, MicroBatch(0, 0, 0, 2)))[1]
        assert told.tolist() == [epoch, epoch]
    assert whole.epochs == [3, 0, 3]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_told_the_epoch_in_the_process_that_reads(workers: int) -> None:
    """Loader processes read the next epoch ahead of time, and subsets are seen through."""
    whole = Told()
    dataset = limited(Subset(Subset(whole, range(11)), range(10)), 9)
    sampler = ElasticSampler(dataset, 4, 2, num_replicas=1, rank=0)
    sampler.epochs = 3
    batches = make_loader(dataset, sampler, "train", workers, CPU)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen = [it for step in by_step(batches, sampler) for batch in step.batches for it in batch[1].tolist()]
        assert seen == [epoch] * 9
    assert whole.epochs == ([] if workers else [0, 1, 2]), "once an epoch"


def test_a_tensor_data_set_is_fetched_whole_in_an_order_of_the_tasks_too() -> None:
    reader = Seeded(Ordered(TensorDataset(torch.arange(10)), Draws(np.ones(10))), 0, "train")
    (found,) = reader.__getitems__(Indices([3, 3], 0, MicroBatch(0, 0, 0, 2)))
    assert found.tolist() == [3, 3]


def test_loader_processes_do_not_ask_for_an_epoch_after_the_last() -> None:
    asked: list[int] = []

    def order(epoch: int) -> Any:
        asked.append(epoch)
        return [[0, 1, 2, 3], [3, 2, 1, 0]][epoch]

    dataset = with_order(4, order)
    sampler = ElasticSampler(dataset, 2, 1, num_replicas=1, rank=0)
    sampler.epochs = 2
    batches = make_loader(ordered(TensorDataset(torch.arange(4)), 4, None, none, order, 0), sampler, "train", 1, CPU)
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found += [int(batch[0]) for step in by_step(batches, sampler) for batch in step.batches]
    assert found == [0, 1, 2, 3, 3, 2, 1, 0]
    assert max(asked) == 1


def test_the_example_of_the_page_draws_classes_equally_and_puts_like_lengths_together() -> None:
    class Mine(Recorded):
        labels, lengths = [0] * 95 + [1] * 6, np.arange(101) % 7

    block, *_ = blocks("python", (ROOT / "docs" / "sampling.md").read_text())
    names: dict[str, Any] = {"Mine": Mine}
    exec(block, names)
    config = Config(batch_size=10)
    draws, bucketed = (order_of(training_set(names[name](), config)) for name in ("Balanced", "Bucketed"))
    assert isinstance(draws, Draws)
    counts = np.bincount(drawn(draws, 2000) >= 95)
    assert abs(chi_square(counts, [1000, 1000])) < 4
    heads = bucketed.shuffled(np.arange(96, dtype=np.uint64), 0, 0).astype(int).reshape(6, 16) % 7
    assert all(len(set(group)) <= 3 for group in heads.tolist())


def test_plan_says_what_an_epoch_is_and_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--task", f"{ROOT / 'tests' / 'support' / 'ordered_task.py'}:Own", "--run-dir", str(tmp_path / "run")]
    assert PlanCommand()([*words, "--batch-size", "12", "--epochs", "2", "--drop-last"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("50 samples, read in 50 draws by sample_weights() (")
    assert "), the last 2 of each epoch left out (--drop-last), global batch 12" in first
    assert "4 steps an epoch, 8 in all" in first
