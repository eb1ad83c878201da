"""For the tests of a project of yours: what holds for every task is checked in one call.

    # tests/test_task.py
    from evenkeel.testing import check

    def test_my_task() -> None:
        check("my_job.py:MyTask", ["--batch-size", "32"])

It takes about as long as `evenkeel check`, some two minutes; exclude it from fast tests by a marker of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .cli.check.command import CheckCommand, as_table
from .cli.check.rows import FAILED
from .common.errors import Refusal

__all__ = ["check"]


def check(task: str = "", options: Sequence[str] = (), script: str | Path = "train.py") -> None:
    """Check that the promises hold for a task, as `evenkeel check` does: with real runs, kills and resumes.

    Args:
        task: as in --task: FILE.py:CLASS, PACKAGE.MODULE:CLASS or a built-in one; default: the task of train.py.
        options: of train.py, for example ["--batch-size", "32"].
        script: the training script.

    Raises:
        AssertionError: some promise does not hold; the text is the table of what failed, with the remedies.
        Refusal: the task or an option cannot be meant.
    """
    __tracebackhide__ = True  # pytest shows the test and the message
    try:
        rows = CheckCommand(task=task, script=Path(script)).rows(options)
    except Refusal as refusal:
        raise Refusal(str(refusal)) from None
    failed = [row for row in rows if row.result == FAILED]
    if failed:
        raise AssertionError(f"{task or 'the task'}: {len(failed)} of {len(rows)} checks failed\n{as_table(failed)}")
