"""Memory that runs out: what is said, how a run goes on, and the micro-batch that fits."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.data.plan import Plan
from tests.support import processes
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, checked, finish, finish_all, fork, free_port, read, run_forked
from tests.support.small_runs import ODD_TASKS, SAMPLES, Records, each_once, options, starts, wait_for_step, weights_of

EPOCHS, BATCH = 2, 16


def job(run_dir: Path, micro_batch: object, *more: object) -> list[str]:
    """Options of a run of a task of which 4 samples fit at a time, and 8 do not."""
    shape = ["--batch-size", BATCH, "--micro-batch", micro_batch, "--epochs", EPOCHS, "--log-every", 1]
    return options(f"{ODD_TASKS}:Hungry", run_dir, *shape, *more)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it, and its memory counts")
def test_auto_finds_what_fits_agrees_on_it_and_keeps_it(tmp_path: Path) -> None:
    """On 2 ranks, of which one has less memory, then on two nodes of which one has the run's folder."""
    run_dir, known, hold = (tmp_path / name for name in ("auto", "known", "hold"))
    hold.touch()
    more = ["--checkpoint-every", 0, "--pause", 0.2, "--hold", hold]
    port = str(free_port())
    common = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}

    def rank(number: int, folder: Path, **variables: object) -> Any:
        own = {"RANK": number, "MASTER_PORT": port, **variables}
        return fork(TRAIN, *job(folder, "auto", *more), env=common | {key: str(value) for key, value in own.items()})

    started = [rank(r, run_dir, LOCAL_RANK=r, LOCAL_WORLD_SIZE=2, ROOM=(6000, 3000)[r]) for r in range(2)]
    wait_for_step(run_dir, 2, started[0])
    for process in started:
        process.send_signal(signal.SIGTERM)
    first, _ = finish_all(started, 75)
    assert "--micro-batch auto: 4 samples fit, on rank 1 no more" in first.stdout, "rank 0 alone would have taken 8"
    assert "micro_batch = 4\n" in (run_dir / "config.toml").read_text()

    # there is room for all now, but the run has its number; rank 0 is on a node that has never heard of it
    hold.unlink()
    port = str(free_port())
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "ROOM": 18000}
    first, _ = finish_all([rank(0, tmp_path / "new", **alone), rank(1, run_dir, **alone)])
    assert "samples fit" not in first.stdout
    assert "micro_batch = 4\n" in (tmp_path / "new" / "config.toml").read_text()
    summary = read(tmp_path / "new")
    assert (summary["bits_void_from"], summary["samples_seen"]) == (None, EPOCHS * SAMPLES)

    # what was tried has left no trace, and the number typed gives the same run
    runs.trained(2, job(known, 4, *more))
    assert weights_of(known) == weights_of(tmp_path / "new")


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is the host's memory that is short")
def test_out_of_memory_at_the_start_and_in_mid_run_and_on_with_other_micro_batches(tmp_path: Path) -> None:
    """Stopped by SIGTERM, out of memory in mid-run, continued as the message says: each sample once an epoch."""
    run_dir, hold, record = tmp_path / "run", tmp_path / "hold", Records(tmp_path / "record")
    more = ["--record", record.link, "--pause", 0.2, "--hold", hold, "--greedy-at", 10, "--checkpoint-every", 0]

    def attempt(micro_batch: object) -> Any:
        record.of_another_attempt()
        return fork(TRAIN, *job(run_dir, micro_batch, *more), warm=True)

    line = runs.the_line(checked(finish(attempt(8)), 1).stderr)
    assert line.startswith("out of memory on rank 0 (the memory of host ")
    for part in (
        "it was in forward and backward of step 1;",
        "4.3 GiB more were requested at ",
        "the batch was [8, 4] float32, [8] int64",
        "of its limit of",
        "the same command with --micro-batch 4 instead of 8 goes on",
        "no step has finished in this attempt; nothing to save",
    ):
        assert part in line

    hold.touch()
    process = attempt(2)
    wait_for_step(run_dir, 1, process)
    processes.stop(process, expect=75)
    hold.unlink()

    warning, line = checked(finish(attempt(4)), 1).stderr.splitlines()
    stopped = starts(run_dir)[-1]
    assert (
        f"from step {stopped} on a step is cut into micro-batches of 4 samples, before into micro-batches of 2"
        in warning
    )
    status = read(run_dir, "status.json")
    assert status["reason"].startswith("out of memory on rank 0")
    assert status["step"] > stopped
    assert f"; step {status['step']} is saved" in line
    assert (run_dir / "checkpoints" / f"step-{status['step']:08d}").is_dir()

    (smaller,) = re.findall(r"--micro-batch (\d+) instead of 4", line)
    done = checked(finish(attempt(smaller)), 0)
    assert f"from step {status['step']} on a step is cut into micro-batches of 2 samples, before into" in done.stderr

    assert starts(run_dir) == [0, 0, stopped, status["step"]]
    plan = Plan(SAMPLES, BATCH, BATCH, EPOCHS)  # a step has its samples, whatever the micro-batch
    assert record.handed_out(plan, run_dir, (1, 1, 1, 1)) == each_once(EPOCHS, SAMPLES)
    assert read(run_dir)["samples_seen"] == EPOCHS * SAMPLES
    assert read(run_dir)["bits_void_from"] == stopped

    prolonged = ["--schedule", "constant", "--max-steps"]
    run_forked(TRAIN, *job(tmp_path / "strict", 2, *prolonged, 2))
    assert "micro_batch 2 -> 4" in runs.refusal(job(tmp_path / "strict", 4, *prolonged, 3, "--strict-bits"))
