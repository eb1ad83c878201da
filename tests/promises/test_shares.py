"""Unequal shares: a slow rank computes less and gets its share back, and no bit of the result changes."""

import json
import signal
from pathlib import Path

import pytest

from tests.support.processes import TRAIN, Process, finish_all, fork_ranks, read, records, wait_beside
from tests.support.small_runs import SUPPORT, options, refusal, signal_ranks, told_step, weights_of

STEPS = 1600
SHAPE = ["--width", 8, "--batch-size", 64, "--micro-batches", 8, "--max-steps", STEPS, "--epochs", 99, "--log-every", 4]
SHAPE += ["--reduce", "tree", "--eval-every", 10**6, "--keeper", "off"]


def slow_job(ranks: int, run_dir: Path, *more: object) -> list[Process]:
    return fork_ranks(ranks, TRAIN, *options(f"{SUPPORT / 'slow_task.py'}:Slow", run_dir, *SHAPE, *more))


def changes(run_dir: Path) -> list[list[int]]:
    begun = (run_dir / "metrics.jsonl").exists()
    return [record["shares"] for record in records(run_dir, "shares")] if begun else []


@pytest.mark.slow
def test_six_changes_a_kill_and_two_resizes_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are loaded by another process, which is ahead when the shares change."""
    finish_all(slow_job(0, tmp_path / "alone"))
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    for name, value in {"RANK": 1, "PART": "forward", "SECONDS": 0.01, "WHILE": slow}.items():
        monkeypatch.setenv(f"SLOW_{name}", str(value))
    for count, end in ((2, signal.SIGKILL), (3, signal.SIGTERM), (2, signal.SIGTERM)):
        before, equal = len(changes(run_dir)), 4 if count == 2 else 3

        def second(known: int = before) -> list[int]:
            """The slow rank's share after each change of this start."""
            return [each[1] for each in changes(run_dir)[known:]]

        slow.touch()
        ranks = slow_job(count, run_dir, "--shares", "auto", "--num-workers", 1)
        wait_beside(ranks[0], lambda less=equal: min(second(), default=less) < less, "the slow rank gets less")
        assert all((len(each), sum(each)) == (count, 8) for each in changes(run_dir)[before:])
        assert read(run_dir, "status.json")["shares"].count(":") == count - 1
        slow.unlink()
        wait_beside(ranks[0], lambda: second()[-1] > min(second()), "it gets its share back")
        signal_ranks(ranks, end)
    assert 0 < told_step(run_dir) < STEPS
    finish_all(slow_job(3, run_dir, "--shares", "2:1:1"))
    assert read(run_dir)["samples_seen"] == STEPS * 64
    assert weights_of(run_dir) == weights_of(tmp_path / "alone")


@pytest.mark.parametrize("shares", ["2", "2:0", "fast", "1:-1"])
def test_what_names_no_shares_is_refused(tmp_path: Path, shares: str) -> None:
    line = refusal(options("classify", tmp_path / "run", "--shares", shares))
    assert json.dumps(shares).strip('"') in line
    assert "e.g. 2:1" in line
    assert not (tmp_path / "run").exists()
