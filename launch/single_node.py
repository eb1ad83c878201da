#!/usr/bin/env python3
"""Start a training job on this machine:  launch/single_node.py -g 4 -- --epochs 5."""

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
    sys.exit(launchers.main(launchers.SingleNode, sys.argv[1:], REPOSITORY / "train.py"))
