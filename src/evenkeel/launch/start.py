"""The main program of a training script: from its arguments to an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from ..distributed.exits import exit_code, leave
from ..training.oom import explaining
from . import launchers


def start(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a training script's main function with the command line's arguments, and end the process.

    Exit codes: 0 finished, 75 stopped and can be continued, 2 refused, 1 failed; errors of a user's are one line.
    ``python train.py -n 2 -g 4 -nr 0`` starts torchrun as launch/multi_node.py does.

    Example:
        >>> def main(arguments):
        ...     config, task = parse(arguments)
        ...     return 0
        >>> start(main)  # doctest: +SKIP
    """

    @record  # torchrun's closing report then shows the traceback of the rank that failed
    @explaining  # where memory runs out
    def call() -> int | None:
        if typed := launchers.topology_in(sys.argv[1:]):
            return launchers.main(typed, Path(sys.argv[0]).resolve())
        return main(sys.argv[1:])

    leave(exit_code(call))
