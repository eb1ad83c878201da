"""Jobs on the GPUs that are here; several ranks share one where there are too few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.processes import TRAIN, start, torchrun

REAL = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
"""For what cannot be rehearsed on a CPU."""


def shared(ranks: int, each: int = 1) -> list[str]:
    """The option with which ranks that use so many GPUs each run where there are fewer."""
    return ["--share-gpu"] if torch.cuda.device_count() < ranks * each else []


def started(ranks: int, *arguments: object, each: int = 1, **environment: str) -> subprocess.Popen[str]:
    """Start train.py by torchrun, with so many GPUs for each rank; 0 ranks: by itself, without torchrun.

    A real start, and no fork: nobody knows yet whether a GPU's driver survives one.
    """
    words = [TRAIN, *arguments, *shared(ranks, each)]
    return start(torchrun(ranks, *words) if ranks else [sys.executable, *map(str, words)], env=environment)


def devices_of(run_dir: Path, attempt: int = 1) -> list[str]:
    """What each rank of an attempt says that it computes on, "cuda:0 (GPU 0) of ..."."""
    logs = sorted((run_dir / "logs" / f"attempt-{attempt:04}").glob("rank-*.log"))
    return [log.read_text().partition("this rank has ")[2].partition("\n")[0] for log in logs]
