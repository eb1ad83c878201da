"""The command line: options from dataclasses by tyro, a file beneath them, errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from .config import OPTION_NAMES, Config, check_numbers, flag, validate
from .errors import Refusal, one_line_errors
from .run_directory import read_config
from .tasks import Task, load_task, option_name


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
    from_file = _read_file(early.config) if early.config else {}
    if _types_a_cut(arguments):  # a file records the other way to say it
        from_file = {name: value for name, value in from_file.items() if name not in CUT}
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
    check_numbers(chosen.task, {})
    task: Task = chosen.task if is_dataclass(task_class) else task_class()
    return config, task.resolved(_of_the_run(config))


def _of_the_run(config: Config) -> dict[str, Any] | None:
    """The options of the run that is continued; None for a new one."""
    saved = os.path.join(config.run_dir or "", "config.toml")  # noqa: PTH118
    return None if config.fresh or not os.path.isfile(saved) else read_config(Path(saved))  # noqa: PTH113


TOPOLOGY = frozenset({"nodes", "gpus", "node_rank", "master"})
"""Options by which train.py hands over to a launcher (launchers.py)."""


CUT = ("micro_batch", "micro_batches")
"""Two options that exclude each other."""


def _types_a_cut(arguments: Sequence[str]) -> bool:
    typed = {argument.partition("=")[0].lstrip("-").replace("-", "_") for argument in arguments if argument[:2] == "--"}
    return bool(typed & set(CUT))


@dataclass(frozen=True)
class _NoOptions:
    """No options of its own."""


def _check_options(task_class: type) -> None:
    """A task's fields share the command line with the job's options and are all optional there."""
    for option in fields(task_class):
        if option_name(option.name) in OPTION_NAMES | TOPOLOGY:
            raise Refusal(
                f"task {task_class.__name__}: its option {flag(option_name(option.name))} exists already in train.py; "
                "rename the field"
            )
        if option.default is MISSING and option.default_factory is MISSING:
            raise Refusal(f"task {task_class.__name__}: its option {flag(option.name)} has no default; give it one")


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return read_config(path)
    except Refusal as refusal:
        raise Refusal(f"--config {refusal}") from None


def _with_file(values: dict[str, Any], path: Path | None, *classes: type) -> list[Any]:
    """Instances of option classes whose defaults a file overrides.

    Raises:
        Refusal: the file has a key that none of the classes has, or a value of another type.
    """
    known = {option_name(option.name) for cls in classes for option in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise Refusal(f"--config {path}: unknown key '{unknown[0]}'; keys are option names, batch_size for example")
    return [_instance(cls, values, path) for cls in classes]


def _instance(cls: type, values: dict[str, Any], path: Path | None) -> Any:
    hints = get_type_hints(cls)
    names = {option.name: option_name(option.name) for option in fields(cls)}
    mine = {attribute: values[name] for attribute, name in names.items() if name in values}
    for attribute, value in mine.items():
        hint, name = hints[attribute], names[attribute]
        try:
            mine[attribute] = _from_toml(value, hint)
        except (TypeError, ValueError):
            shown = str(hint) if get_origin(hint) else getattr(hint, "__name__", str(hint))
            expected = re.sub(r"\b(typing|pathlib)\.", "", shown)
            raise Refusal(f"--config {path}: {name} = {value!r} has the wrong type; expected {expected}") from None
    try:
        return cls(**mine)
    except ValueError as error:  # from a task's own check of its options
        raise Refusal(f"--config {path}: {error}") from None


def _from_toml(value: Any, hint: Any) -> Any:
    """A TOML value as an option of this type; TypeError or ValueError if it is none."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in options:
            with contextlib.suppress(TypeError, ValueError):
                return _from_toml(value, option)
    elif origin is Literal:
        if any(value == option and type(value) is type(option) for option in options):
            return value
    elif origin in (list, tuple):
        if isinstance(value, list):
            any_length = origin is list or options[-1] is Ellipsis
            hints = options[:1] * len(value) if any_length else options
            return origin(_from_toml(item, each) for item, each in zip(value, hints, strict=True))
    elif hint is Path:
        if isinstance(value, str):
            return Path(value)
    elif isinstance(value, bool):  # to Python, True is an int
        if hint in (bool, Any):
            return value
    elif hint is Any or isinstance(value, (float, int) if hint is float else hint):
        return value
    raise TypeError
