"""One order of addition for any number of ranks: in the tree itself, in whole trainings, and through kills."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.processes import ROOT, TRAIN, finish, finish_all, fork_ranks, read, records, start, torchrun
from tests.support.small_runs import BOTH_WAYS, PLAN, SAMPLES, job, pids_of, restarts_of, wait_for_step

WORKER = ROOT / "tests" / "support" / "tree_worker.py"


@pytest.mark.parametrize(
    ("micro_batches", "worlds"), [(12, (1, 2, 3, 4, 5)), pytest.param(8, (1, 2, 4), marks=pytest.mark.slow)]
)
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


def test_the_control_with_the_ring_the_bits_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 4):
        # steps so large that the last bit of a gradient shows in the weights; AdamW's, small and divided by the
        # gradient's size, hide it on some CPUs
        finish_all(small(ranks, tmp_path / str(ranks), "--optimizer", "sgd", "--lr", 0.05, reduce="ring"))
    assert read(tmp_path / "1")["weights_sha256"] != read(tmp_path / "4")["weights_sha256"]


@pytest.mark.slow
@BOTH_WAYS
def test_a_peer_that_dies_in_an_exchange_is_an_error_and_no_hang(tmp_path: Path, dies: str) -> None:
    run_dir = tmp_path / "run"
    process = start(torchrun(3, TRAIN, *job(run_dir, "--reduce", "tree", "--pause", 0.1), restarts=1))
    wait_for_step(run_dir, 3, process)
    os.kill(pids_of(process, dies)[1], signal.SIGKILL)
    done = processes.finish(process)
    assert done.returncode == 0, done.stderr[-4000:]
    assert restarts_of(run_dir) == ((0, 1) if dies == "trainer" else (1, 0))
    assert "no progress" not in done.stderr
    steps = [record["step"] for record in records(run_dir, "train")]
    assert steps == list(range(1, PLAN.total_steps + 1)), "no step is lost or done twice"
