"""The keeper: a dead rank costs half a second, because the process that torchrun starts is not the one that trains.

Most of a restart is importing torch again. So the process that torchrun starts, the *keeper*, imports what training
needs and forks the *trainer*. It never computes, so it survives what kills a trainer, and forks the next one with all
imports done. torchrun's agent sees nothing, and `--max-restarts` is left for the death of a keeper, a node, an agent.

    agent (torchrun)
      keeper of rank 0 ---- the job's store, if rank 0 has it
        trainer                                                 both below a keeper are forks of it
      keeper of rank 1
        trainer

When a trainer is killed, its keeper says so in the job's store, under the name by which the ranks of this generation
met (`distributed.rendezvous`). The other keepers read it and ask their trainers to leave. Each of them saves the last
finished step, as after any loss of a peer, and every keeper forks again. The new trainers meet by the same roll-call as
after a restart by torchrun, so keepers need no agreement of their own: whoever dies early is only late for it.

A trainer is forked again after a signal that nobody asked for, a hang, or the loss of another rank if that one's keeper
has said so. All else (an exception, out of memory, exit codes 0, 2 and 75) goes to the agent: the keeper ends as its
trainer did.

A fork copies one thread. So the keeper has only one, no GPU context and no process group, and waits for signals by
`sigtimedwait`. Where a fork is not safe the process trains itself, as without a keeper.

Keeper and trainer are in one process group: a debugger keeps the terminal, Ctrl-Z stops both, and a SIGKILL for the
group leaves nothing. So what is sent to the group reaches the trainer twice, from the sender and from its keeper, which
cannot know; a stop signal may come twice (`interruption`).
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed.distributed_c10d import Store

from ..common import kept
from ..common.errors import REFUSED, EndedHere
from ..common.phases import activity
from ..common.processes import STOP_SIGNALS, die_with_parent, name_process, survives_the_terminal
from ..distributed.exits import leave, refuse
from ..distributed.rendezvous import DIED, generation_store, job_store

UNFORKABLE = 119
"""Exit code of a fork that finds that it cannot use a GPU because of what its keeper has done."""

CONFIRMED = 5.0
"""Seconds in which the keeper of a dead rank says so. Without a word the agent decides, as without keepers."""

PATIENCE = timedelta(seconds=5)
"""For an answer of the store, which may be on a machine that is gone."""

UNASKED = 35.0
"""Seconds that a trainer has to leave after REGROUP before it is killed, a little more than torchrun would give it."""


def unforkable() -> str:
    """Why this process must not fork a trainer; "" if it may."""
    if sys.platform != "linux":
        return "only Linux tells a process of its parent's death"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "it uses a GPU already"
    if len(_threads()) > 1:  # OpenBLAS ends its own before a fork, and starts them again when it computes
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
    names = _threads()
    return f"it has {len(names)} threads: {', '.join(names)}" if len(names) > 1 else ""


def _threads() -> list[str]:
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


class Keeper:
    """Forks trainers until one ends for good.

    Args:
        train: the main program; does not return.
        changed: whether the source on disk is another than what this process has imported.
    """

    def __init__(self, train: Callable[[], object], changed: Callable[[], bool]) -> None:
        self._train, self._changed = train, changed
        self._rank, self._world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        nohup = survives_the_terminal(os.getppid() if launched else os.getpid())
        self._stops = {number for number in STOP_SIGNALS if not (nohup and number == signal.SIGHUP)}
        self._interval = max(0.05, self._world_size / 5000)  # the store serves some ten thousand requests a second
        self._limit = 3
        self._forks = 0
        self._fruitless = 0
        """Forks in a row that have not finished a step."""
        self._stopped = False
        """Whether somebody has asked the job to end."""
        self._asked = 0.0
        """When the trainer was asked to leave because of another rank's death; 0: it was not."""
        self._told: dict[str, str] = {}
        """The last of each word that the trainer has told."""
        self._text = ""
        """What it has told of the next."""
        self._connection: Store | None = None
        self._store: Store | None = None

    def keep(self) -> None:
        """Fork, and end as the last trainer ends; return only if a trainer cannot be a fork of this process."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._stops | {signal.SIGCHLD})
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(signal.SIGTERM)
        name_process("keeper")
        gc.freeze()  # or a collection in the trainer would copy every page
        if "WORLD_SIZE" in os.environ and self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._serve_store()
        while True:
            status = self._await(self._fork(before))
            code = os.waitstatus_to_exitcode(status)
            if code == UNFORKABLE:
                break
            if not self._forks_again(code):
                self._end(code)
            self._forks += 1
            if self._changed():
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
            with contextlib.suppress(KeyError, OSError):
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink()  # or torchrun would report it after another end
        self._end_server()
        name_process("python")
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, mask: set[int | signal.Signals]) -> int:
        """Fork a trainer, which does not return from here. Returns its pid."""
        self._heard, told = os.pipe()
        os.set_blocking(self._heard, False)
        self._told, self._asked, self._text, self._store = {}, 0.0, "", None
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        keeper, launcher = os.getpid(), os.getppid()
        if pid := os.fork():
            os.close(told)
            return pid
        os.close(self._heard)
        die_with_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() != keeper or torch.cuda._is_in_bad_fork():
            os._exit(UNFORKABLE)
        name_process("trainer")
        if self._forks:  # the imports before the first are part of its start
            activity.begin()
        kept.enter(told, launcher, self._forks)
        self._train()
        raise AssertionError("the main program has returned")

    def _await(self, pid: int) -> int:
        """Wait for the trainer's end; meanwhile pass on stop signals, and ask it to leave if another rank has died."""
        heeded = self._stops | {signal.SIGCHLD}
        while True:
            found = signal.sigtimedwait(heeded, self._interval)
            if found and found.si_signo != signal.SIGCHLD:
                self._stopped = True
                os.kill(pid, found.si_signo)
            ended, status = os.waitpid(pid, os.WNOHANG)
            self._hear()
            if ended:
                os.close(self._heard)
                return status
            if self._stopped:
                continue
            if self._asked:
                if time.monotonic() - self._asked > UNASKED:
                    os.kill(pid, signal.SIGKILL)
            elif self._known(DIED):
                self._asked = time.monotonic()
                os.kill(pid, kept.REGROUP)

    def _hear(self) -> None:
        """Read what the trainer has told."""
        with contextlib.suppress(BlockingIOError):
            *lines, self._text = (self._text + os.read(self._heard, 1 << 16).decode()).split("\n")
            for line in lines:
                word, _, value = line.partition(" ")
                self._told[word] = value
                if word == "generation":
                    self._join(value)
                elif word == "limit":
                    self._limit = int(value)
                elif word == "progress":
                    self._fruitless = 0

    def _join(self, generation: str) -> None:
        """Look from now on at what the keepers of this generation say."""
        with contextlib.suppress(RuntimeError, EndedHere):
            self._connection = self._connection or job_store(self._rank, self._world_size, PATIENCE)
            self._store = generation_store(self._connection, self._world_size, generation)

    def _known(self, key: str) -> bool:
        """Whether a keeper has said so in this generation; False if the store does not answer."""
        with contextlib.suppress(RuntimeError):
            return self._store is not None and self._store.check([key])
        self._store = None
        return False

    def _forks_again(self, code: int) -> bool:
        """Whether the trainer that has ended so is to be followed by another."""
        if self._stopped:
            return False
        if code == 0:
            return self._others_are_not_done()
        if -code in STOP_SIGNALS or code == REFUSED:
            return False
        why = ""
        if self._asked:
            pass
        elif code < 0:
            why = f"was killed by {signal.Signals(-code).name}"
        elif "hang" in self._told:
            why = "has ended because of a hang"
        elif "lost" not in self._told or not self._is_confirmed():
            return False
        if self._fruitless >= self._limit:
            self._say(
                f"rank {self._rank} {why or 'has lost others'}, without a finished step as before; torchrun decides"
            )
            return False
        self._fruitless += 1
        if why:
            with contextlib.suppress(RuntimeError):
                if self._store:
                    self._store.set(DIED, str(self._rank))
            self._say(f"rank {self._rank} {why}; all ranks start again in place")
        return True

    def _is_confirmed(self) -> bool:
        """Wait until another keeper says that its trainer has died, which is why this one has lost it."""
        deadline = time.monotonic() + CONFIRMED
        while self._store and time.monotonic() < deadline:
            if self._known(DIED):
                return True
            if signal.sigtimedwait(self._stops, 0.005):
                self._stopped = True
                return False
        return False

    def _others_are_not_done(self) -> bool:
        """After a finished run: wait for all ranks to finish; True if one has died instead, and needs the others."""
        with contextlib.suppress(RuntimeError):
            if not self._store or self._store.check(["unkept"]):
                return False
            self._store.add("done", 1)
            while self._store.add("done", 0) < self._world_size:
                if self._known(DIED):
                    return True
                if signal.sigtimedwait(self._stops, self._interval):
                    break
        return False

    def _serve_store(self) -> None:
        """Hold the job's store in a process of its own, which would be a thread of rank 0 and die with it."""
        if kept.STORE in os.environ:  # this process has replaced itself
            return
        ready, told = os.pipe()
        if pid := os.fork():
            os.close(told)
            if os.read(ready, 1):  # else rank 0 tries it again, and says what is wrong
                os.environ[kept.STORE] = str(pid)
            os.close(ready)
            return
        name_process("store")
        die_with_parent(signal.SIGKILL)
        with contextlib.suppress(Exception):
            store = job_store(self._rank, self._world_size, PATIENCE)
            os.write(told, b"1")
            os.close(told)
            while store:
                signal.sigwait(self._stops)
        os._exit(1)

    def _end_server(self) -> None:
        with contextlib.suppress(KeyError, ProcessLookupError, ChildProcessError):
            server = int(os.environ.pop(kept.STORE))
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)

    def _end(self, code: int) -> NoReturn:
        """End this process as its trainer has ended."""
        if code == REFUSED and "refusal" in self._told:
            refuse(self._told["refusal"])
        self._end_server()
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
            os.kill(os.getpid(), -code)
            time.sleep(1)  # a signal that is ignored
        leave(code if code >= 0 else 128 - code)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"evenkeel: {text}", file=sys.stderr, flush=True)
