"""The sharded task, slowed down, whose ranks are killed at chosen moments.

STRIKES has words MOMENT:RANK:STEP, each of which kills a rank once, or "all", when so many steps are done: in the
"loss", inside the "optimizer"'s step, in the "copy" into a slot, when the state is "evaluated", or in the "replica"'s
exchange, when the older copy is already overwritten; "hold" stops it there instead. STRUCK is a folder. A rank of
`Late` is late to commit a step that LATE names, as RANK:STEPS-BEFORE.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

from evenkeel.common.phases import activity
from evenkeel.training.replica import Replica
from evenkeel.training.slots import Slot
from tests.support.sharded_task import Sharded


def strike(moment: str) -> None:
    """Kill this rank, if it is its moment for the first time."""
    for word in os.environ.get("STRIKES", "").split():
        which, rank, step = word.split(":")
        done = Path(os.environ["STRUCK"]) / f"{word}-{os.environ.get('RANK', '0')}"
        mine = rank in ("all", os.environ.get("RANK", "0"))
        if (which, int(step)) == (moment, activity.step) and mine and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGSTOP if moment == "hold" else signal.SIGKILL)


class Struck(Sharded):
    """Sleeps in each micro-batch."""

    def optimizers(self, model: nn.Module, config: Any) -> list[Optimizer]:
        made = super().optimizers(model, config)
        made[0].register_step_post_hook(lambda *_: strike("optimizer"))
        return made

    def after_evaluation(self, metrics: dict[str, float], step: int) -> None:
        if os.environ.get("RANK", "0") == "0" and "EVALUATED" in os.environ:
            with Path(os.environ["EVALUATED"]).open("a") as file:
                file.write(f"{step}\n")
        strike("evaluated")

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("PAUSE", "0")))
        strike("loss")
        return super().loss(model, batch)


class Late(Struck):
    """The rank in LATE is late to commit. It has a buffer, so that the loss is added up before all ranks commit."""

    def model(self) -> nn.Module:
        made = super().model()
        made.register_buffer("buffer", torch.zeros(1))
        return made

    def rates(self, config: Any, step: int, total_steps: int) -> dict[str, float]:
        if os.environ.get("LATE") == f"{os.environ['RANK']}:{step}":
            time.sleep(0.5)
        return super().rates(config, step, total_steps)


class Scheduled(Struck):
    """Its rates are those of torch's schedulers, one of which is stepped by evaluations, and halves the rate."""

    best: ClassVar[Any] = ("loss", "min")

    def schedulers(self, optimizers: list[Optimizer], config: Any) -> list[Any]:
        warm = lr_scheduler.LinearLR(optimizers[0], 0.1, total_iters=4)
        rates = lr_scheduler.SequentialLR(
            optimizers[0], [warm, lr_scheduler.CosineAnnealingLR(optimizers[0], config.max_steps)], [4]
        )
        return [rates, lr_scheduler.ReduceLROnPlateau(optimizers[0], factor=0.5, patience=0, threshold=1.0)]


class Interrupted(Slot):
    """A slot whose rank may be killed when the tensors are copied, and it is not whole yet."""

    def complete(self, captured: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        strike("copy")
        super().complete(captured, facts)


class InterruptedReplica(Replica):
    """A copy whose rank may be killed or stopped while rows are on their way."""

    def _swap(self, sent: Tensor, received: Tensor) -> None:
        if sent.dtype == torch.uint8:  # not the sizes
            strike("replica")
            strike("hold")
        super()._swap(sent, received)


import evenkeel.run.sharded_saver as saver  # noqa: E402
import evenkeel.training.slots as slots  # noqa: E402

slots.Slot = Interrupted
saver.Replica = InterruptedReplica
