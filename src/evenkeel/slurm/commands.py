"""Slurm's own commands, none of which may take for ever: a controller that is down answers nobody."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

TIMEOUT = 60.0
"""Seconds; a busy controller makes clients wait for some of them."""


class SlurmError(Exception):
    """A command is missing, failed, or did not answer; the message is one line."""


def slurm(*command: str, timeout: float = TIMEOUT, env: Mapping[str, str] | None = None) -> str:
    """What a command prints.

    Args:
        command: the name and its arguments; no shell is involved.
        timeout: seconds that it may take.
        env: its whole environment; None: this process's.

    Raises:
        SlurmError: see there.
    """
    name = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    except FileNotFoundError:
        raise SlurmError(f"{name}: not found: is this a login node of the cluster?") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{name}: no answer within {timeout:g} s; is Slurm's controller up?") from None
    if done.returncode:
        raise SlurmError(" ".join((done.stderr or done.stdout or f"{name}: exit code {done.returncode}").split()))
    return done.stdout
