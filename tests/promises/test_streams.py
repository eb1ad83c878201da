"""Streams through kills: each sample in its own step, on any number of ranks and loader processes."""

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.support import small_runs as runs
from tests.support.processes import TRAIN, Process, read, run_forked, start, torchrun
from tests.support.shards import tars
from tests.support.small_runs import SUPPORT, options, weights_of
from tests.support.streams_task import SOURCES, read_in_order, trained_on

TASK = f"{SUPPORT / 'streams_task.py'}:Streamed"
STEPS, BATCH = 40, 12


SHAPE = f"--max-steps {STEPS} --batch-size {BATCH} --micro-batch 3 --reduce tree --log-every 1 --checkpoint-every 2"
job = runs.job_of("streams_task.py:Streamed", SHAPE)


def killed(process: Process, run_dir: Path, at: int, one_first: bool) -> None:
    """SIGKILL a whole job at a step; before that, perhaps, one of its ranks or keepers, so that all start again."""
    if one_first:
        runs.wait_for_step(run_dir, at, process)
        dies = random.choice([runs.workers_of, runs.keepers_of])(process)
        os.kill(random.choice([*dies.values()]), signal.SIGKILL)
        at += 2
    runs.kill_at(at, run_dir, process)


def disturbed(tmp_path: Path, seed: int, kills: int) -> None:
    """A run with random kills, numbers of ranks and of loader processes, and sources."""
    dice, run_dir = random.Random(seed), tmp_path / "run"
    print(f"seed {seed}")
    (record := tmp_path / "record").mkdir()

    def shape() -> list[object]:
        return ["--num-workers", dice.choice([0, 2]), "--source", dice.choice([*SOURCES]), "--record", record]

    for number in range(kills):
        command = torchrun(dice.randint(1, 3), TRAIN, *job(run_dir, *shape(), "--pause", 0.1), restarts=3)
        at = 4 + number * STEPS // (kills + 1) + dice.randrange(6)
        killed(start(command), run_dir, at, one_first=dice.random() < 0.5)
    command = [sys.executable, str(TRAIN)] if dice.random() < 0.3 else torchrun(dice.randint(1, 3), TRAIN)
    runs.ended(start([*command, *job(run_dir, *shape())]))
    starts = runs.starts(run_dir)
    assert len(starts) > kills
    assert starts[-1] > 0, "it was continued"
    samples = enumerate(read_in_order(6, BATCH, STEPS * BATCH))
    assert trained_on(record) == {(number // BATCH, *sample) for number, sample in samples}

    run_forked(TRAIN, *job(tmp_path / "undisturbed"))
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed"), "the random numbers of the sources as well"


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_killed_and_finished_on_other_ranks_each_sample_comes_in_its_step(tmp_path: Path, kills: int) -> None:
    disturbed(tmp_path, seed=random.randrange(10**6), kills=kills)


SLOW_SOURCE = """
import torch
from evenkeel.data import substream
from evenkeel.tasks import Streams
substream.TOLD = 1.0

def source(k, turn):
    for i in range(1000):
        time.sleep(0.1 * os.path.exists({slow!r}))
        yield torch.full((4,), float(i)), i
"""


@pytest.mark.long
def test_reading_forward_in_a_loader_process_for_longer_than_the_hang_timeout_is_no_hang(tmp_path: Path) -> None:
    slow, run_dir = tmp_path / "slow", tmp_path / "run"
    body = "def train_dataset(self):\n    return Streams(source, substreams=2)"
    task = runs.own_task(tmp_path, body, SLOW_SOURCE.format(slow=str(slow)))
    shape = "--max-steps 24 --batch-size 12 --micro-batch 3 --log-every 1 --checkpoint-every 0 --num-workers 1"
    words = options(task, run_dir, *shape.split(), "--hang-timeout", 4, "--pause", 0.05)
    runs.interrupt(2, run_dir, words, 20, signal.SIGTERM)
    slow.touch()
    runs.trained(2, words)
    assert len(runs.starts(run_dir)) == 2


@pytest.mark.slow
def test_a_run_keeps_its_cut_and_its_stream(tmp_path: Path) -> None:
    run_forked(TRAIN, *job(tmp_path / "run", "--schedule", "constant", "--max-steps", 2))
    assert read(tmp_path / "run", "status.json")["order"] == "6 substreams, 2 samples at a time"
    longer = ["--schedule", "constant", "--max-steps", 4]
    assert "--substreams" in runs.refusal(job(tmp_path / "run", *longer, "--substreams", 4))
    run_forked(TRAIN, *job(tmp_path / "run", *longer))
    assert read(tmp_path / "run")["step"] == 4, "the number of samples is not part of what is compared"
    line = runs.refusal(options(TASK, tmp_path / "other", "--batch-size", 12))
    assert line.startswith("--max-steps is missing: train_dataset() returned a Streams")
    assert not (tmp_path / "other").exists()


class Dealt(IterableDataset[int]):
    """The control: a stream that deals itself to ranks and loader processes, as torch's documents say."""

    def __init__(self, rank: int, world_size: int, skipped: int = 0) -> None:
        self.rank, self.world_size, self.skipped = rank, world_size, skipped

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        mine = range(240)[self.rank :: self.world_size][self.skipped :]
        yield from mine[number::count]


def dealt(before: int, after: int, make: Any) -> Counter[int]:
    """Samples of a job that stops after 60 on so many ranks and goes on, with what these have saved, on others.

    `make` is (rank, world_size, samples given by each rank, what a rank has saved or None) -> a loader with batches.
    """
    counts, saved = Counter[int](), list[Any]()
    for rank in range(before):
        batches = make(rank, before, 0, None)
        reading = iter(batches)
        for _ in range(60 // before // 5):
            counts.update(map(int, next(reading)))
        saved.append(getattr(batches, "state_dict", lambda: None)())
        del reading
    for rank in range(after):
        for batch in make(rank, after, 60 // after, saved[rank] if rank < before else None):
            counts.update(map(int, batch))
    return counts


def plain(workers: int) -> Any:
    def make(rank: int, world_size: int, given: int, _: Any) -> Any:
        return DataLoader(Dealt(rank, world_size, given), batch_size=5, num_workers=workers, collate_fn=list)

    return make


def stateful(rank: int, world_size: int, _: int, state: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    found = StatefulDataLoader(Dealt(rank, world_size), batch_size=5, num_workers=2, collate_fn=list)
    if state is not None:
        found.load_state_dict(state)
    return found


WHOLE = Counter(range(240))


def test_the_control_a_stream_dealt_to_loader_processes_loses_samples() -> None:
    assert dealt(2, 2, plain(0)) == WHOLE, "without loader processes and on as many ranks it is right"
    assert dealt(2, 2, plain(4)) != WHOLE, "samples given are no place of a loader process"


@pytest.mark.parametrize("library", ["torchdata.stateful_dataloader", "webdataset"])
def test_the_control_others_lose_samples(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wds = pytest.importorskip(library)
    urls = [str(path) for path in sorted(tars(tmp_path, [40] * 6).iterdir())]

    def webdataset(rank: int, world_size: int, given: int, _: Any) -> Any:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        read = wds.WebDataset(urls, nodesplitter=wds.split_by_node, shardshuffle=False)
        numbers = [int(sample["cls"]) for sample in read][given:]
        return [numbers[n : n + 5] for n in range(0, len(numbers), 5)]

    make = webdataset if library == "webdataset" else stateful
    assert dealt(2, 2, make) == WHOLE, "it is right on as many ranks"
    assert dealt(2, 3, make) != WHOLE
    assert dealt(2, 1, make) != WHOLE
