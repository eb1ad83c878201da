#!/usr/bin/env python3
"""Start this node's share of a training job:  launch/multi_node.py -n 2 -nr 0 --master HOST -- --epochs 5."""

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
