"""Errors that may come at every step, such as those of a full disk, logged rarely."""

from __future__ import annotations

import logging
import time

INTERVAL = 600.0
"""Seconds in which an error is logged once."""


class Repeats:
    """Logs an error when it comes first, and then every ten minutes, with how often it has come."""

    def __init__(self) -> None:
        self._count, self._next = 0, 0.0

    def log(self, logger: logging.Logger, text: str) -> None:
        """Count the error, and log it if it is time."""
        self._count += 1
        if (now := time.monotonic()) >= self._next:
            self._next = now + INTERVAL
            logger.error("%s%s", text, f" ({self._count} times so far)" if self._count > 1 else "")

    def end(self) -> bool:
        """Forget the errors, because it works again. Returns whether there were any."""
        found, self._count, self._next = self._count > 0, 0, 0.0
        return found
