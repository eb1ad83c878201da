"""A micro-batch of one sample and BatchNorm: refused before the start, but only where it would fail."""

from __future__ import annotations

from pathlib import Path

from tests.support.processes import TRAIN, run_forked


def test_a_job_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    options = ["--dataset", "fake", "--fake-samples", 101, "--image-size", 32, "--model", "shufflenet_v2_x0_5"]
    cut = ["--batch-size", 8, "--micro-batch", 4, "--run-dir", tmp_path / "run"]
    (line,) = run_forked(TRAIN, *options, *cut, expect=2).stderr.splitlines()
    assert line.endswith("--micro-batch 3 leaves no single sample")
    assert not (tmp_path / "run").exists()
