"""Other places for a run's metrics: Weights & Biases, TensorBoard, a CSV file.

All get the same values by the same names (SET/METRIC), from rank 0. An error in one never ends the training.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import netrc
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from ..common.files import append_line, write_atomically
from ..config import Config

log = logging.getLogger(__name__)

INIT_TIMEOUT = 20.0
"""Seconds that wandb waits for its server (plus 10 to give up); WANDB_INIT_TIMEOUT overrides it."""


class MetricsLog(Protocol):
    """A place for metrics. If a method raises, the place is turned off with a warning."""

    name: str
    """In warnings."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values by full names after a step. Steps do not decrease, and may repeat."""

    def show(self, step: int, name: str, path: Path) -> None:
        """Take a picture (.png) or a table (.csv)."""

    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """End; `summary` has the best evaluation of a finished run, else it is empty."""


class WandB:
    """The run's only W&B run, by the id that the run has stored."""

    name = "Weights & Biases"

    def __init__(self, config: Config, path: Path, mode: Any, run_id: str | None, options: dict[str, Any]) -> None:
        import wandb

        typed = sys.argv
        self._report = config.wandb_report and path
        try:
            sys.argv = typed[:1]  # wandb would send the command line, secrets too; the other options are in its config
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "evenkeel"),
                name=os.environ.get("WANDB_NAME", path.name),
                # a sweep's agent names its runs itself
                id=None if "WANDB_SWEEP_ID" in os.environ else run_id,
                resume="allow" if mode == "online" else None,  # offline there is no server to ask, and wandb would warn
                mode=mode,
                settings=wandb.Settings(init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT))),
                dir=path,
                config=options,
            )
        finally:
            sys.argv = typed

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send them."""
        self._run.log(dict(values), step=step)

    def show(self, step: int, name: str, path: Path) -> None:
        """Send it."""
        import wandb

        if path.suffix == ".png":
            self._run.log({name: wandb.Image(str(path))}, step=step)
        else:
            head, *rows = _read_table(path)
            self._run.log({name: wandb.Table(columns=[*head], data=rows)}, step=step)

    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """Send the best values as the summary, the report if wanted, and the remaining data."""
        if summary:
            self._run.summary.update(dict(summary))
            try:
                if self._report:
                    self._send_report(self._report)
            except Exception as error:  # the run is finished all the same
                log.warning("--wandb-report: no report was sent: %s", error)
        self._run.finish(exit_code=exit_code)

    def _send_report(self, path: Path) -> None:
        """Make the page in its own process, because that takes seconds and more libraries."""
        command = [sys.executable, "-m", __name__.partition(".")[0], "report", str(path)]
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if made.returncode:
            why = (made.stderr.strip().splitlines() or ["it could not be made"])[-1]
            log.warning("--wandb-report: no report was sent: %s", why)
            return
        import wandb

        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(path / "report.html"))
        self._run.log_artifact(artifact)


class TensorBoard:
    """Event files in the run's folder. TensorBoard hides values of an earlier attempt beyond the resumed step."""

    name = "TensorBoard"

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter  # its constructor has no types
        self._writer = make(folder, purge_step=step + 1 if folder.exists() else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write and flush them, so that a kill loses none."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, step: int, name: str, path: Path) -> None:
        """Write it to the file; a table as Markdown."""
        if path.suffix == ".png":
            import numpy as np
            from PIL import Image

            self._writer.add_image(name, np.asarray(Image.open(path).convert("RGB")), step, dataformats="HWC")
        else:
            head, *rows = _read_table(path)
            lines = [head, ["---"] * len(head), *rows]
            self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """Close the file."""
        self._writer.close()


class CsvFile:
    """A row for each report, a column for each name. Drops rows beyond the resumed step, and an incomplete row."""

    name = "metrics.csv"

    def __init__(self, path: Path, step: int) -> None:
        self.path, self._names = path, ["step"]
        if path.exists():
            rows = [row for row in self._rows() if (row["step"] or "").isdecimal() and int(row["step"]) <= step]
            self._names = list(rows[0]) if rows else self._names
            self._rewrite(rows)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row; a name that is new gets a column at the end."""
        row = {"step": step, **values}
        if new := [name for name in row if name not in self._names]:
            rows = [*self._rows(), row] if self.path.exists() else [row]
            self._names += new
            self._rewrite(rows)
        else:
            append_line(self.path, self._text([row]))

    def show(self, step: int, name: str, path: Path) -> None:
        """It is in the run's folder already."""

    def finish(self, summary: Mapping[str, float], exit_code: int) -> None:
        """Nothing to do: each row is in the file."""

    def _rows(self) -> list[dict[str, Any]]:
        whole, _, _ = self.path.read_text().rpartition("\n")
        return list(csv.DictReader(io.StringIO(whole)))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        header = dict(zip(self._names, self._names, strict=True))
        write_atomically(self.path, lambda file: file.write(self._text([header, *rows])))

    def _text(self, rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._names, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue().encode()


def _read_table(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def in_the_folder(config: Config, path: Path, step: int) -> Iterator[MetricsLog]:
    """Those that write into the run's folder, for an attempt that begins at a step."""
    for name, wanted, make in (
        ("TensorBoard", config.tensorboard, lambda: TensorBoard(path / "tensorboard", step)),
        ("metrics.csv", config.csv, lambda: CsvFile(path / "metrics.csv", step)),
    ):
        try:
            if wanted:
                yield make()
        except Exception as error:
            log.warning("%s is off: %s: %s", name, type(error).__name__, error)


def wandb_mode(asked: str) -> tuple[Any, str]:
    """What --wandb means on this machine: online, offline or disabled, and the reason if `auto` turned it off."""
    if asked != "auto":
        return asked, ""
    if mode := os.environ.get("WANDB_MODE"):
        return mode, ""
    # look where wandb looks, without its import, which takes a second, and without reading the key
    found = any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    path = next((path for name in names if (path := Path(name).expanduser()).exists()), None)
    with contextlib.suppress(OSError, UnicodeDecodeError, netrc.NetrcParseError):
        found = found or (path is not None and netrc.netrc(path).authenticators(host) is not None)
    if found:
        return "online", ""
    return "disabled", "no key found; run `wandb login` or set WANDB_API_KEY, or use --wandb offline"
