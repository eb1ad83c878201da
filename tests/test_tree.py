"""One order of addition for any number of ranks: in the tree itself, in whole trainings, and through kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.futures import Future

from evenkeel.plan import share
from evenkeel.reduction import Exchange, _Job, _Pipeline
from evenkeel.tree import Fold, Node, subtrees
from evenkeel.world import World

from . import processes
from .processes import ROOT, TRAIN, finish, finish_all, fork_ranks, read, records, start, torchrun
from .test_survival import workers_of
from .test_train import PLAN, SAMPLES, job, wait_for_step

WORKER = ROOT / "tests" / "tree_worker.py"


def serial(leaves: list[Tensor]) -> Tensor:
    """The tree's definition: the left half is the largest power of two that leaves something for the right one."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return serial(leaves[:half]) + serial(leaves[half:])


def over_ranks(leaves: list[Tensor], runs: list[range]) -> Tensor:
    """Each rank folds its own run, and an owner folds what all of them have."""
    owner = Fold[Tensor](lambda left, right: left + right)
    for leaves_of_rank in runs:
        rank = Fold[Tensor](lambda left, right: left + right)
        for leaf in leaves_of_rank:
            rank.push(Node(0, leaf), leaves[leaf])
        assert [node for node, _ in rank.sums] == list(subtrees(leaves_of_rank)), "what the other ranks expect of it"
        for node, value in rank.sums:
            owner.push(node, value)
    return owner.root()


def touchy(count: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Numbers of which nearly every order of addition gives another sum."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 8, (count, 64), generator=generator)
    return list((torch.randn(count, 64, generator=generator) * 2.0**exponents).to(dtype))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 70), st.data(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_partition_gives_the_serial_tree(count: int, data: st.DataObject, dtype: torch.dtype) -> None:
    leaves = touchy(count, dtype, data.draw(st.integers(0, 1000)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), max_size=12)))  # equal cuts make idle ranks
    runs = [range(begin, end) for begin, end in zip([0, *cuts], [*cuts, count], strict=True)]
    assert torch.equal(over_ranks(leaves, runs), serial(leaves))
    world_size = data.draw(st.integers(1, 20))
    assert torch.equal(over_ranks(leaves, [share(count, r, world_size) for r in range(world_size)]), serial(leaves))


def test_the_control_other_orders_give_other_sums() -> None:
    leaves = touchy(12, torch.float32, 0)
    linear = torch.stack(leaves).cumsum(0)[-1]
    by_rank = sum(torch.stack(leaves[i : i + 3]).cumsum(0)[-1] for i in range(0, 12, 3))
    tree = serial(leaves)
    assert not torch.equal(linear, tree)
    assert not torch.equal(by_rank, tree)
    assert not torch.equal(by_rank, linear)


def test_a_missing_leaf_is_no_zero() -> None:
    minus_zero = torch.tensor([-0.0])
    leaves = [minus_zero] * 3
    assert torch.signbit(over_ranks(leaves, [range(2), range(2, 3)])).all()
    assert not torch.signbit(serial([*leaves, torch.zeros(1)])).any(), "a zero in its place would show"


def test_an_error_in_the_pipeline_reaches_all_that_wait() -> None:
    """There is no process group, so the first exchange fails; backward would wait for the futures of all buckets."""
    cpu = torch.device("cpu")
    pipeline, world = _Pipeline([cpu]), World(0, 0, 2, 2, cpu, launched=True)
    for last in (False, False, True), (True,):
        futures: list[Future[Tensor]] = [Future() for _ in last]
        for future, is_last in zip(futures, last, strict=True):
            bucket = torch.ones(5)
            exchange = Exchange(world, 5, bucket)
            pipeline.put(_Job(exchange, [bucket], [range(1), range(1, 2)], bucket, None, future, is_last))
        for future in futures:
            assert torch.equal(future.wait(), torch.ones(5)), "DDP takes nothing but a tensor"
        with pytest.raises(Exception, match="process group"):
            pipeline.check()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("micro_batches", "worlds"), [(12, (1, 2, 3, 4, 5)), (8, (1, 2, 4))])
