"""Check machines, plan a job, watch and report its runs, predict, sample, compare, and try what a job survives."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from .common.arguments import lose_stdout, one_line_errors, refuse_empty
from .common.errors import Refusal
from .config import check_numbers
from .distributed.exits import exit_code

COMMANDS = {
    "plan": "cli.plan.PlanCommand",
    "checkpoint": "cli.checkpoint.CheckpointCommand",
    "chaos": "cli.chaos.command.ChaosCommand",
    "doctor": "cli.doctor.command.DoctorCommand",
    "data": "cli.data.DataCommand",
    "compare": "cli.compare.CompareCommand",
    "predict": "cli.predict.PredictCommand",
    "sample": "cli.sample.SampleCommand",
    "status": "cli.status.StatusCommand",
    "follow": "cli.follow.FollowCommand",
    "report": "cli.report.command.ReportCommand",
    "profile": "cli.profile.ProfileCommand",
    "scaling": "cli.scaling.command.ScalingCommand",
}
"""Where each command is. Any of these modules may be deleted."""


def subcommands() -> dict[str, Callable[..., Any]]:
    """The commands that are there, by name."""
    found = {}
    for name, place in COMMANDS.items():
        module, _, kind = place.rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = getattr(importlib.import_module(f".{module}", __package__), kind)
    return found


def main() -> int:
    """Run a subcommand. What follows `--` belongs to train.py, or is a whole command."""
    arguments = sys.argv[1:]
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    known = subcommands()
    if not known:
        raise Refusal("there are no commands: all of them have been deleted from this copy")
    refuse_empty(arguments[:cut], *known.values())
    prog = "python -m evenkeel" if Path(sys.argv[0]).name == "__main__.py" else "evenkeel"
    command: Callable[..., int] = one_line_errors(
        lambda: tyro.extras.subcommand_cli_from_dict(known, args=arguments[:cut], prog=prog, description=__doc__)
    )
    check_numbers(getattr(command, "action", command))
    words = arguments[cut + 1 :]
    takes_words = bool(inspect.signature(command).parameters)
    if words and not takes_words:
        raise Refusal(f"-- {' '.join(words)}: `{arguments[0]}` takes no options of train.py; leave them out")
    try:
        return command(words) if takes_words else command()
    except BrokenPipeError:
        lose_stdout()
        return 0


def run() -> int:
    """The command `evenkeel`, and `python -m evenkeel`; returns the exit code."""
    return exit_code(main)


if __name__ == "__main__":
    sys.exit(run())
