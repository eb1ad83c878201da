"""Streams: a sample's number says which it is, whoever reads it in any way; what cannot be promised is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import random
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from evenkeel.common.errors import EndedByData, Refusal
from evenkeel.config import Config
from evenkeel.data.data_digest import ONCE, TWICE, difference, digest_samples
from evenkeel.data.loader import make_loader
from evenkeel.data.order import order_name
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import ElasticSampler
from evenkeel.data.streams import Numbered, Streams, numbered
from tests.support.raised import refusal_of
from tests.support.streams_task import SOURCES, Number, Plain, Stateful, read_in_order, turn_of

CONFIG = Config(max_steps=10, batch_size=12)


def streams(source: str = "plain", substreams: int = 6) -> Streams:
    return Streams(SOURCES[source], substreams, state_every=0)


@settings(max_examples=60, deadline=None)
@given(
    source=st.sampled_from([*SOURCES]),
    substreams=st.integers(1, 8),
    batch=st.integers(1, 16),
    wanted=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    anew=st.booleans(),
)
def test_a_number_is_one_sample_always(source: str, substreams: int, batch: int, wanted: list[int], anew: bool) -> None:
    """In any order, by a process that has read others or none, with states that others have left."""
    expected = read_in_order(substreams, batch, 310)
    with tempfile.TemporaryDirectory() as folder:
        data = Numbered(streams(source, substreams), batch, 0, Path(folder) / "streams")
        for first in wanted:
            if anew:
                data = Numbered(streams(source, substreams), batch, 0, Path(folder) / "streams")
            assert data.__getitems__(range(first, first + 10)) == expected[first : first + 10]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_loader_processes_read_what_one_process_reads(world_size: int, workers: int) -> None:
    found: dict[int, list[Any]] = {}
    for rank in range(world_size):
        data = numbered(streams(), CONFIG)
        data[40]  # opened here before loader processes are forked
        sampler = ElasticSampler(data, 12, 3, num_replicas=world_size, rank=rank)
        sampler.set_epoch(0, first_step=2)
        batches = make_loader(data, sampler, "train", workers, torch.device("cpu"))
        mine = (micro.start for step in sampler.steps() for micro in sampler.micro_batches(step))
        for start, batch in islice(zip(mine, batches, strict=False), 8):
            found[start] = [tuple(map(int, number)) for number in zip(*batch, strict=True)]
    expected = read_in_order(6, 12, 200)
    assert len(found) == 8 * world_size
    assert all(samples == expected[start : start + 3] for start, samples in found.items())


def test_an_open_file_is_not_shared_with_loader_processes(tmp_path: Path) -> None:
    (file := tmp_path / "lines").write_bytes(b"".join(b"%06d\n" % n for n in range(5000)))

    class Lines:
        def __init__(self, k: int, turn: int) -> None:
            self.file = file.open("rb", buffering=0)

        def __iter__(self) -> Iterator[int]:
            while line := self.file.read(7):
                yield int(line)

    data = Numbered(Streams(Lines, 1), 4)
    assert data.__getitems__(range(8)) == [*range(8)]
    options: dict[str, Any] = {"collate_fn": list, "num_workers": 2, "multiprocessing_context": "fork"}
    batches = DataLoader(data, batch_sampler=[range(n, n + 4) for n in range(8, 400, 4)], **options)
    assert [n for batch in batches for n in batch] == [*range(8, 400)]

    opened = iter(Lines(0, 0))  # the control: torch's own way, with the file opened before

    class Shared(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return islice(opened, 200)

    both = sorted(n for batch in DataLoader(Shared(), batch_size=4, **options) for n in batch)
    assert both != sorted([*range(200)] * 2), "each reads on where the other has come"


def test_sources_that_seek_or_have_states_are_not_read_forward(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cost(source: str, at: int) -> int:
        before = Plain.read
        data = Numbered(streams(source), 12, 0, tmp_path / source)
        assert data.__getitems__(range(at, at + 12)) == read_in_order(6, 12, at + 12)[at:]
        return Plain.read - before

    for source in SOURCES:
        data = Numbered(streams(source), 12, 0, tmp_path / source)
        for n in range(0, 6000, 12):
            data.__getitems__(range(n, n + 12))
    assert cost("seek", 4800) == 12
    assert not caplog.records
    assert cost("state", 4800) <= 12 + 6 * 400, "one is within twice the distance to the newest"
    assert cost("state", 5988) <= 12 + 6 * 60, "the last or the one before it, and the samples that are compared"
    assert not caplog.records
    assert cost("plain", 4800) == 4812
    assert "is read from the beginning to sample 800, where the run resumes" in caplog.messages[0]
    assert len(caplog.records) == 1, "once, not for each substream"
    kept = json.loads((tmp_path / "state" / "0.json").read_text())["kept"]
    assert len(kept) < 25, "of 60"
    assert not (tmp_path / "seek").exists()


HARMS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "place 0": lambda found, entry: entry.update(place=0),
    "a negative place": lambda found, entry: entry.update(place=-5),
    "a later place": lambda found, entry: entry.update(place=entry["place"] + 7),
    "an infinite place": lambda found, entry: entry.update(place=math.inf),
    "a turn that is a text": lambda found, entry: entry.update(turn="x"),
    "no sha256, as an older version": lambda found, entry: found.pop("sha256", None),
    "another seed": lambda found, entry: found.update(of=found["of"].replace("seed 0", "seed 1")),
    "not a list": lambda found, entry: found.update(kept=17),
    "cut off": lambda found, entry: found.clear(),
}


@pytest.mark.parametrize("name", HARMS)
def test_a_spoilt_or_foreign_state_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    path = tmp_path / "0.json"
    data = Numbered(streams("state", 1), 4, 0, tmp_path)
    data.__getitems__(range(400))
    found = json.loads(path.read_text())
    entry = next(it for it in found["kept"] if it["place"] > 150)
    found["kept"] = [entry]
    HARMS[name](found, entry)
    path.write_text(json.dumps(found) if found else '{"of": ')
    data = Numbered(streams("state", 1), 4, 0, tmp_path)
    assert data.__getitems__(range(300, 310)) == read_in_order(1, 4, 310)[300:]
    assert "not used" in caplog.messages[0]
    assert "is read from the beginning to sample 300, where the run resumes" in caplog.messages[1]
    data.__getitems__(range(310, 400))
    assert Numbered(streams("state", 1), 4, 0, tmp_path)[350] == read_in_order(1, 4, 351)[350]
    assert len(caplog.messages) == 2, "it was replaced by a right one"


def test_the_control_a_wrong_place_with_a_right_sum_is_trained_on(tmp_path: Path) -> None:
    path, data = tmp_path / "0.json", Numbered(streams("state", 1), 4, 0, tmp_path)
    data.__getitems__(range(400))
    for entry in (kept := json.loads(path.read_text())["kept"]):
        entry["place"] += 7
    of = Numbered(streams("state", 1), 4, 0, tmp_path)._substream(0)
    sum_ = hashlib.sha256(json.dumps([of.name, 0, kept]).encode()).hexdigest()
    path.write_text(json.dumps({"of": of.name, "sha256": sum_, "kept": kept}))
    assert Numbered(streams("state", 1), 4, 0, tmp_path)[350] == read_in_order(1, 4, 344)[343]


class Buffered(Stateful):
    """Shuffles in a buffer that its state does not have, as Hugging Face's."""

    def __iter__(self) -> Iterator[Any]:
        buffer = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 3:
                yield buffer.pop(random.randrange(3))
        yield from buffer


