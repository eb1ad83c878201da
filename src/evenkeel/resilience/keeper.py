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
met (`distributed.rendezvous`). The other keepers read it and ask their trainers to leave. Each of them leaves the last
finished step in memory (`held`), and every keeper forks again. The new trainers meet by the same roll-call as
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
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

import torch

from ..common import keeper_link
from ..common.errors import REFUSED
from ..common.phases import activity
from ..common.processes import STOP_SIGNALS, die_with_parent, leave_nothing, name_process, survives_the_terminal
from ..config import Config
from ..distributed.exits import refuse
from .held import Held, Memory
from .interruption import KEYBOARD, ONE_PRESS, STOPPED
from .peers import Peers, end_store, hold_store, holds_store

UNFORKABLE = 119
"""Exit code of a fork that finds that it cannot use a GPU because of what its keeper has done."""

UNASKED = 10.0
"""Seconds beyond --grace that a trainer has to leave after REGROUP before it is killed."""

AT_ONCE = 0.3
"""Seconds within which the disk has a state, as a rule: nobody needs to hear that a keeper waits for it."""

COUNTS = "EVENKEEL_KEEPER_COUNTS"
"""The environment variable that takes a keeper's counts to the program that replaces it."""


def unforkable() -> str:
    """Why this process must not fork a trainer; "" if it may."""
    if sys.platform != "linux":
        return "only Linux tells a process of its parent's death"
    if not all(os.environ.get(name, "0").isdecimal() for name in ("RANK", "WORLD_SIZE")):
        return "RANK or WORLD_SIZE is no number"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "it uses a GPU already"
    if len(_threads()) > 1:  # OpenBLAS ends its own before a fork, and starts them again when it computes
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
    names = _threads()
    return f"it has {len(names)} threads: {', '.join(names)}" if len(names) > 1 else ""


def _threads() -> list[str]:
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.append(path.read_text().strip())
    return sorted(names)


