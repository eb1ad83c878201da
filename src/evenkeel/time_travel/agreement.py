"""Whether a replay computes what the run has recorded: in every bit by its digests, else by logged loss and norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cli.digests import different, last_digests, last_of_steps

ROUNDING = 1e-3
"""Relative difference of losses and norms up to which a replay agrees but for rounding, which grows with the steps."""


@dataclass
class Recorded:
    """What a run has recorded of its steps, of the last attempt that did each."""

    digests: dict[int, Mapping[str, str]] = field(default_factory=dict)
    logged: dict[int, tuple[float | None, float | None]] = field(default_factory=dict)
    """Step -> loss and norm of the gradient."""

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]]) -> Recorded:
        """From the lines of metrics.jsonl."""
        lines = list(records)
        logged = {
            step: (it.get("loss", it.get("train/loss")), it.get("grad_norm", it.get("train/grad_norm")))
            for step, it in last_of_steps(lines, "train").items()
        }
        return cls(dict(last_digests(lines)), logged)


def agreement(run: Recorded, again: Recorded, exact: bool) -> tuple[bool, str]:
    """Whether a replay agrees with its run, and a line about it.

    Args:
        run: what the run has recorded.
        again: what the replay has found.
        exact: the bits must be equal on any number of ranks: --reduce tree with the same code and libraries.
    """
    steps = sorted(run.digests.keys() & again.digests.keys())
    unequal = next((step for step in steps if run.digests[step] != again.digests[step]), None)
    if steps and unequal is None:
        return True, f"agrees in every bit ({_shown(steps)} compared)"
    if exact and unequal is not None:
        return False, _different(unequal, run.digests[unequal], again.digests[unequal])
    bits = f"; the digests differ from step {unequal} on, as of a ring on other ranks" if unequal is not None else ""
    worst, known = 0.0, sorted(run.logged.keys() & again.logged.keys())
    for step in known:
        for name, old, new in zip(("loss", "norm of the gradient"), run.logged[step], again.logged[step], strict=True):
            apart = _apart(old, new)
            if apart > ROUNDING:
                return False, f"differs: step {step} has the {name} {new}, the run logged {old}"
            worst = max(worst, apart)
    if known:
        how = f"agrees to {worst:.1g}" if worst else "agrees in every digit of the logged loss and norm"
        return True, f"{how} ({_shown(known)} compared){bits}"
    if unequal is not None:
        return False, _different(unequal, run.digests[unequal], again.digests[unequal])
    return True, "not compared: the run has logged none of these steps; --log-every 1 or --digest-every N logs more"


def _apart(old: float | None, new: float | None) -> float:
    """The relative difference; None is not finite."""
    if old is None or new is None or not (math.isfinite(old) and math.isfinite(new)):
        finite = [it is not None and math.isfinite(it) for it in (old, new)]
        return 0.0 if finite[0] == finite[1] else math.inf
    return abs(old - new) / max(abs(old), abs(new), 1e-12)


def _shown(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _different(step: int, run: Mapping[str, str], again: Mapping[str, str]) -> str:
    names = different(run, again)
    return f"differs: from step {step} on, {len(names)} of {len(run)} tensors, the first {names[0]}"
