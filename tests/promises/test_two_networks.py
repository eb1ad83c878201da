"""Two adversarial networks with two optimizers: all promises hold for them."""

import signal
from pathlib import Path

import pytest

from tests.support.processes import TRAIN, finish_all, fork_ranks, read, records
from tests.support.small_runs import interrupt, job_of, model_of, trained

NET = "--backbone small --canvas 32 --digit-size 16 --discriminator-width 4 --reduce tree --log-every 1"
job = job_of("segment", NET)


@pytest.mark.slow
def test_two_networks_keep_all_promises_whole_placed_and_cut(tmp_path: Path, run_dir: Path) -> None:
    shape = ["--samples", 45, "--test-samples", 13, "--batch-size", 11, "--micro-batch", 3, "--epochs", 6]
    shape += ["--checkpoint-every", 2, "--adversarial", 0.1, "--schedule", "poly", "--ema", 0.9]
    undisturbed = fork_ranks(1, TRAIN, *job(tmp_path / "one", *shape))
    interrupt(3, run_dir, job(run_dir, *shape), 3, signal.SIGTERM)
    place = ["--place", "segmenter=0,discriminator=1"]
    interrupt(2, run_dir, job(run_dir, *shape, *place), step=9)
    trained(0, job(run_dir, *shape, "--model-parallel", 2))
    finish_all(undisturbed)
    ours, theirs = read(run_dir), read(tmp_path / "one")
    assert ours["world_sizes"] == [3, 2, 1]
    assert ours["step"] == 30
    assert ours["weights_sha256"] == theirs["weights_sha256"]
    assert ours["metrics"] == theirs["metrics"], "to the last digit"
    logs = "".join(path.read_text() for path in (run_dir / "logs").rglob("rank-0.log"))
    assert "--place segmenter=0,discriminator=1: part 0 " in logs
    assert "segmenter is cut before segmenter.classifier.0" in logs
    assert "there is no GPU, so everything is on the CPU" in logs
    last = {record["step"]: record for record in records(run_dir, "train")}[16]
    assert last["train/lr"] == pytest.approx(2e-3 * 0.5**0.9), "the segmenter's, at step 15 of 30"
    assert last["train/lr_discriminator"] == pytest.approx(1e-4 * 0.5), "by a schedule of its own"
    saved = model_of(run_dir)
    assert {name.split(".")[0] for name in saved} == {"segmenter", "discriminator"}
