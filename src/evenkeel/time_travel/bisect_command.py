"""`python -m evenkeel bisect A B`: the first step at which two runs part, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from ..cli.digests import causes
from ..common.display import say
from ..config import Flag
from .command import refuse_ranks

if TYPE_CHECKING:
    from .bisect import Parting


@dataclass(frozen=True)
class BisectCommand:
    """Find the first step at which two runs differ, by parts run again.

    Example: python -m evenkeel bisect runs/a runs/b

    For runs that should be equal. Their kept checkpoints (--keep-every) and digests (--digest-every) are compared in
    halves; then both are run again from the last equal state, on this process, and nothing is written into them. What
    follows after `--` are options of train.py that differ, for example -- --data-dir /elsewhere. Exit code 0: equal, 1:
    different.
    """

    run_a: tyro.conf.Positional[Path]
    """A run directory."""
    run_b: tyro.conf.Positional[Path]
    """The run directory to compare it with."""
    script: Path = Path("train.py")
    """The training script whose train(run) is the loop."""
    json: Flag = False
    """Print one JSON object with all that was found."""

    def __call__(self, train_options: list[str]) -> int:
        """Print the step, the tensors, the operation, and what else differs between the runs."""
        refuse_ranks("bisect")
        from .bisect import bisect, exact  # imports torch, which the help does not need

        found = bisect(self.run_a, self.run_b, self.script, train_options)
        others = [] if found.equal else causes(self.run_a, self.run_b)
        if self.json:
            say(json.dumps(asdict(found) | {"causes": others[1:]}))
        else:
            say("\n".join([*_lines(found, exact(self.run_a, self.run_b)), *others]))
        return int(not found.equal)


def _lines(found: Parting, exact: bool) -> list[str]:
    compared = f"{found.compared} recorded state{'s' * (found.compared != 1)} compared"
    if found.equal:
        return [f"no difference at step {found.between[1]}, the last that both have recorded ({compared})"]
    low, high = found.between
    lines = [f"equal at step {low}" if low else "not compared before the first step", f"different at step {high}"]
    lines = [f"{', '.join(lines)} ({compared}); run again: {found.segments} parts"]
    if found.operation:
        return [*lines, f"they part in step {found.step}, in {found.operation}", found.tensors]
    if found.suspect and exact:
        step = f"step {found.step}" if found.step == found.since + 1 else f"steps {found.since + 1} to {found.step}"
        return [
            *lines,
            "run again, both compute the same at every step: options, code and data are not the cause",
            f"{found.suspect} has recorded another state after {step}; its memory, its GPU or its disk was wrong",
            found.tensors,
        ]
    if found.step and not found.suspect:
        return [*lines, f"they part in step {found.step}", found.tensors]
    ring = "" if exact else "; with --reduce ring the bits also depend on the number of ranks, so train with tree"
    return [*lines, f"run again on one process, both compute the same at every step{ring}"]
