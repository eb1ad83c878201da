"""What a rank of a checked job notes: `python -m evenkeel.cli.check.observed SCRIPT OPTIONS` runs SCRIPT and looks on.

The job is told by environment variables what it is to do: NOTES is the folder for what it notes, TIMED asks for times
in place of samples, HOLD=STEP:RANK:FILE lets a rank write its pid to a file in the midst of a step, and wait there.
"""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...data.batch import with_parts
from ...data.sampler import Step
from ...distributed.transfer import Transfer
from ...run.run import Run
from ...training.arrivals import BACKWARD, FORWARD, Arrivals
from ...training.distributed_loss import DistributedLoss
from ...training.evaluation import Evaluation
from .jobs import HOLD, NOTES, TIMED

WARM_UP = 3
"""Steps whose times do not count."""


def exact(batch: Any) -> str:
    """A digest of every bit of a batch; of what is no number or text only the type counts."""
    found = hashlib.sha256()

    def add(part: Any) -> Any:
        found.update(type(part).__name__.encode())
        if isinstance(part, torch.Tensor):
            whole = part.detach().cpu().contiguous().flatten()
            found.update(f"{part.dtype}{list(part.shape)}".encode() + bytes(whole.view(torch.uint8).numpy()))
        elif isinstance(part, (np.ndarray, np.generic)):
            found.update(np.ascontiguousarray(part).tobytes())
        elif isinstance(part, (str, bytes, int, float, complex)):
            found.update(repr(part).encode())
        else:
            with_parts(part, add)
        return part

    add(batch)
    return found.hexdigest()[:16]


def hold(rank: int, step: int) -> None:
    """Wait here for ever, once, if this is the rank and the step to do so."""
    at, who, file = os.environ.get(HOLD, "-1:-1:").split(":", 2)
    if (step, rank) == (int(at), int(who)) and not (path := Path(file)).exists():
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        while True:
            time.sleep(1)


def note_samples(folder: Path) -> None:
    """Write a line [step, micro-batch, first position, samples, digest] for each micro-batch before it is computed."""
    original = DistributedLoss.micro_batches

    def micro_batches(self: DistributedLoss, step: Step) -> Iterator[Any]:
        hold(self.world.rank, step.number)
        for number, batch in enumerate(original(self, step)):
            micro = step.micro_batches[number]
            line = [micro.step, micro.id, micro.start, micro.size, exact(self.last_micro_batch[0])]
            with (folder / f"samples-{self.world.rank}-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            yield batch

    DistributedLoss.micro_batches = micro_batches  # type: ignore[method-assign]


class Stopwatch:
    """Seconds by name: what has passed since the last charge. On a GPU the device is waited for."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    def charge(self, name: str) -> None:
        """Add the time since the last charge."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now

    def around(self, kind: type, method: str, before: str, after: str) -> None:
        """Charge at the beginning and at the end of each call of a method."""
        original: Callable[..., Any] = getattr(kind, method)

        @wraps(original)
        def timed(*arguments: Any, **more: Any) -> Any:
            self.charge(before)
            try:
                return original(*arguments, **more)
            finally:
                self.charge(after)

        setattr(kind, method, timed)


def note_times(folder: Path) -> None:
    """Write the seconds of the steps after the first few by what they went to, when the run ends."""
    watch, told = Stopwatch(), {FORWARD: "forward", BACKWARD: "backward"}
    mark, after, finish, steps = Arrivals.mark, Run.after_step, Run.finish, [0]
    watch.around(Arrivals, "begin", "other", "other")
    watch.around(Transfer, "__call__", "data", "transfer")
    watch.around(DistributedLoss, "step", "reduction", "optimizer")
    watch.around(Evaluation, "__call__", "other", "evaluation")
    watch.around(Run, "checkpoint", "other", "checkpoint")

    def marked(self: Arrivals, part: int) -> None:
        if part in told:
            watch.charge(told[part])
        mark(self, part)

    def after_step(self: Run, *arguments: Any) -> None:
        after(self, *arguments)
        watch.charge("other")
        steps[0] += 1
        if steps[0] == WARM_UP:
            watch.seconds.clear()

    def finished(self: Run) -> None:
        found = {"steps": steps[0] - WARM_UP, "seconds": dict(watch.seconds), "device": str(self.world.device)}
        (folder / f"times-{self.world.rank}.json").write_text(json.dumps(found))
        finish(self)

    Arrivals.mark, Run.after_step, Run.finish = marked, after_step, finished  # type: ignore[method-assign, assignment]


def main() -> None:
    """Run the script in this process as Python would, and look on."""
    folder = Path(os.environ[NOTES])
    (note_times if os.environ.get(TIMED) else note_samples)(folder)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
