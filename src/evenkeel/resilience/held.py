"""A state in memory that outlives the rank that wrote it, because its keeper has the memory too.

Ranks that start again in place would wait for a disk twice: for the rescue of the last finished step, and to read it.
So a survivor writes it into a file without a name (memfd_create(2)), which a fork shares. Its keeper hands that to the
next rank, and has a child of its own bring it to the disk meanwhile: if all processes die, as little is lost as if the
survivor had done so. Such a file is in no folder and has no limit of its own, and the kernel frees it with its last
process.

    rank        hold       write a state, instead of or before a checkpoint
    keeper      Memory     what its rank has left; written to the disk by a child
    next rank   before     the same, to start from
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..common import keeper_link
from ..common.processes import name_process

TRIES = 3
"""How many children bring a state to the disk, one after the other, if they are killed."""


class Held(NamedTuple):
    """A whole state in memory."""

    descriptor: int
    facts: dict[str, Any]
    """What the manifest of its checkpoint will say, and where that goes; JSON."""

    @property
    def path(self) -> str:
        """To open it anew: a fork has the same descriptor, and with it the same position in the file."""
        return f"/proc/self/fd/{self.descriptor}"

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.facts["step"])


class Offer(NamedTuple):
    """Where other processes of this machine can read a state that a rank has found in memory."""

    step: int
    path: str
    identity: tuple[str, int, int]
    """The kernel's boot, the file's device and its inode: elsewhere the path may be another file's."""


_mine = -1
_facts: dict[str, Any] = {}
"""Of what is in it; none: it is not whole."""
_before: Held | None = None


def hold(write: Callable[[IO[bytes]], object], facts: dict[str, Any]) -> bool:
    """Have the keeper hold a state in place of the one that it holds.

    Args:
        write: writes it, into a file that can seek.
        facts: see :class:`Held`.

    Returns:
        False if there is no keeper, or no room.
    """
    global _facts
    if _mine < 0:
        return False
    release()
    try:
        with open(f"/proc/self/fd/{_mine}", "wb") as file:  # noqa: PTH123  (its name is no path of a folder)
            write(file)
    except (OSError, RuntimeError, MemoryError):  # torch makes the second of the first
        release()
        return False
    keeper_link.send("memory", json.dumps(facts))  # so it is whole
    _facts = facts
    return True


def release() -> None:
    """Let the keeper hold nothing of what this process has written."""
    global _facts
    if _mine >= 0:
        keeper_link.send("memory")
        _facts = {}
        os.ftruncate(_mine, 0)


def before(folder: str) -> Held | None:
    """What an earlier rank below this keeper has left of the run with this folder of checkpoints."""
    return _before if _before and _before.facts["folder"] == folder else None


def offer(folder: str) -> Offer | None:
    """Offer it to the other ranks of this machine, until :func:`forget_before`."""
    if not (left := before(folder)):
        return None
    path, identity = f"/proc/{os.getpid()}/fd/{left.descriptor}", ("", 0, 0)
    with contextlib.suppress(OSError):  # a sandbox may hide it; then nobody else finds the file
        identity = _identity(path)
    return Offer(left.step, path, identity)


def opened(offers: Iterable[Offer]) -> IO[bytes] | None:
    """The first of these that this process can read, which it then can although the rank that offers it dies."""
    for each in offers:
        with contextlib.suppress(OSError):
            if _identity(each.path) == each.identity:
                return Path(each.path).open("rb")
    return None


def _identity(path: str) -> tuple[str, int, int]:
    status = Path(path).stat()
    return Path("/proc/sys/kernel/random/boot_id").read_text(), status.st_dev, status.st_ino


def forget_before() -> None:
    """Let go of it."""
    global _before
    if _before:
        os.close(_before.descriptor)
        _before = None


def _disown() -> None:
    global _mine, _facts
    forget_before()
    if _mine >= 0:
        os.close(_mine)
    _mine, _facts = -1, {}


class Memory:
    """What a keeper holds of the state of its run.

    Args:
        save: writes it to the disk; in a child, which ends then.
    """

    def __init__(self, save: Callable[[Held], object]) -> None:
        self._save = save
        self._held: Held | None = None
        self._next = -1
        self._writers: dict[int, tuple[Held, int]] = {}
        """By pid: what each child writes, and how many more may follow it."""

    def prepare(self) -> None:
        """Make the memory of the rank that is forked next."""
        with contextlib.suppress(OSError):  # a sandbox may forbid it; then the rank writes to the disk
            self._next = os.memfd_create("state")

    def enter(self) -> None:
        """In that rank: :func:`hold` writes there, and :func:`before` is what the keeper holds."""
        global _mine, _before
        _mine, _before = self._next, self._held
        for descriptor in {held.descriptor for held, _ in self._writers.values()} - {_before and _before.descriptor}:
            os.close(descriptor)
        os.register_at_fork(after_in_child=_disown)  # or loader processes would keep the memory
        keeper = os.getppid()

        def save_orphaned() -> None:
            if _facts and os.getppid() != keeper:  # it has died before it could do so
                self._save(Held(_mine, _facts))

        keeper_link.before_exit(save_orphaned)

    def take(self, facts: str) -> None:
        """After the end of that rank: hold what it has left, if that is whole, and begin to write it to the disk.

        Args:
            facts: what it told of it last; "": it is not whole, or there is nothing.
        """
        if facts:
            self.forget()
            self._held = Held(self._next, json.loads(facts))
            self._write(self._held, TRIES)
        elif self._next >= 0:
            os.close(self._next)
        self._next = -1

    def _write(self, held: Held, tries: int) -> None:
        if pid := os.fork():
            self._writers[pid] = held, tries - 1
            return
        name_process("writer")
        try:
            self._save(held)
        except BaseException:
            traceback.print_exc()
        os._exit(0)

    def forget(self) -> None:
        """Hold nothing for the next rank: the run has come further. What is still being written stays until it is."""
        held, self._held = self._held, None
        self._let_go(held)

    def _let_go(self, held: Held | None) -> None:
        if held and held != self._held and held not in [being_written for being_written, _ in self._writers.values()]:
            os.close(held.descriptor)

    def reap(self) -> list[int]:
        """Take note of children that have ended, and let another follow one that was killed: without a checkpoint of
        an evaluated step, that step could not be the best. Returns the steps that are still being written."""
        for pid, (held, tries) in list(self._writers.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self._writers[pid]
            if os.WIFSIGNALED(status) and tries:
                self._write(held, tries)
                continue
            if os.WIFSIGNALED(status):
                last = f"the last of them by signal {os.WTERMSIG(status)}"
                with contextlib.suppress(OSError):
                    what = f"{TRIES} processes that wrote step {held.step} were killed, {last}"
                    print(f"evenkeel: NOT SAVED: {what}", file=sys.stderr, flush=True)
            self._let_go(held)
        return sorted({held.step for held, _ in self._writers.values()})

    def abandon(self) -> None:
        """Kill the children that still write. Does not wait for their end, for which a disk may let them wait."""
        for pid in self._writers:
            os.kill(pid, signal.SIGKILL)
        self._writers = {}
