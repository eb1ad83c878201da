"""All text that goes to a terminal, and the live line of a run there: step, bar, phase, speed and time left, metrics.

All output goes through `say`, `styled` or `Lines`: names of folders, metrics and samples come from other people, and a
terminal would execute control characters in them.

A thread draws the line from plain Python values, so it costs a step nothing and needs no device. rich is imported only
where there is a terminal, because that takes as long as all of our modules.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from .arguments import lose_stdout
from .naming import TRAIN, eta, rates
from .phases import CHECKPOINT, COMPILATION, DATA, EVALUATION, HANGING, START_UP, activity

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

BAR, NARROW_BAR, NARROW = 16, 8, 100
"""Columns of the bar, of the narrow bar, and of a terminal below which the bar is narrow."""

BRIEF = 0.3
"""Seconds below which a wait for data or a checkpoint is shown as training."""

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that move the cursor, change colours or the order of letters, or cannot be encoded: control characters
except line breaks and tabs, writing directions, surrogates."""

WORDS = {
    COMPILATION: "compiling",
    EVALUATION: "evaluating",
    CHECKPOINT: "saving",
    DATA: "waiting for data",
    HANGING: "hanging",
}
"""How phases are shown; all others of a step are "training"."""


def plain(text: str) -> str:
    """Text that is safe for a terminal: control characters and what cannot be encoded are escaped.

    >>> plain("runs/\\x1b[2Jmine")
    'runs/\\\\x1b[2Jmine'
    """
    return UNSEEN.sub(lambda it: it[0].encode("unicode_escape").decode(), text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def near(path: Path) -> Path:
    """A path as it was typed, perhaps: relative to the working directory, if it is below that."""
    with contextlib.suppress(OSError, ValueError):  # the working directory is gone; or is another one
        return path if path == Path.cwd() else path.relative_to(Path.cwd())
    return path


def say(text: str, to_stderr: bool = False) -> None:
    """Print a text; control characters in it are escaped. Raises OSError if stdout is gone, not if stderr is."""
    with contextlib.suppress(OSError) if to_stderr else contextlib.nullcontext():
        stream = sys.stderr if to_stderr else sys.stdout
        # another process may have drawn its live line there, and draws it again below this
        erase = "\r\x1b[K" if to_stderr and not active and _is_terminal(stream) else ""
        # one write: under `python -u` print() makes two, and who is killed between them leaves half a line
        print(f"{erase}{plain(text)}\n", end="", file=stream, flush=True)


def show(text: str) -> None:
    """Print the result of --dry-run as it is. Its reader may close the output, as in `| head -1`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        lose_stdout()


def flush() -> None:
    """Write out what stdout and stderr still have; no error if a reader is gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def styled(text: str, style: str = "") -> Text:
    """The same for rich's tables and live lines."""
    from rich.text import Text

    return Text(plain(text), style)


class Lines(logging.Formatter):
    """The same for log records."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as lines."""
        return plain(super().format(record))


def announce() -> None:
    """Print that the program has started, before imports that take seconds. The next line overwrites it.

    From here on Ctrl-C ends the program with a line instead of a traceback, and SIGHUP with one instead of none, until
    a run takes signals.

    >>> announce()  # prints nothing, if stdout is no terminal
    """
    for number in (signal.SIGINT, signal.SIGHUP):  # SIGTERM may also end one process of a pool that a task has made
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):  # not under nohup
            signal.signal(number, _stop_at_start)
    if _is_seen():
        print("starting: importing", end="\r", flush=True)


def _stop_at_start(number: int, _frame: object) -> None:
    """End at once, because imports may swallow a KeyboardInterrupt. One rank of a node says so."""
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            say_stopped_at_start(number)
    finally:
        os._exit(128 + number)


def say_stopped_at_start(number: int) -> None:
    """For a handler of a stop signal: print that nothing has begun. A terminal that is gone gets nothing."""
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):
        os.write(2, f"evenkeel: stopped by {name} while starting; the same command goes on from here\n".encode())


def start() -> None:
    """Start to show the line, on rank 0 and if stdout is a terminal."""
    global active
    if _is_seen() and not active:
        active = Display()
        atexit.register(active.stop)


def stop() -> None:
    """End the display, if there is one."""
    if active:
        active.stop()


def forget() -> None:
    """End the display; a later run in this process has its own."""
    global active
    stop()
    active = None


