"""A row of the table of `evenkeel check`, and the lines of a task that are the probable causes."""

from __future__ import annotations

import inspect
import os
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

PASSED, FAILED, UNCHECKED, MEASURED = "passed", "FAILED", "not checked", "measured"

OWN_DICE = (
    r"\bgenerator=(?!torch\.Gen)|SystemRandom|default_rng\(\)|\bRandom\(\)|urandom|uuid4|Generator\(\)(?!\.manual)"
)
CHANGED = r"self\.[\w.\[\]]+ *(?:[-+*/|@]|//|\*\*)= |\bnext\(|\bglobal |\.append\(|self\.\w+ *= "
BY_RANK = r"RANK|get_rank|\brank\b|get_worker_info|getpid|gethostname|listdir|glob\(|\bhash\("
CLOCK = r"\btime\.\w+\(|datetime|perf_counter"
SUM = r"\.sum\(\)|reduction=.sum|\bsum\("


class Row(NamedTuple):
    """A check."""

    name: str
    compared: str
    result: str
    figure: str = ""
    remedy: str = ""
    """What to do, in a line, with the probable cause in the task as FILE:LINE."""


def lines_of(function: Any) -> list[tuple[str, str]]:
    """(FILE:LINE, text) of each line of a user's function, method or class; none for other code."""
    try:
        source, first = inspect.getsourcelines(inspect.unwrap(function))
        file = Path(inspect.getsourcefile(inspect.unwrap(function)) or "").resolve()
    except (OSError, TypeError):
        return []
    package, paths = Path(__file__).parents[2], sysconfig.get_paths()
    engine = file.is_relative_to(package) and not file.is_relative_to(package / "tasks")
    if engine or file.is_relative_to(paths["stdlib"]) or file.is_relative_to(paths["purelib"]):
        return []
    here = Path(os.path.relpath(file))
    shown = here if here.parts[0] != ".." else file
    return [(f"{shown}:{first + number}", text.partition("#")[0]) for number, text in enumerate(source)]


def blame(suspects: Iterable[Any], *patterns: str) -> str:
    """The first line of the suspects that matches a pattern, tried in turn; else where the first suspect begins.

    >>> blame([len])
    ''
    """
    found = [lines for suspect in suspects if (lines := lines_of(suspect))]
    for pattern in patterns:
        for lines in found:
            for place, text in lines:
                if re.search(pattern, re.sub(r"^\s*def .*\)( *->[^:]*)?:", "", text)):  # not in a signature
                    return place
    begins = [next((place for place, text in lines if re.match(r"\s*(def|class) ", text)), "") for lines in found]
    return next(iter(begins), "")
