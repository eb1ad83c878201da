"""What two runs have recorded: the first step and the tensors at which their digests differ, and what else differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..common.arguments import flag
from ..config import HARMLESS
from ..run.checkpoint import Checkpoints
from ..run.fingerprint import describe, differences
from ..run.manifest import load
from ..run.records import read_config, read_facts, read_records

MOST = 12
"""Tensor names to print; the others are only counted."""

Digests = Mapping[str, str]
"""Tensor name -> digest of its bits."""

Verdict = tuple[bool, str]
"""Whether two runs are equal, and a text about it."""


def last_of_steps(records: Iterable[dict[str, Any]], kind: str, name: str = "step") -> dict[int, dict[str, Any]]:
    """Step -> its record of a kind by the last attempt that did the step; only records that have `name`."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if record["kind"] == "start":  # later steps are done again, or were lost
            found = {step: it for step, it in found.items() if step <= record["step"]}
        elif record["kind"] == kind and name in record:
            found[record["step"]] = record
    return found


def last_digests(records: Iterable[dict[str, Any]]) -> dict[int, Digests]:
    """Step -> digests from the last attempt that did the step, from the lines of metrics.jsonl."""
    return {step: it["digests"] for step, it in last_of_steps(records, "digest", "digests").items()}


def compare_digests(a: Mapping[int, Digests], b: Mapping[int, Digests]) -> Verdict:
    """Find the first common step whose digests differ; at least one step is in both."""
    steps = sorted(a.keys() & b.keys())
    for number, step in enumerate(steps):
        if a[step] != b[step]:
            before = f"equal at step {steps[number - 1]}" if number else "no step before it was compared"
            text = f"different from step {step} on ({before}; {number + 1} of {len(steps)} common steps compared)"
            return False, f"{text}\n{name_tensors(a[step], b[step])}"
    compared = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return True, f"equal: {len(steps)} compared ({compared}), {len(a[steps[-1]])} tensors each"


def different(a: Digests, b: Digests) -> list[str]:
    """Names of the tensors that differ, or that only one of the two has."""
    return [name for name in {**a, **b} if a.get(name) != b.get(name)]


def name_tensors(a: Digests, b: Digests) -> str:
    """How many tensors differ, and the names of the first."""
    names = different(a, b)
    lines = [f"{len(names)} of {len({**a, **b})} tensors differ:"]
    for name in names[:MOST]:
        only = " (only in the first)" if name not in b else " (only in the second)" if name not in a else ""
        lines.append(f"  {name}{only}")
    return "\n".join([*lines, *[f"  and {len(names) - MOST} more"] * (len(names) > MOST)])


def digests_of(checkpoint: Path) -> Digests:
    """Those of a checkpoint's tensors; raises Damaged."""
    from ..training.digest import digests
    from ..training.staging import named_tensors

    return digests(named_tensors(load(checkpoint)))


def causes(a: Path, b: Path) -> list[str]:
    """Lines about other differences between the runs: options, numbers of ranks, machine, libraries and code."""
    options, others = (read_config(run / "config.toml") for run in (a, b))
    lines = [
        f"  {flag(name)}: {options.get(name, 'unset')} | {others.get(name, 'unset')}"
        + (" (may change within a run)" if name in HARMLESS else "")
        for name in options | others
        if options.get(name) != others.get(name)
    ]
    ranks, other_ranks = (read_facts(run / "status.json")[0].get("world_sizes", []) for run in (a, b))
    lines += [f"  ranks, by attempt: {ranks} | {other_ranks}"] if ranks != other_ranks else []
    first, second = (Checkpoints(run / "checkpoints", 1).newest_manifest() for run in (a, b))
    if first and second:
        parts = differences(first.fingerprint, second.fingerprint)
        lines += [f"  {name}: {value} | {other}" for name, (value, other) in parts.items()]
    else:
        lines.append("  machine, libraries and code: unknown, because one of the runs has no checkpoint")
    for run in (a, b):
        for record in read_records(run / "metrics.jsonl"):
            if record["kind"] == "bits" and "differences" in record:
                where = f"changed within {run}, from step {record['step']} on"
                lines.append(f"  {where}: {describe(record['differences'])}")
    return ["what else differs:", *lines] if lines else []
