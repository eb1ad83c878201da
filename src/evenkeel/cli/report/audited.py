"""audit.json: what `evenkeel audit` has found in a run, as tables."""

from __future__ import annotations

import time
from html import escape
from pathlib import Path

from ...common.files import alike, read_json
from .history import History

FACTS = {"time": 0.0, "seed": 0, "ranks": 0, "steps": 0, "checks": {"": [""]}, "parts": {"": ""}}
"""An example of each fact in the file."""


def audited(history: History) -> list[tuple[str, str]]:
    """What the last audit has found, as rows of escaped text; empty without one, or if its file is damaged."""
    try:
        found = read_json(Path(history.path) / "audit.json")
    except (OSError, ValueError):
        return []
    if not alike(found, FACTS):
        return []
    wrong = [(name, "; ".join(lines)) for name, lines in found["checks"].items() if lines]
    verdict = "WRONG" if wrong else "nothing is wrong"
    late = f"; the run has gone on to step {history.step:,} since" if history.step > found["steps"] else ""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["time"]))
    about = f"on {when}, up to step {found['steps']:,}{late}"
    again = f"on {found['ranks']} rank{'s' * (found['ranks'] != 1)}, parts chosen by --seed {found['seed']}"
    rows = [(verdict, about), *wrong, *found["parts"].items(), ("run again", again)]
    return [(escape(name), escape(text)) for name, text in rows]
