"""The options of `python -m evenkeel doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from ...config import Flag, MaybePath, option


@dataclass(frozen=True)
class DoctorCommand:
    """Check the machines before a job: GPUs, network, memory, clocks.

    Example: torchrun --standalone --nproc_per_node=2 -m evenkeel doctor -- --num-workers 4

    Also versions, the run directory and collectives. Under torchrun it checks all ranks of a job, else this machine.
    What follows after `--` are the options of train.py for the job. Below each WARN and FAIL are the expected value and
    a command to type. Exit code: 1 after a FAIL.
    """

    run_dir: MaybePath = None
    """Folder to test; no files remain in it. Default: the run directory of the job's options."""
    master: Annotated[str, tyro.conf.arg(metavar="HOST[:PORT]", help_behavior_hint="")] = ""
    """Without torchrun: the address of node 0 that several nodes will use. Default: only the port, 29500, is tested."""
    timeout: float = option(10.0, 1, 3600)
    """Seconds that the ranks wait for each other, and that a check may take."""
    json: Flag = False
    """For programs: print a JSON object."""

    def __call__(self, train_options: list[str]) -> int:
        """Check, print the findings once, and return 1 if there is a FAIL."""
        from .visit import Visit  # imports torch, which the help does without

        return Visit(train_options, self.run_dir, self.master, self.timeout, self.json).run()