def test_all_bits_are_the_same_on_any_number_of_ranks(
    tmp_path: Path, micro_batches: int, worlds: tuple[int, ...]
) -> None:
    results = {}
    for ranks in (0, *worlds):  # 0: without torchrun, and so without DDP
        path = tmp_path / f"{ranks}.json"
        finish_all(fork_ranks(ranks, WORKER, path, micro_batches))
        results[ranks] = json.loads(path.read_text())
    for ranks, result in results.items():
        assert result["ranks agree"] == ["True"], ranks
        for way, bits in result.items():
            if not way.startswith("control"):
                assert bits == results[1][way], f"{way}: {ranks} ranks differ from one"
    for control in ("control: ring", "control: noise of the rank"):
        assert results[4][control] != results[1][control], control
    assert results[1]["control: ring"] != results[1]["adamw"], "linear accumulation, although on one rank"
    assert len({json.dumps(bits) for way, bits in results[1].items() if way != "ranks agree"}) >= 7


def small(ranks: int, run_dir: Path, *more: object, reduce: str = "tree") -> list[subprocess.Popen[str]]:
    """A small run on so many ranks; 0: without a process group."""
    options = job(run_dir, "--reduce", reduce, "--eval-every", 1000, "--checkpoint-every", 2, *more)
    return fork_ranks(ranks, TRAIN, *options)


@pytest.mark.multiprocess
def test_killed_ten_times_and_resumed_on_other_numbers_of_ranks_the_bits_are_the_same(tmp_path: Path) -> None:
    """By SIGTERM, which loses nothing, and by SIGKILL to everything, after which steps are done again."""
    finish_all(small(1, tmp_path / "undisturbed"))
    run_dir, dice = tmp_path / "run", random.Random()
    slowly = ["--pause", 0.2]  # a step takes at least that, so that ten kills come before the last step
    worlds: list[int] = []
    for _ in range(10):
        worlds.append(dice.choice([ranks for ranks in range(5) if ranks not in worlds[-1:]]))
        done = records(run_dir, "train")[-1]["step"] if worlds[:-1] else 0
        ranks = small(worlds[-1], run_dir, *slowly)
        wait_for_step(run_dir, done + 1, ranks[0])
        number = dice.choice([signal.SIGTERM, signal.SIGKILL])
        for rank in ranks:
            rank.send_signal(number)
        for rank in ranks:
            finish(rank)
    finish_all(small(dice.randrange(5), run_dir, *slowly))
    assert len(records(run_dir, "start")) == 11
    assert len(set(worlds)) > 2
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    assert read(run_dir)["weights_sha256"] == read(tmp_path / "undisturbed")["weights_sha256"], worlds


@pytest.mark.multiprocess
def test_the_control_with_the_ring_the_bits_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 4):
        # steps so large that the last bit of a gradient shows in the weights; AdamW's, small and divided by the
        # gradient's size, hide it on some CPUs
        finish_all(small(ranks, tmp_path / str(ranks), "--optimizer", "sgd", "--lr", 0.05, reduce="ring"))
    assert read(tmp_path / "1")["weights_sha256"] != read(tmp_path / "4")["weights_sha256"]


@pytest.mark.multiprocess
def test_a_peer_that_dies_in_an_exchange_is_an_error_and_no_hang(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(torchrun(3, TRAIN, *job(run_dir, "--reduce", "tree", "--pause", 0.1), restarts=1))
    wait_for_step(run_dir, 3, process)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(records(run_dir, "start")) == 2
    assert "no progress" not in done.stderr
    steps = [record["step"] for record in records(run_dir, "train")]
    assert steps == list(range(1, PLAN.total_steps + 1)), "no step is lost or done twice"
