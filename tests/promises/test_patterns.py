"""Each task of docs/patterns.md trains, with the same bits on one process and on two ranks of which one is killed."""

import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT, read
from tests.support.small_runs import interrupt, options, steps_of, trained, weights_of

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "patterns.md").read_text(), re.DOTALL)
NAMES = [name for name in re.findall(r"^class (\w+)", "".join(BLOCKS), re.MULTILINE) if name != "Digits"]


LEARNS = {
    "Curriculum": ("test/accuracy", 0.1),  # four epochs are too few for what it has not seen
    "Detection": ("test/loss", -1.5),  # at least so small
    "Speech": ("test/loss", -1.5),
}
"""A metric and what it must be above, if other than the accuracy; below zero: of the negative metric."""


def test_there_are_patterns() -> None:
    assert len(NAMES) >= 7


MARKS = {"MeanTeacher": ()} | dict.fromkeys(("Curriculum", "Balanced", "Fold", "Rewarded"), pytest.mark.long)
"""The long ones have an order, weights, a split or a loss of their own, as tasks of other promises have."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in NAMES])
def test_a_pattern_keeps_the_promises(tmp_path: Path, name: str) -> None:
    (tmp_path / "patterns.py").write_text("\n\n".join(BLOCKS))
    shape = ["--batch-size", 128, "--epochs", 4, "--lr", 0.02, "--reduce", "tree", "--keeper", "off", "--log-every", 1]
    job = f"{tmp_path / 'patterns.py'}:{name}"
    trained(0, options(job, tmp_path / "alone", *shape))
    run_dir = tmp_path / "killed"
    interrupt(2, run_dir, options(job, run_dir, *shape, "--checkpoint-every", 1), step=8)
    assert steps_of(run_dir)[-1] < read(tmp_path / "alone")["step"], "killed before its end"
    trained(2, options(job, run_dir, *shape))
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")
    assert read(run_dir)["metrics"] == read(tmp_path / "alone")["metrics"]
    metric, least = LEARNS.get(name, ("test/accuracy", 0.3))
    assert read(run_dir)["metrics"][metric] * (1 if least > 0 else -1) > least, "it has learned"