class Documents(Buffered):
    """Texts that are alike behind their last slash."""

    def made(self, number: Number) -> Any:
        return f"<doc>{number}</doc>"


class NoJson(Stateful):
    def state_dict(self) -> dict[Any, Any]:
        return {0: self.at}


class Large(Stateful):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": "x" * 2**20}


class Counting(Stateful):
    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (Buffered, "does not resume at its state"),
        (Documents, "does not resume at its state"),
        (NoJson, "its state is not stored, a resume reads forward: ValueError: it changes when it is written"),
        (Large, "its state is not stored, a resume reads forward: ValueError: it has 1,048,"),
        (Counting, "its state is not stored, a resume reads forward: TypeError"),
    ],
)
def test_a_state_that_does_not_bring_back_the_samples_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: type[Stateful], line: str
) -> None:
    once = Numbered(Streams(source, 3, state_every=0), 6, 0, tmp_path).__getitems__(range(300))
    assert Numbered(Streams(source, 3), 6, 0, tmp_path).__getitems__(range(200, 300)) == once[200:]
    assert line in " ".join(caplog.messages)

    trusting = Buffered(0, 0)  # the control: what such a state brings back
    usual = [sample for sample, _ in zip(trusting, range(3), strict=False)]
    again = Buffered(0, 0)
    again.load_state_dict(trusting.state_dict())
    assert sorted([*usual, *again]) != turn_of(0, 0)


