"""Jobs of `evenkeel check`: they run in parallel, are killed and stopped at a step, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ...common.processes import descendants, start_in_session
from ...distributed.exits import AGAIN, TRYING

NOTES, HOLD = "EVENKEEL_CHECK_NOTES", "EVENKEEL_CHECK_HOLD"
"""Environment variables that tell `observed` what to do."""
LIMIT = 900.0
"""Maximum seconds of a part of a job."""

Waiting = Iterator[None]
"""A task that runs beside others: it yields whenever it has to wait."""


class JobFailed(Exception):  # noqa: N818
    """A job has failed; the text is one line with its last message."""


class Jobs:
    """All processes of a check, in a folder of its own.

    Args:
        folder: for runs and notes.
        script: the training script.
        options: of train.py, for every job.
    """

    def __init__(self, folder: Path, script: Path, options: Sequence[str]) -> None:
        self.folder, self.script, self.options = folder, script, options
        self.env = {"OMP_NUM_THREADS": "1"}
        """Environment variables of every process."""
        self._started: list[subprocess.Popen[bytes]] = []

    def job(
        self,
        name: str,
        ranks: Sequence[int],
        options: Sequence[str],
        breaks: Mapping[int, signal.Signals] | None = None,
    ) -> Waiting:
        """A job from its start to its end, started on these numbers of ranks in turn.

        ``breaks``: step, from 0 -> what happens in the middle of it: a SIGTERM, after which the job is started again,
        or a SIGKILL of its last rank, after which it continues by itself.
        """
        folder, left = self.folder / name, list((breaks or {}).items())
        folder.mkdir()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
        observed = ["-m", f"{__package__}.observed", str(self.script), *self.options, f"--run-dir={folder / 'run'}"]
        for number in ranks:
            step, how = left.pop(0) if left else (-1, None)
            paused = folder / f"paused-{step}"
            env = {NOTES: str(folder), HOLD: f"{step}:{number - 1}:{paused}"}
            arguments = [*torchrun, f"--nproc_per_node={number}", *observed, *options]
            process = self.popen(arguments, folder / "output", env)
            while how and not paused.exists() and process.poll() is None:
                yield
            if how and paused.exists():
                os.kill(int(paused.read_text()) if how == signal.SIGKILL else process.pid, how)
            yield from self.ended(process, folder / "output", stopped=how == signal.SIGTERM and paused.exists())

    def popen(self, arguments: Sequence[str], output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start Python in its own session, so that Ctrl-C reaches only this process, which then ends all."""
        with output.open("ab") as file:
            process = start_in_session(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                env={**os.environ, **self.env, **env},
            )  # fmt: skip
        self._started.append(process)
        return process

    def ended(self, process: subprocess.Popen[bytes], output: Path, stopped: bool = False) -> Waiting:
        """Wait for the end of a process; raises JobFailed unless it ends well or was stopped."""
        until = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < until:
            yield
        if (code := process.returncode) is None:
            raise JobFailed(f"not over after {LIMIT:.0f} s: {last_message(output)}")
        if code and not stopped:
            raise JobFailed((f"exit code {code}: " if code < 0 else "") + last_message(output))

    def end_all(self) -> None:
        """Kill all remaining processes and their descendants."""
        while roots := [process.pid for process in self._started if process.poll() is None]:
            for pid in [*descendants(*roots), *roots]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def together(tasks: Mapping[str, Waiting], at_most: int) -> Iterator[tuple[str, str | None]]:
    """Run at most so many tasks at a time; yields (name, None) when one begins, (name, "" or the error) at its end."""
    waiting, active = list(tasks.items()), dict[str, Waiting]()
    while waiting or active:
        while waiting and len(active) < at_most:
            name, task = waiting.pop(0)
            active[name] = task
            yield name, None
        for name, task in list(active.items()):
            why = ""
            try:
                next(task)
                continue
            except StopIteration:
                pass
            except JobFailed as failed:
                why = str(failed)
            del active[name]
            yield name, why
        time.sleep(0.02)


def alike(*texts: str) -> bool:
    """Whether messages are the same but for their numbers, such as the size of a micro-batch."""
    return len({re.sub(r"(?<!:)\b\d+", "0", text) for text in texts}) == 1


def last_message(output: Path) -> str:
    """The last message of a process: a line of ours that says why, else an error, else its last line."""
    said = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in said if re.match("evenkeel: (?!WARNING|failed at step)", line)]
    errors = [line for line in said if "Error: " in line and not line.startswith("[")]
    last = (own or errors or said or ["it has ended without a message"])[-1]
    return re.sub(f"^evenkeel: (the job has failed: )?(rank [0-9]+ failed: )?|({AGAIN}|{TRYING}.*)$", "", last)[:500]
