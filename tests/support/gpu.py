"""Jobs on the GPUs that are here; several ranks share one where there are too few."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.processes import TRAIN, Process, kill_group, start, torchrun
from tests.support.small_runs import children

_started: list[Process] = []

Record = Callable[[str, object], None]
REAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
"""For what cannot be rehearsed on a CPU."""


def shared(ranks: int, each: int = 1) -> list[str]:
    """The option with which ranks that use so many GPUs each run where there are fewer."""
    return ["--share-gpu"] if torch.cuda.device_count() < ranks * each else []


def started(ranks: int, *arguments: object, each: int = 1, **environment: str) -> Process:
    """Start train.py by torchrun, with so many GPUs for each rank; 0 ranks: by itself, without torchrun.

    A real start, and no fork: nobody knows yet whether a GPU's driver survives one.
    """
    words = [TRAIN, *arguments, *shared(ranks, each)]
    process = start(torchrun(ranks, *words) if ranks else [sys.executable, *map(str, words)], env=environment)
    _started.append(process)
    return process


@contextlib.contextmanager
def no_waits(mode: str = "error") -> Iterator[None]:
    """Within it the host may not wait for the GPU."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def end_all() -> None:
    """Kill what a test has left: it would have a share of the GPU in all tests that follow."""
    while _started:
        process = _started.pop()
        if process.poll() is None:
            for child in children(process.pid):  # torchrun's ranks are in sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(child), signal.SIGKILL)
            kill_group(process)
            process.wait()


def devices_of(run_dir: Path) -> list[str]:
    """What each rank of the first attempt says that it computes on, "cuda:0 (GPU 0) of ..."."""
    logs = sorted((run_dir / "logs" / "attempt-0001").glob("rank-*.log"))
    return [log.read_text().partition("this rank has ")[2].partition("\n")[0] for log in logs]
