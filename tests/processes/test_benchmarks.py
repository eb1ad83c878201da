"""What needs no measurement of benchmarks: the decision of `make bench-smoke`, and that each one runs."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import environment, run, torchrun

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("smoke")


QUIET, NOISY = [1.00, 1.02, 0.99], [1.00, 0.85, 1.10]  # a factor of 1.18


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        pytest.param([1.30, 1.28, 1.35], QUIET, "outside", id="slow"),
        pytest.param([0.10, 0.11, 0.10], QUIET, "outside", id="too fast to be true"),
        pytest.param([1.20], NOISY, "outside", id="noise does not explain it"),
        pytest.param([0.80, 3.00, 0.90], QUIET, "", id="one bad round of three"),
        pytest.param([0.80], [2.00], "cannot tell", id="a busy machine"),
    ],
)
def test_the_verdict_on_a_ratio(smoke: Any, ours: list[float], theirs: list[float], said: str) -> None:
    verdict = smoke.judge(ours, theirs, (0.3, 1.0))
    assert said in verdict
    assert bool(said) == bool(verdict)


def test_a_ratio_is_taken_to_the_best_of_its_own_round(smoke: Any) -> None:
    peers = importlib.import_module("peers")

    def run(side: str, number: int, step: float) -> Any:
        return peers.Run("digits", side, number, step, cpu=step, first=1.0, wall=1.0, peak=1.0)

    # the second round is twice as slow for all, which is the machine and no one's merit
    runs = [run("bare", 0, 10.0), run("fabric", 0, 8.0), run("evenkeel", 0, 6.0)]
    runs += [run("bare", 1, 20.0), run("fabric", 1, 24.0), run("evenkeel", 1, 12.0)]
    assert peers.ratios(runs, "evenkeel", ["bare", "fabric"], "step") == [6 / 8, 12 / 20]
    assert peers.ratios(runs, "evenkeel", ["bare"], "step") == [0.6, 0.6]
    # nobody to compare with in the third
    assert peers.ratios([*runs, run("evenkeel", 2, 1.0)], "evenkeel", ["bare"], "step") == [0.6, 0.6]


@pytest.mark.parametrize(
    ("ranks", "command", "last"),
    [
        (2, "guards.py --blocks 2 --turns 1", "run ledger / run without"),
        (2, "verify.py --turns 1", "N = 100 / off"),
        (2, "reduce.py --models cnn --per-rank 1 --steps 2", "tree / ring"),
        (2, "whole_batch.py --steps 2 --size 8 --image 16", "cut / all_gather"),
        (0, "growth.py world --ranks 1", "| 1 |"),
        (0, "growth.py steps --steps 2000 --parts 2", "| 2,000 |"),
        (0, "recovery.py --jobs 1", "--keeper off / cold start"),
        (0, "shares.py --rounds 1 --steps 40", "weights the same"),
        (0, "checkpoint.py --models resnet18 --saves 1", "passes beside / passes alone"),
        (0, "mirror.py --turns 1", "noise"),
        (2, "shard.py --turns 1", "weights and moments on a rank"),
    ],
)
def test_a_benchmark_runs_where_only_its_own_folder_is_on_the_path(ranks: int, command: str, last: str) -> None:
    """As a user runs it: one had an import from the tests, and two used names that were gone."""
    script, *options = command.split()
    arguments = [f"benchmarks/{script}", *options]
    whole = torchrun(ranks, *arguments) if ranks else [sys.executable, *arguments]
    done = run(whole, env=environment({"PYTHONPATH": ""}))
    assert last in done.stdout + done.stderr  # one of them has the job's own lines on stdout
