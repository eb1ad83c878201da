"""`python -m evenkeel audit RUN`: whether a run computed what it says."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from ..common.display import say
from ..common.files import write_json
from ..common.naming import spans
from ..config import option
from .command import refuse_ranks

if TYPE_CHECKING:
    from .audit import Audit


@dataclass(frozen=True)
class AuditCommand:
    """Check a run's ledger, and run random parts of it again.

    Example: python -m evenkeel audit runs/a --segments 3

    For runs with --digest-every N, --reduce tree and, for more parts, --keep-every. The ledger is in metrics.jsonl.
    The parts run in this process. The result is written to RUN/audit.json, for `report`; nothing else in the run
    changes. It proves the computation, not that the data is what somebody says it is. What follows after `--` are
    options of train.py that differ, for example -- --data-dir /elsewhere. Exit code 0: nothing is wrong, 1: something
    is.
    """

    run_dir: tyro.conf.Positional[Path]
    """A run directory."""
    segments: int = option(3, 0)
    """Random parts between kept checkpoints to run again."""
    seed: int = option(-1, -1, 2**63 - 1)
    """Seed of the choice of parts, to repeat it (-1: another choice each time)."""
    script: Path = Path("train.py")
    """The training script whose train(run) is the loop."""

    def __call__(self, train_options: list[str]) -> int:
        """Print a line for each check, what is wrong, and which steps are shown."""
        refuse_ranks("audit")
        from .audit import Audit  # imports torch, which the help does not need

        audit = Audit(self.run_dir, self.script, train_options)
        seed = random.randrange(10**6) if self.seed < 0 else self.seed
        checks = {name: _print(name, found) for name, found in _checks(audit, self.segments, seed)}
        steps, ranks = max(audit.last, default=0), ", ".join(map(str, audit.status.get("world_sizes", [])))
        say(f"the run had {ranks} ranks; run again on 1, with --seed {seed}: {len(audit.shown)} of {steps} steps")
        streams = all(not it.get("samples") for it in audit.ledger)
        parts = {
            "shown by running them again": spans(audit.shown) or "none",
            "shown by the chain only": spans({*range(1, steps + 1)} - audit.shown) or "none",
            "not shown": ("the order of samples, which a stream has not, and " if streams else "")
            + "what is in the data",
        }
        say("\n".join(f"{name}: {value}" for name, value in parts.items()))
        self._leave({"time": time.time(), "seed": seed, "ranks": 1, "steps": steps, "checks": checks, "parts": parts})
        return int(any(checks.values()))

    def _leave(self, verdict: dict[str, Any]) -> None:
        """Write it into the run, unless the run may not be written to."""
        try:
            write_json(self.run_dir / "audit.json", verdict)
        except OSError as error:
            say(f"not left in {self.run_dir / 'audit.json'} for `report`: {error.strerror or error}")


def _checks(audit: Audit, segments: int, seed: int) -> Iterator[tuple[str, Iterator[str]]]:
    yield f"chain of {len(audit.ledger)} records", audit.chain()
    yield "logged losses", audit.losses()
    yield "options and samples", audit.samples()
    yield "checkpoints", audit.checkpoints()
    for begin, end in audit.segments(segments, seed):
        yield f"steps {begin + 1} to {end}, run again", audit.again(begin, end)


def _print(name: str, found: Iterator[str]) -> list[str]:
    """Print a check and what it has found; returns what is wrong, a line each."""
    lines = list(found)
    say("\n".join([f"{'WRONG' if lines else 'ok':5}  {name}", *(f"       {line}" for line in lines)]))
    return lines
