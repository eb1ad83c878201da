"""For all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _signals_stay_open() -> Iterator[None]:
    """A test that blocks signals would hand that down to all processes of later tests, which then ignore SIGTERM."""
    yield
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "this test has left signals blocked"
