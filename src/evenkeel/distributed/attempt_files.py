"""Files of one attempt of torchrun on this node: which rank failed first and why, and what torchrun will report.

torchrun makes a folder for each attempt, and in it one for each rank with the rank's error file. The file `failed` lies
beside these folders: the first rank to fail writes its line into it. Without torchrun, or if it keeps no files, each
rank is the first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Literal

Place = Literal["first", "alike", "other"]
"""A rank's failure is the first of this node in this attempt; or the first one has the same line, or another one."""


def record_first_failure(line: str) -> Place:
    """Record this failure, unless another rank of this node has recorded one in this attempt: most errors are alike on
    all ranks."""
    with contextlib.suppress(KeyError, OSError):  # no torchrun, or one that keeps no files
        file, text = _first_failure(os.environ["TORCHELASTIC_ERROR_FILE"]), _bytes(line)
        (own := file.with_name(f"{file.name}.{os.getpid()}")).write_bytes(text)
        try:
            os.link(own, file)  # complete at once: another rank may read it
        except OSError:
            if file.exists():  # another rank was first
                return "alike" if file.read_bytes() == text else "other"
            own.replace(file)  # a file system without links
        finally:
            own.unlink(missing_ok=True)
    return "first"


def failed_before(line: str) -> bool:
    """Whether an earlier attempt of torchrun on this node has ended with the same line, after its traceback."""
    with contextlib.suppress(KeyError, OSError):
        mine = _first_failure(os.environ["TORCHELASTIC_ERROR_FILE"])
        return any(other != mine and _failed_with(other, line) for other in mine.parent.parent.glob(f"*/{mine.name}"))
    return False


def failed_alike(line: str) -> bool:
    """Whether the first rank of this node to fail in this attempt has failed with the same line."""
    with contextlib.suppress(KeyError, OSError):
        return _failed_with(_first_failure(os.environ["TORCHELASTIC_ERROR_FILE"]), line)
    return False


def forget_error() -> None:
    """Forget that this rank has failed, or torchrun would report it at the next end."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        for each in (Path(file), _first_failure(file)):  # a rank that has ended without an error has only the second
            with contextlib.suppress(OSError):
                each.unlink()


def _bytes(line: str) -> bytes:
    return line.encode("utf-8", "backslashreplace")  # a path need not be UTF-8


def _failed_with(failed: Path, line: str) -> bool:
    """Whether a rank has failed with this line; shapes and indices may differ, as between ranks, but not the place."""
    first, second = (re.sub(rb"(?<!:)\b\d+", b"0", it) for it in (failed.read_bytes(), _bytes(line)))
    return first == second


def said_first(error_file: str) -> str:
    """The line of the node's first rank to fail, in the attempt of an error file; "" if it is not known."""
    with contextlib.suppress(OSError):
        return _first_failure(error_file).read_text(errors="replace").strip()
    return ""


def _first_failure(error_file: str) -> Path:
    return Path(error_file).parent.parent / "failed"  # in the attempt's folder, which has one for each rank


def shorten_report(line: str, with_traceback: bool = False) -> None:
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
