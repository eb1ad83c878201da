#!/usr/bin/env python3
"""One node's share of a job, as a task of Slurm:  srun --ntasks-per-node=1 slurm/node.py -- --epochs 5."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
from interpreter import REPOSITORY, need_evenkeel

need_evenkeel()
from evenkeel.distributed.exits import exit_code  # noqa: E402
from evenkeel.launch.slurm import node  # noqa: E402

if __name__ == "__main__":
    sys.exit(exit_code(lambda: node.main(sys.argv[1:], REPOSITORY / "train.py")))
