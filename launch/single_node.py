#!/usr/bin/env python3
"""Start a training job on this machine:  launch/single_node.py -g 4 -- --epochs 5."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from interpreter import REPOSITORY, need_evenkeel

need_evenkeel()
import evenkeel  # noqa: E402

evenkeel.announce()  # the next imports take seconds
from evenkeel.distributed.exits import exit_code  # noqa: E402
from evenkeel.launch import launchers  # noqa: E402

if __name__ == "__main__":
    sys.exit(exit_code(lambda: launchers.main(sys.argv[1:], REPOSITORY / "train.py")))
