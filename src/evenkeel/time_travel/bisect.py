"""Where two runs part that should be the same: the first step, tensor and operation.

A step depends on the committed state and its number alone. So both runs can be run again from a step at which they were
equal to one at which they differ, and compared at every step between. There are two cases:

- the two repetitions differ: an option, the code or the data is different, and shows in one step and one operation;
- they are equal, but one run has recorded something else: that run computed something that its options, code and data
  do not give, as a faulty GPU or memory does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cli.digests import Digests, digests_of, last_digests, name_tensors
from ..common.errors import Refusal
from ..run.manifest import step_folders, step_of
from ..run.records import read_config, read_records
from ..run.state_files import Damaged
from .replay import Asked, Replay, refuse_unless_run, replay
from .trace import Trace, first_difference


@dataclass
class Evidence:
    """The states of a run that can be compared: recorded digests, and checkpoints, which are read when asked for."""

    run: Path
    digests: dict[int, Digests] = field(default_factory=dict)
    folders: dict[int, Path] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Path) -> Evidence:
        """What a run has recorded; raises a Refusal if it is none."""
        refuse_unless_run(run)
        recorded = last_digests(read_records(run / "metrics.jsonl"))
        folders = {step_of(path): path for path in step_folders(run / "checkpoints")}
        return cls(run, recorded, {step: path for step, path in folders.items() if step and step not in recorded})

    @property
    def steps(self) -> set[int]:
        """The steps with evidence."""
        return self.digests.keys() | self.folders.keys()

    def at(self, step: int) -> Digests:
        """The digests at a step; raises a Refusal if its checkpoint is damaged."""
        if step not in self.digests:
            try:
                self.digests[step] = digests_of(self.folders[step])
            except Damaged as error:
                raise Refusal(f"{error}; to compare without this checkpoint, move it out of the run") from None
        return self.digests[step]

    def named(self, step: int, names: list[list[str]]) -> Digests:
        """The digests at a step with the names of `State.tensors`: a checkpoint counts an optimizer's parameters."""

        def full(match: re.Match[str]) -> str:
            return f"optimizers.{match[1]}.{names[int(match[1])][int(match[2])]}."

        return {re.sub(r"^optimizers\.(\d+)\.state\.(\d+)\.", full, name): it for name, it in self.at(step).items()}


@dataclass
class Parting:
    """Where two runs part."""

    equal: bool = False
    compared: int = 0
    """States that were compared before anything was run again."""
    segments: int = 0
    """Parts of a run that were run again."""
    between: tuple[int, int] = (0, 0)
    """The last step at which the recorded states are equal (0: the start), and the first at which they differ."""
    step: int = 0
    """The first step at which they differ, or the last at which they may: 0 if they are equal."""
    since: int = 0
    """The last step at which they are known to be equal; one before `step`, unless too little was recorded."""
    suspect: str = ""
    """The run that does not compute this again: its machine was wrong, not its options."""
    tensors: str = ""
    """How many tensors differ at `step`, and their names."""
    operation: str = ""
    """What differs first within the step, if it happens again."""


def bisect(a: Path, b: Path, script: Path, words: list[str]) -> Parting:
    """Find the first step at which two runs differ.

    Args:
        a, b: run directories; nothing in them changes.
        script: whose `train(run)` is the loop.
        words: options of train.py that differ from the runs', such as --data-dir.

    Raises:
        Refusal: they have no state of the same step to compare.
        Ended: a run cannot be repeated here.
    """
    first, second = Evidence.of(a), Evidence.of(b)
    found = Parting()
    if not _search(first, second, found):
        return found
    low, high = found.between
    repeated = []
    for evidence in (first, second):
        again = replay(Asked(evidence.run, high + 1, high, script, words, low))
        repeated.append(again.again.digests)
        found.segments += 1
    steps = sorted(repeated[0].keys() & repeated[1].keys())
    parted = next((step for step in steps if step > low and _differ(repeated[0][step], repeated[1][step])), 0)
    if parted:
        found.step, found.since = parted, parted - 1
        found.tensors = name_tensors(repeated[0][parted], repeated[1][parted])
        found.operation = _within((a, b), parted, script, words)
        found.segments += 2
    else:
        _blame(first, second, again, found)
    return found


def _search(first: Evidence, second: Evidence, found: Parting) -> bool:
    """Fill in `between` by halving the common steps; whether the runs differ. Once different, runs stay different."""
    steps = sorted(first.steps & second.steps)
    if not steps:
        raise Refusal(
            f"{first.run} {second.run}: no state of the same step is recorded; train with --keep-every N or "
            "--digest-every N"
        )

    def differ(step: int) -> bool:
        found.compared += 1
        return _differ(first.at(step), second.at(step))

    if not differ(steps[-1]):
        found.equal, found.between = True, (steps[-1], steps[-1])
        return False
    low, high = -1, len(steps) - 1  # equal at low, which is the start if -1; different at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if differ(steps[middle]) else (middle, high)
    found.between = (steps[low] if low >= 0 else 0, steps[high])
    return True


def _differ(a: Digests, b: Digests) -> bool:
    """Whether two states differ. A checkpoint counts an optimizer's parameters, and recorded digests name them; so of
    one of each the optimizers' tensors are compared without names, and a checkpoint may have more of them."""
    one, other = (Counter(it for name, it in found.items() if name.startswith("optimizers.")) for found in (a, b))
    return any(a[name] != b[name] for name in a.keys() & b.keys()) or not (one <= other or other <= one)


def _blame(first: Evidence, second: Evidence, again: Replay, found: Parting) -> None:
    """The repetitions are equal: the suspect is the run that has recorded something else, and it first."""
    (low, high), right = found.between, again.again.digests
    for evidence in (first, second):
        steps = [step for step in sorted(evidence.steps) if low < step <= high and step in right]
        known = {step: evidence.named(step, again.names) for step in steps}
        wrong = next((step for step in steps if _differ(known[step], right[step])), 0)
        if wrong and (not found.suspect or wrong < found.step):
            found.suspect, found.step = str(evidence.run), wrong
            found.since = max((step for step in steps if step < wrong), default=low)
            found.tensors = name_tensors(right[wrong], known[wrong])


def _within(runs: tuple[Path, Path], step: int, script: Path, words: list[str]) -> str:
    """What differs first within a step, when both runs do it again."""
    traces, facts = [], []
    for run in runs:
        trace = Trace()
        facts.append(replay(Asked(run, step, step, script, words), trace.visit).steps[0])
        traces.append(trace.entries)
    return first_difference(*traces) or _in_backward(*facts)


def _in_backward(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The forward passes are equal: what differs in the backward pass, else in the update."""
    for name, what in (("gradient", "the gradient of"), ("update", "the update of")):
        for one, other in zip(reversed(a["layers"]), reversed(b["layers"]), strict=False):  # backward begins at the end
            if one["name"] == other["name"] and one[name] != other[name]:
                return f"{what} {one['name']}: norm {one[name]:.9g} | {other[name]:.9g}"
    return ""


def exact(*runs: Path) -> bool:
    """Whether the runs have the same bits on any number of ranks, so that repeating them on one repeats their bits."""
    return all(read_config(run / "config.toml").get("reduce") == "tree" for run in runs)
