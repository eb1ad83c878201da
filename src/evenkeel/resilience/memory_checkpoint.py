"""A checkpoint in memory that outlives the rank that wrote it, because its keeper shares the memory.

Without it, ranks that start again in place wait for a disk twice: for the rescue of the last finished step, and to read
it. So a survivor writes the step into a file without a name (memfd_create(2)), which a fork shares. Its keeper passes
the file to the next rank. Meanwhile a child of the keeper writes it to the disk, so that the step is safe even if all
processes die then. The file is in no folder and has no size limit; the kernel frees it with its last process,
or when the run has come further (`KeeperMemory.discard`) and no child writes it. A checkpoint that is being written and
a rescue have a file each: the disk may hang under the first while the second is stored.

    prepare    keeper, before a fork: make a file for each kind of checkpoint
    hand_over  in the new trainer: take these files to write to, and the last trainer's state to read (`previous`)
    store      trainer: write a state, then send its label
    adopt      keeper, after the trainer's end: keep the files whose labels it has; a child writes them to the disk
    discard    keeper: the next trainer has finished a step; trainer: the checkpoint is on the disk

A sharded run stores each step of each rank instead, in two slots that all ranks of a keeper share (`training.slots`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any, NamedTuple, get_args

from ..common import keeper_link
from ..common.display import say
from ..common.naming import Kind
from ..common.processes import name_process
from .slot_files import new_slots, step_in

TRIES = 3
"""Number of children that try to write a state to the disk, one after the other, if they are killed."""


class MemoryCheckpoint(NamedTuple):
    """A complete state in memory."""

    descriptor: int
    label: dict[str, Any]  # its manifest and how to store it, from `run.checkpoint.label_of`; JSON

    @property
    def path(self) -> str:
        """A path to open it again by: forks share the descriptor, and so its position in the file."""
        return f"/proc/self/fd/{self.descriptor}"

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.label["step"])


class SlotCheckpoint(NamedTuple):
    """A sharded rank's slots that hold a step; they stay open."""

    step: int  # of the newer slot
    slots: list[int]


Stored = MemoryCheckpoint | SlotCheckpoint


def _newest_in(slots: list[int]) -> SlotCheckpoint | None:
    steps = [step_in(each) for each in slots]
    return SlotCheckpoint(max(steps), slots) if any(steps) else None


class RankMemory:
    """The memory that this rank shares with its keeper; empty without one. Its only instance is `rank_memory`."""

    def __init__(self) -> None:
        self.files: dict[Kind, int] = {}
        """The files to write to, descriptors; empty: none."""
        self.labels: dict[Kind, dict[str, Any]] = {}
        """The labels of the complete states in them."""
        self._previous: MemoryCheckpoint | None = None
        self._slots: list[int] = []

    def inherit(self, files: dict[Kind, int], previous: MemoryCheckpoint | None, slots: list[int]) -> None:
        """Take over these files from the keeper that has forked this rank."""
        self.files, self._previous, self._slots = files, previous, slots
        os.register_at_fork(after_in_child=self._disown)  # loader processes must not keep it allocated

    def slots(self) -> list[int]:
        """The slots, with what the previous rank of this keeper has left there. Without a keeper: new ones."""
        return self._slots or new_slots()

    def store(self, write: Callable[[IO[bytes]], object], label: dict[str, Any]) -> bool:
        """Store a state for the keeper, which `write` writes into a file that can seek. Returns False if there is no
        keeper, or too little memory.

        There is one file for each kind (`label["kind"]`), as two would need twice the memory, so what is in it is
        discarded first. Usually nothing is: only a state that could not be written to the disk stays.
        """
        if (kind := label["kind"]) not in self.files:
            return False
        self.discard(kind)
        try:
            with open(f"/proc/self/fd/{self.files[kind]}", "wb") as file:  # noqa: PTH123  (its name is no path of a folder)
                write(file)
        except (OSError, RuntimeError, MemoryError):  # torch turns an OSError into a RuntimeError
            self.discard(kind)
            return False
        keeper_link.send(kind, json.dumps(label))  # only now: it is complete
        self.labels[kind] = label
        return True

    def discard(self, kind: Kind) -> None:
        """Discard what this process has stored of this kind."""
        if kind in self.files:
            keeper_link.send(kind)
            self.labels.pop(kind, None)
            os.ftruncate(self.files[kind], 0)

    def has(self, step: int) -> bool:
        """Whether this process has stored this step."""
        return any(label["step"] == step for label in list(self.labels.values()))  # another thread may add one

    def previous(self, run_id: str) -> MemoryCheckpoint | None:
        """The state that the previous rank of this keeper has stored, if it is of this run."""
        return self._previous if self._previous and self._previous.label["run_id"] == run_id else None

    def discard_previous(self) -> None:
        """Free what the previous rank has stored."""
        if self._previous:
            os.close(self._previous.descriptor)
            self._previous = None

    def save_if_orphaned(self, keeper: int, save: Callable[[Stored], object]) -> None:
        """At this process's end: write what it has stored to the disk if its keeper, a pid, has died."""
        if os.getppid() == keeper:
            return
        for kind, label in reversed([*self.labels.items()]):  # last stored first
            save(MemoryCheckpoint(self.files[kind], label))
        if not self.labels and (stored := _newest_in(self._slots)):
            save(stored)

    def _disown(self) -> None:
        self.discard_previous()
        for descriptor in self.files.values():
            os.close(descriptor)
        self.files, self.labels = {}, {}


