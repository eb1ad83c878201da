"""Notes of a checked job's rank: `python -m evenkeel.cli.check.observed SCRIPT OPTIONS` runs SCRIPT and observes it.

NOTES is the folder for the notes. With HOLD=STEP:RANK:FILE a rank writes its pid to a file in the middle of a step, and
waits.
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

from ...data.batch import dense, with_parts
from ...data.sampler import Step
from ...distributed.transfer import Transfer
from ...run.checkpointer import Checkpointer
from ...run.run import Run
from ...training.arrivals import BACKWARD, FORWARD, Arrivals
from ...training.distributed_loss import DistributedLoss
from ...training.evaluation import Evaluation
from .jobs import HOLD, NOTES

WARM_UP = 3
"""Steps whose times do not count."""


def exact(batch: Any) -> str:
    """A digest of every bit of a batch; other values than numbers and text count by their type only."""
    found = hashlib.sha256()

    def add(part: Any) -> Any:
        found.update(type(part).__name__.encode())
        if isinstance(part, torch.Tensor):
            for values in dense(part.detach().cpu()):
                found.update(f"{values.dtype}{list(values.shape)}".encode())
                found.update(bytes(values.contiguous().flatten().view(torch.uint8).numpy()))
        elif isinstance(part, (np.ndarray, np.generic)):
            found.update(np.ascontiguousarray(part).tobytes())
        elif isinstance(part, (str, bytes, int, float, complex)):
            found.update(repr(part).encode())
        else:
            with_parts(part, add)
        return part

    add(batch)
    return found.hexdigest()[:16]


class Watch:
    """Seconds by name: the time since the last charge. Waits for a GPU to finish."""

    def __init__(self) -> None:
        self.steps, self.last = 0, time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def charge(self, name: str) -> None:
        """Add the time since the last charge."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] += now - self.last
        self.last = now

    def around(self, kind: type, method: Callable[..., Any], before: str, after: str) -> None:
        """Charge at the beginning and at the end of each call of a method."""

        @wraps(method)
        def timed(*arguments: Any, **more: Any) -> Any:
            self.charge(before)
            returned = method(*arguments, **more)
            self.charge(after)
            return returned

        setattr(kind, method.__name__, timed)


def pause(rank: int, step: int) -> None:
    """Wait for ever, once, if this is the rank and the step in HOLD."""
    at, who, file = os.environ[HOLD].split(":", 2)
    if (step, rank) == (int(at), int(who)) and not (path := Path(file)).exists():
        path.with_suffix(".new").write_text(str(os.getpid()))
        path.with_suffix(".new").rename(path)
        while True:
            time.sleep(1)


def observe(folder: Path) -> None:
    """Patch methods of this process to note each micro-batch before it is computed, and the time by part."""
    watch, parts = Watch(), {FORWARD: "forward", BACKWARD: "backward"}
    micro_batches, lap, after_step = DistributedLoss.micro_batches, Arrivals.lap, Run.after_step
    watch.around(Arrivals, Arrivals.begin_step, "other", "other")
    watch.around(Transfer, Transfer.__call__, "data", "transfer")
    watch.around(DistributedLoss, DistributedLoss.step, "reduction", "optimizer")
    watch.around(Evaluation, Evaluation.__call__, "other", "evaluation")
    watch.around(Checkpointer, Checkpointer.after_step, "other", "checkpoint")

    def noted(self: DistributedLoss, step: Step) -> Iterator[Any]:
        pause(self.world.rank, step.number)
        for number, batch in enumerate(micro_batches(self, step)):
            line = [*step.micro_batches[number], exact(self.last_micro_batch[0])]
            with (folder / f"samples-{self.world.rank}-{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            watch.charge("notes")
            yield batch

    def lapped(self: Arrivals, part: int) -> None:
        if part in parts:
            watch.charge(parts[part])
        lap(self, part)

    def after(self: Run, *arguments: Any) -> None:
        after_step(self, *arguments)
        watch.charge("other")
        watch.steps += 1
        if watch.steps == WARM_UP:
            watch.seconds.clear()
        times = {"steps": watch.steps - WARM_UP, "seconds": watch.seconds}
        (folder / f"times-{self.world.rank}.json").write_text(json.dumps(times))

    DistributedLoss.micro_batches, Arrivals.lap, Run.after_step = noted, lapped, after  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    observe(Path(os.environ[NOTES]))
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
