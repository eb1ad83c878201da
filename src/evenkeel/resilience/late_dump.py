"""The stacks of a process in which not even the watch can run."""

from __future__ import annotations

import faulthandler
import time
from math import inf
from typing import IO


class LateDump:
    """Lets faulthandler write all threads' stacks by itself, without Python, if this is not put off in time.

    Its disk may hang. To put off or cancel a write that has begun waits for it, with the interpreter locked, so that no
    thread could save any more. So once it is due it is left alone.
    """

    def __init__(self) -> None:
        self._due = inf

    def put_off(self, seconds: float, file: IO[bytes]) -> None:
        """Write after so many seconds from now."""
        if (now := time.monotonic()) < self._due:
            faulthandler.dump_traceback_later(seconds, file=file)
            self._due = now + seconds

    def cancel(self) -> None:
        """Do not write any more."""
        if time.monotonic() < self._due:
            faulthandler.cancel_dump_traceback_later()
