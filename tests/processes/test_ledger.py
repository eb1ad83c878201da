"""Every second of a run has an account."""

import json
import os
import re
import signal
import time
from pathlib import Path

from evenkeel.run.records import YOUNG
from tests.support.processes import TRAIN, checked, finish, fork, read, records, run_forked, start, torchrun
from tests.support.small_runs import job, stop_at, wait_for_step, workers_of


def test_all_seconds_of_a_run_with_a_kill_are_accounted_for(run_dir: Path) -> None:
    """All ranks die at once, and there was no checkpoint, so that all steps are done again."""
    begun = time.time()
    rare = ["--checkpoint-every", 0, "--eval-every", 1000]
    process = start(torchrun(2, TRAIN, *job(run_dir, "--pause", 0.05, *rare), restarts=1))
    wait_for_step(run_dir, 7, process)
    for number in (signal.SIGSTOP, signal.SIGKILL):  # one that outlived the other for a moment would save
        for pid in workers_of(process).values():
            os.kill(pid, number)
    done = checked(finish(process), 0)
    wall = time.time() - begun
    summary = read(run_dir)
    seconds = summary["ledger"]
    first = records(run_dir, "start")[0]
    began = first["time"] - sum(first["spent"].values())
    ended = began + sum(seconds.values())
    last, told = records(run_dir, "eval")[-1]["time"], records(run_dir, "finish")[0]["time"]
    assert last - 0.1 < ended < told + 0.1, "the sum was made between these two"
    assert wall - 60 < sum(seconds.values()) < wall, "torchrun itself starts before its ranks and ends after them"
    assert seconds["redone"] > 7 * 2 * 0.05, "two micro-batches of 0.05 s a step"
    assert seconds["start_up"] > 2, "two starts"
    assert 0 < summary["goodput"] < 1
    assert sum(seconds.values()) > YOUNG or "% of it training" not in done.stdout, "mostly start-up in a minute"


def test_the_hour_between_a_stop_and_the_next_start_is_told_apart(run_dir: Path) -> None:
    command = [TRAIN, *job(run_dir, "--pause", 0.05)]
    stopped = stop_at(run_dir, 2, fork(*command), expect=75)
    assert "train/loss" in stopped.stdout
    assert "goodput" not in stopped.stdout, "which is mostly start-up in the first minute"
    assert stopped.stdout.count("train/loss") <= 2, "lines are seconds apart"
    metrics = run_dir / "metrics.jsonl"
    written = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(it | {"time": it["time"] - 3600}) + "\n" for it in written))
    out = run_forked(*command).stdout
    assert re.search(r"train/loss .* goodput 0 %$", out, re.MULTILINE)
    took = re.search(r"finished in ([\d.]+) s \((\d+) % of it training\), and was down for 36\d\d s more", out)
    assert took, out
    assert float(took[1]) < 600
    seconds = read(run_dir)["ledger"]
    at_work = sum(seconds.values()) - seconds["dead"]
    assert took[2] == f"{100 * seconds['productive'] / at_work:.0f}" > "1", "of the time at work"
