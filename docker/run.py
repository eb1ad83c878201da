#!/usr/bin/env python3
"""Start one node's share of a training job in a container:  docker/run.py -g 4 -- --epochs 5."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
from interpreter import need_evenkeel

need_evenkeel()
from evenkeel.distributed.exits import exit_code  # noqa: E402
from evenkeel.launch.docker import docker_run  # noqa: E402

if __name__ == "__main__":
    sys.exit(exit_code(lambda: docker_run.main(sys.argv[1:])))
