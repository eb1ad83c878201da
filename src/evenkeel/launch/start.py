"""The main program of a training script: from its arguments to an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from ..common import keeper_link
from ..common.arguments import some_options
from ..common.errors import Refusal
from ..config import Config
from ..distributed.causes import lost_keeper_before
from ..distributed.exits import exit_code, leave
from ..resilience.forking import unforkable
from ..resilience.keeper import Keeper
from ..run.fingerprint import remember_code
from ..run.records import read_config
from ..run.stored import write_memory_checkpoint
from ..tasks.command_line import options_of
from ..tasks.registry import default_task, load_task
from ..training.oom import explaining
from ..training.task import Task
from . import launchers

IMPORTED_LATE = "torch._dynamo"
"""torch imports this only when the first optimizer is made. It takes as long as all other imports."""


def start(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a training script's main function with the command line's arguments, and end the process.

    Exit codes: 0 finished, 75 stopped and can be continued, 2 refused, 1 failed; user errors are one line.
    ``python train.py -n 2 -g 4 -nr 0`` starts torchrun as launch/multi_node.py does. Usually the main function runs
    in a fork of this process, which starts it again when it is killed (resilience/keeper.py).

    Example:
        >>> def main(arguments):
        ...     config, task = parse(arguments)
        ...     return 0
        >>> start(main)  # doctest: +SKIP
    """

    typed = [*sys.argv]

    @record  # torchrun's closing report then shows the traceback of the rank that failed
    @explaining  # where memory runs out
    def call() -> int | None:
        sys.argv = typed  # the keeper has imported the task, whose file may have changed them
        if words := launchers.topology_in(sys.argv[1:]):
            return launchers.main(words, Path(sys.argv[0]).resolve())
        return main(sys.argv[1:])

    def train() -> NoReturn:
        leave(exit_code(call))

    if task := _task_to_keep(sys.argv[1:]):
        if reason := _prepare(task) or unforkable():
            keeper_link.note_absence(reason)
        else:
            if end := lost_keeper_before():
                os.environ.setdefault(keeper_link.LAST_END, end)
            Keeper(train, write_memory_checkpoint).keep()
    train()


def _task_to_keep(arguments: list[str]) -> str:
    """The task, if there should be a keeper; "" if not, or if this process becomes torchrun or refuses to run."""
    try:
        typed, _ = some_options(arguments, ("--keeper",), ("--task",), ("--config",))
        recorded = read_config(Path(typed.config)) if typed.config else {}
        launches = launchers.topology_in(arguments)
        task = str(typed.task or recorded.get("task") or default_task()[0])
    except Refusal:  # the rank will raise it again
        return ""
    wanted = (typed.keeper or recorded.get("keeper", Config.keeper)) == "on" and not launches
    return task if wanted else ""


def _prepare(task: str) -> str:
    """Import what training needs, the task included. Returns why there should be no keeper, or ""."""
    # imports must not initialise CUDA, or a fork could not use its GPU; and inductor must not start worker processes
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("TORCH_WARM_POOL", "0")
    importlib.import_module(IMPORTED_LATE)
    script = vars(sys.modules["__main__"]).values()
    own = [it for it in script if isinstance(it, type) and issubclass(it, Task) and it is not Task]
    try:
        task_class = own[-1] if own else load_task(task)
    except Refusal as refusal:  # as above
        return str(refusal)
    package, made = __name__.partition(".")[0], getattr(task_class, "__post_init__", None)
    users = made is not None and made.__module__.partition(".")[0] != package  # its effects belong in the trainer
    if not users and not {"-h", "--help"} & set(sys.argv):
        with contextlib.suppress(Exception, SystemExit):  # as above
            options_of(sys.argv[1:], own[-1] if own else None)
    remember_code(task_class)
    return ""
