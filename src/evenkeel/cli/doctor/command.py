"""The options of `python -m evenkeel doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from ...config import Flag, MaybePath


@dataclass(frozen=True)
class DoctorCommand:
    """Check the machines before a job: versions, GPUs, memory, network, clocks, run directory, collectives.

      python -m evenkeel doctor                                             this machine
      torchrun --standalone --nproc_per_node=2 -m evenkeel doctor           all ranks of a job

    What follows after `--` are the options of train.py that the job will have. Each finding is OK, WARN or FAIL; the
    last two say what was expected and which line to type. Exit code: 1 if there is a FAIL.
    """

    run_dir: MaybePath = None
    """Folder to test; nothing stays in it. Default: the run directory of the job's options."""
    master: Annotated[str, tyro.conf.arg(metavar="HOST[:PORT]")] = ""
    """Without torchrun: the address of node 0 that several nodes will use. Default: only the port, 29500, is tested."""
    timeout: float = 10.0
    """Seconds that the ranks wait for each other, and that a check may take."""
    json: Flag = False
    """For programs: print a JSON object."""

    def __call__(self, train_options: list[str]) -> int:
        """Check, print the findings once, and return 1 if there is a FAIL."""
        from .visit import Visit  # imports torch, which the help does without

        return Visit(train_options, self.run_dir, self.master, self.timeout, self.json).run()
