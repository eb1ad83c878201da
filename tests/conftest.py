"""For all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from evenkeel.processes import STOP_SIGNALS


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """A test that runs `train.main` takes the stop signals; Ctrl-C must end the tests after it all the same."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.set_wakeup_fd(-1)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked signals would be handed down to all processes"
