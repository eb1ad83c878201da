"""Valid names for a user's package. Imports the standard library only, for tools that run without torch."""

from __future__ import annotations

import builtins
import importlib.util
import keyword
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any


def why_not(name: str, taken: Mapping[str, str] = MappingProxyType({}), path: Iterable[str] = ()) -> str:
    """Why a package cannot have this name, and the remedy; "" if it can.

    Args:
        name: of the package.
        taken: names of modules and distributions that it must not hide, and what has them.
        path: folders with installed modules, besides `sys.path`.
    """
    if not re.fullmatch("[a-z]([a-z0-9_]*[a-z0-9])?", name) or keyword.iskeyword(name):
        near = re.sub(r"[^a-z0-9]+", "_", name.lower().rstrip("/").rpartition("/")[2]).lstrip("_0123456789").rstrip("_")
        near = "mytrainer" if not near or keyword.iskeyword(near) else near
        if "/" in name:
            return f"is a path; give a name, for example {near}"
        return f"cannot be a Python package's name; use small letters, digits and _, for example {near}"
    if keyword.issoftkeyword(name) or name in dir(builtins):
        return "is a word of Python; choose another, such as mytrainer"
    if name in sys.stdlib_module_names:
        return "is a module of Python's standard library; choose another name"
    for other, what in taken.items():
        if other.lower().replace("-", "_") == name:
            return f"is the name of {what}; choose another name"
    for module in pkgutil.iter_modules([*sys.path, *path]):
        if module.name.lower() == name:
            found: Any = module.module_finder.find_spec(module.name, None)
            where = getattr(found, "origin", None) or module.name
            return f"is the name of the installed module {where}; choose another name"
    return "a module of this name can be imported here; choose another name" if importlib.util.find_spec(name) else ""
