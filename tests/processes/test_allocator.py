"""Memory that a step has freed is there for the next."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support.processes import run

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
    clean = [f"--unset={name}" for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]
    own = [f"{name}={value}" for name, value in environment.items()]
    return run(["env", *clean, *own, sys.executable, "-c", STEPS, side]).stdout.split()


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "confstr"), reason="needs glibc")
def test_a_step_asks_the_kernel_for_few_pages_and_without_it_for_thousands() -> None:
    said, faults = steps("ours")
    assert said == "True"
    theirs = int(steps("theirs")[0])
    assert theirs > 1000
    assert int(faults) < theirs / 3


def test_what_the_environment_says_stays() -> None:
    assert steps("ours", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
