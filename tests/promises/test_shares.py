"""Unequal shares: a slow rank computes less and gets its share back, and no bit of the result changes."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import TRAIN, finish_all, fork_ranks, read, records, wait_beside
from tests.support.small_runs import SUPPORT, options, refusal, signal_ranks, told_step, weights_of

SHAPE = ["--width", 8, "--batch-size", 64, "--micro-batches", 8, "--max-steps", 600, "--log-every", 4]
SHAPE += ["--reduce", "tree", "--eval-every", 10**6, "--keeper", "off"]


def slow_job(ranks: int, run_dir: Path, *more: object) -> list[subprocess.Popen[str]]:
    return fork_ranks(ranks, TRAIN, *options(f"{SUPPORT / 'slow_task.py'}:Slow", run_dir, *SHAPE, *more))


def changes(run_dir: Path) -> list[list[int]]:
    begun = (run_dir / "metrics.jsonl").exists()
    return [record["shares"] for record in records(run_dir, "shares")] if begun else []


@pytest.mark.slow
def test_a_slow_rank_computes_less_for_a_while_and_no_bit_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples are loaded by another process, which is ahead when the shares change. Then all ranks are killed."""
    finish_all(slow_job(0, tmp_path / "alone"))
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    for name, value in {"RANK": 1, "PART": "forward", "SECONDS": 0.02, "WHILE": slow}.items():
        monkeypatch.setenv(f"SLOW_{name}", str(value))
    slow.touch()
    ranks = slow_job(2, run_dir, "--shares", "auto", "--num-workers", 1)
    wait_beside(ranks[0], lambda: changes(run_dir), "the slow rank gets less")
    first = changes(run_dir)[0]
    assert sum(first) == 8
    assert first[1] <= 3, "it needs several times as long"
    assert read(run_dir, "status.json")["shares"] == ":".join(map(str, first))
    slow.unlink()
    wait_beside(ranks[0], lambda: len(changes(run_dir)) > 1, "it gets its share back")
    assert changes(run_dir)[1][1] > first[1]
    signal_ranks(ranks, signal.SIGKILL)
    assert 0 < told_step(run_dir) < 600
    finish_all(slow_job(3, run_dir, "--shares", "2:1:1"))
    assert read(run_dir)["samples_seen"] == 600 * 64
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")


@pytest.mark.parametrize("shares", ["2", "2:0", "fast", "1:-1"])
def test_what_names_no_shares_is_refused(tmp_path: Path, shares: str) -> None:
    line = refusal(options("regress", tmp_path / "run", "--shares", shares))
    assert json.dumps(shares).strip('"') in line
    assert "e.g. 2:1" in line
    assert not (tmp_path / "run").exists()
