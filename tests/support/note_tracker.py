"""Trackers of one's own, for tests of --tracker."""

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Notes:
    """Writes what it is asked for to notes.jsonl in the run's directory, a line a call."""

    def __init__(self, name: str, directory: Path, config: Mapping[str, Any]) -> None:
        self.path = directory / "notes.jsonl"
        self.write(made=name, batch_size=config["batch_size"])

    def write(self, **what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({**what, "thread": threading.get_ident()}) + "\n")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.write(step=step, metrics={name: str(it) if isinstance(it, Path) else it for name, it in metrics.items()})

    def close(self, status: str) -> None:
        self.write(closed=status)


class Broken:
    """Fails in the method whose name the variable has."""

    where = "log"

    def __init__(self, _name: str, _directory: Path, _config: Mapping[str, Any]) -> None:
        self.fail("__init__")

    def fail(self, here: str) -> None:
        if here == self.where:
            raise OSError("the server\nis gone")

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.fail("log")
        if self.where == "exit":
            sys.exit(0)

    def close(self, status: str) -> None:
        self.fail("close")


class Stuck:
    """Its endpoint does not answer until `answer` is set."""

    answer = threading.Event()

    def __init__(self, _name: str, _directory: Path, _config: Mapping[str, Any]) -> None:
        self.logged: list[int] = []

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.answer.wait(60)

    def close(self, status: str) -> None:
        pass


class StuckStart(Stuck):
    """The same when it is made."""

    def __init__(self, *_: Any) -> None:
        self.answer.wait(60)


class SlowEnd(Notes):
    """Its server takes the last lines slowly."""

    def close(self, status: str) -> None:
        time.sleep(5)
        super().close(status)


class NoClose:
    def __init__(self, name: str, directory: Path, config: Mapping[str, Any]) -> None: ...

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...


class NoStep(NoClose):
    def log(self, metrics: Mapping[str, Any]) -> None: ...

    def close(self, status: str) -> None: ...


class NoConfig:
    def __init__(self, name: str) -> None: ...

    def log(self, metrics: Mapping[str, Any], step: int) -> None: ...

    def close(self, status: str) -> None: ...


def a_function() -> None: ...
