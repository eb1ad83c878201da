"""What an error means: a mistake in code, a machine's fault, or the loss of another rank; and how it is printed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
from bdb import BdbQuit
from pathlib import Path

from ..common.display import say
from ..common.errors import Ended, EndedHere, Refusal, Uncollated, place_in
from ..common.naming import owner
from ..common.user_code import hint
from .attempt_files import record_first_failure, said_first

LOST = r"\[\S*/gloo/|NCCL (error|communicator)|the attempt of this one is over"
"""Found in errors about the loss of a rank. They have no type of their own: gloo's are plain RuntimeErrors."""

BROKEN = r"(?i)/gloo/\S+\].*?\b(connection (?:aborted|closed|refused|reset|timed out)(?: by peer)?|broken pipe)"
LATE = r"(?i)/gloo/\S+\] ((?:timed out|connect timeout)\b[^.\[\n]*\b)"
"""Found in those errors where a connection broke, and where a time-out came; group 1 says how."""

LOST_KEEPER = "the keeper of rank "
"""Begins the line about the death of a keeper."""

MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, BdbQuit, LookupError, ModuleNotFoundError, NameError, RuntimeError,
    SystemExit, TypeError, UserWarning, ValueError,
)  # fmt: skip
"""Errors of code, unless one of another type led to them, or they are torch's own types."""

CERTAIN = (AssertionError, AttributeError, LookupError, NameError, TypeError, ZeroDivisionError)
"""Those of them that another try would hardly change."""

OF_MACHINES = (
    r"(?i:out of memory|allocate memory|(?<!torch\.)cuda(?!:\d)|cudnn|cufft|nccl|nvml|nvidia|hip error|timed? ?out"
    r"|start new thread|too many open files|shared memory|ancdata|PytorchStreamReader|no space left)"
    r"|C[UH]\w+_STATUS|DataLoader worker \(pid|exited unexpectedly"
    "|another exception occurred:|direct cause of the following"
)
"""Found in errors of code that a machine may have caused, so that another try may help; not in "found cuda:0 and cpu",
which is a mistake. The last two: an error in a loader process that has another cause."""


NO_GPU = r"(?s)Found no NVIDIA driver.*|Torch not compiled with CUDA enabled"
"""Errors of .cuda() on a machine without GPUs: a mistake in the task, since Evenkeel trains on the CPU there."""


def print_traceback(error: Exception) -> None:
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
        where = f"; all of it is in {log}" if logged else ""
        say(f"Traceback (most recent call last), your files only{where}:", to_stderr=True)
        say("".join(shown) + (line_of(error) if _is_of_loader(error) else last), to_stderr=True)
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
        return line_of(error)
    line, frames = line_of(error).rstrip(".: "), _frames(error)
    if not frames or owner((last := frames[-1]).filename) != "engine" or hint(error) or not is_mistake(error):
        return line + place_in(frames)
    line += f" at {last.filename}:{last.lineno}, in Evenkeel's own code"
    return f"{line}: unless your task explains it, this is a bug; report it with this output"


def cause_of(error: BaseException) -> str:
    """As :func:`reason_of`; for the loss of a rank of this node that has said why it failed, its line."""
    said = said_first(os.environ.get("TORCHELASTIC_ERROR_FILE", "")) if is_loss_of_a_rank(error) else ""
    return said or reason_of(error)


def failure_behind(stop: str) -> str:
    """The line of the rank of this node whose failure made torchrun stop the others; "" if the stop has another cause.

    Args:
        stop: the name of the signal that came; torchrun sends SIGTERM.
    """
    return said_first(os.environ.get("TORCHELASTIC_ERROR_FILE", "")) if stop == "SIGTERM" else ""


def line_of(error: BaseException) -> str:
    """The first line of an error, with our hint, and in plain words if it is gloo's of a lost rank."""
    name = "" if isinstance(error, Ended | Refusal) else f"{type(error).__name__}: "
    text = "\n".join((f"{name}{error}".strip(), *getattr(error, "__notes__", ())))
    note = re.search(r"^\(((one of the )?samples? \d|the batch is ).*\)$", text, re.M)  # of `sample_of`, `run.blame`
    first = text.partition("\n")[0].rstrip(".: ")
    if is_loss_of_a_rank(error):
        if gloo := re.search(BROKEN, text):
            return f"the connection to another rank broke: it has died or is out of reach (gloo: {gloo[1]})"
        if gloo := re.search(LATE, text):
            return f"no answer from another rank: it is late, stuck or out of reach (gloo: {gloo[1]})"
    # of an error in a loader process torch names the place first, and the error after its traceback
    if kind := re.search(r"Caught (\w+) in DataLoader worker process ", first):
        first = [first, *re.findall(rf"^(?:\w+\.)*{kind[1]}\b.*", text, re.M)][-1]
    return first + hint(error) + (f" {note[0]}" if note else "")


def is_loss_of_a_rank(error: BaseException | None) -> bool:
    """Whether a collective or the store raises such an error when another process is gone."""
    while error and os.environ.get("WORLD_SIZE", "1") != "1":
        if type(error).__module__ == "torch.distributed" or (
            isinstance(error, RuntimeError) and re.search(LOST, str(error))
        ):
            return True
        error = error.__cause__
    return False


def record_lost_keeper(rank: str) -> str:
    """Record on this node that a rank's keeper was killed, for the next attempt; returns the line."""
    line = f"{LOST_KEEPER}{rank} was killed"
    record_first_failure(line)
    return line


def lost_keeper_before() -> str:
    """The line with which torchrun's last attempt has ended on this node, if a keeper was killed; else ""."""
    with contextlib.suppress(KeyError, ValueError):  # no torchrun
        rank = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent  # in the folder attempt_N
        last = rank.parent.with_name(f"attempt_{int(rank.parent.name.removeprefix('attempt_')) - 1}")
        said = said_first(str(last / rank.name / "error.json"))
        return said if said.startswith(LOST_KEEPER) else ""
    return ""


def is_certain(error: BaseException) -> bool:
    """Whether a mistake in code would certainly come again: a check has found it, or it is of a type in
    `CERTAIN` or that `hint` knows. Not if a GPU is missing, perhaps for a moment, or None was read in place of data."""
    if isinstance(error, Ended):
        return type(error) is Uncollated or (type(error) is EndedHere and not error.__cause__)
    text = str(error)
    certain = isinstance(error, CERTAIN) and not isinstance(error, UnboundLocalError)  # as after what was not found
    certain |= bool(hint(error)) and "unpack" not in text
    return certain and not re.search(rf"{NO_GPU}|NoneType|Unable to ", text)  # the last: h5py's, of a file


def is_mistake(error: BaseException | None) -> bool:
    """Whether an error and all that led to it come from code, and not from a machine, a network or another rank."""
    while error:
        name = type(error).__name__  # in a loader process it may have had another one
        mistake = isinstance(error, MISTAKES) and type(error).__module__.partition(".")[0] != "torch"
        text = re.sub(NO_GPU, "", str(error))
        machine = isinstance(error, OSError) or bool(re.search(rf"{OF_MACHINES}|^Caught (?!{name} )", text))
        # ours and torch's: where ranks wait for others
        machine |= any(it.filename.endswith("rendezvous.py") for it in traceback.extract_tb(error.__traceback__))
        if machine or not (mistake or type(error) in (EndedHere, Uncollated)) or is_loss_of_a_rank(error):
            return False
        error = error.__cause__ or error.__context__
    return True
