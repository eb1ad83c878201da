"""--shard on: the same bits on any number of ranks, and the metrics and weights of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel.config import Config
from evenkeel.distributed.placement import place
from tests.support import needs
from tests.support.processes import read, records
from tests.support.small_runs import failed, job_of, options, refusal, results_of, starts, trained, weights_of

pytestmark = needs.sharding

SHAPE = "--epochs 2 --batch-size 20 --micro-batch 3 --reduce tree --shard on --lr 0.02"
job = job_of("sharded_task.py:Sharded", SHAPE)


def test_a_step_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Of 12 micro-batches, and of 7 and 2, with which some ranks are idle in a round, or in all."""
    results = {each: results_of(each, "sharded_worker.py", tmp_path, "bits", "12,7,2") for each in (1, 2, 3, 4)}
    ours = {way: {found[way] for found in results.values()} for way in results[1] if not way.startswith("control")}
    assert all(len(found) == 1 for found in ours.values()), ours
    assert len(ours) == 12
    for control in ("control: gradients", "control: norm", "control: fused"):
        assert len({found[control] for found in results.values()}) > 1, control


@pytest.mark.parametrize(
    ("precisions", "ranks", "micro_batches", "size"),
    [("fp32,bf16", 3, 7, 3), ("fp32,bf16", 4, 7, 2), needs.slow("bf16", 4, 5, 2), needs.long("bf16", 6, 7, 2)],
)
def test_a_step_sends_as_many_bytes_as_the_docs_say(
    tmp_path: Path, precisions: str, ranks: int, micro_batches: int, size: int
) -> None:
    found = results_of(ranks, "sharded_worker.py", tmp_path, precisions, micro_batches, size)
    assert len(found) == ranks * len(precisions.split(","))
    for each in found:
        assert each["counted"] == each["formula"]
        assert min(each["counted"]["weights"], each["counted"]["gradients"]) > 0
        assert (each["counted"]["replicas"] > 0) == (size < ranks)


def test_a_model_is_divided_one_block_after_the_other(tmp_path: Path) -> None:
    """What is not a rank's is freed after each block, so that the whole model and the rows are never there together."""
    found = results_of(2, "memory_worker.py", tmp_path, "division", "ours")
    assert found["growth"] < 1.5 * found["block"]
    control = results_of(2, "memory_worker.py", tmp_path, "division", "held")
    assert control["growth"] > 0.4 * control["model"]


def test_only_buffers_come_to_the_device_before_that() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    place(model, Config(shard="on"), [torch.device("meta")])
    assert {it.device.type for it in model.parameters()} == {"cpu"}
    assert {it.device.type for it in model.buffers()} == {"meta"}
    place(model, Config(shard="on", eval_only=True), [torch.device("meta")])
    assert {it.device.type for it in model.parameters()} == {"meta"}, "nothing divides them"
    model = nn.Sequential(nn.Linear(2, 2))
    place(model, Config(), [torch.device("meta")])
    assert {it.device.type for it in model.parameters()} == {"meta"}, "the control"


def results(run_dir: Path) -> tuple[str, Any]:
    return weights_of(run_dir), read(run_dir)["metrics"]


@pytest.mark.parametrize(
    "more",
    [
        ["--clip-norm", 0.5, "--ema", 0.9],
        needs.slow(["--precision", "bf16", "--checkpoint-activations"]),
        needs.slow(["--optimizer", "sgd", "--batch-size", 6]),
    ],
)
def test_a_run_has_the_same_bits_and_metrics_on_any_number_of_ranks(tmp_path: Path, more: list[Any]) -> None:
    for ranks in (1, 0, 2, 3):  # 0: without torchrun
        trained(ranks, job(tmp_path / str(ranks), *more))
        assert results(tmp_path / str(ranks)) == results(tmp_path / "1"), ranks


def test_the_bits_are_those_of_a_run_without_it_that_has_its_optimizer(tmp_path: Path) -> None:
    for shard in ("on", "off"):
        trained(2, job(tmp_path / shard, "--shard", shard, "--digest-every", 2, task="Foreach"))
    assert results(tmp_path / "on") == results(tmp_path / "off")
    digests = [[it["digests"] for it in records(tmp_path / shard, "digest")] for shard in ("on", "off")]
    assert digests[0] == digests[1]


SLOW_FILES = """
import time
from evenkeel.training import sharding
from tests.support.sharded_task import Sharded

on_disk = sharding.on_disk

def slowly(*what):
    time.sleep(1)
    return on_disk(*what)

sharding.on_disk = slowly

class Slow(Sharded):
    pass
"""


@pytest.mark.slow
def test_the_weights_may_be_gathered_for_longer_than_the_hang_timeout(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_FILES)
    words = [*SHAPE.split(), "--max-steps", 2, "--hang-timeout", 4]
    trained(2, options(f"{tmp_path / 'slow.py'}:Slow", tmp_path / "run", *words))
    assert len(starts(tmp_path / "run")) == 1


OUTSIDE = "--shard: a weight is used outside of the forward() of its block"


@pytest.mark.parametrize(
    ("way", "line"),
    [
        ("number", f"{OUTSIDE} at "),
        *(needs.slow(way, OUTSIDE) for way in ("draw", "row", "rows", "penalty", "whole penalty")),
        needs.slow("write", "loss() or the model's forward() (or faulty memory) changes"),
        needs.slow("gradient", "--shard: create_graph=True: gradients of gradients are not supported"),
    ],
)
def test_what_would_count_this_ranks_rows_for_the_weight_ends_in_one_line(tmp_path: Path, way: str, line: str) -> None:
    """Torch says nothing of most of these, and ranks or numbers of ranks would get other weights."""
    ends = failed(2, job(tmp_path / "run", "--way", way, task="Outside"))
    assert any(line in it.stderr for it in ends), ends


@pytest.mark.slow
def test_a_whole_weight_may_be_read_after_a_step(tmp_path: Path) -> None:
    for ranks in (1, 3):
        trained(ranks, job(tmp_path / str(ranks), "--way", "whole", task="Outside"))
    assert results(tmp_path / "1") == results(tmp_path / "3")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--reduce", "ring"], "--shard on --reduce ring: sums gradients in the tree's order; add --reduce tree"),
        (["--precision", "fp16"], "--shard on --precision fp16: do not work together; leave one of them out"),
    ],
)
def test_what_it_does_not_support_is_refused_in_one_line(tmp_path: Path, words: list[Any], line: str) -> None:
    assert refusal(job(tmp_path / "run", *words)) == line
    assert not (tmp_path / "run").exists()
