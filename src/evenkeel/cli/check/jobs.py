"""Jobs of `evenkeel check`: they run side by side, are killed and stopped at a step, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from ...common.processes import descendants, die_with_parent

NOTES, HOLD = "EVENKEEL_CHECK_NOTES", "EVENKEEL_CHECK_HOLD"
"""Environment variables that tell `observed` what to do."""
LIMIT = 900.0
"""Seconds that a part of a job may take."""

Waiting = Iterator[None]
"""Something that is done beside others: it gives the turn back whenever it has to wait."""


class JobFailed(Exception):  # noqa: N818
    """A job has not ended as it should; the text is a line with what it has said."""


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

        ``breaks``: the steps, from 0, in the midst of which there is a SIGTERM, after which it is started again, or a
        SIGKILL of its last rank, after which it continues by itself.
        """
        folder, left = self.folder / name, list((breaks or {}).items())
        folder.mkdir()
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
        observed = ["-m", f"{__package__}.observed", str(self.script), *self.options, f"--run-dir={folder / 'run'}"]
        for number in ranks:
            step, how = left.pop(0) if left else (-1, None)
            held = folder / f"held-{step}"
            env = {NOTES: str(folder), HOLD: f"{step}:{number - 1}:{held}"}
            arguments = [*torchrun, f"--nproc_per_node={number}", *observed, *options]
            process = self.popen(arguments, folder / "output", env)
            while how and not held.exists() and process.poll() is None:
                yield
            if how and held.exists():
                os.kill(int(held.read_text()) if how == signal.SIGKILL else process.pid, how)
            yield from self.ended(process, folder / "output", stopped=how == signal.SIGTERM and held.exists())

    def popen(self, arguments: Sequence[str], output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start Python in a session of its own, so that Ctrl-C is for this process, which then ends all."""
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True, env={**os.environ, **self.env, **env},
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )  # fmt: skip
        self._started.append(process)
        return process

    def ended(self, process: subprocess.Popen[bytes], output: Path, stopped: bool = False) -> Waiting:
        """Wait for the end of a process; raises JobFailed unless it ends well or was stopped."""
        until = time.monotonic() + LIMIT
        while process.poll() is None and time.monotonic() < until:
            yield
        if process.returncode is None or (process.returncode and not stopped):
            raise JobFailed(f"exit code {process.returncode}: {last_words(output)}")

    def end_all(self) -> None:
        """Kill all processes that are left, and those below them."""
        while roots := [process.pid for process in self._started if process.poll() is None]:
            for pid in [*descendants(*roots), *roots]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def together(tasks: Mapping[str, Waiting], at_most: int) -> Iterator[tuple[str, str | None]]:
    """Do so many things at a time; gives (name, None) when one begins, and (name, "" or what went wrong) at its end."""
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


def last_words(output: Path) -> str:
    """What a process has said of its end: its own line, or the last one."""
    said = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in said if line.startswith("evenkeel: ")]
    errors = [line for line in said if "Error: " in line and not line.startswith("[")]
    return (own or errors or said or ["nothing"])[-1].removeprefix("evenkeel: ")[:500]
