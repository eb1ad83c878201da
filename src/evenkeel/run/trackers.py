"""Trackers, other places for a run's metrics: Weights & Biases, TensorBoard, a CSV file, or one's own.

All get the same values by the same names (SET/METRIC), from rank 0. An error in one never ends the training.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import logging
import netrc
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from ..common.errors import Refusal
from ..common.files import append_line, write_atomically
from ..config import Config
from ..resilience.interruption import STOPPED as INTERRUPTED

log = logging.getLogger(__name__)

INIT_TIMEOUT = 20.0
"""Seconds that wandb waits for its server (plus 10 to give up; WANDB_INIT_TIMEOUT overrides it), and a start for a
tracker of one's own."""

FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""How an attempt ends, for `close`; a stopped one is continued by the same command."""

BEST = "best/step"
"""A report with this metric has the best evaluation of a finished run: best/SET/METRIC. It is the last."""


class MetricsTracker(Protocol):
    """A place for a run's metrics: W&B, TensorBoard, or a class of your own for --tracker FILE.py:CLASS.

    Yours needs not derive from this. It is made once in each attempt, on rank 0, as CLASS(name, directory, config): the
    run's name, its directory, and all options but secret ones. It is made and called in a thread, so it may be slow. If
    it raises an error, it is off for the rest of the attempt, with a warning. DIRECTORY/trackers is for its files.

    >>> class Prints:
    ...     def __init__(self, name, directory, config): self.name = name
    ...     def log(self, metrics, step): print(self.name, step, metrics)
    ...     def close(self, status): print(status)
    >>> Prints("mine", "runs/mine", {"lr": 0.1}).log({"train/loss": 0.5}, 10)
    mine 10 {'train/loss': 0.5}
    """

    def log(self, metrics: Mapping[str, float | Path], step: int) -> None:
        """Log values by full names (SET/METRIC) after a step. Steps do not decrease, and may repeat.

        A picture is the path of a .png file in the run's directory, a table that of a .csv file. At the end of a
        finished run comes its best evaluation: best/step, best/SET/METRIC.
        """

    def close(self, status: str) -> None:
        """End the attempt: "finished", "stopped" (the same command continues), or "failed"."""


Opener = Callable[[str, Path, Mapping[str, Any], int], MetricsTracker]
"""(run name, directory, options, the step at which an attempt begins) -> a tracker."""


def own_trackers(names: Sequence[str]) -> dict[str, Opener]:
    """What makes the trackers of --tracker, by name.

    Raises:
        Refusal: there is no such class, or it is no tracker.
    """
    if not names:
        return {}
    try:
        own = importlib.import_module(".own_trackers", __package__)
    except ModuleNotFoundError:
        raise Refusal(f"--tracker {names[0]}: has been deleted from this copy of Evenkeel; leave it out") from None
    return dict(own.load(names))


class WandB:
    """The run's only W&B run, by the id that the run has stored."""

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

    def log(self, metrics: Mapping[str, float | Path], step: int) -> None:
        """Send them; the best evaluation as the summary."""
        if BEST in metrics:
            self._run.summary.update(dict(metrics))
        else:
            self._run.log({name: self._sent(value) for name, value in metrics.items()}, step=step)

    def _sent(self, value: float | Path) -> Any:
        if not isinstance(value, Path):
            return value
        import wandb

        if value.suffix == ".png":
            return wandb.Image(str(value))
        head, *rows = _read_table(value)
        return wandb.Table(columns=[*head], data=rows)

    def close(self, status: str) -> None:
        """Send the report of a finished run, if wanted, and the remaining data."""
        try:
            if self._report and status == FINISHED:
                self._send_report(self._report)
        except Exception as error:  # the run is finished all the same
            log.warning("--wandb-report: no report was sent: %s", error)
        self._run.finish(exit_code={FINISHED: 0, STOPPED: INTERRUPTED}.get(status, 1))

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

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make: Any = SummaryWriter  # its constructor has no types
        self._writer = make(folder, purge_step=step + 1 if folder.exists() else None)

    def log(self, metrics: Mapping[str, float | Path], step: int) -> None:
        """Write and flush them, so that a kill loses none; a table as Markdown."""
        for name, value in metrics.items():
            if not isinstance(value, Path):
                self._writer.add_scalar(name, value, step)
            elif value.suffix == ".png":
                import numpy as np
                from PIL import Image

                self._writer.add_image(name, np.asarray(Image.open(value).convert("RGB")), step, dataformats="HWC")
            else:
                head, *rows = _read_table(value)
                lines = [head, ["---"] * len(head), *rows]
                self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)
        self._writer.flush()

    def close(self, status: str) -> None:
        """Close the file."""
        self._writer.close()


class CsvFile:
    """A row for each report, a column for each name. Drops rows beyond the resumed step, and an incomplete row."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self._names = path, ["step"]
        if path.exists():
            rows = [row for row in self._rows() if (row["step"] or "").isdecimal() and int(row["step"]) <= step]
            self._names = list(rows[0]) if rows else self._names
            self._rewrite(rows)

    def log(self, metrics: Mapping[str, float | Path], step: int) -> None:
        """Append a row of the numbers; a name that is new gets a column at the end."""
        numbers = {name: value for name, value in metrics.items() if not isinstance(value, Path)}
        if not numbers:
            return  # pictures and tables are in the run's folder already
        row = {"step": step, **numbers}
        if new := [name for name in row if name not in self._names]:
            rows = [*self._rows(), row] if self.path.exists() else [row]
            self._names += new
            self._rewrite(rows)
        else:
            append_line(self.path, self._text([row]))

    def close(self, status: str) -> None:
        """Nothing to do: each row is in the file."""

    def _rows(self) -> list[dict[str, Any]]:
        whole, _, _ = self.path.read_text(encoding="utf-8").rpartition("\n")
        return list(csv.DictReader(io.StringIO(whole)))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        header = dict(zip(self._names, self._names, strict=True))
        write_atomically(self.path, lambda file: file.write(self._text([header, *rows])))

    def _text(self, rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._names, extrasaction="ignore", lineterminator="\n").writerows(rows)
        return text.getvalue().encode()


def _read_table(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def in_the_folder(config: Config, path: Path) -> dict[str, Callable[[int], MetricsTracker]]:
    """What makes those that write into the run's folder, by name, from the step at which an attempt begins."""
    found: dict[str, Callable[[int], MetricsTracker]] = {}
    if config.tensorboard:
        found["TensorBoard"] = partial(TensorBoard, path / "tensorboard")
    if config.csv:
        found["metrics.csv"] = partial(CsvFile, path / "metrics.csv")
    return found


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
