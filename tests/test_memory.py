"""Memory that runs out: what is said, how a run goes on, and the micro-batch that fits."""

from __future__ import annotations

import errno
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel import devices
from evenkeel.activity import CHECKPOINT, COMMIT, COMPUTING, activity
from evenkeel.config import Config
from evenkeel.data import InMemory
from evenkeel.evaluation import Evaluation
from evenkeel.memory import OutOfMemory, explained, explaining, name_processes, note_batch, remedy, shapes
from evenkeel.optimization import build_optimizer
from evenkeel.plan import Plan, next_smaller
from evenkeel.probe import Probe
from evenkeel.run import Run
from evenkeel.state import State
from evenkeel.tasks import Classification
from evenkeel.world import World

from .processes import (
    ROOT,
    TRAIN,
    finish,
    finish_all,
    fork,
    fork_ranks,
    free_port,
    kill_group,
    read,
    records,
    run_forked,
    wait_until,
)
from .recording_task import SAMPLES

TASK = f"{ROOT / 'tests' / 'odd_tasks.py'}:Hungry"
EPOCHS, BATCH = 2, 16
STEPS = EPOCHS * -(-SAMPLES // BATCH)
CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, CPU, launched=False)


def job(run_dir: Path, micro_batch: object, *more: object) -> list[str]:
    """Options of a run of a task of which 4 samples fit at a time, and 8 do not."""
    shape = ["--batch-size", BATCH, "--micro-batch", micro_batch, "--epochs", EPOCHS, "--log-every", 1]
    return [str(word) for word in ("--task", TASK, "--run-dir", run_dir, *shape, "--wandb", "disabled", *more)]


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [([64, 32, 16, 8, 4, 2, 1], 64), ([30, 15, 6, 3, 1], 30), ([13, 5, 2, 1], 100), ([101, 50, 25, 12, 6, 3, 1], 101)],
)
def test_the_next_smaller_micro_batch_divides_the_batch_where_it_can(sizes: list[int], batch: int) -> None:
    assert [next_smaller(size, batch) for size in sizes[:-1]] == sizes[1:]


def test_what_a_batch_is_told_as() -> None:
    batch = {"image": torch.zeros(2, 3), "more": (torch.zeros(2, dtype=torch.long), ["a", "b"])}
    assert shapes(batch) == "[2, 3] float32, [2] int64"
    assert shapes([torch.zeros(1)] * 8).endswith("[1] float32 and 2 more")


def test_the_message_names_all_that_one_would_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    config = Config(batch_size=64, micro_batch=8)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    note_batch(caught.value, (torch.zeros(8, 3), torch.zeros(8)))
    text = explained(caught.value, CPU, config, "step 7 is saved")
    assert "\n" not in text
    for part in (
        "out of memory on rank 3 (the memory of host ",
        "it was in ",
        "1152921504606846976 bytes more were wanted",
        "the batch was [8, 3] float32, [8] float32",
        "this process holds ",
        "the same command with --micro-batch 4 instead of 8 goes on",
        "step 7 is saved",
    ):
        assert part in text
    assert "is 1 already" in remedy(Config(batch_size=64, micro_batch=1))
    note_batch(ValueError("something else"), None)


