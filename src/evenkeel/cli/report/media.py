"""media/NAME/step-00000042.png and .csv: pictures and tables that a job has logged, of each name the newest."""

from __future__ import annotations

import base64
import csv
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

log = logging.getLogger(__name__)

FILE = re.compile(r"step-([0-9]{8,15})\.(png|csv)")
MOST, MOST_BYTES, MOST_ROWS = 24, 2**21, 50
"""Names, bytes of a picture and rows of a table in a page."""


@dataclass(frozen=True)
class Logged:
    """A picture, or a table."""

    name: str
    step: int
    image: str = ""
    """A PNG in base64."""
    rows: tuple[list[str], ...] = ()
    """Of a table, the head first."""


def read_media(path: Path) -> Iterator[Logged]:
    """What is in a run's folder, by name. Leaves out what cannot be read or is too large."""
    newest: dict[str, tuple[int, Path]] = {}
    for file in sorted((path / "media").rglob("step-*")):
        if found := FILE.fullmatch(file.name):
            name = str(file.parent.relative_to(path / "media"))
            newest[name] = max(newest.get(name, (-1, file)), (int(found[1]), file))
    for name, (step, file) in islice(sorted(newest.items()), MOST):
        try:
            if file.suffix == ".csv":
                with file.open(newline="", errors="replace") as text:
                    rows = tuple(islice(csv.reader(text), MOST_ROWS + 1))
                yield Logged(name, step, rows=tuple(row for row in rows if row))
            elif file.stat().st_size <= MOST_BYTES and (content := file.read_bytes()).startswith(b"\x89PNG"):
                yield Logged(name, step, image=base64.b64encode(content).decode())
        except (OSError, csv.Error) as error:
            log.warning("%s: %s", file, error)
