"""The one error that is the user's to mend, told apart from a bug in the code, and said in one line."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from .processes import can_lose_a_node, end_agent, leave_nothing, orphaned_within, torchrun_agent

T = TypeVar("T")

OTHERS_SPEAK = 10.0
"""Seconds in which local rank 0 says what all ranks of its node refuse. Where only another one does, that speaks."""

NODES_REFUSE = 30.0
"""How long a node that refuses waits for the others, which may be slower to start."""

FAILED = 1
"""Exit code of a run that could not go on; torchrun starts it again, if it may."""

REFUSED = 2
"""Exit code of a refused input."""


class Refusal(Exception):  # noqa: N818  (a refusal is an answer, not an error of ours)
    """Bad input: one line that names the flag or file, its value and the remedy.

    Main programs print it on stderr as ``evenkeel: <line>`` and exit with :data:`REFUSED`, before any
    process group exists and before anything is written.
    """


class Ended(Exception):  # noqa: N818
    """The run could not go on, for a reason that a line tells better than a traceback. Exit code 1.

    It is the same on all ranks, and rank 0 says it.
    """


class EndedHere(Ended):
    """As above, but on some ranks only, each of which says it."""


class EndedByData(EndedHere):
    """As above, because of a sample. A loading process puts its traceback around the line, which is taken off here:
    torch's `DataLoader` makes the error anew from the text of both."""

    def __init__(self, text: str) -> None:
        super().__init__(text.strip().rpartition(f"{type(self).__module__}.{type(self).__qualname__}: ")[2])


@contextlib.contextmanager
def no_exit(kind: type[Ended] = EndedHere) -> Iterator[None]:
    """A context for a task's code, which may not end the process: exit code 0 would pass for a finished run.

    Raises:
        Ended: of that kind, where the code has called `sys.exit` or raised SystemExit.
    """
    try:
        yield
    except SystemExit as exit_:
        raise kind(
            f"the task called sys.exit({exit_.code!r}){place_of(exit_.__traceback__)}, and the run is not finished; "
            "raise an error that says what is wrong instead"
        ) from exit_


def place_of(trace: Any) -> str:
    """Where an error comes from, " at FILE:LINE" or nothing: the user's line, not the one deep in NumPy that it led
    to."""
    paths, ours = sysconfig.get_paths(), ("<frozen", __file__, str(Path(__file__).with_name("tasks.py")))
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(ours)]
    installed = [f for f in frames if f.filename.startswith((paths["purelib"], paths["platlib"]))]
    theirs = [f for f in frames if f not in installed and not f.filename.startswith(paths["stdlib"])]
    found = theirs or installed  # their own package may be an installed one
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""


def lose_stdout() -> None:
    """Let what is still written to stdout go nowhere: its reader has gone, as that of `--help | head` does."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def refuse_empty(words: Sequence[str], *classes: Any) -> None:
    """Refuse an empty word, which an unset shell variable leaves, except for an option that is empty by default.

    Args:
        words: of a command line. Options that the classes do not have are not looked at.
        classes: dataclasses with the options.

    Raises:
        Refusal: names the option.
    """
    defaults = {option.name.rstrip("_"): option.default for cls in classes for option in fields(cls)}
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if word and (value or not equals):
            continue
        before = words[number - 1] if number else ""
        option = name or before * before.startswith("-")
        in_a_list = not option and any(earlier.startswith("-") for earlier in words[:number])
        if in_a_list or (option and defaults.get(option.lstrip("-").replace("-", "_"), "") == ""):
            continue
        raise Refusal(
            f"{option or 'an argument'} is empty, as an unset shell variable is: give a value, or leave it out"
        )


def one_line_errors(call: Callable[[], T], hint: str = "--help lists all options") -> T:
    """Run a tyro command line so that its framed error message becomes a :class:`Refusal` of one line."""
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return call()
    except BrokenPipeError:  # of its help
        lose_stdout()
        raise SystemExit(0) from None
    except SystemExit as exit_:
        if exit_.code != REFUSED:
            raise
        plain = re.sub(r"\x1b\[[\d;]*m|[│╭╮╰╯]", "", captured.getvalue())  # no colours, no frame
        title, *lines = [line.strip() for line in plain.splitlines()] or [""]
        sections = re.split(r"^[─-]{3,}$", "\n".join(lines), flags=re.MULTILINE)  # dashes where there is no UTF-8
        message = next((" ".join(section.split()) for section in sections if section.strip()), title)
        _, _, suggested = "\n".join(sections).partition("Perhaps you meant:")
        if names := re.findall(r"^--[\w-]+", suggested, re.MULTILINE):
            message += f"; perhaps {' or '.join(names)}?"
        raise Refusal(f"{message} ({hint})") from None


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a main program; a refusal is one line on stderr and exit code 2, another known end one line and 1.

    A bug is a traceback and 1, as if it had not been caught. But a :func:`leave` that follows spares a rank that has
    lost its peer a second of taking down the interpreter, for which the job's restart would wait.

    A refusal ends torchrun as well, which would start the ranks again and report each of them on a page.
    """
    try:
        return main() or 0
    except Ended as ended:
        line = " ".join(str(ended).split())
        if isinstance(ended, EndedHere) or os.environ.get("RANK", "0") == "0":
            _tell(line)
        _shorten_report(f"{type(ended).__module__}.{type(ended).__qualname__}: {line}")
        return FAILED
    except Refusal as refusal:
        _refuse(" ".join(str(refusal).split()))
        return REFUSED
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1


def _shorten_report(line: str) -> None:
    """torchrun's closing report shows the traceback that `record` has left for it, where a line tells more."""
    with contextlib.suppress(KeyError, OSError, ValueError):  # no torchrun, or one that keeps no files
        path = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        report = json.loads(path.read_text())
        report["message"]["extraInfo"]["py_callstack"] = line
        path.write_text(json.dumps(report))


def _tell(line: str) -> None:
    """The exit code is right even where nobody can read why."""
    with contextlib.suppress(OSError):
        print(f"evenkeel: {line}", file=sys.stderr, flush=True)


def _refuse(line: str) -> None:
    """Say it once a node, and end its torchrun. Mostly all ranks refuse alike, and local rank 0 is to speak."""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    others_speak = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_RANK") != "0"
    if others_speak and orphaned_within(OTHERS_SPEAK + NODES_REFUSE * (nodes > 1), os.getppid()):
        return
    _tell(line)
    if agent := torchrun_agent():
        if nodes > 1 and not can_lose_a_node(agent):
            from .rendezvous import refuse_together

            refuse_together(line)
        end_agent(agent)


def leave(code: int) -> NoReturn:
    """End a process that has used collectives, after everything registered with `atexit` has run.

    gloo's threads may still be letting go of a finished collective when the interpreter is taken down under them;
    seen once in some hundred runs on a busy machine, as "terminate called without an active exception", exit code
    -6. torchrun would take that for a failure of a run that has finished. So the interpreter is not taken down.
    """
    atexit._run_exitfuncs()
    leave_nothing()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a pipe that is gone
            stream.flush()
    os._exit(code)