class Keeper:
    """Forks trainers until one ends for good.

    Args:
        train: the main program; does not return.
        changed: whether the source on disk is another than what this process has imported.
        save: writes a state that a trainer has left in memory to the disk.
    """

    def __init__(
        self, train: Callable[[], object], changed: Callable[[], bool], save: Callable[[Held], object]
    ) -> None:
        self._train, self._changed = train, changed
        self._memory = Memory(save)
        self._rank, self._world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._peers = Peers(self._rank, self._world_size)
        launched = "TORCHELASTIC_RUN_ID" in os.environ
        nohup = survives_the_terminal(os.getppid() if launched else os.getpid())
        self._stops = {number for number in STOP_SIGNALS if not (nohup and number == signal.SIGHUP)}
        self._limit, self._grace = Config.keeper_restarts, Config.grace
        # how often it has forked again, how often in a row without progress, and the first step of the newest trainer
        # that came further than those before it
        self._forks, self._fruitless, self._reached = json.loads(os.environ.pop(COUNTS, "[0, 0, 0]"))
        self._stopped = 0.0
        """When somebody asked the job to end; 0: nobody has."""
        self._stop = 0
        """The signal that asked first."""
        self._hurried = False
        """Whether somebody has pressed Ctrl-C after that, and so does not want to wait."""
        self._asked = 0.0
        """When the trainer was asked to leave because of another rank's death; 0: it was not."""
        self._told: dict[str, str] = {}
        """The last of each word that the trainer has told."""
        self._text = b""
        """What it has told of the next."""

    def keep(self) -> None:
        """Fork, and end as the last trainer ends; return only if a trainer cannot be a fork of this process."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._stops | {signal.SIGCHLD})
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(signal.SIGTERM)
        name_process("keeper")
        gc.freeze()  # or a collection in the trainer would copy every page
        if "WORLD_SIZE" in os.environ and self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            hold_store(self._rank, self._world_size)
        while True:
            code = os.waitstatus_to_exitcode(self._await(self._fork(before)))
            self._memory.take(self._told.get("memory", ""))
            if code == UNFORKABLE and not self._told:
                break
            if not self._forks_again(code):
                self._end(code)
            self._forks += 1
            if self._changed():
                written = self._await_written()
                if self._stopped:
                    self._end(STOPPED if written else KEYBOARD)
                os.environ[COUNTS] = json.dumps([self._forks, self._fruitless, self._reached])
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
            with contextlib.suppress(KeyError, OSError):
                Path(os.environ["TORCHELASTIC_ERROR_FILE"]).unlink()  # or torchrun would report it after another end
        end_store()
        name_process("python")
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, mask: set[int | signal.Signals]) -> int:
        """Fork a trainer, which does not return from here. Returns its pid."""
        self._heard, told = os.pipe()
        os.set_blocking(self._heard, False)
        self._told, self._asked, self._text = {}, 0.0, b""
        self._peers.join("")
        self._memory.prepare()
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
        keeper_link.open_link(told, launcher, self._forks)
        self._memory.enter()
        self._train()
        raise AssertionError("the main program has returned")

    def _await(self, pid: int) -> int:
        """Wait for the trainer's end; meanwhile pass on stop signals, and ask it to leave if another rank has died."""
        heeded = self._stops | {signal.SIGCHLD}
        while True:
            number = _await_signal(heeded, self._peers.interval)
            if number and number != signal.SIGCHLD:
                self._note_stop(number)
                os.kill(pid, number)
            ended, status = os.waitpid(pid, os.WNOHANG)
            self._memory.reap()
            self._hear()
            if ended:
                os.close(self._heard)
                return status
            if self._stopped:
                continue
            if self._asked:
                if time.monotonic() - self._asked > self._grace + UNASKED:
                    os.kill(pid, signal.SIGKILL)
            elif self._peers.has_died():
                self._asked = time.monotonic()
                os.kill(pid, keeper_link.REGROUP)

    def _hear(self) -> None:
        """Read what the trainer has told."""
        with contextlib.suppress(BlockingIOError):
            while some := os.read(self._heard, 1 << 16):
                self._text += some
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            word, _, value = line.decode(errors="surrogateescape").partition(" ")
            self._told[word] = value
            if word == "generation":
                self._peers.join(value)
            elif word == "limit":
                self._limit = int(value)
            elif word == "grace":
                self._grace = float(value)
            elif word == "progress":
                self._memory.forget()
                if int(value) > self._reached:
                    # the same steps again are none: without a checkpoint since, a run may die at one step for ever
                    self._reached, self._fruitless = int(value), 0

    def _stopped_within(self, seconds: float) -> bool:
        """Wait, and say whether somebody has asked the job to end."""
        if number := _await_signal(self._stops, seconds):
            self._note_stop(number)
        return bool(self._stopped)

    def _note_stop(self, number: int) -> None:
        """Only a keyboard is in a hurry: agents and schedulers send one SIGTERM by several ways."""
        now = time.monotonic()
        if not self._stopped:
            self._stopped, self._stop = now, number
        elif signal.SIGINT in (number, self._stop) and now - self._stopped > ONE_PRESS:
            self._hurried = True

    def _await_written(self) -> bool:
        """Wait until the disk has what trainers have left in memory: --grace at most, from a stop signal on if there
        was one. Returns False if a second Ctrl-C has ended that, so that it is lost."""
        begun, told = time.monotonic(), False
        while steps := self._memory.reap():
            what, now = f"step {' and '.join(map(str, steps))}", time.monotonic()
            until = (self._stopped or begun) + self._grace
            if self._hurried:
                self._memory.abandon()
                self._say(f"second Ctrl-C: exiting, {what} is NOT SAVED")
                return False
            if now > until:
                self._say(f"{what} is NOT SAVED within --grace {self._grace:g} s; a process goes on writing it")
                break
            if self._stopped and not told and now > max(self._stopped, begun) + AT_ONCE:
                told, again = True, "again " * (self._stop == signal.SIGINT)
                self._say(
                    f"{_name(self._stop)}: waiting {until - now:.0f} s at most until the disk has {what}; press Ctrl-C "
                    f"{again}to exit without it"
                )
            self._stopped_within(0.01)
        return True

    def _forks_again(self, code: int) -> bool:
        """Whether the trainer that has ended so is to be followed by another."""
        if self._stopped or -code in STOP_SIGNALS or code == REFUSED or not holds_store():
            return False
        if code == 0:
            return not self._peers.await_all(self._stopped_within)
        why = ""
        if code < 0 and not self._asked:
            why = f"was killed by {_name(-code)}"
        elif "hang" in self._told:
            why = "has ended because of a hang"
        elif not self._asked and not ("lost" in self._told and self._is_confirmed()):
            return False
        if self._fruitless >= self._limit:
            self._say(f"rank {self._rank} {why or 'has lost another rank'} again, without progress; torchrun decides")
            return False
        if why and not self._peers.tell_death():
            return False  # the others would wait for what nobody has told them of
        self._fruitless += 1
        if why:
            self._say(f"rank {self._rank} {why}; all ranks start again in place")
        return True

    def _is_confirmed(self) -> bool:
        """Whether the trainer has lost a rank that has died; if not, show the error that looked so."""
        if self._peers.confirm_death(self._stopped_within):
            return True
        if not self._stopped:
            with contextlib.suppress(OSError, ValueError):
                print(json.loads(self._told["lost"]), file=sys.stderr, end="", flush=True)
        return False

    def _end(self, code: int) -> NoReturn:
        """End this process as its trainer has ended, which has run all that is to be run at exit."""
        if code == REFUSED and "refusal" in self._told:
            refuse(self._told["refusal"])
        if code:
            self._peers.tell_end()
        self._hurried |= code == KEYBOARD
        if not self._await_written():
            code = KEYBOARD
        end_store()
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the trainer has left one, if that is wanted
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
            os.kill(os.getpid(), -code)
            time.sleep(1)  # a signal that is ignored
        leave_nothing()
        os._exit(code if code >= 0 else 128 - code)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(f"evenkeel: {text}", file=sys.stderr, flush=True)


def _await_signal(numbers: Collection[int], seconds: float) -> int | None:
    """Wait for one of these signals, which are blocked. Returns its number."""
    found = signal.sigtimedwait(numbers, seconds)
    # suspended (Ctrl-Z) and continued after the time is up, CPython returns a structure that it has not filled in
    return found.si_signo if found and found.si_signo in numbers else None


def _name(number: int) -> str:
    with contextlib.suppress(ValueError):  # a real-time signal
        return signal.Signals(number).name
    return f"signal {number}"
