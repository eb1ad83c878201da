"""`python -m evenkeel follow` of real runs without Slurm: at work, finished, stopped, killed."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

from tests.cli.test_status import endless, write_run
from tests.support import processes
from tests.support.processes import TRAIN, contents_of, finish, kill_group, run, start, torchrun
from tests.support.small_runs import job, wait_for_step
from tests.support.terminal import Terminal

FOLLOW = [sys.executable, "-m", "evenkeel", "follow"]


def test_refusals(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        done = run([*FOLLOW, str(path)], expect=2)
        assert done.stderr == f"evenkeel: {path}: no run there and no Slurm job; name a run directory\n"
    done = run([*FOLLOW, str(tmp_path), "--", "--lr", "1"], expect=2)
    assert "`follow` takes no options of train.py" in done.stderr


def test_a_run_at_work_is_shown_as_on_its_console_until_it_is_stopped(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    job = start(torchrun(2, TRAIN, *endless(run_dir)))
    try:
        wait_for_step(run_dir, 3, job)
        with Terminal([*FOLLOW, str(run_dir)], columns=220) as terminal:
            line = r"step (\d+)/10000 \S+ running  ETA [\d:]+  \d+ samples/s  train/loss \d\.\d{4}"
            terminal.read_until(line)
            first = int(re.findall(line, terminal.text)[-1])
            terminal.read_until(line.replace(r"(\d+)", rf"(?!{first}/)\d+"))
            terminal.read_until(r"epoch \d+  data wait \d+ %")
            for columns in (120, 100, 80):  # on each the time left and the speed
                terminal.resize(columns)
                terminal.output = ""
                terminal.read_until(line + ("  epoch " if columns == 120 else ""))
                print(columns, terminal.text.strip().splitlines()[-1])
            first = int(re.findall(line, terminal.text)[-1])
            terminal.press_ctrl_c()
            assert terminal.end() == 130
            assert terminal.text.endswith(f"continues; `python -m evenkeel follow {run_dir}` follows it again\n")
        piped = start([*FOLLOW, str(run_dir)])
        wait_for_step(run_dir, first + 20, job)
        job.send_signal(signal.SIGTERM)
        shown, told = finish(piped), finish(job)
    finally:
        kill_group(job)
    assert shown.returncode == 75, shown.stderr
    *lines, last = shown.stdout.splitlines()
    assert re.fullmatch(rf"evenkeel: stopped at step \d+: SIGTERM -> {run_dir}", last)
    # the same lines as the job's own; what is left and the goodput are as of now
    own = {text.partition(" samples/s")[0] for text in told.stdout.splitlines() if "train/loss" in text}
    steps = [text.partition(" samples/s")[0] for text in lines if "train/loss" in text]
    assert len(steps) > 1
    assert set(steps) <= own
    assert not shown.stderr


def test_runs_that_have_ended(tmp_path: Path) -> None:
    finished, killed = tmp_path / "finished", tmp_path / "killed"
    run([sys.executable, str(TRAIN), *job(finished)])
    before = contents_of(finished)
    *_, last = run([*FOLLOW, str(finished)]).stdout.splitlines()
    assert last == f"evenkeel: finished at step 27 -> {finished}"
    assert contents_of(finished) == before, "it only looks"
    dying = start([sys.executable, str(TRAIN), *endless(killed)])
    wait_for_step(killed, 3, dying)
    kill_group(dying)
    processes.finish(dying)
    *_, last = run([*FOLLOW, str(killed)], expect=1).stdout.splitlines()
    assert re.fullmatch(rf"evenkeel: lost at step \d+: its process is gone and gave no reason.* -> {killed}", last)
    assert json.loads((killed / "status.json").read_text())["state"] == "running", "the control"


def test_hints_are_shown(tmp_path: Path) -> None:
    hints = {"data": "data wait 38 %: try --num-workers 4", "evaluation": ""}
    run_dir = write_run(tmp_path / "run", state="stopped", step=5, total_steps=9, reason="SIGTERM", hints=hints)
    out = run([*FOLLOW, str(run_dir)], expect=75).stdout
    assert out == (f"hint: data wait 38 %: try --num-workers 4\nevenkeel: stopped at step 5: SIGTERM -> {run_dir}\n")
