"""--profile: traces of each rank on one clock, the bits of the run unchanged; and `python -m evenkeel profile`."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import TRAIN, evenkeel, read, run, run_forked
from tests.support.small_runs import job, refusal, trained, weights_of


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two ranks with a window, and what it has said."""
    run_dir = tmp_path_factory.mktemp("profiled") / "run"
    ranks = trained(2, job(run_dir, "--profile", "4:7"))
    return run_dir, ranks[0].stdout + ranks[0].stderr


def trace_of(run_dir: Path, rank: int = 0) -> dict:
    return read(run_dir / "profile", f"rank-{rank}.json")


def steps_of(trace: dict) -> list[str]:
    return [event["name"] for event in trace["traceEvents"] if str(event.get("name")).startswith("step ")]


def overlaps(run_dir: Path, name: str) -> list[bool]:
    """Of each all-reduce in the merged traces: whether both ranks were in it at some time."""
    evenkeel("profile", run_dir, "--output", run_dir / name)
    events = json.loads((run_dir / name).read_text())["traceEvents"]
    ranks = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert [rank.partition(" (node ")[0] for _, rank in sorted(ranks.items())] == ["rank 0", "rank 1"]
    found: dict[int, list[tuple[float, float]]] = {pid: [] for pid in sorted(ranks)}
    for event in events:
        if event.get("name") == "gloo:all_reduce":
            found[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    first, second = map(sorted, found.values())
    assert len(first) >= 3
    return [a[0] < b[1] and b[0] < a[1] for a, b in zip(first, second, strict=True)]


@pytest.mark.promise
def test_no_bit_changes_and_nothing_is_left_without_the_option(profiled: tuple[Path, str], tmp_path: Path) -> None:
    trained(2, job(tmp_path / "run"))
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


@pytest.mark.promise
def test_a_collective_of_two_ranks_overlaps_in_the_merged_trace(profiled: tuple[Path, str], tmp_path: Path) -> None:
    run_dir = Path(shutil.copytree(profiled[0], tmp_path / "run"))
    assert all(overlaps(run_dir, "merged.json"))
    # as a node with a clock 5 s ahead would write it
    trace = trace_of(run_dir, 1)
    trace["baseTimeNanoseconds"] += 5 * 10**9
    (run_dir / "profile" / "rank-1.json").write_text(json.dumps(trace))
    assert not any(overlaps(run_dir, "control.json")), "the control: raw clocks"
    trace["evenkeel"]["clock_ahead_ns"] += 5 * 10**9
    (run_dir / "profile" / "rank-1.json").write_text(json.dumps(trace))
    assert all(overlaps(run_dir, "put-right.json"))


def test_a_resume_within_the_window_and_after_it(tmp_path: Path) -> None:
    options = job(tmp_path, "--schedule", "constant", "--profile", "4:7")
    run_forked(TRAIN, *options, "--max-steps", 5)
    assert steps_of(trace_of(tmp_path)) == ["step 5"]
    run_forked(TRAIN, *options, "--max-steps", 8)
    assert steps_of(trace_of(tmp_path)) == ["step 6", "step 7"]
    assert (tmp_path / "profile" / "rank-0.json-2").exists(), "the first one is kept"
    later = run_forked(TRAIN, *options, "--max-steps", 10)
    assert "--profile 4:7: nothing to trace, the run is at step 8 already" in later.stdout


@pytest.mark.parametrize(
    ("typed", "more"), [*((typed, []) for typed in ("20", "4:4", "100:110")), ("4:7", ["--memory-snapshot"])]
)
def test_what_cannot_be_traced_is_refused_in_a_line(typed: str, more: list[str], tmp_path: Path) -> None:
    line = refusal(job(tmp_path / "run", "--profile", typed, *more))
    assert "this process computes on the CPU" in line if more else line.startswith(f"--profile {typed}: ")
    assert not (tmp_path / "run").exists()
