"""The one error that is the user's to mend, told apart from a bug in the code, and said in one line."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import re
import sys
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from .processes import leave_nothing

T = TypeVar("T")

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


def lose_stdout() -> None:
    """Let what is still written to stdout go nowhere: its reader has gone, as that of `--help | head` does."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


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

    Under torchrun all processes of a node refuse alike. The first to exit ends the others, so the one that
    speaks must be first.
    """
    try:
        return main() or 0
    except Ended as ended:
        if isinstance(ended, EndedHere) or os.environ.get("RANK", "0") == "0":
            print(f"evenkeel: {' '.join(str(ended).split())}", file=sys.stderr, flush=True)
        return FAILED
    except Refusal as refusal:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            line = " ".join(str(refusal).split())
            print(f"evenkeel: {line}", file=sys.stderr, flush=True)
        else:
            time.sleep(10)  # torchrun ends this process as soon as local rank 0 has exited
        return REFUSED
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1


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
