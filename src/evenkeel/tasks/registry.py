"""From --task to a class: a built-in task by name, or a user's class in a file or package."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..common.errors import Refusal
from ..common.user_code import as_submitted, load_name
from ..config import Config
from ..run.records import read_config
from ..training.task import Task, defines

BUILT_IN = {"classify": "Classify", "regress": "Regress", "segment": "Segment", "lm": "Lm"}
"""Tasks by the names of their modules here, which may have been deleted; imported on demand."""


HOOKS = {it: getattr(Task, it) for it in dir(Task) if it[0] != "_" and inspect.isfunction(getattr(Task, it))}
"""The methods of a task that a run calls."""

ELSEWHERE = {
    "training_step": "loss", "compute_loss": "loss", "configure_optimizers": "optimizers", "validation_step": "metrics",
    "compute_metrics": "metrics", "train_dataloader": "train_dataset", "val_dataloader": "validation_dataset",
    "val_dataset": "validation_dataset", "valid_dataset": "validation_dataset", "training_dataset": "train_dataset",
    "collate_fn": "collate", "train_data": "train_dataset", "test_data": "test_dataset",
}  # fmt: skip
"""Names in Lightning, transformers and other people's heads -> here."""

MOST_LISTED = 10
"""Classes of a file that a message lists."""

NO_MODEL = r"batch|data|(out|output|pred|prediction|logit|score|input|target|label)s?|y|x|y_hat|y_pred"
"""Names of a first parameter that is taken for something else than the model."""


def built_in() -> list[str]:
    """Names of the tasks whose modules are here."""
    return [name for name in BUILT_IN if Path(__file__).with_name(f"{name}.py").is_file()]


def default_task() -> tuple[str, str]:
    """The task of a job without --task: `task` of [tool.evenkeel] in the project's pyproject.toml, else a built-in one.

    Also the label for errors: that file, or --task.

    The project is the working folder, else that of the script (train.py, or a launcher in a folder beside it), else a
    queued job's copy of the code. It is put on the path for imports, so that MODULE:CLASS is found from any folder.

    Raises:
        Refusal: pyproject.toml is not TOML, or its task is not text.
    """
    script = Path(sys.argv[0]).absolute()
    copy = map(Path, filter(None, [os.environ.get("EVENKEEL_CODE")]))
    for folder in dict.fromkeys((Path.cwd(), script.parent, script.parent.parent, *copy)):
        path = as_submitted(folder / "pyproject.toml")
        if not path.is_file():
            continue
        tool = read_config(path).get("tool")
        table = tool.get("evenkeel") if isinstance(tool, dict) else None
        if isinstance(table, dict) and "task" in table:
            if not isinstance(task := table["task"], str):
                raise Refusal(f'{path}: task of [tool.evenkeel] is {task!r}; give "MODULE:CLASS"')
            if str(path.parent) not in sys.path:
                sys.path.insert(0, str(path.parent))
            return task, f"{path}: task = {task!r}"
    return Config.task, f"--task {Config.task}"


OF_A_TASK = r"^class (\w+)\((?!.*\b(?:Dataset|Module)\b)"
"""A class of a file that may be a task."""


def _tasks_in(source: str) -> list[str]:
    """The names of the tasks that a module or file, imported already, defines."""
    module = sys.modules[Path(source).stem if source.endswith(".py") else source]
    kinds = [it for it in vars(module).values() if isinstance(it, type) and issubclass(it, Task)]
    return [it.__name__ for it in kinds if it.__module__ == module.__name__]


def _known() -> dict[str, str]:
    """What --task may be, by the short name: the built-in tasks, and the classes of the project's module."""
    known = {it: it for it in built_in()}
    with contextlib.suppress(Refusal, OSError, ValueError):  # the project's file is read, not run
        source = default_task()[0].rpartition(":")[0]
        name = source if source.endswith(".py") else source.replace(".", os.sep) + ".py"
        files = [file for folder in sys.path if (file := Path(folder, name)).is_file()]
        known |= {it: f"{source}:{it}" for file in files[:1] for it in re.findall(OF_A_TASK, file.read_text(), re.M)}
    return known


def _load(source: str, attribute: str, label: str) -> Any:
    """As `load_name`; the refusal of a file or module that is not there names the one that may be meant."""
    try:
        return load_name(f"{source}:{attribute}", label)
    except Refusal as refusal:
        lacks = getattr(refusal.__cause__, "name", None) if isinstance(refusal.__cause__, ImportError) else None
        if not (str(refusal).endswith(f": no file {source}") or (lacks and f"{source}.".startswith(f"{lacks}."))):
            raise
        name, known = f"{source}:{attribute}", {it: it for it in _known().values()}
        if source.endswith(".py"):  # by the stems, because all ends are alike
            files = Path(source).parent.glob("*.py")
            name, known = Path(source).stem, {it.stem: f"{it}:{attribute}" for it in files if it.is_file()}
        near = [f"; did you mean {known[it]}?" for it in difflib.get_close_matches(name, known, 1)]
        raise Refusal("".join([str(refusal), *near])) from refusal.__cause__


