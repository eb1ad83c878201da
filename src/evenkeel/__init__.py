"""Evenkeel: the parts of an elastic, exactly resumable distributed training job."""

import io
import os
import sys
from pathlib import Path

__version__ = "0.1.0"


def _keep_streams() -> None:
    """Let closed standard streams (`>&-`) lead nowhere: a checkpoint might be opened in their place, and get what
    libraries print. And let a path that stdout has no letters for end no run."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            file = Path(os.devnull).open("w" if number else "r")  # noqa: SIM115  (as long as the process)
            os.set_inheritable(file.fileno(), True)
            setattr(sys, name, file)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


_keep_streams()