class Reused(Stateful):
    """Returns the same dictionary each time."""

    def state_dict(self) -> dict[str, Any]:
        self.state = getattr(self, "state", {})
        self.state["at"] = self.at
        return self.state


def test_states_are_kept_of_a_stream_of_several_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each takes every second micro-batch, shorter than what a state is checked by."""
    sides = [Numbered(Streams(Reused, 1, state_every=0), 8, 0, tmp_path) for _ in range(2)]
    for n in range(0, 800, 4):
        sides[n // 4 % 2].__getitems__(range(n, n + 4))
    before = Plain.read
    assert Numbered(Streams(Reused, 1), 8, 0, tmp_path)[790] == read_in_order(1, 8, 791)[790]
    assert Plain.read - before < 200
    assert not caplog.records


class Lying(Plain):
    def seek_sample(self, samples: int) -> int:
        return samples + 1


class Closed(Plain):
    def made(self, number: Number) -> Any:
        raise GeneratorExit("the other end is closed")


def failing(k: int, turn: int) -> Iterator[int]:
    yield 1
    raise OSError("no route to host")


@pytest.mark.parametrize(
    ("source", "substreams", "number", "line"),
    [
        (lambda k, turn: [k] * (turn < 2), 2, 20, "substream 0 of the training data has no samples in its turn 2"),
        (Lying, 1, 5, r"seek_sample\(5\) returned 6; return the number of skipped samples"),
        (failing, 1, 1, r"its sample 1 cannot be read: OSError: no route to host at .*test_streams"),
        (Closed, 1, 0, "its sample 0 cannot be read: GeneratorExit: the other end is closed at "),
    ],
)
def test_a_source_that_fails_ends_the_run_in_a_line(source: Any, substreams: int, number: int, line: str) -> None:
    with pytest.raises(EndedByData, match=line):
        Numbered(Streams(source, substreams), 2)[number]


def test_any_function_of_two_numbers_is_a_source(tmp_path: Path) -> None:
    """A file is one although it has a seek, and so is what has no signature, as functions of extension modules."""
    (tmp_path / "lines").write_text("".join(f"line {n}\n" for n in range(50)))
    data = Numbered(Streams(lambda k, turn: (tmp_path / "lines").open(), 1), 4)
    assert data.__getitems__([40, 41, 7]) == ["line 40\n", "line 41\n", "line 7\n"]
    assert Numbered(Streams(range, 1), 2)._substream(0).source(0, 3) == range(3)


def test_what_is_no_training_and_no_stream_is_let_through() -> None:
    assert len(numbered(Whole(), replace(CONFIG, max_steps=0, eval_only=True))) % 12 == 0
    assert numbered(usual := [1, 2, 3], CONFIG) is usual


class Sharded(IterableDataset[Number]):
    """As Hugging Face's: has shards, and deals those that it has to the loader processes that there are."""

    def __init__(self, shards: list[int]) -> None:
        self.shards, self.num_shards, self.epoch = shards, len(shards), 0

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(self.shards[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Number]:
        info = get_worker_info()
        for shard in self.shards[info.id :: info.num_workers] if info else self.shards:
            yield from turn_of(shard, self.epoch)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_dataset_is_as_many_substreams_as_it_has_shards(workers: int) -> None:
    data = numbered(Sharded([*range(6)]), CONFIG)
    assert order_name(data) == "6 substreams, 2 samples at a time"
    numbers = [range(n, n + 6) for n in range(0, 120, 6)]
    batches = DataLoader(data, batch_sampler=numbers, collate_fn=list, num_workers=workers)
    assert [sample for batch in batches for sample in batch] == read_in_order(6, 12, 120)

    one = numbered(Whole(), CONFIG)
    assert order_name(one) == "1 substreams, 12 samples at a time"
    assert one.__getitems__(range(12)) == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def hugging_faces(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"shard": shard, "n": n} for n in range(399))


