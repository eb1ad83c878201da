"""A micro-batch of one sample and BatchNorm: refused before the start, but only where it would fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import ROOT, TRAIN, checked, finish, fork, read, run_forked


def test_a_job_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    options = ["--dataset", "fake", "--fake-samples", 101, "--image-size", 32, "--model", "shufflenet_v2_x0_5"]
    cut = ["--batch-size", 8, "--micro-batch", 4, "--run-dir", tmp_path / "run"]
    (line,) = run_forked(TRAIN, *options, *cut, expect=2).stderr.splitlines()
    assert line.endswith("--micro-batch 3 leaves no single sample")
    assert not (tmp_path / "run").exists()


ONLY_THE_GENERATOR = """
import gan
from evenkeel import start

class Other(gan.Gan):
    def loss(self, model, batch):
        return model["critic"](batch[0].flatten(1) / 255).square().mean()

gan.Gan = Other
start(gan.main)
"""
LINE = (
    "evenkeel: --batch-size 64 --micro-batch 63: every step has 64 samples, of which a micro-batch gets only one, and "
    "the model's BatchNorm cannot train on one sample; --micro-batch 62 leaves no single sample"
)


@pytest.mark.parametrize("one", ["the task's loss", "the other network's loss"])
def test_networks_that_take_turns_are_refused_before_the_first_step(tmp_path: Path, one: str) -> None:
    script, run_dir = ROOT / "examples" / "gan.py", tmp_path / "run"
    if own := one != "the task's loss":
        (script := tmp_path / "own.py").write_text(ONLY_THE_GENERATOR)
    job = ["--run-dir", run_dir, "--wandb", "disabled", "--max-steps", 2]
    env = {"PYTHONPATH": f"{ROOT / 'examples'}:{ROOT / 'src'}"}
    done = checked(finish(fork(script, *job, "--batch-size", 64, "--micro-batch", 63, env=env)), 2)
    assert done.stderr.splitlines() == [LINE]
    assert run_dir.exists() == own
    checked(finish(fork(script, *job, "--batch-size", 64, "--micro-batch", 62, env=env)), 0)
    assert read(run_dir)["step"] == 2
