"""From an exception to an exit code and a line on stderr, once per node."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ..common import keeper_link
from ..common.display import flush, say
from ..common.errors import FAILED, REFUSAL_TIMEOUT, REFUSED, Ended, EndedHere, Refusal, Uncollated, place_in
from ..common.naming import owner
from ..common.processes import FAILURE, can_lose_a_node, end_agent, leave_nothing, orphaned_within, torchrun_agent
from ..common.user_code import hint

LOST = r"\[\S*/gloo/|NCCL (error|communicator)|the attempt of this one is over"
BROKEN = r"(?i)/gloo/\S+\].*?\b(connection (?:aborted|closed|refused|reset|timed out)(?: by peer)?|broken pipe)"
LATE = r"(?i)/gloo/\S+\] ((?:timed out|connect timeout)\b[^.\[\n]*\b)"
"""Patterns in these errors, as gloo's are plain RuntimeErrors: all of them; a connection that broke; a time-out."""

MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, ModuleNotFoundError, NameError, RuntimeError,
    SystemExit, TypeError, ValueError,
)  # fmt: skip
"""Errors of code, unless one of another type led to them, or they are torch's own types."""

OF_MACHINES = (
    r"(?i:out of memory|allocate memory|(?<!torch\.)cuda(?!:\d)|cudnn|cufft|nccl|nvml|nvidia|hip error|timed? ?out"
    r"|start new thread|too many open files|shared memory|ancdata|PytorchStreamReader|no space left)"
    r"|C[UH]\w+_STATUS|DataLoader worker \(pid|exited unexpectedly"
    "|another exception occurred:|direct cause of the following"
)
"""Patterns in such errors that the next try may not have, but not in "found cuda:0 and cpu"; the last two: in a loader
process, with another cause."""

AGAIN = "; the same error as before: not tried again"

OTHERS_SPEAK = 10.0
"""Seconds that other ranks of a node wait for local rank 0 to print a refusal before they print it themselves."""


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a main program and return its exit code.

    A refusal prints one line on stderr and returns 2, another known end a line and 1, a bug a traceback, a line and 1.
    Of a node's ranks the first to fail prints, a traceback once. A refusal also ends torchrun, which would restart, and
    so does a mistake in the code the second time, if no step was finished.
    """
    try:
        return main() or 0
    except Ended as ended:
        line, rank_0 = " ".join(str(ended).split()), os.environ.get("RANK", "0") == "0"
        # rank 0 may know more than the first one, such as which ranks are missing, but not of the data
        first = fails_first(line, or_otherwise=rank_0 and not isinstance(ended, Uncollated))
        speaks = first if isinstance(ended, EndedHere) else rank_0
        again = _comes_again(ended, line)
        if speaks:
            say(f"evenkeel: {line}{AGAIN * (again and _failed_before(line))}", to_stderr=True)
        _shorten_report(f"{type(ended).__module__}.{type(ended).__qualname__}: {line}")
        return _failed(again)
    except Refusal as refusal:
        line = " ".join(str(refusal).split())
        if keeper_link.has_keeper():
            keeper_link.send("refusal", line)  # the keeper reports it to torchrun
        else:
            refuse(line)
        return REFUSED
    except Exception as error:
        # printed here, so that `leave` can follow: shutting down the interpreter delays a restart by a second
        line, again = reason_of(error), False
        if keeper_link.has_keeper() and is_loss_of_a_rank(error):
            keeper_link.send("lost", json.dumps("".join(traceback.format_exception(error))[-20_000:]))
        else:
            speaks, again = fails_first(line), _comes_again(error, line)
            if speaks and not _failed_before(line):
                _print_traceback(error)
            if speaks:
                say(f"evenkeel: rank {os.environ.get('RANK', '0')} failed: {line}{AGAIN * again}", to_stderr=True)
        _shorten_report(line, with_traceback=True)
        return _failed(again)


def _print_traceback(error: Exception) -> None:
    """Print the traceback; of one that ends in the user's files only their frames, if the rest is not needed or is in
    this rank's log."""
    frames = [it for it in _frames(error) if owner(it.filename) in ("engine", "user")]
    last = "".join(traceback.format_exception_only(error)).rstrip()
    logs = [it for it in logging.getLogger("evenkeel").handlers if isinstance(it, logging.FileHandler)]
    log = Path(logs[0].baseFilename if logs else "")
    logged = log.is_file() and last in log.read_text(errors="replace")
    led_here = error.__cause__ or (error.__context__ and not error.__suppress_context__)
    if frames and owner(frames[-1].filename) == "user" and (logged or not led_here):
        shown = traceback.format_list([it for it in frames if owner(it.filename) == "user"])
        where = f"; all of it is in {log}" * logged
        say(f"Traceback (most recent call last), your files only{where}:", to_stderr=True)
        say("".join(shown) + (_what(error) if _is_of_loader(error) else last), to_stderr=True)
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Of the traceback; after them those of a loader process, which torch has put into the message."""
    there = re.findall(r'^ *File "(.+)", line (\d+), in (.+)$', str(error), re.M) if _is_of_loader(error) else []
    more = [traceback.FrameSummary(file, int(number), name) for file, number, name in there]
    return [*traceback.extract_tb(error.__traceback__), *more]


def _is_of_loader(error: BaseException) -> bool:
    return " in DataLoader worker process " in str(error).partition("\n")[0]


def reason_of(error: BaseException) -> str:
    """What went wrong, in a line, and where; if that is the engine's code, also what to do."""
    if isinstance(error, Ended | Refusal):
        return _what(error)
    line, frames = _what(error).rstrip(".: "), _frames(error)
    if not frames or owner((last := frames[-1]).filename) != "engine" or hint(error) or not is_mistake(error):
        return line + place_in(frames)
    line += f" at {last.filename}:{last.lineno}, in Evenkeel's own code"
    return f"{line}: unless your task explains it, this is a bug; report it with this output"


