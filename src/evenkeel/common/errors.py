"""Errors that end a program with one line instead of a traceback, and their exit codes."""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from .naming import owner

FAILED = 1
"""Exit code of a run that cannot go on; torchrun restarts it if it has restarts left."""

REFUSED = 2
"""Exit code of a refused input."""

REFUSAL_TIMEOUT = 30.0
"""Seconds that a node which refuses its input waits for the other nodes, which may start more slowly."""


class Refusal(Exception):  # noqa: N818  (a refusal is an answer, not an error of ours)
    """Bad input: one line that names the flag or file, its value and the remedy.

    Programs print it as ``evenkeel: <line>`` on stderr and exit with :data:`REFUSED`. It comes before anything is
    written, except from `resume` (such as --strict-bits) and from `Run.distribute`.
    """


class Ended(Exception):  # noqa: N818
    """The run cannot go on; the text is one line that says why. Raised on all ranks, or on rank 0, which prints it."""


class EndedForGood(Ended):
    """Ended on all ranks, as every further attempt would be: torchrun starts none."""


class Unfit(Ended):
    """Ended on a rank whose state may be wrong and must not be saved; the others raise `Ended` with the same text."""


class EndedHere(Ended):
    """Ended on some ranks only; the first to fail on each node prints its line; so does rank 0 if its line differs."""


class EndedByData(EndedHere):
    """Ended on this rank because of a sample. Torch raises a loader process's error again with its traceback as the
    text; only the last line of it is kept."""

    def __init__(self, text: str) -> None:
        super().__init__(text.strip().rpartition(f"{type(self).__module__}.{type(self).__qualname__}: ")[2])


class Uncollated(EndedByData):
    """Samples of which no batch can be made: a mistake in the code, which comes again."""


@contextlib.contextmanager
def no_exit(kind: type[Ended] = EndedHere) -> Iterator[None]:
    """Turn a `sys.exit` in a task's code into an error of this kind: with exit code 0 the run would look finished."""
    try:
        yield
    except SystemExit as exit_:
        raise kind(
            f"the task called sys.exit({exit_.code!r}){place_of(exit_.__traceback__)}, and the run is not finished; "
            "raise an error that says what is wrong instead"
        ) from exit_


@contextlib.contextmanager
def seen_at(*methods: Any) -> Iterator[None]:
    """Name, by file and line, the first of the methods that is the user's, in an error about its result."""
    try:
        yield
    except (Ended, Refusal) as error:
        codes = [getattr(inspect.unwrap(method), "__code__", None) for method in methods]
        code = next((it for it in codes if it and owner(it.co_filename) == "user"), None)
        made_of_text = type(error) in (Ended, EndedForGood, EndedHere, Uncollated, Refusal)  # not those with more data
        if not (made_of_text and code):
            raise
        raise type(error)(f"{error}; see {code.co_filename}:{code.co_firstlineno}") from error.__cause__


def place_of(trace: TracebackType | None) -> str:
    """The place in the user's code, or a package, where an error comes from, as " at FILE:LINE"; "": not known."""
    return place_in(traceback.extract_tb(trace))


def place_in(frames: Sequence[traceback.FrameSummary]) -> str:
    """As :func:`place_of`, of the frames of a traceback."""
    found = [f for f in frames if owner(f.filename) == "user"] or [f for f in frames if owner(f.filename) == "package"]
    return f" at {found[-1].filename}:{found[-1].lineno}" if found else ""
