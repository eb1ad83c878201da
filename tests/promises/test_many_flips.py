"""Many random bit flips in gradients on three ranks, and many steps without any: no flip missed, no false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_runs import results_of


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("flips", "steps"), [(12, 60), pytest.param(200, 2000, marks=pytest.mark.long)])
def test_each_flip_is_found_and_named_and_calm_steps_give_no_alarm(tmp_path: Path, flips: int, steps: int) -> None:
    """With BatchNorm, dropout and bfloat16. The control: the rank itself misses each fault that is always there."""
    found = results_of(3, "flips_worker.py", tmp_path, flips, steps)
    print(found)
    assert (found["found"], found["named"], found["equal"]) == (flips, flips, flips)
    assert flips // 4 < found["sticky"] == found["missed by itself"]
    assert (found["committed"], found["verified"], found["alarms"]) == (steps, steps, [])
