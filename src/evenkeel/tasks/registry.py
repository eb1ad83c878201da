"""From --task to a class: a built-in task by name, or a user's class in a file or package."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ..common.errors import Refusal, place_of
from ..config import Config
from ..run.records import read_config
from ..training.task import Task, defines

BUILT_IN = {"classify": "Classify", "regress": "Regress", "segment": "Segment", "lm": "Lm"}
"""Tasks by the names of their modules here, which may have been deleted; imported on demand."""


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
        path = _as_submitted(folder / "pyproject.toml")
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


def load_task(name: str, label: str = "") -> type[Task]:
    """The class behind --task: a built-in by name, else FILE.py:CLASS or PACKAGE.MODULE:CLASS.

    `label` begins errors about it; default: --task NAME.

    Raises:
        Refusal: no such task, or its file fails to import (says at which line and why).
    """
    here, label = built_in(), label or f"--task {name}"
    source, _, attribute = (f"{__package__}.{name}:{BUILT_IN[name]}" if name in here else name).rpartition(":")
    if not source or not attribute:
        why = "has been deleted from this copy of Evenkeel" if name in BUILT_IN else "unknown"
        if name == "digits":  # of version 0.1.0
            why = "is now --task classify --dataset digits, the defaults"
        own = "your own: FILE.py:CLASS or PACKAGE.MODULE:CLASS"
        raise Refusal(f"{label}: {why}; built in: {', '.join(here)}; {own}")
    try:
        module = _import_file(label, Path(source)) if source.endswith(".py") else _import_module(name, source)
    except Refusal:
        raise
    except (Exception, SystemExit) as error:
        place, reason = place_of(error.__traceback__), str(error)
        if isinstance(error, SyntaxError) and error.filename:
            place, reason = f" at {error.filename}:{error.lineno}", error.msg
        first_line = f"{type(error).__name__}: {reason}".split("\n")[0]
        raise Refusal(f"{label}: does not import: {first_line}{place}") from error
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        what = "does not exist" if found is None else "is not a subclass of evenkeel.tasks.Task"
        raise Refusal(f"{label}: {attribute} {what} in {source}")
    lossless = not any(defines(found, method) for method in ("loss", "embed", "batch_loss"))
    if missing := sorted({*found.__abstractmethods__, *["loss"] * lossless}):
        raise Refusal(f"{label}: {attribute} must define {', '.join(f'{it}()' for it in missing)}")
    return found


def _import_file(label: str, path: Path) -> Any:
    """Import a file under its own stem, so that loader processes can find its classes by name."""
    path = _as_submitted(path)
    if not path.is_file():
        raise Refusal(f"{label}: no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    known = sys.modules.get(path.stem)
    if spec is None or spec.loader is None or (known and getattr(known, "__file__", None) != spec.origin):
        raise Refusal(f"{label}: the module name '{path.stem}' is taken or not allowed; rename the file")
    if known:  # a keeper has imported it, and some files may run only once in a process
        return known
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # else the next import would find it incomplete
        raise
    return module


def _import_module(name: str, module: str) -> Any:
    if name not in BUILT_IN:
        sys.path.insert(0, str(_as_submitted(Path.cwd())))
    return importlib.import_module(module)


def _as_submitted(path: Path) -> Path:
    """The same path in a queued job's copy of the code, because the original may have changed."""
    code, origin = os.environ.get("EVENKEEL_CODE"), os.environ.get("EVENKEEL_ORIGIN")
    if not (code and origin):
        return path
    path = path.resolve()
    copy = Path(code) / path.relative_to(origin) if path.is_relative_to(origin) else Path(code, "outside", path.name)
    return copy if copy.exists() else path
