"""The live line, on a real terminal."""

import io
import multiprocessing
import os
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from evenkeel.common.display import Display, Line, say
from evenkeel.common.phases import activity
from tests.support.small_runs import PLAN, workers_of
from tests.support.terminal import CONTROL, Terminal

TASK = """
import time
from dataclasses import dataclass
from evenkeel.tasks.classify import Classify


@dataclass
class Slow(Classify):
    open: float = 0.0
    pause: float = 0.0

    def train_dataset(self):
        time.sleep(self.open)
        return super().train_dataset()

    def loss(self, model, batch):
        time.sleep(self.pause)
        return super().loss(model, batch)

    def metrics(self, model, batch):
        time.sleep(0.4)
        return super().metrics(model, batch)
"""


def command(folder: Path, *options: object) -> list[str]:
    (folder / "slow.py").write_text(TASK)
    task = ["--task", folder / "slow.py:Slow", "--width", 2, "--wandb", "disabled", "--run-dir", folder / "run"]
    # no line of metrics at all: the display must move without
    return [sys.executable, "train.py", *map(str, [*task, "--log-every", 1000, *options])]


def drawn(terminal: Terminal) -> list[str]:
    """All states of the line, and the lines between them."""
    parts = re.split(r"[\r\n]|\x1b\[1A", terminal.output)
    return list(filter(None, (CONTROL.sub("", part).strip() for part in parts)))


def test_it_moves_by_time_and_ends_at_the_full_count(tmp_path: Path) -> None:
    options = ["--batch-size", 288, "--micro-batches", 2, "--epochs", 2, "--open", 0.8, "--pause", 0.3]
    with Terminal(command(tmp_path, *options), columns=160) as terminal:
        assert terminal.end() == 0
        lines = drawn(terminal)
        assert "\x1b[?25l" not in terminal.output, "a process that is killed could not bring the cursor back"
    assert lines[0] == "starting: importing"
    assert "starting: data" in lines
    moves = [(int(found[1]), found[2]) for line in lines if (found := re.search(r"step (\d+)/10 ━\S* (\w+)", line))]
    assert {step for step, phase in moves if phase == "training"} >= set(range(1, 5)) | set(range(6, 10))
    assert any("step 5/10" in line and "evaluating 1 of 3 micro-batches  ETA " in line for line in lines)
    assert any(re.search(r"training  ETA 0:00:0\d  [\d,]+ samples/s  epoch 1/2", line) for line in lines)
    assert any(re.fullmatch(r"step 10/10  test/loss \d\.\d{4}  test/accuracy \d\.\d{4}", line) for line in lines)
    assert re.fullmatch(r"step 10/10 ━{16} finished  test/accuracy \d\.\d{4}  epoch 2/2", lines[-1])


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (200, "training  ETA 0:01:00  9 samples/s  gan/loss -8.6988  gan/gradient_penalty 0.1234  epoch 1/20"),
        (100, "training  ETA 0:01:00  9 samples/s  gan/loss -8.6988  epoch 1/20"),
        (80, "training  ETA 0:01:00  9 samples/s  gan/loss -8.6988"),
        (60, "training  ETA 0:01:00  9 samples/s"),
    ],
)
def test_facts_that_do_not_fit_are_left_out_as_a_whole(columns: int, shown: str) -> None:
    facts = ["training", "ETA 0:01:00", "9 samples/s", "gan/loss -8.6988", "gan/gradient_penalty 0.1234", "epoch 1/20"]
    console = Console(width=columns, file=io.StringIO())
    console.print(Line(120, 4600, facts))
    assert isinstance(console.file, io.StringIO)
    (line,) = console.file.getvalue().splitlines()
    assert re.fullmatch(rf"step 120/4600 +{re.escape(shown)}", line.rstrip())