def cause_of(error: BaseException) -> str:
    """As :func:`reason_of`; for the loss of a rank of this node that has said why it failed, its line."""
    said = said_first(os.environ.get("TORCHELASTIC_ERROR_FILE", "")) if is_loss_of_a_rank(error) else ""
    return said or reason_of(error)


def _what(error: BaseException) -> str:
    name = "" if isinstance(error, Ended | Refusal) else f"{type(error).__name__}: "
    text = "\n".join((f"{name}{error}".strip(), *getattr(error, "__notes__", ())))
    sample = re.search(r"^\(sample \d+\)$", text, re.M)  # of `Seeded`
    first = text.partition("\n")[0].rstrip(".: ")
    if is_loss_of_a_rank(error):
        if gloo := re.search(BROKEN, text):
            return f"the connection to another rank broke: it has died or is out of reach (gloo: {gloo[1]})"
        if gloo := re.search(LATE, text):
            return f"no answer from another rank: it is late, stuck or out of reach (gloo: {gloo[1]})"
    # of an error in a loader process torch names the place first, and the error after its traceback
    if kind := re.search(r"Caught (\w+) in DataLoader worker process ", first):
        first = [first, *re.findall(rf"^(?:\w+\.)*{kind[1]}\b.*", text, re.M)][-1]
    return first + hint(error) + (f" {sample[0]}" if sample else "")


def is_loss_of_a_rank(error: BaseException | None) -> bool:
    """Whether a collective or the store raises such an error when another process is gone."""
    while error and os.environ.get("WORLD_SIZE", "1") != "1":
        if type(error).__module__ == "torch.distributed" or (
            isinstance(error, RuntimeError) and re.search(LOST, str(error))
        ):
            return True
        error = error.__cause__
    return False


def fails_first(line: str = "", or_otherwise: bool = False) -> bool:
    """Whether no other rank of this node has failed in this attempt: most errors are the same on all ranks.
    ``or_otherwise``: or the first one has failed with another line."""
    with contextlib.suppress(KeyError, OSError):  # no torchrun, or one that keeps no files
        mark, text = _mark(os.environ["TORCHELASTIC_ERROR_FILE"]), _bytes(line)
        try:
            with mark.open("xb") as file:
                file.write(text)
        except FileExistsError:
            return or_otherwise and mark.read_bytes() != text
    return True


def _failed_before(line: str) -> bool:
    """Whether an earlier attempt of torchrun on this node has ended with the same line, after its traceback."""
    with contextlib.suppress(KeyError, OSError):
        mine = _mark(os.environ["TORCHELASTIC_ERROR_FILE"])
        return any(other != mine and _says(other, line) for other in mine.parent.parent.glob(f"*/{mine.name}"))
    return False


