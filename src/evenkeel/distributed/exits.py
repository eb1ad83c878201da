"""From an exception to an exit code and a line on stderr, once per node.

What ends the main program of a rank, and what follows:

    error                             exit code  a line by                    the keeper gets  then
    Refusal: bad input                2          local rank 0, or its keeper  "refusal"        torchrun ends
    Ended: on all ranks, or on rank 0 1          rank 0                                        torchrun decides
    EndedForGood: on all ranks        1          rank 0                       "give_up"        torchrun ends
    EndedHere: on some ranks          1          see `prints`                                  torchrun decides
      a mistake, by `_comes_again`    1          the same                     "give_up"        torchrun ends
    the loss of another rank          1          its keeper, if unconfirmed   "lost"           the keeper decides
    any other exception               1          as EndedHere, a traceback too                 torchrun decides
      a mistake, by `_comes_again`    1          the same                     "give_up"        torchrun ends

"torchrun decides": it starts all ranks again, if --max-restarts allows. Signals end a process elsewhere (75, see
`resilience.interruption`), and so do hangs (`Ending.hung`); the keeper's own table is `Keeper._handle_end`.
"""

from __future__ import annotations

import atexit
import json
import os
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from ..common import keeper_link
from ..common.display import flush, say
from ..common.errors import FAILED, REFUSAL_TIMEOUT, REFUSED, Ended, EndedForGood, EndedHere, Refusal, Uncollated
from ..common.processes import (
    FAILURE,
    await_parents_death,
    can_lose_a_node,
    clean_up_before_exit,
    end_agent,
    torchrun_agent,
    under_torchrun,
)
from .attempt_files import Place, failed_alike, failed_before, record_first_failure, shorten_report
from .causes import is_certain, is_loss_of_a_rank, is_mistake, print_traceback, reason_of

AGAIN = "; the same error as before: not tried again"
"""What follows a mistake that has ended an earlier attempt too."""

TRYING = "; torchrun tries again, in case the machine is to blame, unless another rank reports a mistake"
"""What follows another error."""

SPEAKER_TIMEOUT = 10.0
"""Seconds that other ranks of a node wait for local rank 0 to print a refusal before they print it themselves."""


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a main program and return its exit code, by the table of this module. Prints to stderr."""
    try:
        return main() or 0
    except Refusal as refusal:
        line = " ".join(str(refusal).split())
        if keeper_link.has_keeper():
            keeper_link.send("refusal", line)  # the keeper reports it to torchrun
        else:
            refuse(line)
        return REFUSED
    except Exception as error:  # handled here, so that `leave` can follow: the interpreter's own end takes a second
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error that is no refusal, and tell the keeper and torchrun of it. Returns the exit code."""
    rank, ended = os.environ.get("RANK", "0"), isinstance(error, Ended)
    line = " ".join(str(error).split()) if ended else reason_of(error)
    kind = f"{type(error).__module__}.{type(error).__qualname__}: " if ended else ""
    if keeper_link.has_keeper() and is_loss_of_a_rank(error) and not ended:
        keeper_link.send("lost", json.dumps("".join(traceback.format_exception(error))[-20_000:]))
        shorten_report(line, with_traceback=True)
        return FAILED
    place = record_first_failure(line)
    before = failed_before(line)
    again = _comes_again(error, line, before)
    if prints(error, rank == "0", place):
        if not (before or ended):
            print_traceback(error)
        who = "" if ended else f"rank {rank} failed: "
        say(f"evenkeel: {who}{line}{_what_follows(again, before)}", to_stderr=True)
    shorten_report(kind + line, with_traceback=not ended)
    if again:
        if isinstance(error, EndedForGood) and rank != "0":
            time.sleep(1.0)  # rank 0 prints the line before it ends torchrun, which would end rank 0 earlier
        if keeper_link.has_keeper():
            keeper_link.send("give_up")
        else:
            give_up()
    return FAILED


def prints(error: Exception, rank_0: bool, place: Place) -> bool:
    """Whether this rank prints the error that ends it. Not asked after the loss of a rank, which the keeper reports.

    error                  rank 0                                           another rank
    Ended, EndedForGood    yes                                              no
    Uncollated             the first of its node                            the same
    another EndedHere      the first, or if its line differs from that      the first of its node
    any other              the first of its node                            the same
    """
    if isinstance(error, Ended) and not isinstance(error, EndedHere):
        return rank_0
    adds = rank_0 and isinstance(error, EndedHere) and not isinstance(error, Uncollated)
    return place == "first" or (adds and place == "other")


def _comes_again(error: BaseException, line: str, before: bool) -> bool:
    """Whether the next attempt would fail in the same way: `EndedForGood`; or, in a job of one node and before this
    attempt's first step, a mistake in code that is certain, or that has ended an earlier attempt too. With several
    nodes it is not known how the others failed."""
    if isinstance(error, EndedForGood):
        return True
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1" and torchrun_agent()
    if keeper_link.has_sent("first_step") or not (alone and is_mistake(error)):
        return False
    restarts_left = os.environ.get("TORCHELASTIC_MAX_RESTARTS") != os.environ.get("TORCHELASTIC_RESTART_COUNT")
    return (before and failed_alike(line)) or (is_certain(error) and restarts_left)


def _what_follows(again: bool, before: bool) -> str:
    """The end of a line: that torchrun tries again, and why; or that it does not, because the error came before."""
    if again:
        return AGAIN if before else ""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{it}", "0")) for it in ("RESTART_COUNT", "MAX_RESTARTS"))
    return f"{TRYING} (restart {count + 1} of {most})" if count < most else ""


def give_up() -> None:
    """End torchrun, which would start this rank again, after an error that would come again."""
    if agent := torchrun_agent():
        end_agent(agent, by=FAILURE)


def refuse(line: str) -> None:
    """Print the line, if local rank 0 of this node does not, and end torchrun."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    may_stay_silent = under_torchrun() and os.environ.get("LOCAL_RANK") != "0"
    if may_stay_silent and await_parents_death(SPEAKER_TIMEOUT + REFUSAL_TIMEOUT * (nodes > 1), os.getppid()):
        return
    say(f"evenkeel: {line}", to_stderr=True)
    if agent := torchrun_agent():
        if nodes > 1 and not can_lose_a_node(agent):
            from .refusals import refuse_together  # imports torch, which takes two seconds

            refuse_together(line)
        end_agent(agent)


def leave(code: int) -> NoReturn:
    """End a process that has used collectives, after all `atexit` functions.

    Does not shut down the interpreter: gloo's threads may still be releasing a collective, which once in some hundred
    runs aborted the process (exit code -6), and torchrun would restart a finished run.
    """
    if not keeper_link.has_sent("lost"):  # after a lost rank the next fork needs the files that they delete
        atexit._run_exitfuncs()
    clean_up_before_exit()
    flush()
    os._exit(code)
