"""What stands in place of an interruption in a process that goes on after the run, such as a notebook."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .interruption import Interruption

log = logging.getLogger(__name__)


class Resident(Interruption):
    """Takes no signals and never ends the process, which goes on after the run, such as a notebook."""

    def _receive_signals(self) -> None:
        """Leave them to the program."""

    def begin_shutdown(self, reason: str, act: Callable[[], None], code: int) -> None:
        """Warn, and do not end."""
        log.warning("%s; Ctrl-C (twice, or a restart of the kernel) ends it", reason)
