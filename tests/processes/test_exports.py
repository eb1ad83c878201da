"""What `evenkeel` exports are few names whose examples run, and nothing heavy is imported before it is needed."""

import json
import sys
from pathlib import Path

import evenkeel
from tests.support.processes import read, records, run
from tests.support.terminal import Terminal

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


HEAVY = ("wandb", "submitit", "torchvision", "PIL", "rich", "tensorboard", "scipy", "sklearn", "matplotlib")
"""What takes time to import and the default job has no use for."""


REPORT = """
import atexit, json, os, runpy, sys
atexit.register(lambda: json.dump(sorted(sys.modules), open(os.environ["MODULES"], "w")))
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def imported(folder: Path, *options: str) -> set[str]:
    """The heavy ones that a job of one step has imported by its end."""
    job = ["train.py", "--width", "2", "--max-steps", "1", "--run-dir", folder / "run", "--wandb", "disabled", *options]
    run([sys.executable, "-c", REPORT, *map(str, job)], env={"MODULES": str(folder / "modules.json")})
    return set(HEAVY) & set(json.loads((folder / "modules.json").read_text()))


def test_the_default_job_imports_nothing_heavy_and_the_control_what_a_task_needs_shows(tmp_path: Path) -> None:
    assert imported(tmp_path) == set()
    assert "torchvision" in imported(tmp_path, "--augment", "basic", "--fresh")


def test_the_display_is_imported_for_a_terminal(tmp_path: Path) -> None:
    """The other control: there the bar is, and the lines above it."""
    job = ["train.py", "--width", "2", "--max-steps", "1", "--run-dir", tmp_path / "run", "--wandb", "disabled"]
    env = {"MODULES": str(tmp_path / "modules.json")}
    with Terminal([sys.executable, "-c", REPORT, *map(str, job)], env=env) as terminal:
        assert terminal.end() == 0
        assert "step 0/1 ->" in terminal.text
        assert "step 1/1" in terminal.text
    assert "rich" in json.loads((tmp_path / "modules.json").read_text())