class Greedy(Classification):
    """Has room for training only."""

    def train_dataset(self) -> InMemory:
        return InMemory(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Linear(6, 3)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": torch.empty(1 << 60, dtype=torch.uint8)}


def test_the_message_names_the_phase_in_which_it_was_and_not_the_one_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that it is told, the evaluation is over."""
    monkeypatch.setattr(activity, "phase", COMMIT)
    monkeypatch.setattr(activity, "step", 7)
    task, config = Greedy(), Config(batch_size=4, micro_batch=2)
    with pytest.raises(RuntimeError) as caught:
        Evaluation(task, task.model(), task.test_dataset(), config, ALONE)()
    assert activity.phase == COMMIT
    assert "it was in evaluation after step 7;" in explained(caught.value, CPU, config)

    with pytest.raises(MemoryError) as held, activity.during(CHECKPOINT):
        raise MemoryError
    assert "it was in checkpoint after step 7;" in explained(held.value, CPU, config)

    activity.enter(COMPUTING)
    note_batch(error := MemoryError(), None)
    activity.enter(COMMIT)  # a rescue
    assert "it was in forward and backward of step 8;" in explained(error, CPU, config)


def test_the_device_is_the_first_of_this_process_where_each_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "_chosen", [])
    assert devices.own_device() == CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert World.from_environment(2).device == devices.own_device() == torch.device("cuda", 2)


def test_other_processes_on_the_gpu_are_named() -> None:
    told = "GPU-aa, 71, 2048 MiB, /usr/bin/python3\nGPU-aa, 5, 10 MiB, mine\nGPU-bb, 9, 1 MiB, elsewhere\n\nodd line\n"
    assert name_processes(told, "aa", own=5) == " (process 71 python3: 2048 MiB)"
    assert name_processes(told, "GPU-cc", own=5) == ""


def test_memory_that_runs_out_before_the_training_is_told_as_well() -> None:
    @explaining
    def main() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.raises(OutOfMemory, match=r"^out of memory on rank 0 .*take a smaller --micro-batch$"):
        main()

    @explaining
    def broken() -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        broken()


class Needy(Classification):
    """Draws random numbers, moves buffers, and fails above so many samples; as much memory nobody has."""

    def __init__(self, fit: int) -> None:
        self.fit = fit
        self.seen: list[int] = []

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(3)
        return InMemory(torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.seen.append(len(batch[0]))
        loss = super().loss(model, batch)
        if len(batch[0]) > self.fit:
            torch.empty(1 << 60, dtype=torch.uint8)
        return loss


@pytest.mark.parametrize("fit", [64, 7, 0])
def test_the_probe_finds_what_fits_and_leaves_no_trace(fit: int) -> None:
    task, config = Needy(fit), Config(batch_size=40, micro_batch="auto")
    model = task.model()
    state = State(model, [build_optimizer(model.parameters(), config)])
    before = {name: value.clone() for name, value in state.tensors().items()}
    optimizer = str(state.optimizers[0].state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    probe = Probe(config, task, ALONE, task.train_dataset(), state)
    if fit:
        found, said = probe()
        assert found == {64: 40, 7: 5}[fit]
        assert said.startswith(f"--micro-batch auto: {found} samples fit here")
        assert task.seen == {64: [40, 40], 7: [40, 20, 10, 5, 5]}[fit], "two passes where the first one fits"
    else:
        with pytest.raises(OutOfMemory, match=r"the batch was \[2, 6\] float32, \[2\] int64"):
            probe()
    assert torch.equal(torch.rand(3), expected), "generators"
    after = state.tensors()
    assert after.keys() == before.keys(), "no state of the optimizer"
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert str(state.optimizers[0].state_dict()) == optimizer
    assert all(parameter.grad is None for parameter in model.parameters())


def test_whose_number_auto_means(tmp_path: Path) -> None:
    """The newest of those that nodes know; with --fresh only one of this very launch."""

    def settled(fresh: bool, *known: tuple[str, dict[str, Any]]) -> tuple[int, str]:
        task = Needy(64)
        config = Config(run_dir=tmp_path, batch_size=40, micro_batch="auto", fresh=fresh).resolved()
        run = Run(config, task, Plan.of(config, 50), replace(ALONE, rank=1, local_rank=1))
        said = run._settle_cut(list(known), lambda: (10, "found"))  # type: ignore[arg-type]
        assert run.options["micro_batch"] == run.config.micro_batch == run.plan.micro_batch
        assert run.checkpoints.fingerprint["micro_batch"] == str(run.plan.micro_batch)
        return run.plan.micro_batch, said

    old = {"micro_batch": 4, "world_sizes": [2], "launch": ["a"]}
    new = {"micro_batch": 5, "world_sizes": [2, 1], "launch": ["b"]}
    assert settled(False, ("x", {})) == (10, "found")
    assert settled(False, ("x", old), ("y", {}), ("z", new)) == (5, "")
    assert settled(True, ("x", old), ("y", {})) == (10, "found")
    assert settled(True, ("x", {}), ("a", old)) == (4, ""), "torchrun has started this again"


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it, and its memory counts")
def test_auto_finds_what_fits_agrees_on_it_and_keeps_it(tmp_path: Path) -> None:
    """On 2 ranks, of which one has less memory, then on two nodes of which one has the run's folder."""
    run_dir, known = tmp_path / "auto", tmp_path / "known"
    hold = tmp_path / "hold"
    hold.touch()
    more = ["--checkpoint-every", 0, "--pause", 0.2, "--hold", hold]
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}

    def rank(number: int, folder: Path, **variables: object) -> Any:
        own = {"RANK": number, "MASTER_PORT": port, **variables}
        return fork(TRAIN, *job(folder, "auto", *more), env=common | {key: str(value) for key, value in own.items()})

    started = [rank(r, run_dir, LOCAL_RANK=r, LOCAL_WORLD_SIZE=2, ROOM=(6000, 3000)[r]) for r in range(2)]
    try:
        wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(records(run_dir, "train")) >= 2, "step 2")
        for process in started:
            process.send_signal(signal.SIGTERM)
        first, second = [finish(process) for process in started]
    finally:
        for process in started:
            kill_group(process)
    assert first.returncode == 75, first.stderr + second.stderr
    assert "--micro-batch auto: 4 samples fit on each of 2 ranks" in first.stdout, "rank 0 alone would have taken 8"
    assert "for rank 1, where more does not" in first.stdout
    assert "micro_batch = 4\n" in (run_dir / "config.toml").read_text()

    # there is room for all now, but the run has its number; rank 0 is on a node that has never heard of it
    hold.unlink()
    port = str(free_port())
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "ROOM": 18000}
    started = [rank(0, tmp_path / "new", **alone), rank(1, run_dir, **alone)]
    try:
        first, second = [finish(process) for process in started]
    finally:
        for process in started:
            kill_group(process)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "samples fit" not in first.stdout
    assert "micro_batch = 4\n" in (tmp_path / "new" / "config.toml").read_text()
    summary = read(tmp_path / "new")
    assert (summary["bits_void_from"], summary["samples_seen"]) == (None, EPOCHS * SAMPLES)

    # what was tried has left no trace, and the number typed gives the same run
    finish_all(fork_ranks(2, TRAIN, *job(known, 4, *more)))
    assert read(known)["weights_sha256"] == summary["weights_sha256"]


