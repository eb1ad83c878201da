"""The folder of a run: who may use it, and that two jobs never do."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.run import run_directory
from tests.run.test_run_directory import (
    FORK,
    OPTIONS,
    claim,
    path,  # noqa: F401  (a fixture)
    started,
)


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 0.3)


def start_over_and_hold(path: Path, ready: Any, go: Any, done: Any) -> None:
    """Be another job that starts over while somebody waits for the folder."""
    directory = claim(path, OPTIONS, fresh=True)
    ready.set()
    go.wait(120)
    time.sleep(0.3)
    directory.start_over([""])
    directory.begin(OPTIONS, [""])
    done.set()
    signal.pause()


def test_who_waits_while_another_starts_over_gets_no_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock it waits for is moved aside with the old run, and then free; but the new run has one of its own."""
    monkeypatch.setattr(run_directory, "LOCK_TIMEOUT", 4.0)
    started(path)
    ready, go, done = (FORK.Event() for _ in range(3))
    process = FORK.Process(target=start_over_and_hold, args=(path, ready, go, done))
    process.start()
    try:
        assert ready.wait(120)
        go.set()
        with pytest.raises(Refusal, match=f"is in use by process {process.pid} "):
            claim(path, OPTIONS, fresh=False)
        assert done.is_set()
    finally:
        process.kill()
        process.join()
