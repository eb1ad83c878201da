"""`python -m evenkeel report`: the options and their checks; writes the page, and figures and numbers if wanted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from ...common.display import say
from ...common.errors import Ended, Refusal
from ...common.files import write_atomically
from ...config import MaybePath
from ...run.records import read_records, values_of
from ..html_page import begins
from .history import History, read_histories

REPORT = "report.html"

HEAD = ("run", "attempt", "kind", "step", "time", "name", "value")
"""Of --csv: a row for each value. `time` is in seconds since 1970; `value` is empty if it was not finite."""


@dataclass(frozen=True)
class ReportCommand:
    """Make one HTML file about a run, or about several side by side.

    Example: python -m evenkeel report runs/classify

    It shows curves, all attempts and the use of time. It needs no network and no data, so you can send it as it is, and
    it can be made while the run goes on. Needs matplotlib: pip install matplotlib
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    output: MaybePath = None
    """The file to write. Default: report.html in the run's folder; of several runs, beside the first one's."""
    png: MaybePath = None
    """Also write each figure as a PNG into this folder."""
    csv: MaybePath = None
    """Also write all measured values into this CSV file."""

    def __call__(self) -> int:
        """Write the files and print their names."""
        if not self.runs:
            raise Refusal("report: no run is named; name run directories, for example runs/classify")
        files = self._make()
        for path, (_, mark) in files.items():
            _refuse_foreign(path, mark)
        for path, (content, _) in files.items():
            _write(path, content)
            say(str(path))
        return 0

    def _make(self) -> Mapping[Path, tuple[bytes, str]]:
        """File -> its content, and a text that marks such a file as ours."""
        from .page import contents, page
        from .theme import SOFTWARE, drawing

        histories, first = read_histories(self.runs), self.runs[0].resolve()
        default = (self.runs[0] if len(self.runs) == 1 else first.parent) / REPORT
        with drawing():
            sections, figures = contents(histories)
            files = {self.output or default: (page(histories, sections).encode(errors="replace"), begins("report"))}
            if self.png:
                files |= {self.png / f"{figure.name}.png": (figure.png(), SOFTWARE) for figure in figures}
        if self.csv in files:
            raise Refusal(f"--csv {self.csv}: is the report's own file; name another one")
        if self.csv:
            csv.writer(text := io.StringIO(newline="")).writerows([HEAD, *_measured(histories)])
            files[self.csv] = text.getvalue().encode(errors="replace"), ",".join(HEAD)
        return files


def _measured(histories: Sequence[History]) -> Iterator[tuple[object, ...]]:
    """Rows of all measured numbers. A step that was done again has several, one per attempt."""
    for history in histories:
        attempt = 0
        for record in read_records(history.path / "metrics.jsonl"):
            attempt += record["kind"] == "start"
            for name, value in values_of(record).items():
                yield history.name, attempt, record["kind"], record["step"], record["time"], name, value


def _refuse_foreign(path: Path, mark: str) -> None:
    """Refuse to replace a file that this command has not made."""
    try:
        if path.exists() and not (path.is_file() and mark.encode() in path.read_bytes()[:1000]):
            raise Refusal(f"{path}: exists and was not made by `evenkeel report`; name another file")
    except OSError as error:
        raise Refusal(f"{path}: cannot be read: {error.strerror or error}; name another file") from None


def _write(path: Path, content: bytes) -> None:
    private = path.suffix not in (".png", ".csv")  # as config.toml is, whose options the page has
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content), private=private)
    except OSError as error:
        raise Ended(f"{path}: cannot be written: {error.strerror or error}; name another file") from None
