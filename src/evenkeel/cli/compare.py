"""`python -m evenkeel compare`: whether two runs are equal bit for bit; if not, from which step, where and why.

With --metrics: a table of the metrics of two runs or more (`compare_metrics`).

Reads the files of the runs and changes nothing. Imports torch only to read checkpoints.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..common.display import say
from ..common.errors import Refusal
from ..config import Flag
from ..run.manifest import step_folders, step_of
from ..run.records import read_facts, read_records
from ..run.state_files import Damaged
from . import compare_metrics
from .digests import Verdict, causes, compare_digests, digests_of, last_digests, name_tensors


@dataclass(frozen=True)
class CompareCommand:
    """Find where two runs first differ, or compare metrics of several.

    Example: python -m evenkeel compare runs/a runs/b

    Example: python -m evenkeel compare --metrics runs/a runs/b runs/c

    Train both with --digest-every 1; otherwise only the final weights or a common checkpoint can be compared.
    Differences in options, machine, libraries and code are printed too: usually one of them is the cause. Exit code 0:
    equal, 1: different.
    """

    runs: tyro.conf.Positional[
        Annotated[tuple[Path, ...], tyro.conf.arg(metavar="RUN RUN ...", help_behavior_hint="")]
    ] = ()
    """Two run directories; with --metrics: or more."""
    metrics: Flag = False
    """Print the last metrics and those of the best step, with differences from the first run."""
    json: Flag = False
    """With --metrics: print JSON."""

    def __call__(self) -> int:
        """Print the first difference and its possible causes."""
        runs = self.runs
        for path in runs:
            if not (path / "config.toml").is_file():
                raise Refusal(f"{path}: no run there (no config.toml); name two run directories")
        if len(runs) < 2:
            there = sorted((runs[0].parent if runs else Path("runs")).glob("*/config.toml"))
            others = [str(it.parent) for it in there if it.parent not in runs]
            pair = [*map(str, runs), *others, "runs/a", "runs/b"][:2]
            raise Refusal(f"compare needs two runs, as in: python -m evenkeel compare {shlex.join(pair)}")
        if self.metrics:
            found = json.dumps(compare_metrics.as_json(runs), indent=2) if self.json else compare_metrics.table(runs)
            say(found if isinstance(found, str) else "\n".join(found))
            return 0
        if runs[2:] or self.json:
            raise Refusal(f"{runs[2] if runs[2:] else '--json'}: only with --metrics; else two runs are compared")
        equal, text = compare(*runs)
        say("\n".join([text, *causes(*runs)]))
        return int(not equal)


def compare(a: Path, b: Path) -> Verdict:
    """Compare digests of common steps; without any, the final weights, else the newest checkpoints of a common step.

    Raises:
        Refusal: the runs have nothing in common to compare.
    """
    first, second = (last_digests(read_records(run / "metrics.jsonl")) for run in (a, b))
    if first.keys() & second.keys():
        return compare_digests(first, second)
    end, other = (read_facts(run / "summary.json")[0] for run in (a, b))
    verdict = None
    if {"step", "weights_sha256"} <= end.keys() & other.keys() and end["step"] == other["step"]:
        equal = end["weights_sha256"] == other["weights_sha256"]
        verdict = equal, f"the weights at the end, step {end['step']}, are {'equal' if equal else 'different'}"
    if not (verdict and verdict[0]):
        verdict = _compare_checkpoints(a, b) or verdict  # these show which tensors differ
    if verdict is None:
        missing = "they have no digests, final weights or checkpoints of the same step; run both with --digest-every 1"
        instead = f"or compare their metrics: python -m evenkeel compare --metrics {shlex.join([str(a), str(b)])}"
        raise Refusal(f"{a} {b}: nothing to compare: {missing}, {instead}")
    return verdict[0], f"no digests of a common step (--digest-every), so only one step is compared: {verdict[1]}"


def _compare_checkpoints(a: Path, b: Path) -> Verdict | None:
    first, second = ({step_of(path): path for path in step_folders(run / "checkpoints")} for run in (a, b))
    for step in sorted(first.keys() & second.keys(), reverse=True):
        try:
            digests, others = digests_of(first[step]), digests_of(second[step])
        except Damaged:
            continue
        if digests == others:
            return True, f"the checkpoints of step {step} are equal, {len(digests)} tensors each"
        return False, f"the checkpoints of step {step} are different\n{name_tensors(digests, others)}"
    return None
