"""For the scripts that people type: find the Python that has evenkeel, whichever one they were started with."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def need_evenkeel() -> None:
    """Go on if evenkeel can be imported, else start over with the Python of `make setup`, or say how to get one."""
    again = os.environ.pop("EVENKEEL_STARTED_OVER", "")
    try:
        importlib.import_module("evenkeel")
    except ModuleNotFoundError:  # or one of the packages that it needs
        python = REPOSITORY / ".venv" / "bin" / "python"
        if again or not python.exists() or Path(sys.prefix) == python.parents[1]:
            sys.exit("evenkeel: is not installed here; run: make setup")
        os.environ["EVENKEEL_STARTED_OVER"] = "1"  # once: a .venv may have lost its packages
        os.execv(python, [str(python), *sys.argv])  # noqa: S606
