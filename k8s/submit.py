#!/usr/bin/env python3
"""Submit a training job to Kubernetes:  k8s/submit.py -n 2 -g 4 --image NAME -- --epochs 5."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
from interpreter import need_evenkeel

need_evenkeel()
from evenkeel.distributed.exits import exit_code  # noqa: E402
from evenkeel.launch.k8s import submission  # noqa: E402

if __name__ == "__main__":
    sys.exit(exit_code(lambda: submission.main(sys.argv[1:])))
