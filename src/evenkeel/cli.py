"""The command line: options from dataclasses by tyro, a file beneath them, errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from .config import OPTION_NAMES, Config, flag, validate
from .errors import REFUSED, Refusal
from .run_directory import read_config
from .tasks import Task, load_task

T = TypeVar("T")


def parse(arguments: Sequence[str]) -> tuple[Config, Task]:
    """The options of `train.py`, those of the chosen task included.

    Raises:
        Refusal: an unknown option or task, a value that cannot be meant, a bad configuration file.
        SystemExit: after --help.
    """
    # --task and --config decide what other options there are, so they are looked for first
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--task")
    first.add_argument("--config", type=Path)
    try:
        early, _ = first.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise Refusal(str(error)) from None
    from_file = read_config(early.config) if early.config else {}
    task_class = load_task(str(early.task or from_file.get("task", Config.task)))
    task_options = task_class if is_dataclass(task_class) else _NoOptions
    _check_options(task_options)
    job_default, task_default = _with_file(from_file, early.config, Config, task_options)

    hide_prefix: Any = tyro.conf.OmitArgPrefixes  # --width, not --task.width
    both = make_dataclass(
        "Options",
        [
            ("job", hide_prefix[Config], field(default_factory=lambda: job_default)),
            ("task", hide_prefix[task_options], field(default_factory=lambda: task_default)),
        ],
    )
    chosen: Any = one_line_errors(lambda: tyro.cli(both, args=list(arguments), description=Config.__doc__))
    config: Config = chosen.job.resolved()
    validate(config)
    return config, chosen.task if is_dataclass(task_class) else task_class()


@dataclass(frozen=True)
class _NoOptions:
    """No options of its own."""


def one_line_errors(call: Callable[[], T]) -> T:
    """Run a tyro command line so that its framed error message becomes a :class:`Refusal` of one line."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return call()
    except SystemExit as exit_:
        if exit_.code != REFUSED:
            raise
        lines = [re.sub(r"[│╭╮╰╯─]+", " ", line).strip() for line in captured.getvalue().splitlines()]
        message = " ".join(lines[1 : lines.index("", 1)] if "" in lines[1:] else lines)
        raise Refusal(f"{message} (--help lists all options)") from None


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a main program; a refusal is one line on stderr and exit code 2.

    Under torchrun all processes of a node refuse alike. The first to exit ends the others, so the one that
    speaks must be first.
    """
    try:
        return main() or 0
    except Refusal as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            line = " ".join(str(refusal).split())
            print(f"evenkeel: {line}", file=sys.stderr, flush=True)
        else:
            time.sleep(10)  # torchrun ends this process as soon as local rank 0 has exited
        return REFUSED


def _check_options(task_class: type) -> None:
    """A task's fields share the command line with the job's options and are all optional there."""
    for option in fields(task_class):
        if option.name in OPTION_NAMES:
            raise Refusal(
                f"task {task_class.__name__}: its option {flag(option.name)} exists already in train.py; "
                "rename the field"
            )
        if option.default is MISSING and option.default_factory is MISSING:
            raise Refusal(f"task {task_class.__name__}: its option {flag(option.name)} has no default; give it one")


def _with_file(values: dict[str, Any], path: Path | None, *classes: type) -> list[Any]:
    """Instances of option classes whose defaults a file overrides.

    Raises:
        Refusal: the file has a key that none of the classes has, or a value of another type.
    """
    known = {option.name for cls in classes for option in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise Refusal(f"{path}: unknown key '{unknown[0]}'; keys are option names, batch_size for example")
    return [_instance(cls, values, path) for cls in classes]


def _instance(cls: type, values: dict[str, Any], path: Path | None) -> Any:
    hints = get_type_hints(cls)
    mine = {option.name: values[option.name] for option in fields(cls) if option.name in values}
    for name, value in mine.items():
        hint = hints[name]
        if not _fits(value, hint):
            expected = getattr(hint, "__name__", str(hint)).replace("typing.", "")
            raise Refusal(f"{path}: {name} = {value!r} has the wrong type; expected {expected}")
        if Path in (hint, *get_args(hint)):
            mine[name] = Path(value)
    return cls(**mine)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value may stand for an option of this type."""
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    if origin in (list, tuple):
        return isinstance(value, list)
    accepted: Any = {float: (float, int), Path: str}.get(hint, hint)
    return isinstance(value, accepted) and (hint is bool or not isinstance(value, bool))
