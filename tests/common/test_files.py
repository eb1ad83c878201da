"""Locks, and lines that are whole. Atomic writes: tests/run/test_run_directory.py."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from evenkeel.common.files import append_line, lock


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


def test_a_line_is_in_a_file_whole_or_not_at_all(tmp_path: Path) -> None:
    append_line(tmp_path / "lines", b"one\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, before[1]))  # as a disk that is full in the middle of the next
    try:
        with pytest.raises(OSError, match="No space left"):
            append_line(tmp_path / "lines", b"another\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "lines").read_bytes() == b"one\n"
