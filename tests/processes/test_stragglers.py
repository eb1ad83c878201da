"""A rank that is late is named, with the part in which it is; and nobody else ever is. Three ranks, on the CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, TRAIN, checked, finish, kill_group, read, run, start, torchrun, wait_until
from tests.support.rooms import has
from tests.support.small_runs import options

RANKS = 3
SECONDS = 0.05
"""The delay of one rank. A step takes about as long without, on a busy machine of two cores."""

COLUMNS = ("data", "forward", "backward")


def train(run_dir: Path, *more: object, **variables: object) -> subprocess.Popen[str]:
    """Two micro-batches a step for each rank."""
    task = f"{ROOT / 'tests' / 'support' / 'slow_task.py'}:Slow"
    shape = ["--batch-size", 24, "--micro-batch", 4, "--log-every", 5, "--checkpoint-every", 0, "--epochs", 1000]
    env = {name.upper(): str(value) for name, value in variables.items()}
    return start(torchrun(RANKS, TRAIN, *options(task, run_dir, *shape, *more)), env=env)


def intervals(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "ranks.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def hints(run_dir: Path) -> dict[str, str]:
    return dict(read(run_dir, "status.json").get("hints", {})) if (run_dir / "status.json").exists() else {}


@pytest.mark.parametrize(
    ("rank", "part", "more"),
    [(0, "data", {}), (2, "forward", {"--reduce": "tree"}), (1, "backward", {"--reduce": "tree", "slow_unused": 1})],
)
def test_a_delay_is_named_by_rank_and_part_and_its_end_is_said(
    tmp_path: Path, rank: int, part: str, more: dict[str, object]
) -> None:
    """The last case has no hook of DDP: the tree exchanges all gradients after backward."""
    run_dir, hold = tmp_path / "run", tmp_path / "slow"
    hold.touch()
    given = {"slow_rank": rank, "slow_part": part, "slow_seconds": SECONDS, "slow_while": hold}
    given |= {name: value for name, value in more.items() if name.startswith("slow")}
    flags = [word for name, value in more.items() if name.startswith("--") for word in (name, value)]
    process = train(run_dir, *flags, **given)
    try:
        wait_until(lambda: hints(run_dir).get(f"rank {rank}") or process.poll() is not None, "a name")
        if part == "data":  # of the rank that reports it
            wait_until(lambda: hints(run_dir).get("data") or process.poll() is not None, "a hint")
            if has("status"):
                seen = run([sys.executable, "-m", "evenkeel", "status", str(run_dir)]).stdout
                assert f"{run_dir}: hint: {hints(run_dir)['data']}" in seen.splitlines()
        named = hints(run_dir)
        hold.unlink()
        wait_until(lambda: hints(run_dir).get(f"rank {rank}") == "" or process.poll() is not None, "an end")
        process.terminate()
        done = checked(finish(process), None)
    finally:
        kill_group(process)
    assert {subject for subject in named if subject.startswith("rank")} == {f"rank {rank}"}, done.stderr[-3000:]
    text = named[f"rank {rank}"]
    assert re.fullmatch(rf"rank {rank} on \S+ arrives [\d.]+ times later than the median, in {part}", text)
    said = [line for line in done.stderr.splitlines() if " arrives " in line or " in time again" in line]
    assert len(said) == 2, said
    assert said[0].startswith(f"evenkeel: WARNING: {text} (steps ")
    assert said[1].startswith(f"evenkeel: WARNING: rank {rank} on ")
    assert part != "data" or re.findall("hint: data .*", done.stdout) == [f"hint: {named['data']}"], "once"
    first, _, third, *_ = intervals(run_dir)
    assert third[part][rank] == max(third[part])
    assert len(first["hosts"]) == len(third["arrival"]) == len(third["data_wait"]) == RANKS


def test_nobody_is_named_over_a_quiet_run(tmp_path: Path) -> None:
    """On a busy machine one interval in three shows a late rank; see docs/live.md, and the control in tests/run."""
    process = train(run_dir := tmp_path / "run", "--max-steps", 900)
    done = checked(finish(process), 0)
    assert " arrives " not in done.stderr
    assert not [subject for subject in hints(run_dir) if subject.startswith("rank")]
    found = intervals(run_dir)
    assert [it["step"] for it in found] == list(range(5, 901, 5)), "the last one too"
    for it in found:
        assert all(len(it[name]) == RANKS for name in ("arrival", "data_wait", *COLUMNS))
        sums = [sum(parts) for parts in zip(*(it[name] for name in COLUMNS), strict=True)]
        assert it["arrival"] == pytest.approx(sums, abs=3e-6), "written to the microsecond"


def test_one_rank_measures_nothing(tmp_path: Path) -> None:
    task = f"{ROOT / 'tests' / 'support' / 'slow_task.py'}:Slow"
    run_dir = tmp_path / "run"
    more = ["--max-steps", 10, "--batch-size", 24, "--log-every", 5]
    checked(finish(start(torchrun(1, TRAIN, *options(task, run_dir, *more)))), 0)
    assert not (run_dir / "ranks.jsonl").exists()
