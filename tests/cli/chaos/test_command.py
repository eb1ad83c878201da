"""The command line of chaos: what it refuses, what it understands."""

import json
from pathlib import Path

import pytest

from evenkeel.cli.chaos.command import ChaosCommand, find_run_dir, parse_duration, parse_faults
from tests.support.chaos import chaos
from tests.support.processes import run
from tests.support.raised import refusal_of

JOB = ["torchrun", "train.py", "--run-dir", "runs/never"]


@pytest.mark.parametrize(
    ("options", "command", "line"),
    [
        ({"kill_every": "often"}, JOB, "--kill-every often: give a duration above 0"),
        ({"kill_every": "0s"}, JOB, "--kill-every 0s: give a duration above 0"),
        ({"faults": "kill,flood"}, JOB, "--faults flood: there is no such fault"),
        ({"faults": "kill,"}, JOB, "there is no such fault"),
        ({"faults": "node"}, JOB, "--faults node: needs several nodes"),
        ({"nodes": 2}, JOB, "the command must have {node}"),
        ({}, [], "no command"),
        ({}, ["torchrum", "train.py", "--run-dir", "x"], "torchrum: no such program"),
        ({}, ["README.md", "--run-dir", "x"], "README.md: no such program"),
        ({}, JOB[:2], "--run-dir is missing"),
        ({}, [*JOB, "--fresh"], "--fresh: chaos starts the command again"),
    ],
)
def test_refusals(
    options: dict[str, object], command: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "torchrun"
    there.write_text("")
    there.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert line in refusal_of(ChaosCommand(**options), command)


def test_a_finished_run_is_refused_in_one_line_and_nothing_is_started(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "finished"}))
    done = run(chaos("--kill-every 5s", "touch", tmp_path / "started", f"--run-dir={tmp_path}"), expect=2)
    assert done.stderr == f"evenkeel: --run-dir {tmp_path}: this run has finished; name another folder\n"
    assert not (tmp_path / "started").exists()


def test_durations() -> None:
    assert [parse_duration(text) for text in ("20s", "2m", "0.5h", "7", "1.5")] == [20, 120, 1800, 7, 1.5]


def test_the_run_directory_is_the_last_one_in_the_command() -> None:
    assert find_run_dir(["t", "--run-dir", "a"]) == Path("a")
    assert find_run_dir(["t", "--run-dir=a", "--", "--run-dir=b"]) == Path("b")
    assert find_run_dir(["t", "--run_dir", "a", "--run-directory", "b"]) == Path("a")


def test_what_may_reach_others_is_done_only_on_request() -> None:
    assert "fill" not in parse_faults("", nodes=1)
    assert "node" not in parse_faults("", nodes=1)
    assert "node" in parse_faults("", nodes=3)
    assert parse_faults("fill,kill", nodes=1) == ["fill", "kill"]
