"""Copies of the state in memory that is kept: right, in no one's way, and never overwritten while they are written."""

from __future__ import annotations

import resource
import sys
from typing import Any

from torch import nn

from evenkeel.training.staging import Staging
from evenkeel.training.state import State
from tests.support.processes import run
from tests.training.test_staging import CPU


def page_faults(work: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    kept = work()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    del kept
    return faults


def test_only_the_first_copy_asks_the_kernel_for_memory() -> None:
    """And the control: a copy into new memory asks each time, which takes longer than copying. In a process where no
    test before has had freed memory kept."""
    run([sys.executable, "-c", "from tests.processes.test_staging import compare_page_faults as it; it()"])


def compare_page_faults() -> None:
    state = State(nn.Linear(4000, 4000), [])  # too much for malloc to keep when it is freed
    staging = Staging(CPU)
    state.capture(staging=staging)
    for _ in range(3):
        again, new = page_faults(lambda: state.capture(staging=staging)), page_faults(state.capture)
        assert 5 * again < new
