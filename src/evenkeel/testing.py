"""For the tests of a project of yours: what holds for every task is checked in one call.

    # tests/test_task.py
    from evenkeel.testing import check

    def test_my_task() -> None:
        check("my_job.py:MyTask", ["--batch-size", "32"])

It takes about as long as `evenkeel check`, some two minutes; exclude it from fast tests by a marker of your own.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from .cli.check.command import HALTED, CheckCommand, as_table
from .cli.check.rows import FAILED, UNCHECKED
from .common.errors import Refusal

__all__ = ["check"]


def check(task: str = "", options: Sequence[str] = (), script: str | Path = "train.py") -> None:
    """Check that the promises hold for a task, as `evenkeel check` does: with real runs, kills and resumes.

    Args:
        task: as in --task: FILE.py:CLASS, PACKAGE.MODULE:CLASS or a built-in one; default: the task of train.py.
        options: of train.py, for example ["--batch-size", "32"].
        script: the training script.

    Warns of each check that could not be done.

    Raises:
        AssertionError: some promise does not hold; the text is the table of what failed, with the remedies.
        KeyboardInterrupt: Ctrl-C came, after which nothing more was checked.
        Refusal: the task or an option cannot be meant.
    """
    __tracebackhide__ = True  # pytest shows the test and the message
    try:
        rows = CheckCommand(task=task, script=Path(script)).rows(options)
    except Refusal as refusal:
        raise Refusal(str(refusal)) from None
    if any(row.figure == HALTED for row in rows):
        raise KeyboardInterrupt
    for row in rows:
        if row.result == UNCHECKED:
            warnings.warn(f"{row.name}: not checked: {row.figure}", stacklevel=2)
    failed = [row for row in rows if row.result == FAILED]
    if failed:
        raise AssertionError(f"{task or 'the task'}: {len(failed)} of {len(rows)} checks failed\n{as_table(failed)}")