def _is_seen() -> bool:
    return os.environ.get("RANK", "0") == "0" and _is_terminal(sys.stdout)


def _is_terminal(stream: TextIO) -> bool:
    dumb = os.environ.get("TERM") in ("dumb", "unknown")  # where rich draws nothing, and lines are better
    return stream.isatty() and not dumb


class Display:
    """The line, below all other output. rich asks for the present one (`__rich__`) also below a text that it prints."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        class Terminal(Console):
            def on_broken_pipe(self) -> None:
                self.quiet = True
                lose_stdout()  # without a reader the training goes on

            def show_cursor(self, show: bool = True) -> bool:
                return False  # nor hide it: a killed process could not show it again

        # no colours for numbers, and no line breaks of rich's own
        console = Terminal(highlight=False, soft_wrap=True)
        self.metrics = list[str]()
        """The last metrics, as text."""
        self.more = list[str]()
        """More about the speed and the time, as text."""
        self._plan: Any = None
        self._end = ""
        self._seen = 0  # the step of the last redraw
        self._points: deque[tuple[float, int]] = deque(maxlen=80)  # time and step of the last redraws with a new step
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)
        self._live.start(refresh=True)
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def begin(self, plan: Any) -> None:
        """Count the steps of a :class:`~evenkeel.data.plan.Plan` from here on."""
        self._plan, self._seen, self._live.transient = plan, activity.step, False

    def stop(self, end: str = "stopped") -> None:
        """Leave the line as it is, with how the run ended; erase it if no step was counted."""
        self._end = self._end or end * bool(self._plan)
        self._live.stop()

    def _leave_to_parent(self) -> None:
        """In a loader process: print, but do not draw, nor wait for a lock that the thread had at the fork."""
        console = self._live.console
        console._lock = threading.RLock()
        if self._live.is_started:
            console.pop_render_hook()

    def __rich__(self) -> Line:
        step = activity.step
        return Line(step, self._plan.total_steps if self._plan else 0, [self._end or _doing(), *self._facts(step)])

    def _facts(self, step: int) -> list[str]:
        """Time left, speed, metrics and epoch, as far as they are known."""
        if not (plan := self._plan):
            return []
        speed = list[str]()
        if step != self._seen:
            self._seen = step
            self._points.append((time.monotonic(), step))
        if len(self._points) > 1 and not self._end:
            (then, first), (now, last) = self._points[0], self._points[-1]
            rate = (plan.samples_seen(last) - plan.samples_seen(first)) / (now - then)
            left = (plan.total_steps - last) * (now - then) / (last - first)
            speed = [eta(left), *rates({f"{TRAIN}/samples_per_s": rate})]
        now_in = plan.epoch_label(min(step + 1, plan.total_steps))
        return [*speed, *self.metrics, now_in, *(self.more if speed else [])]


@dataclass(frozen=True)
class Line:
    """Step, bar and facts in a row of a terminal, for rich."""

    step: int
    total: int  # 0: unknown, and no bar
    facts: list[str]
    """The most important first. Those that do not fit are left out; the first one may be cut."""

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[Table]:
        from rich.cells import cell_len
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        head, width = f"step {self.step}/{self.total}", NARROW_BAR if options.max_width < NARROW else BAR
        before: list[Any] = [styled(head), ProgressBar(self.total, self.step, width=width)] if self.total else []
        room = options.max_width - (len(head) + width + len(before) if self.total else 0)
        text, *more = filter(None, self.facts)
        for fact in more:
            if cell_len(longer := f"{text}  {fact}") <= room:
                text = longer
        line = Table.grid(padding=(0, 1), expand=True)
        for cell in (cells := [*before, styled(text)]):  # only the text at the end may shrink in a narrow terminal
            line.add_column(no_wrap=True, overflow="ellipsis", ratio=1 if cell is cells[-1] else None)
        line.add_row(*cells)
        yield line


def _doing() -> str:
    """The present phase in words, with its seconds from 2 on."""
    phase, detail, seconds = activity.phase, activity.detail, activity.seconds_in_phase()
    if phase == START_UP:
        word = f"starting: {detail}"
    elif phase in (DATA, CHECKPOINT) and seconds < BRIEF:
        word = "training"
    else:
        word = " ".join(filter(None, [WORDS.get(phase, "training"), detail]))
    return f"{word}, {seconds:.0f} s" if seconds >= 2 else word


active: Display | None = None
"""The display of this process, if there is one."""