def load_task(name: str, label: str = "") -> type[Task]:
    """The class behind --task: a built-in by name, else FILE.py:CLASS or PACKAGE.MODULE:CLASS.

    `label` begins errors about it; default: --task NAME.

    Raises:
        Refusal: no such task, or its file fails to import (says at which line and why).
    """
    here, label = built_in(), label or f"--task {name}"
    source, _, attribute = (f"{__package__}.{name}:{BUILT_IN[name]}" if name in here else name).rpartition(":")
    if not source or not attribute:
        known = _known()
        near = [f"unknown; did you mean {known[it]}?" for it in difflib.get_close_matches(name, known, 1)]
        why = "has been deleted from this copy of Evenkeel" if name in BUILT_IN else [*near, "unknown"][0]
        if name == "digits":  # of version 0.1.0
            why = "is now --task classify --dataset digits, the defaults"
        if (file := Path(name.rstrip(":"))).suffix == ".py":
            text = file.read_text(errors="replace") if file.is_file() else None
            classes = [f"{file}:{it}" for it in re.findall(OF_A_TASK, text or "", re.M)]
            why = "no such file" if text is None else "the class is missing"
            why += f"; did you mean {' or '.join(classes[:MOST_LISTED])}?" if classes else ""
        own = "your own: FILE.py:CLASS or PACKAGE.MODULE:CLASS"
        raise Refusal(f"{label}: {why}{' Built' if why.endswith('?') else '; built'} in: {', '.join(here)}; {own}")
    found = _load(source, attribute, label)
    if not (isinstance(found, type) and issubclass(found, Task)):
        what = f"is not a subclass of evenkeel.tasks.Task in {source}{place_of_class(found)}"
        if found is None:
            there = _tasks_in(source)
            near = [f"did you mean {it}?" for it in difflib.get_close_matches(attribute, there, 1)]
            listed = ", ".join(there[:MOST_LISTED]) + (", ..." if len(there) > MOST_LISTED else "")
            has = f"{listed}; {[*near, 'name one of them'][0]}" if there else "no task"
            what = f"does not exist in {source}, which has {has}"
        raise Refusal(f"{label}: {attribute} {what}")
    lossless = not any(defines(found, method) for method in ("loss", "embed", "batch_loss"))
    if missing := sorted({*found.__abstractmethods__, *["loss"] * lossless}):
        refuse_misspelt(found)
        needed = ", ".join(f"{it}()" for it in missing)
        raise Refusal(f"{label}: {attribute} must define {needed}{place_of_class(found)}")
    return found


def place_of_class(found: Any) -> str:
    """Where a class is defined, as "; see FILE:LINE"; "" if that is not known."""
    with contextlib.suppress(OSError, TypeError):
        return f"; see {inspect.getsourcefile(found)}:{inspect.getsourcelines(found)[1]}"
    return ""


def refuse_other_parameters(task: type[Task]) -> None:
    """Refuse a method that cannot be called as :class:`Task`'s is, or a value in its place: the error would name a line
    that calls it."""
    for name, usual in HOOKS.items():
        value, own = getattr(task, name), inspect.getattr_static(task, name)
        is_option = name in getattr(task, "__dataclass_fields__", {})  # which another check names
        if not is_option and (isinstance(value, nn.Module) or not callable(value)):
            what = f"must be a method, and is a value of type {type(value).__name__}"
            raise Refusal(f"{task.__name__}.{name} {what}; write def {name}(self, ...){place_of_class(task)}")
        if own is usual or not inspect.isfunction(own):
            continue
        known, has = inspect.signature(usual).parameters, inspect.signature(own).parameters
        wanted = [it.name for it in known.values() if it.default is it.empty]
        try:
            inspect.signature(own).bind(
                *wanted, **{it: 0 for it in ("step", "samples") if it in has and it not in known}
            )
            if "model" in wanted and re.fullmatch(NO_MODEL, [*has, ""][1]):
                raise TypeError
        except TypeError:
            raise Refusal(
                f"{task.__name__}.{name}({', '.join(has)}) must be {name}({', '.join(wanted)}),{_place(own)}"
            ) from None


def refuse_misspelt(task: type[Task]) -> None:
    """Refuse a public method that no file of the task's classes calls, and whose name is close to that of a hook."""
    classes = task.__mro__[: task.__mro__.index(Task)]
    with contextlib.suppress(OSError, TypeError):  # no file, as in a notebook
        sources = "".join(inspect.getsource(sys.modules[name]) for name in sorted({it.__module__ for it in classes}))
        for name, own in ((name, own) for kind in classes for name, own in vars(kind).items()):
            public = inspect.isfunction(own) and name not in dir(Task) and not name.startswith("_")
            meant = ELSEWHERE.get(name) or next(iter(difflib.get_close_matches(name, HOOKS, 1, 0.9)), "")
            if public and meant and not re.search(rf"[.\"']{name}\b", sources):
                raise Refusal(
                    f"{own.__qualname__}(){_place(own)} is never called: did you mean {meant}()? Rename it; "
                    f"a method of your own needs another name, such as _{name}()"
                )


def refuse_own_init(task: type[Task]) -> None:
    """Refuse an `__init__` that takes other arguments than the fields of the dataclass, which are the options."""
    options = {it.name: None for it in fields(task) if it.init} if is_dataclass(task) else dict[str, None]()
    try:
        inspect.signature(task).bind(**options)
    except TypeError:
        init: Any = vars(task).get("__init__", task.__init__)
        raise Refusal(
            f"{task.__name__}.__init__({', '.join(inspect.signature(init).parameters)}){_place(init)}: a task gets no "
            "arguments; make the class a @dataclass with its options as fields (hidden: int = 32), and compute the "
            "rest in __post_init__(self)"
        ) from None


def _place(function: Any) -> str:
    code = inspect.unwrap(function).__code__
    return f" at {code.co_filename}:{code.co_firstlineno}"
