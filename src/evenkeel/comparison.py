"""`python -m evenkeel compare`: whether two runs hold the same bits, and if not, since when, where and perhaps why.

Reads what the runs have left and changes nothing. torch is imported only where checkpoints have to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from .checkpoint import Checkpoints, Damaged, load, step_folders, step_of
from .config import HARMLESS, flag
from .errors import Refusal
from .fingerprint import describe, differences
from .records import read_config, read_facts, read_records

MOST = 12
"""Names of tensors that are shown; the rest is counted."""


class Verdict(NamedTuple):
    """What came of a comparison."""

    equal: bool
    text: str


@dataclass(frozen=True)
class CompareCommand:
    """Find the first step at which two runs differ, and in which tensors. Exit code 0: equal, 1: different.

    Both runs need digests (--digest-every of train.py) for that; without, their ends or checkpoints are compared.
    Differences of options, machine, libraries and code follow, for one of them usually is the cause.
    """

    run_a: tyro.conf.Positional[Path]
    """A run directory."""
    run_b: tyro.conf.Positional[Path]
    """Another one."""

    def __call__(self, train_options: list[str]) -> int:
        """Print what was found."""
        if train_options:
            raise Refusal(f"-- {' '.join(train_options)}: only `plan` takes options of train.py; leave them out")
        for path in (self.run_a, self.run_b):
            if not (path / "config.toml").is_file():
                raise Refusal(f"{path}: no run there (no config.toml); name two run directories")
        equal, text = compare(self.run_a, self.run_b)
        print(text)
        for line in causes(self.run_a, self.run_b):
            print(line)
        return int(not equal)


def compare(a: Path, b: Path) -> Verdict:
    """By the digests of common steps, else by the weights at the end, else by the newest checkpoints of a common step.

    Raises:
        Refusal: the runs have nothing in common that could be compared.
    """
    first, second = (last_digests(read_records(run / "metrics.jsonl")) for run in (a, b))
    if first.keys() & second.keys():
        return compare_digests(first, second)
    verdict = _compare_ends(a, b)
    if verdict is None or not verdict.equal:
        verdict = _compare_checkpoints(a, b) or verdict
    if verdict is None:
        raise Refusal(
            f"{a} {b}: nothing to compare: no digests, ends or checkpoints of the same step; run both with "
            "--digest-every 1"
        )
    return Verdict(verdict.equal, f"no digests of a common step (--digest-every), so only one step: {verdict.text}")


def last_digests(records: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, str]]:
    """Step -> digests by tensor, of the last attempt that did the step.

    Args:
        records: lines of metrics.jsonl, in order.
    """
    found: dict[int, dict[str, str]] = {}
    for record in records:
        if record["kind"] == "start":  # what an earlier attempt did after this step is done again, or never was
            found = {step: digests for step, digests in found.items() if step <= record["step"]}
        elif record["kind"] == "digest" and "digests" in record:
            found[record["step"]] = record["digests"]
    return found


def compare_digests(a: Mapping[int, Mapping[str, str]], b: Mapping[int, Mapping[str, str]]) -> Verdict:
    """Find the first difference.

    Args:
        a: step -> digests by tensor.
        b: the other run's; they have a step in common.
    """
    steps = sorted(a.keys() & b.keys())
    for number, step in enumerate(steps):
        if a[step] != b[step]:
            before = f"equal at step {steps[number - 1]}" if number else "no step before it was compared"
            text = f"different from step {step} on ({before}; {number + 1} of {len(steps)} common steps compared)"
            return Verdict(False, f"{text}\n{_name_tensors(a[step], b[step])}")
    shown = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return Verdict(True, f"equal: {len(steps)} compared ({shown}), {len(a[steps[-1]])} tensors each")


def causes(a: Path, b: Path) -> list[str]:
    """In what the runs were different from the beginning, as lines: options, numbers of ranks, what bits depend on."""
    options, others = (read_config(run / "config.toml") for run in (a, b))
    names = [*options, *(name for name in others if name not in options)]
    lines = [
        f"  {flag(name)}: {options.get(name, 'unset')} | {others.get(name, 'unset')}"
        + " (may change within a run)" * (name in HARMLESS)
        for name in names
        if options.get(name) != others.get(name)
    ]
    ranks = [read_facts(run / "status.json")[0].get("world_sizes", []) for run in (a, b)]
    if ranks[0] != ranks[1]:
        lines.append(f"  ranks, by attempt: {ranks[0]} | {ranks[1]}")
    manifests = [Checkpoints(run / "checkpoints", 1, ("", "min")).newest_manifest() for run in (a, b)]
    if manifests[0] and manifests[1]:
        found = differences(manifests[0].fingerprint, manifests[1].fingerprint)
        lines += [f"  {name}: {old} | {new}" for name, (old, new) in found.items()]
    else:
        lines.append("  machine, libraries and code: not known, for one of them has no checkpoint")
    for run in (a, b):
        for record in read_records(run / "metrics.jsonl"):
            if record["kind"] == "bits" and "differences" in record:
                changed = {name: (old, new) for name, (old, new) in record["differences"].items()}
                lines.append(f"  changed within {run}, from step {record['step']} on: {describe(changed)}")
    return ["what else differs:", *lines] if lines else []


def _compare_ends(a: Path, b: Path) -> Verdict | None:
    ends = [read_facts(run / "summary.json")[0] for run in (a, b)]
    (step, weights), (other_step, others) = ((end.get("step"), end.get("weights_sha256")) for end in ends)
    if None in (step, weights, others) or step != other_step:
        return None
    equal = weights == others
    return Verdict(equal, f"the weights at the end, step {step}, are {'equal' if equal else 'different'}")


def _compare_checkpoints(a: Path, b: Path) -> Verdict | None:
    first, second = ({step_of(path): path for path in step_folders(run / "checkpoints")} for run in (a, b))
    for step in sorted(first.keys() & second.keys(), reverse=True):
        try:
            a_digests, b_digests = (_digests_of(path) for path in (first[step], second[step]))
        except Damaged:
            continue
        if a_digests == b_digests:
            return Verdict(True, f"the checkpoints of step {step} are equal, {len(a_digests)} tensors each")
        text = f"the checkpoints of step {step} are different"
        return Verdict(False, f"{text}\n{_name_tensors(a_digests, b_digests)}")
    return None


def _digests_of(path: Path) -> dict[str, str]:
    """Of everything in a checkpoint, read into memory; optimizers name parameters by number there."""
    from .digest import digests
    from .state import named_tensors

    return digests(named_tensors(load(path)))


def _name_tensors(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    names = [*a, *(name for name in b if name not in a)]
    different = [name for name in names if a.get(name) != b.get(name)]
    lines = [
        f"  {name}" + (" (only in the first)" * (name not in b) + " (only in the second)" * (name not in a))
        for name in different[:MOST]
    ]
    if len(different) > MOST:
        lines.append(f"  and {len(different) - MOST} more")
    return "\n".join([f"{len(different)} of {len(names)} tensors differ:", *lines])