rank_memory = RankMemory()


class KeeperMemory:
    """The state of the run that a keeper has in memory. A descriptor stays open while it is in `_trainer_files`,
    `_checkpoint` or `_writers`; `_close_unused` closes one that has left the last two.

    Args:
        save: writes it to the disk; called in a child, which then ends.
    """

    def __init__(self, save: Callable[[Stored], object]) -> None:
        self._save = save
        self._checkpoint: MemoryCheckpoint | None = None
        self._trainer_files, self._slots = dict[Kind, int](), list[int]()  # of the present trainer
        self._writers: dict[int, tuple[Stored, int]] = {}  # what each child writes, by its pid, and the tries left

    def prepare(self) -> None:
        """Allocate the memory of the trainer that is forked next."""
        with contextlib.suppress(OSError):  # a sandbox may forbid it; then the trainer writes to the disk
            for kind in get_args(Kind):
                self._trainer_files[kind] = os.memfd_create("state")
            self._slots = self._slots or new_slots()

    def hand_over(self) -> None:
        """In the trainer: give it memory to write to, and the last trainer's state as `RankMemory.previous`."""
        # older states, which children of the keeper still write: not needed here
        being_written = {it.descriptor for it, _ in self._writers.values() if isinstance(it, MemoryCheckpoint)}
        for descriptor in being_written - {self._checkpoint and self._checkpoint.descriptor}:
            os.close(descriptor)
        rank_memory.inherit(self._trainer_files, self._checkpoint, self._slots)
        keeper_link.before_exit(partial(rank_memory.save_if_orphaned, os.getppid(), self._save))

    def adopt(self, messages: Mapping[str, str]) -> None:
        """Take over what the trainer has stored, after its end, and start to write it.

        `messages`: its last ones; of each file the label. "": the state is not complete, or there is none.
        """
        # the snapshot comes last: a rescue is never of an earlier step, and is what the next trainer gets
        for kind, descriptor in self._trainer_files.items():
            if label_json := messages.get(kind):
                self.discard()
                self._checkpoint = MemoryCheckpoint(descriptor, json.loads(label_json))
                self._write(self._checkpoint, TRIES)
            else:
                os.close(descriptor)
        self._trainer_files = {}

    def save_slots(self) -> None:
        """Start to write what is in the slots, because no trainer will be forked that could."""
        if checkpoint := self.in_slots():
            self._write(checkpoint, TRIES)

    def in_slots(self) -> SlotCheckpoint | None:
        """What is in the slots; None: no step, as without --shard."""
        return _newest_in(self._slots)

    def _write(self, checkpoint: Stored, tries: int) -> None:
        try:
            pid = os.fork()
        except OSError:  # no more processes, or no memory for one: then the keeper writes, and the ranks wait
            if not self._try_to_save(checkpoint):
                _report_lost(checkpoint.step)
            self._close_unused(checkpoint)
            return
        if pid == 0:
            name_process("writer")
            os._exit(not self._try_to_save(checkpoint))
        self._writers[pid] = checkpoint, tries - 1

    def _try_to_save(self, checkpoint: Stored) -> bool:
        """Save it; False, after the traceback, if that fails."""
        try:
            self._save(checkpoint)
        except BaseException:
            traceback.print_exc()
            return False
        return True

    def discard(self) -> None:
        """Free the stored state: the run has come further. What is still being written is freed afterwards."""
        checkpoint, self._checkpoint = self._checkpoint, None
        self._close_unused(checkpoint)

    def _close_unused(self, checkpoint: Stored | None) -> None:
        in_use = [self._checkpoint, *(each for each, _ in self._writers.values())]
        if isinstance(checkpoint, MemoryCheckpoint) and checkpoint not in in_use:
            os.close(checkpoint.descriptor)

    def reap(self) -> list[int]:
        """Collect children that have ended; returns the steps that are still being written.

        Starts another one in place of a killed one, so that the evaluation of that step is not lost with it.
        """
        for pid, (checkpoint, tries) in list(self._writers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._writers[pid]
            if os.WIFSIGNALED(status) and tries:
                self._write(checkpoint, tries)
                continue
            if status:
                _report_lost(checkpoint.step, os.WTERMSIG(status))
            self._close_unused(checkpoint)
        return sorted({checkpoint.step for checkpoint, _ in self._writers.values()})

    def kill_writers(self) -> None:
        """Kill the children that still write. Does not wait for their end, which a slow disk may delay."""
        for pid in self._writers:
            os.kill(pid, signal.SIGKILL)
        self._writers = {}


def _report_lost(step: int, killed_by: int = 0) -> None:
    """Report a step that could not be written, by the signal that killed the last child that tried; 0: it failed."""
    why = f"the process that wrote step {step} failed, see the traceback"
    if killed_by:
        why = f"{TRIES} processes that wrote step {step} were killed, the last of them by signal {killed_by}"
    say(f"evenkeel: NOT SAVED: {why}", to_stderr=True)
