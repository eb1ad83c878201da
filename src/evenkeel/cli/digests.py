"""The digests that two runs have recorded with --digest-every: the first step at which they differ, and the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

MOST = 12
"""Tensor names to print; the others are only counted."""

Digests = Mapping[str, str]
"""Tensor name -> digest of its bits."""

Verdict = tuple[bool, str]
"""Whether two runs are equal, and a text about it."""


def last_digests(records: Iterable[Mapping[str, Any]]) -> dict[int, Digests]:
    """Step -> digests from the last attempt that did the step, from the lines of metrics.jsonl."""
    found: dict[int, Digests] = {}
    for record in records:
        if record["kind"] == "start":  # later steps are done again, or were lost
            found = {step: digests for step, digests in found.items() if step <= record["step"]}
        elif record["kind"] == "digest" and "digests" in record:
            found[record["step"]] = record["digests"]
    return found


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


def name_tensors(a: Digests, b: Digests) -> str:
    """How many tensors differ, and the names of the first."""
    names = {**a, **b}
    different = [name for name in names if a.get(name) != b.get(name)]
    lines = [f"{len(different)} of {len(names)} tensors differ:"]
    for name in different[:MOST]:
        lines.append(f"  {name}" + " (only in the first)" * (name not in b) + " (only in the second)" * (name not in a))
    if len(different) > MOST:
        lines.append(f"  and {len(different) - MOST} more")
    return "\n".join(lines)
