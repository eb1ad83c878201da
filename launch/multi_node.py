#!/usr/bin/env python3
"""Start this node's share of a training job:  launch/multi_node.py -n 2 -nr 0 --master HOST -- --epochs 5."""

import os
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
try:
    from evenkeel import launchers
except ModuleNotFoundError:
    python = REPOSITORY / ".venv" / "bin" / "python"
    if not python.exists() or Path(sys.prefix) == python.parents[1]:
        sys.exit("evenkeel: is not installed here; run: make setup")
    os.execv(python, [str(python), *sys.argv])  # noqa: S606

if __name__ == "__main__":
    sys.exit(launchers.main(launchers.MultiNode, sys.argv[1:], REPOSITORY / "train.py"))
