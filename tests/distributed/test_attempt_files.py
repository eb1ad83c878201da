"""What ranks of a node tell each other by files: which failed first, and how."""

import contextlib
import os
from pathlib import Path

import pytest

from evenkeel.distributed.attempt_files import record_first_failure, said_first


def test_the_first_failure_is_whole_as_soon_as_another_rank_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or that rank takes it for another failure than its own, and the job is tried again in vain."""
    error_file = tmp_path / "0" / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    line = "long " * 10**6
    if not (first := os.fork()):
        os._exit(record_first_failure(line) != "first")
    while not (seen := said_first(str(error_file))) and os.waitpid(first, os.WNOHANG) == (0, 0):
        pass
    assert (seen or said_first(str(error_file))) == line.strip()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(first, 0)
    assert [record_first_failure(it) for it in (line, "short")] == ["alike", "other"]
    assert {it.name for it in tmp_path.iterdir()} == {"failed"}
