"""The keeper: a dead rank costs half a second, because the process that torchrun starts is not the one that trains.

Most of a restart is importing torch again. So the process that torchrun starts, the *keeper*, imports what training
needs and forks the *trainer*. It never computes, so it survives what kills a trainer, and forks the next one with all
imports done. torchrun's agent sees nothing, and `--max-restarts` is left for the death of a keeper, a node, an agent.

    agent (torchrun)
      keeper of rank 0 ---- the job's store, if rank 0 has it
        trainer                                                 a fork of its keeper
      keeper of rank 1
        trainer

When a trainer is killed, its keeper writes this to the job's store, under the name by which the ranks of this
generation met (`distributed.rendezvous`). The other keepers read it and ask their trainers to leave. Each trainer
stores the last finished step in memory (`memory_checkpoint`), and every keeper forks again. The new trainers meet by
the same roll-call as after a restart by torchrun, so keepers need no agreement of their own: a rank that dies early is
only late for the roll-call.

`Keeper._handle_end` says after which ends of a trainer another is forked. After others the keeper ends as it did.

A fork copies one thread. So the keeper has only one, no GPU context and no process group, and waits for signals by
`sigtimedwait`. Where a fork is not safe (`forking`) the process trains itself, as without a keeper.

Keeper and trainer are in one process group: a debugger keeps the terminal, Ctrl-Z stops both, and a SIGKILL for the
group leaves nothing. A keeper passes on stop signals until its trainer has reported one (`interruption`).
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
from typing import NoReturn

import torch

from ..common import keeper_link
from ..common.display import flush, say
from ..common.errors import FAILED, REFUSED
from ..common.phases import activity
from ..common.processes import (
    STOP_SIGNALS,
    clean_up_before_exit,
    die_with_parent,
    handled_stop_signals,
    is_plain_torchrun,
    name_process,
    signal_name,
    under_torchrun,
)
from ..config import Config
from ..distributed.attempt_files import forget_error
from ..distributed.exits import give_up, refuse
from ..distributed.rendezvous import agent_hosts_store
from .interruption import KEYBOARD, STOPPED, means_exit_now
from .keeper_store import end_store, serve_store, store_is_alive
from .memory_checkpoint import KeeperMemory, Stored
from .peers import Peers

UNFORKABLE = 119
"""Exit code of a fork that cannot train: its keeper has used a GPU, or has died."""

LEAVE_TIMEOUT = 10.0
"""Seconds beyond --grace after which a trainer that was asked to leave, and has not, is killed."""

STOP_ANSWER_TIMEOUT = 3.0
"""With --shard: seconds in which a trainer must report a stop signal, or it is killed. Only its keeper has its rows
then, and torchrun kills that after 30 s."""

EXIT_TIMEOUT = 5.0
"""Seconds after a second Ctrl-C, after which a trainer that still lives is killed: it saves nothing more."""

ANNOUNCE_DELAY = 0.3
"""Seconds in which a state is usually on the disk. Only a keeper that waits longer prints that it waits."""


class Keeper:
    """Forks trainers until one ends for good.

    Args:
        train: the main program; does not return.
        save: writes to the disk what a trainer has stored in memory (`run.stored`).
    """

    def __init__(self, train: Callable[[], object], save: Callable[[Stored], object]) -> None:
        self._train = train
        self._memory = KeeperMemory(save)
        self._rank, self._world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._peers = Peers(self._rank, self._world_size)
        self._stops: set[int] = {*handled_stop_signals()}
        self._max_restarts, self._grace = Config.keeper_restarts, Config.grace
        self._forks, self._without_progress = 0, 0  # forks after the first one; consecutive ones without progress
        self._furthest_start = 0  # the highest first finished step of all trainers so far
        self._stop_time, self._stop_signal = 0.0, 0  # of the first stop signal; 0: none has come
        self._exit_time = 0.0  # of a second Ctrl-C, after which nothing is waited for; 0: none has come
        self._store_lost = False  # whether the process is gone that rank 0's keeper had for the job's store
        self._regroup_time = 0.0  # at which the trainer got REGROUP; 0: it has not
        self._messages: dict[str, str] = {}  # the last value of each message from the trainer
        self._partial_line = b""  # the part of the next message that has been read

    def keep(self) -> None:
        """Fork until a trainer ends for good, and end like it; return only if this process cannot be forked."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._stops | {signal.SIGCHLD})
        if under_torchrun():
            die_with_parent(signal.SIGTERM)
        name_process("keeper")
        gc.freeze()  # a collection in the trainer would copy every page
        if "WORLD_SIZE" in os.environ and self._rank == 0 and not agent_hosts_store():
            serve_store(self._rank, self._world_size)
        while True:
            code = os.waitstatus_to_exitcode(self._supervise(self._fork(mask)))
            self._memory.adopt(self._messages)  # first: a child writes meanwhile
            if code == UNFORKABLE and not self._messages:
                if self._stop_time:
                    self._end(STOPPED)
                keeper_link.note_absence("a fork of it could not use its GPU")
                break  # this process trains itself
            if not self._handle_end(code):
                if code:
                    self._memory.save_slots()
                self._end(code)  # does not return
            self._forks += 1
            forget_error()
        end_store()
        name_process("python")
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _fork(self, mask: set[int | signal.Signals]) -> int:
        """Fork a trainer, which does not return from here. Returns its pid."""
        self._pipe, sending = os.pipe()
        os.set_blocking(self._pipe, False)
        self._messages, self._regroup_time, self._partial_line = {}, 0.0, b""
        self._peers.leave()
        self._memory.prepare()
        flush()
        keeper, launcher = os.getpid(), os.getppid()
        try:
            pid = os.fork()
        except OSError as error:  # no more processes, or no memory for one
            _say(f"rank {self._rank} cannot be forked: {error.strerror}; torchrun decides")
            self._memory.save_slots()
            self._end(FAILED)
        if pid:
            os.close(sending)
            return pid
        os.close(self._pipe)
        die_with_parent(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() != keeper or torch.cuda._is_in_bad_fork():
            os._exit(UNFORKABLE)
        name_process("trainer")
        if self._forks:  # the imports before the first are part of its start
            activity.begin()
        keeper_link.open_link(sending, launcher, self._forks)
        self._memory.hand_over()
        self._train()
        raise AssertionError("the main program has returned")

    def _supervise(self, pid: int) -> int:
        """Wait for the trainer's end; meanwhile pass on stop signals, and ask it to leave if another rank has died."""
        heeded = self._stops | {signal.SIGCHLD}
        while True:
            number = _await_signal(heeded, self._peers.interval)
            if number and number != signal.SIGCHLD:
                self._pass_on(number, pid)
            ended, status = os.waitpid(pid, os.WNOHANG)
            self._memory.reap()
            self._read_messages()
            if ended:
                os.close(self._pipe)
                return status
            if not (self._store_lost or store_is_alive()):
                self._store_lost = True
                _say("the process with the job's store was killed; the job goes on, but restarts by torchrun only")
            if self._is_overdue():
                os.kill(pid, signal.SIGKILL)
            elif not (self._stop_time or self._regroup_time) and self._peers.learn_of_death():
                self._regroup_time = time.monotonic()
                os.kill(pid, keeper_link.REGROUP)

    def _is_overdue(self) -> bool:
        """Whether the trainer was asked to leave and no longer can: it is stopped, or its interpreter does not run."""
        if self._exit_time:
            return time.monotonic() > self._exit_time + EXIT_TIMEOUT
        if not (asked := self._stop_time or self._regroup_time):
            return False
        silent = self._stop_time and "stop" not in self._messages and self._memory.in_slots()
        return time.monotonic() > asked + (STOP_ANSWER_TIMEOUT if silent else self._grace + LEAVE_TIMEOUT)

    def _pass_on(self, number: int, pid: int) -> None:
        """Pass a stop signal on to the trainer, which may have received it itself: as one of its process group."""
        self._record_stop(number)
        self._read_messages()
        # this process may have waited for the store; a trainer that has the signal would take this for a second one
        if self._exit_time or "stop" not in self._messages:
            os.kill(pid, number)

    def _read_messages(self) -> None:
        """Read the trainer's messages, until there are no more."""
        while True:
            try:
                some = os.read(self._pipe, 1 << 16)
            except BlockingIOError:
                return
            if not some:  # the trainer has ended
                return
            *lines, self._partial_line = (self._partial_line + some).split(b"\n")
            for line in lines:
                self._handle_message(*line.decode(errors="surrogateescape").partition(" ")[::2])

    def _handle_message(self, message: str, value: str) -> None:
        self._messages[message] = value
        if message == "generation":
            self._peers.join(value)
        elif message == "limit":
            self._max_restarts = int(value)
        elif message == "grace":
            self._grace = float(value)
        elif message == "first_step":
            self._memory.discard()
            if int(value) > self._furthest_start:
                # repeating steps is no progress: without a new checkpoint a run may die at one step for ever
                self._furthest_start, self._without_progress = int(value), 0

    def _wait_for_stop(self, seconds: float) -> bool:
        """Wait; return whether a stop signal has come."""
        if number := _await_signal(self._stops, seconds):
            self._record_stop(number)
        return bool(self._stop_time)

    def _record_stop(self, number: int) -> None:
        now = time.monotonic()
        if not self._stop_time:
            self._stop_time, self._stop_signal = now, number
        elif means_exit_now(number, self._stop_time, now):
            self._exit_time = self._exit_time or now

    def _await_written(self) -> bool:
        """Wait until what trainers have stored in memory is on the disk, or refused: at most --grace, counted from a
        stop signal if one has come; then children go on. False: a second Ctrl-C has ended the wait."""
        begun, announced = time.monotonic(), False
        while steps := self._memory.reap():
            what, now = f"step {' and '.join(map(str, steps))}", time.monotonic()
            until = (self._stop_time or begun) + self._grace
            if self._exit_time:
                self._memory.kill_writers()
                _say(f"second stop signal: exiting, {what} is NOT SAVED")
                return False
            if now > until:
                _say(f"{what} is NOT SAVED within --grace {self._grace:g} s; a process continues writing it")
                break
            if self._stop_time and not announced and now > max(self._stop_time, begun) + ANNOUNCE_DELAY:
                announced, wait = True, f"waiting {until - now:.0f} s at most until {what} is on the disk"
                _say(f"{signal_name(self._stop_signal)}: {wait}; {self._how_to_exit()} to exit without it")
            self._wait_for_stop(0.01)
        return True

    def _how_to_exit(self) -> str:
        if is_plain_torchrun(os.getppid()):  # it makes SIGTERM of a second Ctrl-C
            return f"type `kill -INT {os.getpid()}`"
        return "press Ctrl-C again" if self._stop_signal == signal.SIGINT else "press Ctrl-C"

    def _handle_end(self, code: int) -> bool:
        """Handle a trainer's end: return whether to fork another trainer, by the first row that fits.

        a stop signal; refused input; the store in which ranks meet is gone     no
        finished                         only if another rank has died, which cannot finish without this one
        killed by another signal without REGROUP, or ended because of a hang    `_restart`: this rank has died
        got REGROUP, or lost a rank whose keeper confirms its death             `_restart`: another rank has died
        anything else, such as an exception                                     no
        """
        if self._stop_time and code == -signal.SIGKILL:
            _say(f"rank {self._rank} was killed before it had left after {signal_name(self._stop_signal)}")
        stopped = self._stop_time or "stop" in self._messages or -code in STOP_SIGNALS
        if stopped or code == REFUSED or self._store_lost or not store_is_alive():
            return False
        if code == 0:
            return not self._peers.await_all(self._wait_for_stop)
        if code < 0 and not self._regroup_time:  # after REGROUP this keeper may have killed it
            hung = self._peers.hang_of() if -code == signal.SIGKILL else ""
            return self._restart(hung or f"rank {self._rank} was killed by {signal_name(-code)}")
        if "hang" in self._messages:
            return self._restart(f"rank {self._rank} ended because of a hang", self._messages["hang"])
        if self._regroup_time or ("lost" in self._messages and self._is_confirmed()):
            return self._restart()
        return False

    def _restart(self, death: str = "", cause: str = "") -> bool:
        """Report this rank's death to the other keepers, and return whether to fork another trainer: not after
        --keeper-restarts restarts without progress, nor if the others cannot be told.

        Args:
            death: how this rank has died; "": another one has, and its keeper reports that.
            cause: what the others are told, if not `death`.
        """
        if self._without_progress >= self._max_restarts:
            again = " again, without progress" if self._max_restarts else ""
            _say(f"{death or f'rank {self._rank} lost another rank'}{again}; torchrun decides")
            return False
        if death and not self._peers.report_death(cause or death):
            _say(f"{death}, and the other keepers cannot be told of it; torchrun decides")
            return False  # they would wait for this rank
        self._without_progress += 1
        if death:
            _say(f"{death}; all ranks restart in place, without torchrun")
        return True

    def _is_confirmed(self) -> bool:
        """Whether the trainer has lost a rank that died; if not, print the error that looked like it."""
        if self._peers.confirm_death(self._wait_for_stop):
            return True
        if not self._stop_time:  # of all ranks: the first one may only have lost the one whose error it is
            with contextlib.suppress(OSError, ValueError):
                print(json.loads(self._messages["lost"]), file=sys.stderr, end="", flush=True)
        return False

    def _end(self, code: int) -> NoReturn:
        """End this process in the way its trainer has ended, which has run the exit handlers. In this order: report a
        refusal (torchrun is ended there); tell the others; give up; wait for the disk; end the store."""
        # another rank has refused: torchrun stops this one, and waits for its end
        agent_stops_us = self._stop_time and os.environ.get("LOCAL_RANK", "0") != "0"
        if code == REFUSED and "refusal" in self._messages and not agent_stops_us:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # the agent would wait for this process
            refuse(self._messages["refusal"])
        if code:
            self._peers.report_leaving()
        if "give_up" in self._messages and not self._wait_for_stop(1.0):  # other ranks record their failure too
            give_up()
        # 130 means a second Ctrl-C only of a trainer that handled signals: it has sent --grace
        if code == KEYBOARD and "grace" in self._messages:
            self._exit_time = self._exit_time or time.monotonic()
        if not self._await_written():
            code = KEYBOARD
        end_store()
        if code < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the trainer has left a core file, if one is wanted
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
            os.kill(os.getpid(), -code)
            time.sleep(1)  # a signal that is ignored
        clean_up_before_exit()
        os._exit(code if code >= 0 else 128 - code)


def _say(text: str) -> None:
    say(f"evenkeel: {text}", to_stderr=True)


def _await_signal(numbers: Collection[int], seconds: float) -> int | None:
    """Wait for one of these signals, which are blocked. Returns its number."""
    found = signal.sigtimedwait(numbers, seconds)
    # after Ctrl-Z and a continuation past the time-out, CPython returns a structure that it has not filled in
    return found.si_signo if found and found.si_signo in numbers else None
