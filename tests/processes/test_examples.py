"""The examples: loops and tasks of their own from the names that train.py uses, and every promise holds for them."""

import difflib
import random
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support import needs
from tests.support.processes import ROOT, TRAIN, finish, finish_all, fork, fork_ranks, rank_variables, read, records
from tests.support.small_runs import model_of, options, signal_ranks_at, trained, weights_of

GAN = ROOT / "examples" / "gan.py"
GPT = ROOT / "examples" / "nanogpt.py"
SIMCLR = ROOT / "examples" / "simclr.py"
SHAPES = {
    GAN: ["--batch-size", 64, "--max-steps", 20, "--checkpoint-every", 100, "--lr", 1e-3, "--optimizer", "adam"],
    SIMCLR: ["--batch-size", 32, "--max-steps", 16, "--checkpoint-every", 100, "--lr", 1e-3],
    GPT: ["--batch-size", 12, "--max-steps", 12, "--checkpoint-every", 100, "--limit-batches", 4, "--lr", 1e-3],
}


def command(example: Path, run_dir: Path) -> list[object]:
    options = ["--run-dir", run_dir, "--wandb", "disabled", "--log-every", 1, "--reduce", "tree", "--micro-batch", 4]
    script = [TRAIN, "--task", f"{example}:SimClr"] if example == SIMCLR else [example]
    return [*script, *options, *SHAPES[example]]


def kill(ranks: list[subprocess.Popen[str]], run_dir: Path, after: int, number: signal.Signals) -> int:
    """Signal one rank after a step, and return the step that the run has come to when all have ended."""
    signal_ranks_at(after, run_dir, ranks, number, victims=1)
    return int(read(run_dir, "status.json")["step"])


@pytest.mark.parametrize("example", [GAN, GPT, SIMCLR], ids=["gan", "nanogpt", "simclr"])
def test_an_example_keeps_all_promises(example: Path, tmp_path: Path, run_dir: Path) -> None:
    """Killed on 2 ranks and stopped on 3, and finished on 1: the weights of a run on 1 that was never stopped."""
    undisturbed = fork_ranks(0, *command(example, tmp_path / "one"))
    first = kill(fork_ranks(2, *command(example, run_dir)), run_dir, 2, signal.SIGKILL)
    second = kill(fork_ranks(3, *command(example, run_dir)), run_dir, first + 1, signal.SIGTERM)
    finish_all(fork_ranks(0, *command(example, run_dir)))
    finish_all(undisturbed)
    ours, theirs = read(run_dir), read(tmp_path / "one")
    assert 2 <= first < second < ours["step"] == theirs["step"]
    assert ours["world_sizes"] == [2, 3, 1]
    assert ours["weights_sha256"] == theirs["weights_sha256"]
    steps = [record["step"] for record in records(run_dir, "train")]
    assert len(steps) == len(set(steps)), "no step was done twice"


def test_in_a_turn_only_one_network_of_the_gan_learns(tmp_path: Path) -> None:
    """The control: that both learn in each step would leave no turn in which the generator stays what it was."""
    finish_all(fork_ranks(2, *command(GAN, tmp_path), "--digest-every", 1))
    digests = [record["digests"] for record in records(tmp_path, "digest")]
    for before, after in pairwise(digests[1:9]):
        parameters = [name for name in before if name.endswith("weight") and name.startswith("model.")]
        changed = {name.split(".")[1] for name in parameters if before[name] != after[name]}
        assert len(changed) == 1, changed
    assert {"generator", "critic"} == {name.split(".")[1] for name in digests[0] if name.startswith("model.")}


@needs.sharding
def test_the_norm_of_torch_is_refused_when_the_gradient_is_divided(tmp_path: Path) -> None:
    """With the example's own loop; evenkeel's norm is the same on any number of ranks."""
    options = ["--batch-size", 32, "--max-steps", 3, "--lr", 1e-3, "--reduce", "tree", "--shard", "on"]
    done = [finish(it) for it in [fork(GPT, *options, "--run-dir", tmp_path / "run", env=v) for v in rank_variables(2)]]
    assert [it.returncode for it in done] == [1, 1]
    assert "use the one of evenkeel: norm = clip_grad_norm(run.state.parameters, 1.0)" in done[0].stderr


def test_nanogpt_takes_twenty_lines() -> None:
    """And docs/nanogpt.md shows them."""
    plain = (ROOT / "examples" / "nanogpt_plain.py").read_text().splitlines()
    ours = GPT.read_text().splitlines()
    start = plain.index("import math"), ours.index("import math")
    difference = list(difflib.unified_diff(plain[start[0] :], ours[start[1] :], lineterm="", n=1))[2:]
    assert sum(line.startswith("+") and len(line) > 1 for line in difference) <= 20
    shown = (ROOT / "docs" / "nanogpt.md").read_text()
    assert "\n".join(difference) in shown


TIMM = f"{ROOT / 'examples' / 'vit_of_timm.py'}:Timm"
BERT = f"{ROOT / 'examples' / 'bert_of_transformers.py'}:Bert"
LORA = ["--lora", 4]


def job(task: str, run_dir: Path, steps: int, *more: object) -> list[str]:
    shape = ["--batch-size", 12, "--micro-batch", 4, "--max-steps", steps, "--eval-every", 100, "--log-every", 1]
    return options(task, run_dir, *shape, "--reduce", "tree", "--lr", 2e-3, *more)


@pytest.mark.parametrize(("task", "more"), [(TIMM, []), (BERT, []), (BERT, LORA)], ids=["timm", "bert", "lora"])
def test_a_kill_and_other_ranks_change_no_bit(task: str, more: list[object], tmp_path: Path, run_dir: Path) -> None:
    """With stochastic depth, dropout, layer decay and frozen weights among them."""
    undisturbed = fork_ranks(0, TRAIN, *job(task, tmp_path / "one", 9, *more))
    without = ["--keeper", "off", "--checkpoint-every", 0]
    killed = fork_ranks(2, TRAIN, *job(task, run_dir, 9, *more, *without))
    come = kill(killed, run_dir, random.randint(1, 5), signal.SIGKILL)
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
