"""Networks of timm and of transformers, by the tasks in examples/: random weights, no network to download from."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch

from tests.processes.test_examples import kill
from tests.support.processes import ROOT, TRAIN, finish_all, fork_ranks, read, records
from tests.support.small_runs import model_of, options, trained, weights_of

TIMM = f"{ROOT / 'examples' / 'vit_of_timm.py'}:Timm"
BERT = f"{ROOT / 'examples' / 'bert_of_transformers.py'}:Bert"
LORA = ["--lora", 4]


def job(task: str, run_dir: Path, steps: int, *more: object) -> list[str]:
    shape = ["--batch-size", 12, "--micro-batch", 4, "--max-steps", steps, "--eval-every", 100, "--log-every", 1]
    return options(task, run_dir, *shape, "--reduce", "tree", "--lr", 2e-3, *more)


@pytest.mark.parametrize(("task", "more"), [(TIMM, []), (BERT, []), (BERT, LORA)], ids=["timm", "bert", "lora"])
def test_killed_on_two_ranks_and_finished_on_one_the_bits_are_the_same(
    task: str, more: list[object], tmp_path: Path, run_dir: Path
) -> None:
    """With stochastic depth, dropout, layer decay and frozen weights among them."""
    undisturbed = fork_ranks(0, TRAIN, *job(task, tmp_path / "one", 9, *more))
    without = ["--keeper", "off", "--checkpoint-every", 0]
    come = kill(
        fork_ranks(2, TRAIN, *job(task, run_dir, 9, *more, *without)), run_dir, random.randint(1, 5), signal.SIGKILL
    )
    trained(0, job(task, run_dir, 9, *more))
    finish_all(undisturbed)
    assert records(run_dir, "start")[1]["step"] == come > 0
    assert read(run_dir)["world_sizes"] == [2, 1]
    assert weights_of(run_dir) == weights_of(tmp_path / "one")


def test_lora_learns_its_adapters_and_the_last_layer_alone(tmp_path: Path) -> None:
    learned = {}
    for name, more in (("lora", LORA), ("all", [])):
        for steps in (1, 3):
            trained(2, job(BERT, tmp_path / f"{name}-{steps}", steps, *more))
        before, after = (model_of(tmp_path / f"{name}-{steps}") for steps in (1, 3))
        learned[name] = {key for key in before if not torch.equal(before[key], after[key])}
    assert learned["lora"]
    assert all("lora_" in key or "classifier.modules_to_save" in key for key in learned["lora"]), learned["lora"]
    assert any("embeddings" in key for key in learned["all"]), "the control: without LoRA all weights learn"