def test_a_stop_shows_at_which_step_also_on_a_terminal_that_has_become_narrow(tmp_path: Path) -> None:
    with Terminal(command(tmp_path, "--pause", 0.3), columns=160) as terminal:
        terminal.read_until(r"step 2/460 ")
        terminal.resize(66)
        terminal.output = ""
        terminal.read_until(r"step \d+/460 \S+ training  ETA [\d:]+  [\d,]+ samples/s *step")  # the next
        assert max(map(len, drawn(terminal))) <= 66
        terminal.resize(160)
        terminal.press_ctrl_c()
        assert terminal.end() == 75
        *_, line, said = drawn(terminal)
    step = re.match(r"step (\d+)/460 ━\S* stopped  (train/loss \S+  )?epoch 1/20", line)
    assert step, line
    assert said.startswith(f"evenkeel: stopped by SIGINT; step {step[1]} is saved")


@pytest.mark.slow
def test_a_death_has_a_line_of_its_own(tmp_path: Path) -> None:
    """It is printed by another process than the one that draws."""
    launch = [sys.executable, "launch/single_node.py", "-g", "2", "--", *command(tmp_path, "--pause", 0.2)[2:]]
    with Terminal([*launch, "--max-steps", "20", "--keeper", "on"], columns=160) as terminal:
        terminal.read_until(r"step 2/20 ")
        os.kill(workers_of(terminal.process)[1], signal.SIGKILL)
        assert terminal.end() == 0
        lines = drawn(terminal)
    said = "evenkeel: rank 1 was killed by SIGKILL; all ranks restart in place, without torchrun"
    assert said in lines
    assert any(re.match(r"step \d+/20 ━\S* restarting  ", line) for line in lines)
    assert any(re.fullmatch(r"attempt 2, .*, because rank 1 was killed by SIGKILL", line) for line in lines)


def test_a_refusal_takes_the_line_away_and_a_terminal_that_cannot_draw_gets_lines(tmp_path: Path) -> None:
    with Terminal(command(tmp_path, "--open", 1, "--batch-size", 1438)) as terminal:
        terminal.read_until("starting: data")
        assert terminal.end() == 2
        assert re.search(r"evenkeel: --batch-size 1438: the training data", terminal.text)
        assert "\x1b[1A\x1b[2K" in terminal.output.rpartition("starting: data")[2], "the last line is erased"
    options = ["--batch-size", 288, "--micro-batches", 2, "--epochs", 1, "--log-every", 2]
    with Terminal(command(tmp_path, *options), columns=160, env={"TERM": "dumb"}) as terminal:
        assert terminal.end() == 0
    assert "starting" not in terminal.output
    assert re.search(r"^step 2/5  epoch 1/1  train/loss", terminal.text, re.MULTILINE)


def test_a_loader_process_prints_while_the_line_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is forked while the thread that draws holds rich's lock: without a lock of its own it would wait for ever."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any file for a terminal
    display = Display()
    held, done = threading.Event(), threading.Event()

    def draw() -> None:
        with display._live.console._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=draw)
    thread.start()
    held.wait()
    try:
        child = multiprocessing.get_context("fork").Process(target=print, args=("a warning of a data set's",))
        child.start()
        child.join(10)
        code = child.exitcode
        child.kill()
    finally:
        done.set()
        thread.join()
        display.stop()
    assert code == 0


def test_below_a_text_is_the_present_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """rich would draw the last one again, and after a fast epoch the bar went back."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(activity, "step", 1)
    display = Display()
    display.begin(PLAN)
    display._live.refresh()
    activity.step = 2
    print("said")
    display.stop()
    shown = CONTROL.sub("", capsys.readouterr().out)
    assert f"step 1/{PLAN.total_steps}" in shown.partition("said")[0]
    assert f"step 1/{PLAN.total_steps}" not in shown.partition("said")[2]


class Gone(io.StringIO):
    """A stream without a reader."""

    def flush(self) -> None:
        raise BrokenPipeError


def test_a_line_on_a_stderr_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot say why it ends still ends as it should; whoever prints on stdout decides."""
    monkeypatch.setattr(sys, "stderr", Gone())
    say("NOT SAVED", to_stderr=True)
    monkeypatch.setattr(sys, "stdout", Gone())
    with pytest.raises(BrokenPipeError):
        say("step 1/2")
