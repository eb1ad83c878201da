"""Evenkeel: the parts of an elastic, exactly resumable distributed training job.

`train.py` uses only these names, and so may a training script of your own:

    Task            data, model, loss, metrics; the only thing that a user must write
    parse           the command line: options and the task
    fit             train.py in one call, from Python and notebooks
    start           run a main function: exit codes, one-line errors, `python train.py -n 2 -g 4`
    Run             one run across all restarts: its steps, and what is saved and logged after them
    DistributedLoss the model and a loss on all ranks; from `Run.distribute`
    clip_grad_norm  scale the gradient down to a norm, and return the norm
    evaluate        --eval-only
    Classification, secret, constants   for tasks: see their docstrings
    MetricsTracker  what a tracker of your own must have, for --tracker
    announce        print on a terminal that imports take seconds
"""

import io
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .common.display import announce
    from .config import Config
    from .launch.fit import fit
    from .launch.start import start
    from .run.eval_only import evaluate
    from .run.run import Run
    from .run.trackers import MetricsTracker
    from .tasks.command_line import parse
    from .training.classification import Classification
    from .training.distributed_loss import DistributedLoss
    from .training.optimization import clip_grad_norm
    from .training.task import Task, constants, secret

__version__ = "0.1.0"

STARTED = os.getpid(), os.getppid()
"""This process and what has started it, which may die during the imports."""


def _need_packages() -> None:
    """Raise one line with the remedy if a Python other than that of `make setup` imports this package."""
    if missing := [name for name in ("torch", "tyro") if find_spec(name) is None]:
        line = f"{sys.executable} has no package {missing[0]}; type `. .venv/bin/activate`, or first `make setup`"
        raise ModuleNotFoundError(line, name=__name__)  # by this name `python -m evenkeel` prints no traceback


_need_packages()


def _keep_streams() -> None:
    """Open closed standard streams (`>&-`) as /dev/null, else a checkpoint could be opened in their place.

    Also let stdout escape a path that it cannot encode, instead of ending the run.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            file = Path(os.devnull).open("w" if number else "r")  # noqa: SIM115  (as long as the process)
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


_keep_streams()

__all__ = [
    "Classification",
    "Config",
    "DistributedLoss",
    "MetricsTracker",
    "Run",
    "Task",
    "announce",
    "clip_grad_norm",
    "constants",
    "evaluate",
    "fit",
    "parse",
    "secret",
    "start",
]

_HOMES = {
    "common.display": ["announce"],
    "config": ["Config"],
    "launch.fit": ["fit"],
    "launch.start": ["start"],
    "run.eval_only": ["evaluate"],
    "run.run": ["Run"],
    "run.trackers": ["MetricsTracker"],
    "tasks.command_line": ["parse"],
    "training.distributed_loss": ["DistributedLoss"],
    "training.optimization": ["clip_grad_norm"],
    "training.classification": ["Classification"],
    "training.task": ["Task", "constants", "secret"],
}


def __getattr__(name: str) -> Any:
    """Import exported names on demand: launchers and commands need no torch, which takes two seconds."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
