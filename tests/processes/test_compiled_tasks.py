"""`--compile` with each built-in task and example: the same bits through a kill and on another number of ranks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from evenkeel.tasks.registry import BUILT_IN
from tests.processes.test_examples import GAN, GPT, kill
from tests.support.processes import ROOT, TRAIN, finish_all, fork_ranks, read, records
from tests.support.small_runs import saved_step

STEPS = 200
COMPILED = 900.0
"""Seconds within which a network is compiled, on a machine that has much else to do."""
JOBS: dict[str, list[object]] = {
    "classify": [TRAIN],
    "regress": [TRAIN, "--task", "regress"],
    "segment": [TRAIN, "--task", "segment", "--backbone", "small", "--samples", 63, "--test-samples", 8],
    "lm": [TRAIN, "--task", "lm", "--seq-len", 32, "--width", 32, "--layers", 1, "--heads", 2],
    "timm": [TRAIN, "--task", f"{ROOT / 'examples' / 'vit_of_timm.py'}:Timm"],
    "transformers": [TRAIN, "--task", f"{ROOT / 'examples' / 'bert_of_transformers.py'}:Bert"],
    "gan": [GAN],
    "nanogpt": [GPT],
}


def job(name: str, run_dir: Path) -> list[object]:
    shape = ["--batch-size", 9, "--micro-batch", 3, "--epochs", 100, "--max-steps", STEPS]
    told = ["--wandb", "disabled", "--eval-every", 100, "--log-every", 1]
    return [*JOBS[name], "--run-dir", run_dir, "--reduce", "tree", "--compile", *shape, *told]


@pytest.mark.long
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", JOBS)
def test_killed_on_two_ranks_and_finished_on_one_the_bits_are_the_same(name: str, tmp_path: Path) -> None:
    if name in BUILT_IN:
        pytest.importorskip(f"evenkeel.tasks.{name}")
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    finish_all(fork_ranks(0, *job(name, whole)), COMPILED)
    kill(fork_ranks(2, *job(name, run_dir), "--keeper", "off"), run_dir, 2, signal.SIGKILL, COMPILED)
    come = saved_step(run_dir)
    finish_all(fork_ranks(0, *job(name, run_dir)), COMPILED)
    assert 0 < come < STEPS
    assert read(run_dir)["world_sizes"] == [2, 1]
    assert read(run_dir)["weights_sha256"] == read(whole)["weights_sha256"]
    first, *_ = records(whole, "compile")
    assert first["times"] > 0, "the control: something has been compiled"
