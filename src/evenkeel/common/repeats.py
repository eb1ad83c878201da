"""Errors that may come at every step, such as those of a full disk, logged now and then."""

from __future__ import annotations

import logging
import time

INTERVAL = 60.0
"""Seconds in which an error is logged once."""


class Repeats:
    """Logs an error when it comes first, and then once a minute, with how often it has come."""

    def __init__(self) -> None:
        self._count, self._next = 0, 0.0

    def log(self, logger: logging.Logger, text: str) -> None:
        """Count the error, and log it if it is time."""
        self._count += 1
        if (now := time.monotonic()) >= self._next:
            self._next = now + INTERVAL
            logger.error("%s%s", text, f" ({self._count} times so far)" if self._count > 1 else "")
