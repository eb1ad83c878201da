"""`python -m evenkeel`: look at a job without running it, at what a run has left, at what it survives and repeats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro

from .chaos.command import ChaosCommand
from .comparison import CompareCommand
from .config import COMMAND_BOUNDS, check_numbers
from .errors import exit_code, lose_stdout, one_line_errors, refuse_empty
from .inspection import CheckpointCommand
from .planning import PlanCommand
from .slurm.follow import FollowCommand
from .status import StatusCommand

SUBCOMMANDS: dict[str, Callable[..., Any]] = {
    "plan": PlanCommand,
    "checkpoint": CheckpointCommand,
    "chaos": ChaosCommand,
    "compare": CompareCommand,
    "status": StatusCommand,
    "follow": FollowCommand,
}


def main() -> int:
    """Run a subcommand; what stands after `--` belongs to train.py, or is a whole command."""
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    refuse_empty(arguments[:cut], *SUBCOMMANDS.values())
    command: Callable[[list[str]], int] = one_line_errors(
        lambda: tyro.extras.subcommand_cli_from_dict(
            SUBCOMMANDS, args=arguments[:cut], prog="python -m evenkeel", description=__doc__
        )
    )
    check_numbers(getattr(command, "action", command), COMMAND_BOUNDS)
    try:
        return command(arguments[cut + 1 :])
    except BrokenPipeError:
        lose_stdout()
        return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