def _comes_again(error: BaseException, line: str) -> bool:
    """Whether torchrun should not try again: this rank has finished no step, and the error is a mistake in code that a
    check has found, or with which another attempt has ended. Only on one node: another may have failed otherwise."""
    alone = os.environ.get("GROUP_WORLD_SIZE") == "1" and torchrun_agent()
    if keeper_link.has_sent("progress") or not (alone and is_mistake(error)):
        return False
    left = os.environ.get("TORCHELASTIC_MAX_RESTARTS") != os.environ.get("TORCHELASTIC_RESTART_COUNT")
    found = type(error) is Uncollated or (type(error) is EndedHere and not error.__cause__)
    before = _failed_before(line) and _says(_mark(os.environ["TORCHELASTIC_ERROR_FILE"]), line)
    return before or (found and left)


def is_mistake(error: BaseException | None) -> bool:
    """Whether an error and all that led to it come from code, and not from a machine, a network or another rank."""
    while error:
        name = type(error).__name__  # in a loader process it may have had another one
        mistake = isinstance(error, MISTAKES) and type(error).__module__.partition(".")[0] != "torch"
        machine = isinstance(error, OSError) or bool(re.search(rf"{OF_MACHINES}|^Caught (?!{name} )", str(error)))
        # ours and torch's: where ranks wait for others
        machine |= any(it.filename.endswith("rendezvous.py") for it in traceback.extract_tb(error.__traceback__))
        if machine or not (mistake or type(error) in (EndedHere, Uncollated)) or is_loss_of_a_rank(error):
            return False
        error = error.__cause__ or error.__context__
    return True


def _failed(for_good: bool) -> int:
    """The exit code of a rank that has failed; ``for_good``: and that torchrun should not start again."""
    if for_good and keeper_link.has_keeper():
        keeper_link.send("give_up")
    elif for_good:
        give_up()
    return FAILED


def give_up() -> None:
    """End torchrun, which would start this rank again, after an error that would come again."""
    if agent := torchrun_agent():
        end_agent(agent, by=FAILURE)


def forget_error() -> None:
    """Forget that this rank has failed, or torchrun would report it at the next end."""
    with contextlib.suppress(KeyError, OSError):
        Path(file := os.environ["TORCHELASTIC_ERROR_FILE"]).unlink()
        _mark(file).unlink()


def _bytes(line: str) -> bytes:
    return line.encode("utf-8", "backslashreplace")  # a path need not be UTF-8


def _says(mark: Path, line: str) -> bool:
    """Whether a rank has failed with this line; shapes and indices may differ, as between ranks, but not the place."""
    first, second = (re.sub(rb"(?<!:)\b\d+", b"0", it) for it in (mark.read_bytes(), _bytes(line)))
    return first == second


def said_first(error_file: str) -> str:
    """The line of the node's first rank to fail, in the attempt of an error file; "" if it is not known."""
    with contextlib.suppress(OSError):
        return _mark(error_file).read_text(errors="replace").strip()
    return ""


def _mark(error_file: str) -> Path:
    return Path(error_file).parent.parent / "failed"  # in the attempt's folder, which has one for each rank


def _shorten_report(line: str, with_traceback: bool = False) -> None:
    """Put the line into torchrun's closing report, in place of the traceback that `record` has written for it.

    The traceback goes under another name, for `evenkeel follow`.
    """
    with contextlib.suppress(KeyError, OSError, ValueError):  # no torchrun, or one that keeps no files
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        report = json.loads(path.read_text())
        known = report["message"]["extraInfo"]
        known |= {"traceback": known["py_callstack"]} if with_traceback else {}
        known["py_callstack"] = line
        path.write_text(json.dumps(report))


def refuse(line: str) -> None:
    """Print the line, if local rank 0 of this node does not, and end torchrun."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    others_speak = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0"
    if others_speak and orphaned_within(OTHERS_SPEAK + REFUSAL_TIMEOUT * (nodes > 1), os.getppid()):
        return
    say(f"evenkeel: {line}", to_stderr=True)
    if agent := torchrun_agent():
        if nodes > 1 and not can_lose_a_node(agent):
            from .rendezvous import refuse_together  # imports torch, which takes two seconds

            refuse_together(line)
        end_agent(agent)


def leave(code: int) -> NoReturn:
    """End a process that has used collectives, after all `atexit` functions.

    Does not shut down the interpreter: gloo's threads may still be releasing a collective, which once in some hundred
    runs aborted the process (exit code -6), and torchrun would restart a finished run.
    """
    if not keeper_link.has_sent("lost"):  # else the next fork misses what they delete
        atexit._run_exitfuncs()
    leave_nothing()
    flush()
    os._exit(code)
