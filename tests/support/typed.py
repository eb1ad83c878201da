"""What a user types after `evenkeel`, in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from evenkeel.__main__ import run


def typed(*words: object) -> tuple[int, str, str]:
    """The exit code, and what stdout and stderr have got. Text is divided into words, a path is one."""
    pieces = [piece for word in words for piece in (word.split() if isinstance(word, str) else [str(word)])]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evenkeel", *pieces])
        return run(), out.getvalue(), err.getvalue()
