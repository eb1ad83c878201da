"""Deadlines: times of `time.monotonic`, so that several waits can share one."""

from __future__ import annotations

import math
import threading
import time

FOREVER = math.inf
"""A deadline that never comes."""


def left(deadline: float) -> float:
    """Seconds until a deadline; 0 if it is past. No more than a lock of `threading` can wait."""
    return min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
