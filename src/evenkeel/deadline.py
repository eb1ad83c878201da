"""One moment that several waits share, so that they cannot add up: a moment of the monotonic clock, handed down."""

from __future__ import annotations

import math
import threading
import time

FOREVER = math.inf
"""The moment of who can wait as long as it takes."""


def left(moment: float) -> float:
    """Seconds until a moment, 0 if it is past, as locks of `threading` want them."""
    return min(max(0.0, moment - time.monotonic()), threading.TIMEOUT_MAX)
