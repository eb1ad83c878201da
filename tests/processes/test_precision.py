"""Mixed precision: what is computed in which type, float16's loss scaling, and both through kills."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import TRAIN, run_forked
from tests.support.small_runs import recipe_job


def test_a_run_that_only_looks_for_its_scale_says_so(tmp_path: Path) -> None:
    options = ["--precision", "fp16", "--loss-scale", 2.0**126, "--max-steps", 12]
    told = run_forked(TRAIN, *recipe_job(tmp_path / "run", *options)).stderr
    assert told.count("the gradient overflowed in all of the last 10 steps, which were left out") == 1
