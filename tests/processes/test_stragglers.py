"""A rank that is late is named, with the part in which it is; and nobody else ever is. Three ranks, on the CPU."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.components import has
from tests.support.processes import ROOT, TRAIN, checked, evenkeel, finish, kill_group, read, start, stop, wait_beside
from tests.support.small_runs import options

RANKS = 3
SECONDS = 0.05
"""The delay of one rank. A step takes about as long without, on a busy machine of two cores."""

COLUMNS = ("data", "forward", "backward")


def train(run_dir: Path, *more: object, ranks: int = RANKS, **variables: object) -> subprocess.Popen[str]:
    """Two micro-batches a step for each rank."""
    task = f"{ROOT / 'tests' / 'support' / 'slow_task.py'}:Slow"
    shape = ["--batch-size", 24, "--micro-batch", 4, "--log-every", 5, "--checkpoint-every", 0, "--epochs", 1000]
    env = {name.upper(): str(value) for name, value in variables.items()}
    return start(processes.torchrun(ranks, TRAIN, *options(task, run_dir, *shape, *more)), env=env)


def intervals(run_dir: Path) -> list[dict]:
    path = run_dir / "ranks.jsonl"
    whole, _, _ = (path.read_text() if path.exists() else "").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def hints(run_dir: Path) -> dict[str, str]:
    return dict(read(run_dir, "status.json").get("hints", {})) if (run_dir / "status.json").exists() else {}


@pytest.mark.parametrize(
    ("rank", "part", "more", "variables"),
    [
        pytest.param(0, "data", [], {}, marks=pytest.mark.promise),
        (2, "forward", ["--reduce", "tree"], {}),
        (1, "backward", ["--reduce", "tree"], {"slow_unused": 1}),  # the tree exchanges all gradients after backward
    ],
)
def test_a_delay_is_named_by_rank_and_part_and_its_end_is_said(
    tmp_path: Path, rank: int, part: str, more: list[str], variables: dict[str, object]
) -> None:
    run_dir, hold = tmp_path / "run", tmp_path / "slow"
    hold.touch()
    given = {"slow_rank": rank, "slow_part": part, "slow_seconds": SECONDS, "slow_while": hold}
    process = train(run_dir, *more, **given, **variables)
    try:
        wait_beside(process, lambda: hints(run_dir).get(f"rank {rank}"), "a name")
        if part == "data":  # of the rank that reports it
            wait_beside(process, lambda: hints(run_dir).get("data"), "a hint")
            if has("status"):
                seen = evenkeel("status", run_dir).stdout
                assert f"{run_dir}: hint: {hints(run_dir)['data']}" in seen.splitlines()
        named = hints(run_dir)
        hold.unlink()
        wait_beside(process, lambda: hints(run_dir).get(f"rank {rank}") == "", "an end")
        done = stop(process)
    finally:
        kill_group(process)
    assert {subject for subject in named if subject.startswith("rank")} == {f"rank {rank}"}, done.stderr[-3000:]
    text = named[f"rank {rank}"]
    assert re.fullmatch(rf"rank {rank} on \S+ arrives [\d.]+ times later than the median, in {part}", text)
    first_said, last_said = [it for it in done.stderr.splitlines() if " arrives " in it or " in time again" in it]
    assert first_said.startswith(f"evenkeel: WARNING: {text} (steps ")
    assert last_said.startswith(f"evenkeel: WARNING: rank {rank} on ")
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
    checked(finish(train(tmp_path / "run", "--max-steps", 10, ranks=1)), 0)
    assert not (tmp_path / "run" / "ranks.jsonl").exists()
