"""Checkpoints while training goes on, and the rescue of the last finished step when it must end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from functools import partial
from typing import Any

import torch

from ..common.memory import memory_left
from ..common.naming import Kind
from ..common.phases import CHECKPOINT, activity
from ..config import Config
from ..distributed.world import World
from ..resilience.memory_checkpoint import rank_memory
from ..training.seqlock import Torn
from ..training.staging import Staging, named_tensors
from ..training.state import State
from .checkpoint import Checkpoints, known_step, label_of

log = logging.getLogger(__name__)

RANK_DELAY = 0.05
"""Seconds by which each rank of a node begins later: the lowest live one writes, and the others find its checkpoint."""

DISK_TIMEOUT = 1.0
"""Seconds that a rescue into memory first waits for the disk to say which step is its newest."""


NOTHING_NEW = "no step has finished in this attempt; nothing to save"


class Saver:
    """Copies the state while the next step is computed, and writes it in a thread. The next commit waits for the copy.

    Args:
        checkpoints: the run's folder of them.
        world: this rank among the others.
        config: the options.
        on_written: is called with the step of each checkpoint, in the thread that has written it.
    """

    def __init__(
        self, checkpoints: Checkpoints, world: World, config: Config, on_written: Callable[[int], None]
    ) -> None:
        self.checkpoints, self._world, self._on_written = checkpoints, world, on_written
        self._devices, self._grace = world.devices, config.grace
        self._use_memory = config.keeper_memory == "on"
        self._on_cpu = world.device.type == "cpu"
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._executor.submit(int)  # starts it: later the system may have no more threads
        self._work: Future[float] | None = None
        self._staging = Staging(*self._devices)
        self.step = 0
        """The step of the checkpoint that is being written."""

    @property
    def busy(self) -> bool:
        """Whether a checkpoint was started whose :meth:`result` nobody has read yet."""
        return self._work is not None

    @property
    def done(self) -> bool:
        """Whether :meth:`result` would answer at once."""
        work = self._work  # read once: the main thread may take it meanwhile
        return work is not None and work.done()

    def result(self) -> float:
        """Seconds that the last checkpoint took; waits for it.

        Raises:
            OSError: it could not be written.
        """
        assert self._work
        work, self._work = self._work, None
        return work.result()

    def pin(self, state: State) -> None:
        """Page-lock the memory for copies from a GPU, once; on rank 0 only, because all ranks would need too much."""
        if not self._staging.pinned:
            state.pin(self._staging)

    def start(self, state: State, metrics: dict[str, float]) -> None:
        """Start a checkpoint of the present state. The result of the last one must have been read."""
        assert not self.busy
        begun = time.perf_counter()
        with activity.during(CHECKPOINT):
            self._staging.reserve()
        try:
            finish_capture = state.begin_capture(staging=self._staging)
        except BaseException:
            self._staging.release()
            raise
        self.step = state.step
        self._work = self._executor.submit(self._save, finish_capture, metrics, begun)

    def _save(self, finish_capture: Callable[[], dict[str, Any]], metrics: dict[str, float], begun: float) -> float:
        try:
            captured = finish_capture()
            if captured["step"] == self.step:  # unequal: a GPU has undone this step, and the next commit ends the run
                self._write(captured, metrics)
        finally:
            self._staging.release()
        return time.perf_counter() - begun

    def _write(self, captured: dict[str, Any], metrics: dict[str, float]) -> None:
        # first, so that the keeper has the state if this process is killed in the middle of the write
        in_memory = self._store_in_memory(captured, metrics, "checkpoint")
        self.checkpoints.save(captured, metrics)
        if in_memory:
            rank_memory.discard("checkpoint")
        self._on_written(captured["step"])

    def save_last(self, state: State, metrics: dict[str, float]) -> None:
        """Write the state after the last step. With a keeper it is kept in memory too until it is on the disk.

        Raises:
            OSError: it cannot be written.
        """
        self._staging.reserve()  # so that a rescue waits for this save, before it writes the same step
        try:
            self._write(state.capture(staging=Staging(*self._devices, still=True)), metrics)
        finally:
            self._staging.release()

    def store_step(self, state: State) -> None:
        """In a sharded run store the step that was just done, whose rows no other rank has (`ShardedSaver`)."""

    def _store_in_memory(self, captured: dict[str, Any], metrics: dict[str, float], kind: Kind) -> bool:
        """Store a state in memory for the keeper; False without a keeper or enough memory."""
        if not self._use_memory:
            return False
        if kind == "snapshot" and rank_memory.has(captured["step"]):  # as a checkpoint, with its evaluation
            return True
        size = sum(tensor.nbytes for tensor in named_tensors(captured).values())
        # all ranks of this node may store a rescue at once
        if size * (self._world.local_world_size if kind == "snapshot" else 1) > memory_left():
            return False  # the kernel would kill ranks
        label = label_of(self.checkpoints, captured["step"], metrics, kind)
        return rank_memory.store(partial(torch.save, captured), label)

    def _newest_on_disk(self) -> int:
        """The newest step on the disk. 0, so that a rescue goes into memory, if a checkpoint is being written, or the
        disk fails or does not answer within DISK_TIMEOUT."""
        if self.busy and not self.done:
            return 0
        with contextlib.suppress(OSError, TimeoutError):
            return self._executor.submit(self.checkpoints.newest_step).result(DISK_TIMEOUT)
        return 0

    def rescue(self, state: State, in_place: bool = False) -> str:
        """Save the last finished step from this rank, unless another rank of the node has done so. From any thread.
        Returns what was done, in words.

        It goes into memory for the keeper, whose child writes it, if ranks are about to start again in place; without a
        keeper, or memory for it, it goes to the disk. Of --grace, at most a quarter is to wait for the staging memory
        (a save may still use it, also on a CPU), up to the half to wait for a commit, the rest to write.

        Args:
            state: the live one. No further step is committed on the host.
            in_place: whether ranks are about to start again in place.
        """
        if state.step == 0:
            return NOTHING_NEW
        begun = time.monotonic()
        half_time = begun + self._grace / 2
        # False: the checkpoint thread still writes; its disk may hang
        reserved = self._staging.reserve(begun + self._grace / 4)
        try:
            captured = state.capture(half_time, self._memory_of_rescue(reserved), final=True)
            result = self._store_or_write(captured, in_place, half_time)
        except (OSError, Torn, RuntimeError, MemoryError) as error:  # the RuntimeError is from a failed GPU
            trace, known = isinstance(error, RuntimeError), known_step(self.checkpoints)
            log.error("NOT SAVED: %s; the last checkpoint is at step %s", error, known, exc_info=trace)
            return f"not saved ({error})"
        finally:
            if reserved:
                self._staging.release()
        log.info("%s, %.2f s after the end began", result, time.monotonic() - begun)
        return result

    def _memory_of_rescue(self, reserved: bool) -> Staging:
        """On a CPU nothing is copied, because no step is committed any more. A GPU that hangs may still finish one, so
        its tensors are copied: into our memory, or into new one if the checkpoint thread has ours."""
        if self._on_cpu:
            return Staging(*self._devices, still=True)
        return self._staging if reserved else Staging(*self._devices)

    def _store_or_write(self, captured: dict[str, Any], in_place: bool, until: float) -> str:
        """Store a rescue's state for the keeper, if `in_place`, or write it to the disk."""
        if (step := captured["step"]) == 0:  # a GPU has not finished the first one
            return NOTHING_NEW
        if in_place and step > self._newest_on_disk() and self._store_in_memory(captured, {}, "snapshot"):
            return f"step {step} is stored in memory"
        begun = time.monotonic()
        # not before the capture: steps that finish meanwhile would be lost
        time.sleep(min(RANK_DELAY * self._world.local_rank, self._grace / 8))
        path = self.checkpoints.save_if_new(captured, until)
        return f"step {step} is saved" + (f", in {time.monotonic() - begun:.2f} s" if path else "")
