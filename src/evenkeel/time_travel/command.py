"""`python -m evenkeel replay RUN --step N`: run a step again and look into it."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..common.display import say
from ..common.errors import FAILED, Refusal
from ..config import Flag, MaybePath, option
from .page import write_page

if TYPE_CHECKING:
    from .replay import Replay, Visit

MOST = 8
"""Samples and layers to print of a step; --json has all."""


@dataclass(frozen=True)
class ReplayCommand:
    """Run a step of a run again and look into it.

    Example: python -m evenkeel replay runs/classify --step 120

    Begins at the newest kept checkpoint before that step (--keep-every keeps more), and writes nothing into the run.
    What follows after `--` are options of train.py that differ, for example -- --data-dir /elsewhere. Exit code 1: the
    replay does not agree with what the run has recorded.
    """

    run: tyro.conf.Positional[Path]
    """The run directory."""
    step: Annotated[str, tyro.conf.arg(metavar="N[:M]")]
    """The step, counted from 1 as in messages, or the steps N to M."""
    script: Path = Path("train.py")
    """The training script whose train(run) is the loop."""
    ranks: int = option(1, 1, 1024)
    """Processes on this machine, started by torchrun; a ring has the bits of its own number of ranks only."""
    python: Annotated[str, tyro.conf.arg(metavar="FILE.py:FUNCTION", help_behavior_hint="")] = ""
    """Call this function with (model, batch, step) before each micro-batch of these steps."""
    pdb: Flag = False
    """Stop in the debugger before each micro-batch of these steps, with `model`, `batch` and `step`."""
    save_samples: MaybePath = None
    """Write the samples of these steps into this folder: pictures as PNG, text as text, all else for torch.load."""
    html: MaybePath = None
    """Also write what was found, with all samples and layers, as a page into this new file."""
    json: Flag = False
    """Print one JSON object with all that was found."""

    def __call__(self, train_options: list[str]) -> int:
        """Replay, and print what was found."""
        first, last = self._steps()
        refuse_ranks("replay")
        self._refuse_html()
        from .ranks import replay_on  # imports torch, which the help does not need
        from .replay import Asked, replay

        visit = self._visit()
        asked = Asked(self.run, first, last, self.script, train_options, save_samples=self._folder())
        found = replay(asked, visit) if self.ranks == 1 else replay_on(self.ranks, asked, self.python)
        if self.html:
            write_page(self.html, self.run.name, found)
        if self.json:
            facts = {name: value for name, value in asdict(found).items() if name != "again"}
            say(json.dumps(_finite(facts)))
        else:
            say("\n".join(told(found)))
        return 0 if found.agrees else FAILED

    def _steps(self) -> tuple[int, int]:
        numbers = re.fullmatch("([0-9]{1,12})(?::([0-9]{1,12}))?", self.step)
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (0, 0)
        if not 1 <= first <= last:
            raise Refusal(f"--step {self.step[:40]}: give a step from 1 on, or N:M with N up to M, for example 120:125")
        return first, last

    def _refuse_html(self) -> None:
        """Refuse a file that cannot be a new one outside the run; after a long replay it would be too late."""
        file = self.html
        if not file:
            return
        if file.resolve().is_relative_to(self.run.resolve()):
            raise Refusal(f"--html {file}: is in the run, which replay leaves as it is; name a file elsewhere")
        if os.path.lexists(file):
            raise Refusal(f"--html {file}: exists; name a new file")
        if not file.parent.is_dir():
            raise Refusal(f"--html {file}: there is no folder {file.parent}; make it, or name another one")

    def _folder(self) -> Path | None:
        if self.save_samples:
            if self.save_samples.resolve().is_relative_to(self.run.resolve()):
                raise Refusal(f"--save-samples {self.save_samples}: is in the run, which replay leaves as it is")
            try:
                self.save_samples.mkdir(parents=True, exist_ok=True)
                full = any(self.save_samples.iterdir())
            except OSError as error:
                raise Refusal(f"--save-samples {self.save_samples}: {error.strerror}; name another folder") from None
            if full:
                raise Refusal(f"--save-samples {self.save_samples}: is not empty; name a new folder")
        return self.save_samples

    def _visit(self) -> Visit | None:
        if self.pdb and (self.python or self.ranks > 1):
            raise Refusal("--pdb: works on one rank, and without --python, whose function can call breakpoint() itself")
        from .replay import function_of

        return debug if self.pdb else function_of(self.python)


def refuse_ranks(command: str) -> None:
    """Refuse to be one of several processes."""
    if "RANK" in os.environ:
        started = "torchrun has started this process"
        more = ", with --ranks N for several" if command == "replay" else ""
        raise Refusal(f"{command}: {started}; start {command} without torchrun{more}")


def debug(model: Any, batch: Any, step: int) -> None:
    """Stop here, on the terminal: what the loop prints in a replay is discarded."""
    from pdb import Pdb

    Pdb(stdin=sys.__stdin__, stdout=sys.__stdout__).set_trace()


def told(found: Replay) -> list[str]:
    """The lines about a replay."""
    lines = [f"evenkeel: replayed from {f'the checkpoint of step {found.started}' if found.started else 'the start'}"]
    lines += [f"evenkeel: code or libraries differ from the run's: {found.other}"] if found.other else []
    for step in found.steps:
        lines += _step(step)
    lines += [f"evenkeel: {found.ended}"] if found.ended else []
    return [*lines, f"evenkeel: {found.agreement}"]


def _step(step: dict[str, Any]) -> list[str]:
    lines = [f"step {step['step']}: loss {step['loss']:.6g}, norm of the gradient {step['norm']:.6g}"]
    if bad := step["nonfinite"]:
        where = f" in {bad['module']}" if bad["module"] else ""
        lines.append(f"  the first {bad['value']} is the result of {bad['operation']}{where}")
        lines += [f"    {bad['line']}"] if bad["line"] else []
        lines += ["    its input is not finite already: the data, or the weights"] if bad["given"] else []
        lines += [f"    sample {_sample(it)}" for it in bad["samples"][:MOST]]
    lines += [f"  {step['note']}"] if step["note"] else []
    for it in step["samples"][:MOST]:
        loss = "" if it["loss"] is None else f"  loss {it['loss']:.6g}"
        lines.append(f"  sample {_sample(it)}{loss}")
    if more := len(step["samples"]) - MOST:
        lines += [f"  and {more} samples more (--json has all)"] if more > 0 else []
    width = max((len(it["name"]) for it in step["layers"]), default=0)
    lines.append(f"  {'layer'.ljust(width)}  gradient    update      weights")
    for it in sorted(step["layers"], key=lambda it: -(it["gradient"] or 0.0))[:MOST]:
        values = (
            f"{'-' if it[name] is None else format(it[name], '.4g'):<10}" for name in ("gradient", "update", "weights")
        )
        lines.append(f"  {it['name'].ljust(width)}  {'  '.join(values)}".rstrip())
    largest = ", ".join(f"{it['module']} {it['largest']:.4g}" for it in step["activations"][:4])
    return [*lines, f"  largest activations: {largest}"] if largest else lines


def _sample(it: dict[str, Any]) -> str:
    return f"{it['sample']}" + (f" ({it['source']})" if it["source"] else "")


def _finite(value: Any) -> Any:
    """The same for JSON, which has no NaN: as text."""
    if isinstance(value, dict):
        return {name: _finite(it) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(it) for it in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
