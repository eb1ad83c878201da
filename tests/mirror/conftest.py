"""Short waits for all tests of the mirror that run in one process."""

import pytest

from evenkeel.mirror import lease


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("RENEWED", 0.4), ("PATIENCE", 2.0), ("SETTLES", 0.2)):
        monkeypatch.setattr(lease, name, seconds)
