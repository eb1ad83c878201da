"""Locks. Atomic writes: tests/run/test_run_directory.py."""

from __future__ import annotations

import time
from pathlib import Path

from evenkeel.common.files import lock


def test_a_lock_is_held_until_its_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    with path.open("ab") as mine, path.open("ab") as other:
        assert lock(mine)
        assert not lock(other)
        begun = time.monotonic()
        assert not lock(other, until=begun + 0.1)
        assert time.monotonic() - begun >= 0.1
        mine.close()
        assert lock(other)
