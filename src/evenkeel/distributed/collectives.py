"""Collectives in a task's own code, which are refused unless the task allows them.

A loss that gathers negatives from all ranks gets those of the micro-batches that are computed at the same time, so its
result depends on the number of ranks. If a rank has one micro-batch more than the others, its collective has no peers,
and the job breaks.

All functions of `torch.distributed`, also the functional ones, call a helper for their process group before they send
anything. These helpers are wrapped. So a function that a task has imported by name is found too, and on every rank
before it waits. `sync_batchnorm`, which is exact, allows its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from ..common.errors import EndedHere, Refusal, place_of

HELPERS = {c10d: ["_rank_not_in_group"], functional: ["_resolve_group", "_resolve_group_name"]}
"""Not every release of torch has all of these names."""

UNINITIALIZED = "process group has not been initialized"
"""torch's message without a process group, as in a job of one process."""

QUESTIONS = ("get_", "set_")
"""Prefixes of functions that also call the helpers, but send nothing."""

MIXED = "got mixed torch.Tensor and DTensor"
"""torch's message if something is computed from a weight that --shard divides and a tensor that it does not."""

_refused: list[str] = []  # names of callers that must not use collectives now, the innermost last


@contextmanager
def no_collectives(what: str) -> Iterator[None]:
    """Raise EndedHere at a collective of the code within, which is `what`, "loss()" for example; "" allows them. An
    error from a weight that --shard divides becomes one line."""
    _refused.append(what)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if MIXED not in str(error) and (not what or UNINITIALIZED not in str(error)):
            raise
        frame, trace = sys._getframe(), error.__traceback__
        while trace:
            frame, trace = trace.tb_frame, trace.tb_next
        raise (divided_weight_error(frame) if MIXED in str(error) else _refusal(what, frame)) from error
    finally:
        _refused.pop()


@contextmanager
def before_the_group(method: str) -> Iterator[None]:
    """Refuse DDP, a `DistributedSampler` and the like in a task's method, which is called without a process group."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if UNINITIALIZED not in str(error):
            raise
        raise Refusal(
            f"{method}(){place_of(error.__traceback__)} needs a process group, and there is none yet: leave out DDP, "
            "DistributedSampler and collectives; Evenkeel distributes the model and the samples itself"
        ) from error


def divided_weight_error(frame: FrameType | None = None) -> EndedHere:
    """The error for an operation on a weight of which each rank has some rows, from a frame within it, if known."""
    user = _called(frame)[1] if frame else None
    place = f" at {user.f_code.co_filename}:{user.f_lineno}" if user and _package(user) != "evenkeel" else ""
    return EndedHere(
        f"--shard: a weight is used outside of the forward() of its block{place}, where this rank has only some of its "
        "rows; use it in that forward(), or, without gradients, weight.full_tensor() on all ranks, with collectives = "
        "True in the task's class"
    )


def _refusal(what: str, frame: FrameType) -> EndedHere:
    """The error for a function of torch's, from a frame within it."""
    called, user = _called(frame)
    name = called.f_code.co_name
    if name.startswith("_") and called.f_globals["__name__"].startswith("torch.distributed.tensor"):
        return divided_weight_error(frame)
    call = f"{what} calls {name} of torch.distributed at {user.f_code.co_filename}:{user.f_lineno}"
    if name.startswith(QUESTIONS):
        return EndedHere(
            f"{call}, but one process alone has no process group; ask is_initialized() first; for a collective after "
            "it, set collectives = True in the task's class"
        )
    return EndedHere(
        f"{call}, so its result would depend on the number of ranks and on the cut into micro-batches; compute it for "
        "each micro-batch by itself, or set collectives = True in the task's class if you accept that"
    )


def _called(frame: FrameType) -> tuple[FrameType, FrameType]:
    """The frames of the function of `torch.distributed` that was called, and of its caller outside torch."""
    called = frame
    while _package(frame) in ("torch", "typing_extensions", "contextlib") and frame.f_back:
        if frame.f_globals["__name__"].startswith("torch.distributed") and frame.f_code.co_name != "wrapper":
            called = frame
        frame = frame.f_back
    return called, frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _watched(helper: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(helper)
    def watched(*arguments: Any, **options: Any) -> Any:
        if _refused and _refused[-1] and not (frame := sys._getframe(1)).f_code.co_name.startswith(QUESTIONS):
            raise _refusal(_refused[-1], frame)
        return helper(*arguments, **options)

    return watched


for module, names in HELPERS.items():
    for name in names:
        if helper := getattr(module, name, None):
            setattr(module, name, _watched(helper))
