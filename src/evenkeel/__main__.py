"""Start a project, check machines, plan a job, watch and report runs, predict, compare, test what a job survives."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import tyro

from .common.arguments import lose_stdout, one_line_errors, refuse_empty, refuse_unknown_command
from .common.display import Lines, say
from .common.errors import Refusal
from .config import check_numbers
from .distributed.exits import exit_code

COMMANDS = {
    "new": "cli.new.command.NewCommand",
    "update": "cli.new.update.UpdateCommand",
    "plan": "cli.plan.PlanCommand",
    "checkpoint": "cli.checkpoint.CheckpointCommand",
    "chaos": "cli.chaos.command.ChaosCommand",
    "check": "cli.check.command.CheckCommand",
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
    "sweep": "cli.sweep.SweepCommand",
    "replay": "time_travel.command.ReplayCommand",
    "bisect": "time_travel.bisect_command.BisectCommand",
    "audit": "time_travel.audit_command.AuditCommand",
}
"""The place of each command. Any of these modules may be deleted."""

GROUPS = {
    "A project of your own": "new update",
    "Before a job": "plan check doctor data",
    "While it runs": "status follow",
    "Its results": "report compare predict sample checkpoint",
    "Inside a step": "profile replay bisect audit",
    "Many runs, faults": "sweep scaling chaos",
}
"""The sections of --help, and their commands."""


def subcommands() -> dict[str, Callable[..., Any]]:
    """The existing commands, by name."""
    found = {}
    for name, place in COMMANDS.items():
        module, _, kind = place.rpartition(".")
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = getattr(importlib.import_module(f".{module}", __package__), kind)
    return found


def main() -> int:
    """Run a subcommand. What follows `--` belongs to train.py, or is a whole command."""
    arguments = sys.argv[1:]
    if logging.lastResort:
        logging.lastResort.setFormatter(Lines())
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    known = subcommands()
    if not known:
        raise Refusal("there are no commands: all have been deleted from this copy")
    refuse_empty(arguments[:cut], *known.values())
    _refuse_unknown(arguments[:cut], known)
    if any("://" in word for word in arguments[:cut]):
        with contextlib.suppress(ModuleNotFoundError):  # as with COMMANDS
            words = importlib.import_module(".mirror.command", __package__).with_local_copies(arguments[:cut])
            arguments, cut = [*words, *arguments[cut:]], len(words)
    prog = "python -m evenkeel" if Path(sys.argv[0]).name == "__main__.py" else "evenkeel"
    try:
        if arguments[0] in ("-h", "--help"):
            say(_help(known, prog))
            return 0
        return _command(arguments[:cut], known, prog)(arguments[cut + 1 :])
    except BrokenPipeError:
        lose_stdout()
        return 0
    except PermissionError as error:
        raise Refusal(f"{error.filename}: {error.strerror}") from None


def _command(arguments: list[str], known: dict[str, Callable[..., Any]], prog: str) -> Callable[[list[str]], int]:
    """The command with its options; call it with what follows `--`."""
    named = known.get(arguments[0])  # none if an option is in its place
    takes = inspect.signature(named.__call__).parameters if named else ()  # type: ignore[operator]
    command: Callable[..., int] = one_line_errors(
        lambda: tyro.extras.subcommand_cli_from_dict(known, args=arguments, prog=prog, description=__doc__),
        f"--help lists all options{'; those of train.py come after --' if 'train_options' in takes else ''}",
    )
    check_numbers(getattr(command, "action", command))
    if inspect.signature(command).parameters:
        return command

    def without_words(words: list[str]) -> int:
        if words:
            raise Refusal(f"-- {' '.join(words)}: `{arguments[0]}` takes no options of train.py; leave them out")
        return command()

    return without_words


def _help(known: dict[str, Callable[..., Any]], prog: str) -> str:
    """A line for each command, by section; the options of one are in its own help."""
    width = max(map(len, known))
    lines = [f"usage: {prog} COMMAND [OPTIONS]"]
    for title, names in GROUPS.items():
        shown = [name for name in names.split() if name in known]
        lines += ["", f"{title}:"] if shown else []
        lines += [f"  {it:{width}}  {(inspect.getdoc(known[it]) or '').splitlines()[0]}" for it in shown]
    return "\n".join([*lines, "", f"`{prog} COMMAND --help` shows its options and an example."])


def _refuse_unknown(words: list[str], known: dict[str, Callable[..., Any]]) -> None:
    """Refuse a command that does not exist, or an action of one, as in `checkpoint list`."""
    if not words:
        raise Refusal(f"which command? {', '.join(known)} (--help says what each does)")
    refuse_unknown_command(words[0], known)
    hints = get_type_hints(known[words[0]], include_extras=True) if words[0] in known else {}
    if "action" in hints and len(words) > 1:
        actions, _ = get_args(hints["action"])
        refuse_unknown_command(words[1], [get_args(action)[1].name for action in get_args(actions)])


def run() -> int:
    """The command `evenkeel`, and `python -m evenkeel`; returns the exit code."""
    return exit_code(main)


if __name__ == "__main__":
    sys.exit(run())
