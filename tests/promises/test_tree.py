"""One order of addition for any number of ranks: in the tree itself, in whole trainings, and through kills."""

import json
import os
import random
import signal
from pathlib import Path

import pytest

from tests.support import needs
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, Process, finish_all, fork_ranks, read, start, torchrun
from tests.support.small_runs import PLAN, ended, job, results_of, signal_ranks_at, starts, steps_of, weights_of


@pytest.mark.parametrize(("micro_batches", "worlds"), [(12, (1, 2, 3, 4, 5)), needs.slow(8, (1, 2, 4))])
def test_all_bits_are_the_same_on_any_ranks(tmp_path: Path, micro_batches: int, worlds: tuple[int, ...]) -> None:
    # 0 ranks: without torchrun, and so without DDP
    results = {ranks: results_of(ranks, "tree_worker.py", tmp_path, micro_batches) for ranks in (0, *worlds)}
    for ranks, result in results.items():
        assert result["ranks agree"] == ["True"], ranks
        for way, bits in result.items():
            if not way.startswith("control"):
                assert bits == results[1][way], f"{way}: {ranks} ranks differ from one"
    for control in ("control: ring", "control: noise of the rank"):
        assert results[4][control] != results[1][control], control
    assert results[1]["control: ring"] != results[1]["adamw"], "linear accumulation, although on one rank"
    assert len({json.dumps(bits) for way, bits in results[1].items() if way != "ranks agree"}) >= 7


def small(ranks: int, run_dir: Path, *more: object, reduce: str = "tree") -> list[Process]:
    """A small run on so many ranks; 0: without a process group."""
    options = job(run_dir, "--reduce", reduce, "--eval-every", 1000, "--checkpoint-every", 2, *more)
    return fork_ranks(ranks, TRAIN, *options)


def test_killed_ten_times_and_resumed_on_other_numbers_of_ranks_the_bits_are_the_same(tmp_path: Path) -> None:
    finish_all(small(1, tmp_path / "undisturbed"))
    run_dir, dice = tmp_path / "run", random.Random()
    slowly = ["--pause", 0.2]  # a step takes at least that, so that ten kills come before the last step
    worlds: list[int] = []
    for _ in range(10):
        worlds.append(dice.choice([ranks for ranks in range(5) if ranks not in worlds[-1:]]))
        number = dice.choice([signal.SIGTERM, signal.SIGKILL])
        signal_ranks_at(runs.told_step(run_dir) + 1, run_dir, small(worlds[-1], run_dir, *slowly), number)
    finish_all(small(dice.randrange(5), run_dir, *slowly))
    assert len(starts(run_dir)) == 11
    assert len(set(worlds)) > 2
    assert read(run_dir)["samples_seen"] == PLAN.epochs * runs.SAMPLES
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed"), worlds


def test_the_control_with_the_ring_the_bits_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    for ranks in (1, 4):
        # steps so large that the last bit of a gradient shows in the weights; AdamW's, small and divided by the
        # gradient's size, hide it on some CPUs
        finish_all(small(ranks, tmp_path / str(ranks), "--optimizer", "sgd", "--lr", 0.05, reduce="ring"))
    assert weights_of(tmp_path / "1") != weights_of(tmp_path / "4")


@pytest.mark.slow
@runs.BOTH_WAYS
def test_a_peer_that_dies_in_an_exchange_is_an_error_and_no_hang(run_dir: Path, dies: str) -> None:
    process = start(torchrun(3, TRAIN, *job(run_dir, "--reduce", "tree", "--pause", 0.1), restarts=1))
    runs.wait_for_step(run_dir, 3, process)
    os.kill(runs.pids_of(process, dies)[1], signal.SIGKILL)
    done = ended(process)
    assert runs.restarts_of(run_dir) == ((0, 1) if dies == "trainer" else (1, 0))
    assert "no progress" not in done.stderr
    assert steps_of(run_dir) == list(range(1, PLAN.total_steps + 1)), "no step is lost or done twice"
