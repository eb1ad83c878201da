"""--profile: traces of each rank on one clock, the bits of the run unchanged; and `python -m evenkeel profile`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import TRAIN, finish_all, fork_ranks, run, run_forked
from tests.support.small_runs import job, the_line, weights_of

EVENKEEL = [sys.executable, "-m", "evenkeel"]
SECONDS = 5 * 10**9


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two ranks with a window, and what it has said."""
    run_dir = tmp_path_factory.mktemp("profiled") / "run"
    ranks = finish_all(fork_ranks(2, TRAIN, *job(run_dir, "--profile", "4:7")))
    return run_dir, ranks[0].stdout + ranks[0].stderr


def trace_of(run_dir: Path, rank: int = 0) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads((run_dir / "profile" / f"rank-{rank}.json").read_text())
    return trace


def steps_of(trace: dict[str, Any]) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if str(event.get("name")).startswith("step ")]


def reductions(merged: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """Begin and end of each all-reduce, for each rank in order."""
    ranks = {
        event["pid"]: event["args"]["name"] for event in merged["traceEvents"] if event.get("name") == "process_name"
    }
    assert [name.partition(" (node ")[0] for _, name in sorted(ranks.items())] == ["rank 0", "rank 1"]
    found: dict[int, list[tuple[float, float]]] = {pid: [] for pid in sorted(ranks)}
    for event in merged["traceEvents"]:
        if event.get("name") == "gloo:all_reduce":
            found[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    return [sorted(spans) for spans in found.values()]


def overlap(merged: dict[str, Any]) -> list[bool]:
    first, second = reductions(merged)
    assert len(first) == len(second) >= 3
    return [a[0] < b[1] and b[0] < a[1] for a, b in zip(first, second, strict=True)]


def merge(run_dir: Path, name: str) -> dict[str, Any]:
    output = run_dir / name
    run([*EVENKEEL, "profile", str(run_dir), "--output", str(output)])
    merged: dict[str, Any] = json.loads(output.read_text())
    return merged


def test_no_bit_changes_and_nothing_is_left_without_the_option(profiled: tuple[Path, str], tmp_path: Path) -> None:
    finish_all(fork_ranks(2, TRAIN, *job(tmp_path / "run")))
    assert weights_of(tmp_path / "run") == weights_of(profiled[0])
    assert not (tmp_path / "run" / "profile").exists()
    run([sys.executable, "-c", "import sys, evenkeel.run.run; assert 'evenkeel.run.profiling' not in sys.modules"])


def test_each_rank_leaves_a_trace_of_the_window_and_rank_0_a_table(profiled: tuple[Path, str]) -> None:
    run_dir, said = profiled
    for rank in (0, 1):
        assert steps_of(trace_of(run_dir, rank)) == ["step 5", "step 6", "step 7"]
    table = (run_dir / "profile" / "operators.txt").read_text()
    assert "aten::" in table
    assert "step 5" not in table, "which is no operator"
    assert table.splitlines()[1] in said


def test_the_same_collective_of_two_ranks_overlaps_in_the_merged_trace(profiled: tuple[Path, str]) -> None:
    run_dir, _ = profiled
    assert all(overlap(merge(run_dir, "merged.json")))
    # as a node with a clock 5 s ahead would write it
    path, trace = run_dir / "profile" / "rank-1.json", trace_of(run_dir, 1)
    try:
        trace["baseTimeNanoseconds"] += SECONDS
        path.write_text(json.dumps(trace))
        assert not any(overlap(merge(run_dir, "control.json"))), "the control: raw clocks"
        trace["evenkeel"]["clock_ahead_ns"] += SECONDS
        path.write_text(json.dumps(trace))
        assert all(overlap(merge(run_dir, "put-right.json")))
    finally:
        trace["baseTimeNanoseconds"] -= SECONDS
        trace["evenkeel"]["clock_ahead_ns"] -= SECONDS
        path.write_text(json.dumps(trace))


def test_a_resume_within_the_window_and_after_it(tmp_path: Path) -> None:
    options = job(tmp_path, "--schedule", "constant", "--profile", "4:7")
    run_forked(TRAIN, *options, "--max-steps", 5)
    assert steps_of(trace_of(tmp_path)) == ["step 5"]
    run_forked(TRAIN, *options, "--max-steps", 8)
    assert steps_of(trace_of(tmp_path)) == ["step 6", "step 7"]
    assert (tmp_path / "profile" / "rank-0.json-2").exists(), "the first one is kept"
    later = run_forked(TRAIN, *options, "--max-steps", 10)
    assert "--profile 4:7: nothing to trace, the run is at step 8 already" in later.stdout


@pytest.mark.parametrize("typed", ["20", "7:4", "4:4", "a:b", "100:110"])
def test_a_window_that_cannot_be_meant_is_refused_in_a_line(typed: str, tmp_path: Path) -> None:
    done = run_forked(TRAIN, *job(tmp_path / "run", "--profile", typed), expect=2)
    assert the_line(done.stderr).startswith(f"--profile {typed}: ")
    assert not (tmp_path / "run").exists()


def test_a_memory_snapshot_on_a_cpu_is_refused_in_a_line(tmp_path: Path) -> None:
    done = run_forked(TRAIN, *job(tmp_path / "run", "--memory-snapshot", "--profile", "4:7"), expect=2)
    assert "this process computes on the CPU" in the_line(done.stderr)