@pytest.mark.parametrize("buffer", [0, 50])
@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_faces_own(tmp_path: Path, caplog: pytest.LogCaptureFixture, buffer: int, workers: int) -> None:
    """With a buffer that shuffles its state is not exact, which must be found out."""
    kind = pytest.importorskip("datasets").IterableDataset
    whole = kind.from_generator(hugging_faces, gen_kwargs={"shards": [*range(4)]})
    whole = whole.shuffle(seed=1, buffer_size=buffer) if buffer else whole
    made = replace(Streams.of(whole), state_every=0)
    data = Numbered(made, 12, 0, tmp_path)
    numbers = [range(n, n + 3) for n in range(0, 2400, 3)]
    batches = DataLoader(data, batch_sampler=numbers, collate_fn=list, num_workers=workers)
    samples = [(it["shard"], it["n"]) for batch in batches for it in batch]
    assert len({*samples[:1596]}) == 1596, "each once"
    again = Numbered(made, 12, 0, tmp_path)
    assert [(it["shard"], it["n"]) for it in again.__getitems__(range(1200, 1300))] == samples[1200:1300]
    assert ("does not resume at its state" in caplog.text) == bool(buffer)


class Whole(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class Drawn(IterableDataset[Any]):
    """Draws from the generators that are seeded, between samples as well."""

    def __iter__(self) -> Iterator[Any]:
        while True:
            skipped = random.randrange(3)
            yield torch.rand(3), skipped


class OfItsOwn(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        dice = random.Random()
        return iter([dice.random() * 1000 for _ in range(9)])


class Drifting(IterableDataset[float]):
    """So little at each opening that other data would pass for the same."""

    opened = 0

    def __iter__(self) -> Iterator[float]:
        Drifting.opened += 1
        return iter([1e5 + Drifting.opened] * 9)


class Once(IterableDataset[int]):
    def __init__(self) -> None:
        self.left = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self.left


class ByRank(IterableDataset[int]):
    rank = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 100, 2))


class Permuted(Plain):
    """Draws its order where it has been sought already."""

    def seek_sample(self, samples: int) -> int:
        self.at = min(samples, len(self.samples))
        return self.at

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(len(self.samples)).tolist()
        for n in order[self.at :]:
            yield self.samples[n]


class PermutedAtOnce(Permuted):
    def __init__(self, k: int, turn: int) -> None:
        super().__init__(k, turn)
        self.order = torch.randperm(len(self.samples)).tolist()

    def __iter__(self) -> Iterator[Any]:
        for n in self.order[self.at :]:
            yield self.samples[n]


