"""The records that a run adds to its metrics.jsonl, read as they come."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from ..run.records import read_record


class Tail:
    """The base of what is computed from a metrics.jsonl that grows, and need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = self._offset = 0
        self.reset()

    def reset(self) -> None:
        """Forget all records: the file is a new one."""
        raise NotImplementedError

    def take(self, record: dict[str, Any]) -> None:
        """Add a record."""
        raise NotImplementedError

    def update(self) -> None:
        """Take the records that are new since the last call."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._inode, self._offset = facts.st_ino, 0
                self.reset()
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                if record := read_record(line):
                    self.take(record)
