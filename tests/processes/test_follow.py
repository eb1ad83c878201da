"""`python -m evenkeel follow` of real runs without Slurm: at work, finished, stopped, killed."""

import re
import signal
from pathlib import Path

from tests.cli.test_status import endless, write_run
from tests.support import processes
from tests.support.processes import EVENKEEL, TRAIN, checked, contents_of, evenkeel, finish, fork, kill_group, start
from tests.support.small_runs import job, stop_at, the_line, wait_for_step
from tests.support.terminal import Terminal


def test_refusals(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        line = the_line(evenkeel("follow", path, expect=2).stderr)
        assert line == f"{path}: no run there and no Slurm job; name a run directory"
    assert "`follow` takes no options of train.py" in evenkeel("follow", tmp_path, "--", "--lr", 1, expect=2).stderr


def test_a_run_at_work_is_shown_as_on_its_console_until_it_is_stopped(run_dir: Path) -> None:
    job = start(processes.torchrun(2, TRAIN, *endless(run_dir)))
    try:
        wait_for_step(run_dir, 3, job)
        with Terminal([*EVENKEEL, "follow", str(run_dir)], columns=220) as terminal:
            line = r"step (\d+)/10000 \S+ running  ETA [\d:]+  \d+ samples/s  train/loss \d\.\d{4}"
            terminal.read_until(line)
            first = int(re.findall(line, terminal.text)[-1])
            terminal.read_until(line.replace(r"(\d+)", rf"(?!{first}/)\d+"))
            terminal.read_until(r"epoch \d+  data wait \d+ %")
            terminal.resize(80)
            terminal.output = ""
            terminal.read_until(line)  # the time left and the speed on a narrow one
            terminal.press_ctrl_c()
            assert terminal.end() == 130
            assert terminal.text.endswith(f"continues; `python -m evenkeel follow {run_dir}` follows it again\n")
        piped = start([*EVENKEEL, "follow", run_dir])
        early = ""
        while early.count("train/loss") < 2:
            early += piped.stdout.readline()
        processes.stop(job)
        shown = checked(finish(piped), 75)
    finally:
        kill_group(job)

    *lines, last = (early + shown.stdout).splitlines()
    assert re.fullmatch(rf"evenkeel: stopped at step \d+: SIGTERM -> {run_dir}", last)
    written = {record["step"]: record for record in processes.records(run_dir, "train")}
    steps = [text for text in lines if "train/loss" in text]
    assert len(steps) > 1
    for text in steps:
        record = written[int(text.split("/")[0].removeprefix("step "))]
        assert f"  train/loss {record['train/loss']:.4f}  {record['train/samples_per_s']:,.0f} samples/s" in text
    assert len(written) > len(steps), "lines are seconds apart"
    assert not shown.stderr


def test_runs_that_have_ended(tmp_path: Path) -> None:
    finished, killed = tmp_path / "finished", tmp_path / "killed"
    processes.run_forked(TRAIN, *job(finished))
    before = contents_of(finished)
    *_, last = evenkeel("follow", finished).stdout.splitlines()
    assert last == f"evenkeel: finished at step 27 -> {finished}"
    assert contents_of(finished) == before, "it only looks"
    stop_at(killed, 3, fork(TRAIN, *endless(killed)), signal.SIGKILL)
    *_, last = evenkeel("follow", killed, expect=1).stdout.splitlines()
    assert re.fullmatch(rf"evenkeel: lost at step \d+: its process is gone and recorded no reason.* -> {killed}", last)
    assert processes.read(killed, "status.json")["state"] == "running", "the control"
    hints = {"data": "data wait 38 %: try --num-workers 4", "evaluation": ""}
    run_dir = write_run(tmp_path / "run", state="stopped", step=5, total_steps=9, reason="SIGTERM", hints=hints)
    out = evenkeel("follow", run_dir, expect=75).stdout
    assert out == f"hint: data wait 38 %: try --num-workers 4\nevenkeel: stopped at step 5: SIGTERM -> {run_dir}\n"
