"""What a test needs of its machine. A machine that lacks it skips the test, with the reason.

Where `EVENKEEL_NO_SKIPS` is set, as in CI, which installs all tools, such a skip is a failure: tests/conftest.py.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.common.versions import TORCH_FOR_SHARDING, numbers
from tests.support.components import has

NO_SKIPS = "EVENKEEL_NO_SKIPS"
CI_LACKS = re.compile(
    r"\bGPUs?\b|\bCUDA\b|'(torchdata|webdataset|datasets)\b|older releases have none"
    r"|'evenkeel\.|this copy has left out"
)
"""In the reason of a skip: what CI does not have either, and what make_it_yours.py may have taken out."""


sharding = pytest.mark.skipif(numbers(torch.__version__) < TORCH_FOR_SHARDING, reason="--shard on needs torch 2.9")
NO_RECOVERY = "older releases have none of FSDPModule.reset_iter_state"
recovery = pytest.mark.skipif(numbers(torch.__version__) < (2, 15), reason=NO_RECOVERY)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it")
"""For a test of several ranks that compute where they are."""


def slow(*values: object) -> Any:
    """Parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: object) -> Any:
    """Parameters of a test beside which others show nearly the same."""
    return pytest.param(*values, marks=pytest.mark.long)


def root(to: str) -> pytest.MarkDecorator:
    """For a test that only root can run; `to` says what root is needed to do."""
    return pytest.mark.skipif(os.geteuid() != 0, reason=f"needs root to {to}")


def tools(*names: str) -> pytest.MarkDecorator:
    """For a test that runs these programs."""
    missing = [name for name in names if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def command(name: str) -> None:
    """Skip the rest of a test if a copy has left out a command of `python -m evenkeel`."""
    if not has(name):
        pytest.skip(f"this copy has left out {name}")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of a given size, such as 1m, as a real disk that gets full. Without root the test skips."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("needs root to mount a small file system")
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], timeout=30, check=True)
