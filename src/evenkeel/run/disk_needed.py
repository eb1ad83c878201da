"""The disk space that a run's checkpoints will take at its end, said before it starts."""

from __future__ import annotations

from rich.filesize import decimal

from ..config import Config
from ..training.memory_parts import bytes_after_a_step
from ..training.state import State


def disk_needed(config: Config, steps: int, state: State) -> str:
    """How many checkpoints a run of so many steps leaves, and their size, in a line."""
    size, more = sum(tensor.nbytes for tensor in state.tensors().values()), ""
    try:
        whole = state.sharding.whole if state.sharding else {}
        begun = [it for it in state.optimizers if not it.state]
        size += sum(bytes_after_a_step(it, lambda p: whole.get(p, p).shape) for it in begun)
    except Exception:  # a task's own optimizer may do anything in its step
        more = " and the optimizer's state"
    kept = steps // config.keep_every
    count = kept + config.keep + config.keep_best
    return (
        f"at step {steps} the disk holds up to {count} checkpoints of {decimal(size)}{more} ({kept} by --keep-every, "
        f"{config.keep} by --keep, {config.keep_best} by --keep-best): {decimal(count * size)}"
    )
