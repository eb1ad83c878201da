"""What `evenkeel` exports are few names, and the examples in their docstrings run."""

from __future__ import annotations

import sys
from pathlib import Path

import evenkeel
from tests.support.processes import read, records, run

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
    folder = sys.argv[1] + "-fit" * (name == "fit")
    for test in finder.find(names[name], name, module=False, globs=dict(names, folder=folder)):
        tried[name] = runner.run(test)
print(*(name for name, found in tried.items() if found.attempted))
sys.exit(any(found.failed for found in tried.values()))
"""


def test_there_are_few_names_and_their_examples_run(tmp_path: Path) -> None:
    assert len(evenkeel.__all__) <= 14
    ran = run([sys.executable, "-c", EXAMPLES, str(tmp_path / "run")]).stdout.split()
    # the docstring of Config is the help of train.py, and `start` does not come back
    assert set(evenkeel.__all__) - {"Config", "start"} <= set(ran)


OWN_LOOP = """
import sys
from evenkeel import Config, Run, parse
_, task = parse([])
with Run.open(Config(run_dir=sys.argv[1], max_steps=2, log_every=1, wandb="disabled"), task) as run:
    model = run.distribute()
    for step in run.steps():
        for batch in model.micro_batches(step):
            model.backward(model(batch))
        model.step()
        run.after_step(model)
"""


def test_a_loop_of_ones_own_without_a_command_line_and_without_a_norm(tmp_path: Path) -> None:
    run([sys.executable, "-c", OWN_LOOP, str(tmp_path / "run")])
    assert read(tmp_path / "run")["step"] == 2
    assert all(record["train/grad_norm"] > 0 for record in records(tmp_path / "run", "train"))
