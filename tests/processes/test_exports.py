"""What `evenkeel` exports is a dozen names, and the examples in their docstrings run."""

from __future__ import annotations

import sys
from pathlib import Path

import evenkeel
from tests.support.processes import run

EXAMPLES = """
import doctest, sys
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
import evenkeel
from evenkeel import *
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import Step
from evenkeel.distributed.world import World
from evenkeel.training.state import State

names = dict(globals(), folder=sys.argv[1])
finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
tried = {}
for name in ["Run", *(name for name in evenkeel.__all__ if name != "Run")]:  # `evaluate` looks at its checkpoint
    for test in finder.find(names[name], name, module=False, globs=dict(names)):
        tried[name] = runner.run(test)
print(*(name for name, found in tried.items() if found.attempted))
sys.exit(any(found.failed for found in tried.values()))
"""


def test_there_are_a_dozen_names_and_their_examples_run(tmp_path: Path) -> None:
    assert len(evenkeel.__all__) <= 12
    ran = run([sys.executable, "-c", EXAMPLES, str(tmp_path / "run")]).stdout.split()
    # the docstring of Config is the help of train.py, and `start` does not come back
    assert set(evenkeel.__all__) - {"Config", "start"} <= set(ran)
