"""`python -m evenkeel doctor` on real ranks: a healthy job, and faults that it must find."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, Done, rank_variables, read, run, torchrun

DOCTOR = ["-m", "evenkeel", "doctor", "--json", "--timeout", "60"]
FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


def told(done: Done) -> dict:
    """The findings by name, the worst of each name last."""
    found = json.loads(done.stdout)["findings"]
    return {it["name"]: it for it in sorted(found, key=lambda it: ["OK", "WARN", "FAIL"].index(it["level"]))}


def failures(done: Done) -> list[str]:
    return [name for name, it in told(done).items() if it["level"] == "FAIL"]


def each_rank(tmp_path: Path, first: str) -> list[str]:
    """torchrun's options to run a line of shell before the doctor on each rank, which is `$RANK` there."""
    script = tmp_path / "rank.sh"
    script.write_text(f'{first}\nexec "{sys.executable}" "$@"\n')
    return ["--no-python", "/bin/bash", str(script)]


def test_two_healthy_ranks(tmp_path: Path) -> None:
    done = run(torchrun(2, *DOCTOR, "--run-dir", tmp_path / "run"))
    found = told(done)
    assert failures(done) == []
    for name in ("all-reduce", "all-to-all", "broadcast"):
        assert found[name]["value"].startswith("right, ")
    expected = {"Python", "torch", "torchvision", "run directory", "clocks", "shared folder", "process group"}
    assert expected <= found.keys()
    assert (found["torch"]["ranks"], found["torch"]["where"]) == ([0, 1], "")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_ends_torchrun_with_1_and_without_restarts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(torchrun(2, *DOCTOR, "--run-dir", tmp_path / "file" / "run", restarts=3), expect=1)
    assert failures(done) == ["run directory"], "one JSON object, so there was one visit"
    assert done.stderr.count("Traceback") == 1, "torchrun's own, of the signal"
    assert "FAILED" not in done.stderr, "not its report on every rank"


def test_a_rank_that_does_not_come_is_named() -> None:
    first, _ = rank_variables(2)
    found = told(run([sys.executable, *DOCTOR[:4], "--timeout", 2], env=first, expect=1))["ranks meet"]
    assert "waiting for 1" in found["value"]
    assert "--timeout 12" in found["remedy"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 or not shutil.which("taskset"), reason="needs two cores, taskset")
def test_a_slowed_rank_is_named(tmp_path: Path) -> None:
    """Rank 1 shares its core with eight busy processes, with which it also takes long to import torch."""
    first, second, *_ = sorted(os.sched_getaffinity(0))
    burn = f"""
if [ "$RANK" = 1 ]; then
  for _ in 1 2 3 4 5 6 7 8; do timeout 230 taskset -c {first} sh -c 'while :; do :; done' & done
  trap 'kill $(jobs -p)' EXIT
  taskset -c {first} "{sys.executable}" "$@"
  exit
fi
taskset -p -c {second} $$ >/dev/null"""
    done = run(torchrun(2, *each_rank(tmp_path, burn), *DOCTOR[:-1], "200", "--run-dir", tmp_path), expect=0)
    slow = told(done)["matrix products"]
    assert slow["level"] == "WARN"
    assert "slow: rank 1 on " in slow["expected"]


@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (apt install faketime)")
def test_a_clock_that_is_off_by_five_seconds(tmp_path: Path) -> None:
    fake = f'[ "$RANK" = 1 ] && export LD_PRELOAD={FAKETIME} FAKETIME=+5s'
    done = run(torchrun(2, *each_rank(tmp_path, fake), *DOCTOR, "--run-dir", tmp_path), expect=1)
    assert failures(done) == ["clocks"]
    assert re.search(r"rank 1 by up to \+(5|4\.9)", told(done)["clocks"]["value"])


def test_the_launcher_starts_nothing_after_a_failure_and_the_job_after_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    launcher = [sys.executable, ROOT / "launch" / "single_node.py", "-g", "2", "--doctor", "--"]
    small = ["--batch-size", "16", "--limit-batches", "4", "--max-steps", "2", "--wandb", "disabled"]
    done = run([*launcher, *small, "--run-dir", tmp_path / "file" / "run"], expect=1)
    assert "FAIL  run directory" in done.stdout
    assert done.stderr.endswith("evenkeel: --doctor: the job is not started\n")
    done = run([*launcher, *small, "--run-dir", tmp_path / "run"])
    assert " 0 FAIL in " in done.stdout
    assert read(tmp_path / "run")["step"] == 2