class UnseededTexts(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter([f"<doc>{random.Random().random()}</doc>"] * 9)


def test_random_numbers_of_a_source_do_not_depend_on_who_reads_it() -> None:
    together = numbered(Drawn(), CONFIG).__getitems__(range(30))
    torch.manual_seed(1)
    alone = [numbered(Drawn(), CONFIG)[n] for n in range(20, 30)]
    for (first, once), (second, again) in zip(together[20:], alone, strict=True):
        assert torch.equal(first, second)
        assert once == again


def test_a_stream_that_cannot_be_repeated_is_refused() -> None:
    for steady in (Drawn(), Sharded([0, 1, 2]), streams("state"), streams("seek"), Streams(PermutedAtOnce, 2)):
        digests, unsteady = digest_samples(CONFIG, {"training": numbered(steady, CONFIG)}, TWICE)
        assert "training" in digests
        assert not unsteady
    for another in (OfItsOwn(), Drifting(), Once(), UnseededTexts(), Streams(Permuted, 2)):
        with pytest.raises(Refusal, match=r"is another each time that it is opened.*begin anew in each iter"):
            digest_samples(CONFIG, {"training": numbered(another, CONFIG)}, TWICE)


def test_a_stream_that_goes_by_ranks_or_has_changed_is_found_out() -> None:
    first, second = ByRank(), ByRank()
    second.rank = 1
    of_ranks = [digest_samples(CONFIG, {"training": numbered(it, CONFIG)}, ONCE)[0] for it in (first, second)]
    assert "training data of rank 1 differs" in difference({}, of_ranks)
    assert "has changed" in difference(of_ranks[0], of_ranks[1:])


STREAM = "train_dataset() returned a Whole, a stream, which has no epochs here; "


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: numbered(Whole(), replace(CONFIG, max_steps=0)), f"--max-steps is missing: {STREAM}set"),
        (lambda: numbered(Whole(), replace(CONFIG, validation=0.1)), f"--validation 0.1: {STREAM}le"),
        (lambda: numbered(Whole(), replace(CONFIG, limit_batches=2)), f"--limit-batches 2: {STREAM}"),
        (lambda: numbered(Whole(), CONFIG, unchanged=True), "--set train: "),
        (lambda: Streams(Plain, 0), "substreams must be an integer of at least 1, but is 0"),
        (lambda: Streams(Plain, 2.5), "substreams must be an integer of at least 1, but is 2.5"),  # type: ignore[arg-type]
        (lambda: Streams([1], 2), "source must be a function of (substream, turn), but is a list"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_number_of_samples_and_no_substreams_is_refused(make: Callable[[], Any], line: str) -> None:
    assert refusal_of(make).removeprefix("Streams: ").startswith(line)


@pytest.mark.parametrize(
    ("substreams", "micro_batch", "world_size", "workers", "told"),
    [
        (6, 12, 2, 0, ""),
        (4, 6, 2, 2, ""),
        (6, 4, 3, 2, ""),
        (48, 12, 2, 2, ""),
        (6, 12, 2, 2, "up to 2 processes read the same .*with --num-workers 1 only one does"),
        (4, 6, 2, 3, "with --num-workers 2 only one does"),
        (6, 12, 2, 4, "up to 4 processes"),
        (5, 12, 2, 0, r"substreams \(5\) and --batch-size \(24\) should be multiples of the number of ranks \(2\)"),
    ],
)
def test_substreams_that_several_processes_read_are_told_with_what_to_do(
    substreams: int, micro_batch: int, world_size: int, workers: int, told: str
) -> None:
    data = Numbered(streams(substreams=substreams), 24)
    found = data.shared(Plan(len(data), 24, micro_batch, 1, 1000), world_size, workers)
    assert re.search(told, found) if told else found == ""


def test_substreams_that_unequal_shares_divide_are_told() -> None:
    data = Numbered(streams(substreams=6), 24)
    plan = Plan(len(data), 24, 6, 1, 1000)
    assert data.shared(plan, 2, 0) == data.shared(plan, 2, 0, (2, 2)) == ""
    told = data.shared(plan, 2, 0, (3, 1))
    shared = "up to 2 processes read the same substreams, each of them all of it"
    assert told == f"{shared}; with --shares equal only one does"


def test_reading_forward_is_told_as_it_goes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("evenkeel.data.substream.TOLD", 0.0)
    caplog.set_level(logging.WARNING)
    Numbered(streams(), 12)[1200]
    assert "substream 0: at 1 of 200 samples" in caplog.messages
