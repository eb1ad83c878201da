"""The sharded task, slowed down, whose ranks are killed at chosen moments.

STRIKES has words MOMENT:RANK:STEP, each of which kills a rank once, or "all", when so many steps are done: in the
"loss", inside the "optimizer"'s step, in the "copy" into a slot, or when the state is "evaluated". STRUCK is a folder.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from evenkeel.common.phases import activity
from evenkeel.training.slots import Slot
from tests.support.sharded_task import Sharded


def strike(moment: str) -> None:
    """Kill this rank, if it is its moment for the first time."""
    for word in os.environ.get("STRIKES", "").split():
        which, rank, step = word.split(":")
        done = Path(os.environ["STRUCK"]) / f"{word}-{os.environ['RANK']}"
        mine = rank in ("all", os.environ["RANK"])
        if (which, int(step)) == (moment, activity.step) and mine and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Struck(Sharded):
    """Sleeps in each micro-batch."""

    def optimizers(self, model: nn.Module, config: Any) -> list[Optimizer]:
        made = super().optimizers(model, config)
        made[0].register_step_post_hook(lambda *_: strike("optimizer"))
        return made

    def after_evaluation(self, metrics: dict[str, float], step: int) -> None:
        if os.environ["RANK"] == "0" and "EVALUATED" in os.environ:
            with Path(os.environ["EVALUATED"]).open("a") as file:
                file.write(f"{step}\n")
        strike("evaluated")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        strike("loss")
        return super().loss(model, batch)


class Interrupted(Slot):
    """A slot whose rank may be killed when the tensors are copied, and it is not whole yet."""

    def complete(self, captured: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        strike("copy")
        super().complete(captured, facts)


import evenkeel.training.slots as slots  # noqa: E402

slots.Slot = Interrupted  # type: ignore[misc]