def handed_out(folder: Path, first: int, end: int) -> Counter[tuple[int, int]]:
    """(epoch, sample) -> times, of the steps first .. end of an attempt of one rank. A step has its samples, whatever
    the micro-batch."""
    plan = Plan(SAMPLES, BATCH, BATCH, EPOCHS)
    (file,) = folder.iterdir()
    indices = iter(map(int, file.read_text().split()))
    steps = [(plan.locate(step)[0], plan.step_samples(step)) for step in range(first, end)]
    return Counter((epoch, next(indices)) for epoch, samples in steps for _ in range(samples))


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the host's memory that is short")
def test_out_of_memory_at_the_start_and_in_mid_run_and_on_with_other_micro_batches(tmp_path: Path) -> None:
    """Stopped by SIGTERM, out of memory in mid-run, continued as the message says: each sample once an epoch."""
    run_dir, link = tmp_path / "run", tmp_path / "record"
    hold = tmp_path / "hold"
    more = ["--record", link, "--pause", 0.2, "--hold", hold, "--greedy-at", 10, "--checkpoint-every", 0]

    def attempt(number: int, micro_batch: object) -> Any:
        (folder := tmp_path / f"attempt-{number}").mkdir()
        link.unlink(missing_ok=True)
        link.symlink_to(folder)
        return fork(TRAIN, *job(run_dir, micro_batch, *more))

    tried = finish(attempt(0, 8))
    assert tried.returncode == 1, tried.stderr
    (line,) = tried.stderr.splitlines()
    assert line.startswith("evenkeel: out of memory on rank 0 (the memory of host ")
    for part in (
        "it was in forward and backward of step 1;",
        "4194304000 bytes more were wanted",
        "the batch was [8, 4] float32, [8] int64",
        "of its limit of",
        "the same command with --micro-batch 4 instead of 8 goes on",
        "there was no step to save",
    ):
        assert part in line

    hold.touch()
    process = attempt(1, 2)
    wait_until(lambda: any(record["step"] >= 1 for record in records(run_dir, "train")), "a step")
    process.send_signal(signal.SIGTERM)
    assert finish(process).returncode == 75
    hold.unlink()

    failed = finish(attempt(2, 4))
    assert failed.returncode == 1
    warning, line = failed.stderr.splitlines()
    stopped = [record["step"] for record in records(run_dir, "start")][-1]
    assert (
        f"from step {stopped} on micro-batches are of 4 instead of 2: the global batches and their samples" in warning
    )
    status = read(run_dir, "status.json")
    assert status["reason"].startswith("out of memory on rank 0")
    assert status["step"] > stopped
    assert f"; step {status['step']} is saved" in line
    assert (run_dir / "checkpoints" / f"step-{status['step']:08d}").is_dir()

    (smaller,) = re.findall(r"--micro-batch (\d+) instead of 4", line)
    done = finish(attempt(3, smaller))
    assert done.returncode == 0, done.stderr
    assert f"from step {status['step']} on micro-batches are of 2 instead of 4" in done.stderr

    starts = [record["step"] for record in records(run_dir, "start")]
    assert starts == [0, 0, stopped, status["step"]]
    total: Counter[tuple[int, int]] = Counter()
    for number, (first, end) in enumerate(zip(starts[1:], [*starts[2:], STEPS], strict=True), start=1):
        total += handed_out(tmp_path / f"attempt-{number}", first, end)
    assert total == Counter({(epoch, index): 1 for epoch in range(EPOCHS) for index in range(SAMPLES)})
    assert read(run_dir)["samples_seen"] == EPOCHS * SAMPLES
    assert read(run_dir)["bits_void_from"] == stopped

    prolonged = ["--schedule", "constant", "--max-steps"]
    run_forked(TRAIN, *job(tmp_path / "strict", 2, *prolonged, 2))
    refused = run_forked(TRAIN, *job(tmp_path / "strict", 4, *prolonged, 3, "--strict-bits"), expect=2)
    assert "micro_batch 2 -> 4" in refused.stderr


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
def test_a_gpu_that_is_full_tells_what_is_held_by_whom() -> None:
    device = torch.device("cuda", 0)
    held = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    torch.cuda.set_per_process_memory_fraction(0.05, device)
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(torch.cuda.get_device_properties(device).total_memory // 10, dtype=torch.uint8, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    note_batch(caught.value, held[:8].view(2, 4))
    text = explained(caught.value, device, Config(batch_size=8, micro_batch=2))
    print(text)
    for part in (
        "out of memory on rank 0 (cuda:0 (",
        "GiB more were wanted",
        "the batch was [2, 4] uint8",
        "in tensors",
    ):
        assert part in text
    assert re.search(r"of [\d.]+ GiB this process holds [\d.]+ GiB", text)
    assert "--micro-batch 1 instead of 2" in text


class Wide(Classification):
    """Each sample takes some 64 MiB for backward."""

    def train_dataset(self) -> InMemory:
        return InMemory(torch.randn(64, 1 << 12), torch.zeros(64, dtype=torch.long))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 64, 64)), nn.Conv2d(1, 4096, 1), nn.ReLU(), nn.AvgPool2d(64), nn.Flatten()
        )


@pytest.mark.gpu
@gpu
def test_the_probe_stays_below_a_gpus_limit_and_gives_its_memory_back() -> None:
    device = torch.device("cuda", 0)
    world = World(0, 0, 1, 1, device, launched=False)
    task, config = Wide(), Config(batch_size=64, micro_batch="auto")
    model = task.model().to(device)
    state = State(model, [build_optimizer(model.parameters(), config)])
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.set_per_process_memory_fraction(0.03 + 1.5 * 2**30 / whole, device)
    try:
        found, said = Probe(config, task, world, task.train_dataset(), state)()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    print(said)
    assert 1 <= found < 64
    assert re.search(r"and 64\b.* did not", said)
    assert torch.cuda.memory_allocated(device) == before
