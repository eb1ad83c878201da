"""Memory that a step has freed is there for the next; copies of the state are kept, and in no one's way."""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

import pytest
from torch import nn

from evenkeel.training.staging import Staging
from evenkeel.training.state import State
from tests.support.processes import run
from tests.training.test_staging import CPU

STEPS = """
import resource, sys, torch
from evenkeel.common.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "ours":
    print(keep_freed_memory())
# above 32 MiB: glibc raises its own threshold up to there, by what has been freed before
inputs = torch.ones(12 << 20)
def step():
    (inputs * 2).sum()
for _ in range(20):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


def steps(side: str, **environment: str) -> list[str]:
    """What the program prints, the page faults of a step last."""
    clean = dict.fromkeys(name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_")))
    return run([sys.executable, "-c", STEPS, side], env={**clean, **environment}).stdout.split()


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "confstr"), reason="needs glibc")
def test_a_step_asks_the_kernel_for_few_pages_and_without_it_for_thousands() -> None:
    said, faults = steps("ours")
    assert said == "True"
    theirs = int(steps("theirs")[0])
    assert theirs > 1000
    assert int(faults) < theirs / 3


def test_what_the_environment_says_stays() -> None:
    assert steps("ours", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


def page_faults(work: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    kept = work()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    del kept
    return faults


def test_only_the_first_copy_asks_the_kernel_for_memory() -> None:
    """And the control: a copy into new memory asks each time, which takes longer than copying. In a process where no
    test before has had freed memory kept."""
    run([sys.executable, "-c", "from tests.processes.test_allocator import compare_page_faults as it; it()"])


def compare_page_faults() -> None:
    state = State(nn.Linear(4000, 4000), [])  # too much for malloc to keep when it is freed
    staging = Staging(CPU)
    state.capture(staging=staging)
    for _ in range(3):
        again, new = page_faults(lambda: state.capture(staging=staging)), page_faults(state.capture)
        assert 5 * again < new
