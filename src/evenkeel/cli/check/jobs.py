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

from ...common.naming import count_ranks
from ...common.processes import descendants, die_with_parent

NOTES, TIMED, HOLD = "EVENKEEL_CHECK_NOTES", "EVENKEEL_CHECK_TIMED", "EVENKEEL_CHECK_HOLD"
"""Environment variables by which `observed` is told what to do."""

LIMIT = 600.0
"""Seconds that a job may take, or that may pass until a rank holds."""

Waiting = Iterator[None]
"""What is done step by step beside others: it gives the turn back whenever it has to wait."""


class JobFailed(Exception):  # noqa: N818
    """A job has not ended as it should; the text is a line with what it has said."""


class Jobs:
    """All processes of a check, in a folder of its own.

    Args:
        folder: for runs and notes.
        script: the training script.
        options: of train.py, for every job.
        env: environment variables of every job.
    """

    def __init__(self, folder: Path, script: Path, options: Sequence[str], env: Mapping[str, str]) -> None:
        self.folder, self.script, self.options, self.env = folder, script, options, dict(env)
        self._running: list[subprocess.Popen[bytes]] = []

    def run_dir(self, name: str) -> Path:
        """The run of a job."""
        return self.folder / name / "run"

    def start(
        self,
        name: str,
        ranks: int,
        options: Sequence[str] = (),
        hold: tuple[int, int] | None = None,
        timed: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a job, or continue it on so many ranks. ``hold``: (step from 0, rank) where that rank is to wait."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "--max-restarts=1"]
        own = [*self.options, f"--run-dir={self.run_dir(name)}", *options]
        env = {NOTES: str(folder)} | ({TIMED: "1"} if timed else {})
        if hold:
            env[HOLD] = f"{hold[0]}:{hold[1]}:{folder / f'held-{hold[0]}'}"
        observed = ["-m", f"{__package__}.observed", str(self.script), *own]
        return self.popen([*torchrun, *observed], folder / "output", env)

    def popen(self, arguments: Sequence[str], output: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start Python in a session of its own, so that Ctrl-C is for this process, which then ends all."""
        with output.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **self.env, **env},
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGTERM),
            )
        self._running.append(process)
        return process

    def ended(self, process: subprocess.Popen[bytes], output: Path, what: str, fails: bool = False) -> Waiting:
        """Wait for the end of a process. Raises JobFailed unless it ends well; ``fails``: it need not."""
        until = time.monotonic() + LIMIT
        while process.poll() is None:
            if time.monotonic() > until:
                raise JobFailed(f"{what} has not ended after {LIMIT:g} s")
            yield
        if process.returncode and not fails:
            raise JobFailed(f"{what} ended with code {process.returncode}: {last_words(output)}")

    def undisturbed(self, name: str, ranks: int, options: Sequence[str] = (), timed: bool = False) -> Waiting:
        """A job from its start to its end."""
        process = self.start(name, ranks, options, timed=timed)
        yield from self.ended(process, self.folder / name / "output", f"the job on {count_ranks(ranks)}")

    def killed(self, name: str, ranks: int, step: int, options: Sequence[str]) -> Waiting:
        """A job whose last rank is killed in the midst of a step."""
        process = self.start(name, ranks, options, (step, ranks - 1))
        for pid in self._held(name, step, process):
            if pid:
                os.kill(pid, signal.SIGKILL)
            yield
        yield from self.ended(process, self.folder / name / "output", "the job with a killed rank")

    def stopped(self, name: str, ranks: Sequence[int], steps: Sequence[int], options: Sequence[str]) -> Waiting:
        """A job that is stopped by SIGTERM in these steps, and continued each time, on the next number of ranks."""
        output = self.folder / name / "output"
        for number, step in zip(ranks, steps, strict=False):
            process = self.start(name, number, options, (step, number - 1))
            for _ in self._held(name, step, process):
                yield
            process.send_signal(signal.SIGTERM)
            yield from self.ended(process, output, "the stopped job", fails=True)
        process = self.start(name, ranks[-1], options)
        yield from self.ended(process, output, f"the job continued on {count_ranks(ranks[-1])}")

    def _held(self, name: str, step: int, process: subprocess.Popen[bytes]) -> Iterator[int]:
        """Wait until a rank holds; gives its pid at last."""
        file, until = self.folder / name / f"held-{step}", time.monotonic() + LIMIT
        while not file.exists():
            if process.poll() is not None or time.monotonic() > until:
                said = last_words(self.folder / name / "output")
                raise JobFailed(f"the job ended with code {process.poll()} before step {step + 1}: {said}")
            yield 0
        yield int(file.read_text())

    def end_all(self) -> None:
        """Kill all processes that are left, and those below them."""
        for _ in range(100):
            roots = [process for process in self._running if process.poll() is None]
            left = [*descendants(*(process.pid for process in roots)), *(process.pid for process in roots)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                return
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
            try:
                next(task)
            except StopIteration:
                del active[name]
                yield name, ""
            except JobFailed as failed:
                del active[name]
                yield name, str(failed)
        time.sleep(0.02)


def last_words(output: Path) -> str:
    """What a job has said of its end: its own line, or the last ones."""
    said = [line.strip() for line in output.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in said if line.startswith("evenkeel: ")]
    errors = [line for line in said if "Error: " in line and not line.startswith("[")]
    return (own or errors or said or ["nothing"])[-1].removeprefix("evenkeel: ")[:500]
