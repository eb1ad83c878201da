"""Every second of a run has an account."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.support import processes
from tests.support.processes import TRAIN, read, records, start, torchrun
from tests.support.small_runs import job, wait_for_step, workers_of


def test_all_seconds_of_a_run_with_a_kill_are_accounted_for(tmp_path: Path) -> None:
    """All ranks die at once, and there was no checkpoint, so that all steps are done again."""
    run_dir = tmp_path / "run"
    begun = time.time()
    rare = ["--checkpoint-every", 0, "--eval-every", 1000]
    process = start(torchrun(2, TRAIN, *job(run_dir, "--pause", 0.05, *rare), restarts=1))
    wait_for_step(run_dir, 7, process)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # one that outlived the other for a moment would save
        for pid in workers_of(process).values():
            os.kill(pid, number)
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    wall = time.time() - begun
    summary = read(run_dir)
    seconds = summary["ledger"]
    first = records(run_dir, "start")[0]
    began = first["time"] - sum(first["spent"].values())
    ended = began + sum(seconds.values())
    last, finish = records(run_dir, "eval")[-1]["time"], records(run_dir, "finish")[0]["time"]
    assert last - 0.1 < ended < finish + 0.1, "the sum was made between these two"
    assert wall - 60 < sum(seconds.values()) < wall, "torchrun itself starts before its ranks and ends after them"
    assert seconds["redone"] > 7 * 2 * 0.05, "two micro-batches of 0.05 s a step"
    assert seconds["start_up"] > 2, "two starts"
    assert 0 < summary["goodput"] < 1
    assert f"({summary['goodput'] * 100:.0f} % training, " in done.stdout
