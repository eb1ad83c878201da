"""A user's code: from FILE.py:NAME or PACKAGE.MODULE:NAME, as an option names a class, to it; and its errors."""

from __future__ import annotations

import ast
import builtins
import contextlib
import difflib
import importlib.util
import inspect
import os
import re
import sys
import textwrap
import traceback
import warnings
from bdb import BdbQuit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import EndedHere, Refusal, place_of

BROADCAST = r"Using a target size \D+(?!1\b)(\d+)(, 1)??((?:, \d+)*)\]\D+\[\1(?(2)|, 1)\3\]"
"""torch's warning of a loss whose outputs and target are [n, ...] and [n, 1, ...], which makes [n, n, ...] of them.
Other shapes may be meant, such as one target for all."""

HINTS = {
    r"Found no NVIDIA driver|not compiled with CUDA|re-initialize CUDA": "leave out .cuda(): Evenkeel moves all there",
    r"Target -?\d+ is out of bounds": "a label must be less than the number of the model's outputs, and not negative",
    r"target dtype to be Long|scalar type Long but": "class labels must be integers: call .long() in the data set",
    r"same dtype, but got Double|Double but found Float|Float but found Double"
    r"|Input type \((double|long|unsigned|[^)]*(Double|Long|Byte)Tensor)": "call .float() in the data set",
    "multi-target not supported": "labels must have the shape [n], not [n, 1]: take labels[:, 0]",
    r"shapes cannot be multiplied": "the second number is what the layer gets, the third what it was made for",
    r"before Module.__init__\(\) call": "begin __init__ with super().__init__()",
    r"does not require grad and does not have a grad_fn": "leave out backward(), which the training loop calls; an "
    "evaluation has no gradients: where metrics need them, use `with torch.enable_grad():`",
    r"default process group (has not been initialized|twice)": "leave out process groups and DDP: Evenkeel makes them",
    r"values to unpack": "if it is a batch, it has as many parts as a sample of the data set",
    r"\.model\(\) takes 1 positional": "call the argument: model(...), not self.model(...)",
    r"argument 'target' .*must be Tensor, not (tuple|list)$": "are the labels text? Then number them in the data set",
    r"must be Tensor, not str$": "is the batch a dict? Then name its parts: batch['x']",
    r"modified by an inplace operation": "in loss() or the model: write x = x + y, not x += y, add_() or inplace=True",
    r"^'(tuple|list|dict)' object has no attribute": "not a tensor, but several: take one of them",
}
"""Patterns in errors of torch -> what to do; these errors do not say it."""


@contextlib.contextmanager
def no_broadcast() -> Iterator[None]:
    """A context in which `BROADCAST` is an error. For few steps: after it Python shows other warnings once more."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", BROADCAST)
            yield
    except UserWarning as error:
        if not (found := re.search(BROADCAST, str(error))):
            raise
        n, one, rest = found.groups()
        short, long = ("outputs", "targets") if one else ("targets", "outputs")
        raise EndedHere(
            f"a loss of torch gets {long} of shape [{n}, 1{rest}] and {short} of shape [{n}{rest}]"
            f"{place_of(error.__traceback__)}, and would compare each of {n} samples with all: take .squeeze(1) of the "
            f"{long}, or .unsqueeze(1) of the {short}"
        ) from None


def lacks_return(function: Any) -> bool:
    """Whether a function does something but has no `return`; False if its source is not known."""
    try:
        (found,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, ValueError, SyntaxError):
        return False
    if not isinstance(found, ast.FunctionDef):
        return False
    idle = [isinstance(it, ast.Pass) or isinstance(getattr(it, "value", None), ast.Constant) for it in found.body]
    return not all(idle) and not any(isinstance(it, ast.Return) for it in ast.walk(found))


def load_name(name: str, label: str) -> Any:
    """What FILE.py:NAME or PACKAGE.MODULE:NAME is; None if the file or module has no such name.

    `label` begins errors about it, such as the option.

    Raises:
        Refusal: the file or module is not there, or fails to import (says at which line and why).
    """
    source, _, attribute = name.rpartition(":")
    try:
        module = _import_file(label, Path(source)) if source.endswith(".py") else _import_module(source)
    except Refusal:
        raise
    except (Exception, SystemExit) as error:
        place, reason = place_of(error.__traceback__), str(error)
        if isinstance(error, SyntaxError) and error.filename:
            place, reason = f" at {error.filename}:{error.lineno}", error.msg
        first_line = f"{type(error).__name__}: {reason}".split("\n")[0] + hint(error)
        raise Refusal(f"{label}: does not import: {first_line}{place}") from error
    return getattr(module, attribute, None)


_imported: dict[str, Any] = {}  # modules, by their absolute paths as typed


def _import_file(label: str, path: Path) -> Any:
    """Import a file under its own stem, so that loader processes can find its classes by name."""
    path = as_submitted(path)
    known, typed = sys.modules.get(path.stem), os.path.abspath(path)  # noqa: PTH100  (a link may be another file by now)
    if known and (known is _imported.get(typed) or getattr(known, "__file__", None) == str(path.resolve())):
        return known  # a keeper has imported it, and goes on with that whatever the file is now
    if not path.is_file():
        raise Refusal(f"{label}: no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if known or spec is None or spec.loader is None:
        raise Refusal(f"{label}: the module name '{path.stem}' is taken or not allowed; rename the file")
    sys.path.insert(0, str(path.resolve().parent))
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # else the next import would find it incomplete
        raise
    _imported[typed] = module
    return module


def _import_module(module: str) -> Any:
    if module.partition(".")[0] != __name__.partition(".")[0]:  # it is the user's
        sys.path.insert(0, str(as_submitted(Path.cwd())))
    return importlib.import_module(module)


def as_submitted(path: Path) -> Path:
    """The same path in a queued job's copy of the code, because the original may have changed."""
    code, origin = os.environ.get("EVENKEEL_CODE"), os.environ.get("EVENKEEL_ORIGIN")
    if not (code and origin):
        return path
    path = path.resolve()
    copy = Path(code) / path.relative_to(origin) if path.is_relative_to(origin) else Path(code, "outside", path.name)
    return copy if copy.exists() else path


def hint(error: BaseException) -> str:
    """What to do about an error, as " (LINE)": of a misspelt name what may be meant, with any version of Python."""
    near = [text for pattern, text in HINTS.items() if re.search(pattern, str(error))]
    if str(error).startswith("Target ") and (count := _outputs(error)):
        near = [f"the model has {count} outputs, so a label must be 0 to {count - 1}"]
    if isinstance(error, BdbQuit):
        near = ["to debug, start one rank in a terminal: python train.py, with --hang-timeout 0"]
    with contextlib.suppress(Exception):  # the user's __dir__ may fail, or the error have no name
        names = dir(error.obj) if isinstance(error, AttributeError) else []
        if isinstance(error, NameError):
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            names = [*frame.f_locals, *frame.f_globals, *dir(builtins)]
        near += [f"did you mean {it}?" for it in difflib.get_close_matches(getattr(error, "name", ""), names, 1, 0.7)]
    return f" ({near[0]})" if near else ""


def _outputs(error: BaseException) -> int:
    """The number of outputs that a loss of torch got which has failed; 0 if it is not known."""
    with contextlib.suppress(Exception):  # another version of torch may name them otherwise
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return int(frame.f_locals["input"].shape[1])
    return 0
