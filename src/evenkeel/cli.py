"""The command line: options from dataclasses by tyro, a file beneath them, errors in one line."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import re
import types
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from .checked_metrics import check_best
from .config import GROUPS, OPTION_NAMES, Config, check_numbers, flag, validate
from .errors import Refusal, one_line_errors, refuse_empty
from .mistakes import kind_of
from .records import is_run, read_config
from .synonyms import refuse_synonyms
from .tasks import Task, load_task, option_name


def parse(arguments: Sequence[str]) -> tuple[Config, Task]:
    """The options of `train.py`, those of the chosen task included.

    Raises:
        Refusal: an unknown option or task, a value that cannot be meant, a bad configuration file.
        SystemExit: after --help.
    """
    refuse_empty(arguments, Config)
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
    _check_decorated(task_class)
    task_options = task_class if is_dataclass(task_class) else _NoOptions
    _check_options(task_options)
    refuse_empty(arguments, task_options)
    job_default, task_default = _with_file(from_file, early.config, Config, task_options)

    parts = {group.__name__.lower(): _part(group, job_default) for group in GROUPS} | {"task": task_default}
    grouped = make_dataclass("Options", [(name, _group(type(it)), _default(it)) for name, it in parts.items()])
    refuse_synonyms(arguments, {flag(option_name(option.name)) for it in parts.values() for option in fields(it)})
    about = inspect.getdoc(Config)
    chosen: Any = one_line_errors(lambda: tyro.cli(grouped, args=list(arguments), description=about))
    options = [vars(getattr(chosen, group.__name__.lower())) for group in GROUPS]
    config = Config(**{name: value for part in options for name, value in part.items()}).resolved()
    validate(config)
    check_numbers(chosen.task, {})
    open_task: Task = chosen.task if is_dataclass(task_class) else task_class()
    task: Any = open_task.resolved(_of_the_run(config))
    if not isinstance(task, Task):
        raise Refusal(f"resolved() returned {kind_of(task)}: it must return a task, itself where nothing is open")
    check_best(task.best, config.patience)
    return config, task


def _part(group: type, config: Config) -> Any:
    """The values of a group's options."""
    return group(**{option.name: getattr(config, option.name) for option in fields(group)})


def _group(options: type) -> Any:
    """A box of the help; its title says enough."""
    hide_prefix: Any = tyro.conf.OmitArgPrefixes  # --width, not --task.width
    return hide_prefix[Annotated[options, tyro.conf.arg(help="")]]


def _default(value: Any) -> Any:
    return field(default_factory=lambda: value)


def _of_the_run(config: Config) -> dict[str, Any] | None:
    """The options of the run that is continued; None for a new one."""
    assert config.run_dir is not None  # resolved
    saved = config.run_dir / "config.toml"
    return read_config(saved) if not config.fresh and is_run(config.run_dir) and saved.is_file() else None


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


def _check_decorated(task_class: type[Task]) -> None:
    """Refuse what looks like an option of a task, or like its default, and is none because @dataclass passes it over.

    Raises:
        Refusal: a field of a class that is not decorated, or another value for a parent's field, not annotated.
    """
    known: set[str] = {option.name for option in fields(task_class)} if is_dataclass(task_class) else set()
    for cls in (cls for cls in task_class.__mro__ if issubclass(cls, Task)):
        annotated = inspect.get_annotations(cls)
        own = {name for name in annotated if not re.search(r"\b(ClassVar|Final)\b", str(annotated[name]))}
        if "__dataclass_fields__" in vars(cls):
            ignored = known - own
            known -= own  # what its parents say of them does not count
        else:
            ignored = known | {name for name in own if not name.startswith("_") and not hasattr(Task, name)}
        if names := [name for name in vars(cls) if name in ignored]:
            raise Refusal(
                f"task {cls.__name__}: its {names[0]} has no effect as an option; decorate the class with @dataclass "
                f"and annotate the name ({names[0]}: int = 3), as ClassVar if it is to be none"
            )


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
    for option in (option for cls in classes for option in fields(cls)):
        if values.get(option_name(option.name)) == "" != option.default:
            raise Refusal(f'--config {path}: {option_name(option.name)} = "" is empty; give a value, or leave it out')
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
