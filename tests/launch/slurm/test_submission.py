"""What of Slurm's side needs no Slurm: requests, times, the copy of the code."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.launch.slurm import submission
from evenkeel.launch.slurm.cluster import Partition, choose
from evenkeel.launch.slurm.code import LARGEST, copy_code
from evenkeel.launch.slurm.jobs import SlurmError, slurm
from tests.support import needs
from tests.support.processes import ROOT

GPU = Partition("gpu", default=True, nodes=4, gpus=8, minutes=24 * 60)


CPU = Partition("cpu", default=False, nodes=100, gpus=0, minutes=None)


def test_a_request_is_for_the_default_partition_or_the_named_one() -> None:
    assert choose([GPU, CPU], None, 2, None, None) == GPU
    assert choose([GPU, CPU], None, 4, 8, 24 * 60) == GPU, "all that it has"
    assert choose([GPU, CPU], "cpu", 4, 3, 9) == CPU


REFUSED: list[tuple[list[Partition], tuple[str | None, int, int, int | None], str]] = [
    ([GPU, CPU], (None, 5, 1, None), "-n 5: partition gpu has 4 nodes"),
    ([GPU, CPU], (None, 1, 9, None), "-g 9: a node of partition gpu has 8 GPUs"),
    ([GPU, CPU], ("no", 1, 1, None), "--partition no: does not exist; the cluster has gpu, cpu"),
    ([GPU, CPU], ("gpu", 1, 1, 1441), "--time 1-00:01:00: partition gpu allows 1-00:00:00"),
    ([CPU], (None, 1, 1, None), "--partition is missing: the cluster has no default one; the cluster has cpu"),
]


@pytest.mark.parametrize(("partitions", "request_", "line"), REFUSED)
def test_a_request_that_cannot_be_had(partitions: list[Partition], request_: Any, line: str) -> None:
    with pytest.raises(Refusal, match=line):
        choose(partitions, *request_)


@needs.tools("git")
def test_a_copy_of_the_code_is_what_git_would_keep(tmp_path: Path) -> None:
    origin, copy = tmp_path / "origin", tmp_path / "slurm" / "code"
    origin.mkdir()
    copy.parent.mkdir()
    for name, text in {"train.py": "1", "new.py": "2", ".gitignore": "data\n", "data": "3"}.items():
        (origin / name).write_text(text)
    with (origin / "large.bin").open("wb") as large:
        large.truncate(LARGEST + 1)
    assert copy_code(origin, tmp_path / "slurm" / "plain", "digits") == ""  # before there is a repository
    for words in (["init", "-q"], ["add", "train.py", ".gitignore"]):
        subprocess.run(["git", *words], cwd=origin, check=True)
    commit = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]
    subprocess.run(commit, cwd=origin, check=True)
    (origin / "train.py").write_text("4")
    (tmp_path / "task.py").write_text("5")
    for name in ("mine/state.py", "other/status.json", "other/wandb/old.py", "sweep/slurm/20300101-000000/code/x.py"):
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text("of a run")
    (origin / "latin").write_bytes(b"\xe9")
    subprocess.run(["git", "add", "-N", "latin"], cwd=origin, check=True)
    revision = copy_code(origin, copy, f"{tmp_path / 'task.py'}:Task", leave_out=[origin / "mine"])
    assert revision.endswith("-dirty")
    assert {it.name: it.read_text() for it in copy.rglob("*.py")} == {"train.py": "4", "new.py": "2", "task.py": "5"}
    assert not (copy / "data").exists()
    assert not (copy / "large.bin").exists()
    assert b"+4" in (tmp_path / "slurm" / "code.diff").read_bytes()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--array-seeds 0:3 --follow", "--follow: shows one job"),
        ("--array-seeds 0:3 --container x", "--container: does not work with --array-seeds"),
        ("--max-requeues -1", "--max-requeues -1: must be at least 0"),
        ("--cpus-per-gpu 0", "--cpus-per-gpu 0: must be at least 1"),
        ("--mem much", "--mem much: give a number"),
        ("--partitoin x", "did you mean --partition"),
    ],
)
def test_options_that_cannot_be_meant(words: str, line: str) -> None:
    with pytest.raises(Refusal, match=line):
        submission.main(words.split(), ROOT)


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refusal, match="no Slurm on this machine: sinfo: not found"):
        submission.main(["-n", "2"], ROOT)


SICK = '#!/bin/sh\nfor it in error: error: fatal:; do echo "sinfo: $it no answer" >&2; done\nexit 1\n'


@pytest.mark.parametrize(("sinfo", "why"), [("", "sinfo: not found: "), (SICK, "sinfo: fatal: no answer;")])
def test_a_dry_run_prints_the_script_without_any_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], sinfo: str, why: str
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sinfo").write_text(sinfo)
    (tmp_path / "bin" / "sinfo").chmod(0o755 if sinfo else 0o644)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/nowhere")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    run_dir = tmp_path / "a run"
    words = ["-n", "2:4", "-g", "3", "--time", "2h", "--partition", "big", "--dry-run", "--", "--run-dir", str(run_dir)]
    assert submission.main(words, ROOT) == 0
    script, told = capsys.readouterr()
    lines = ("#!/bin/bash", "#SBATCH --nodes=2-4", "#SBATCH --gpus-per-node=3", "#SBATCH --time=120")
    more = ("#SBATCH --partition=big", "#SBATCH --requeue", "#SBATCH --signal=USR2@90")
    assert {*lines, *more} <= {*script.splitlines()}
    assert told.startswith(f"evenkeel: no Slurm on this machine: {why}")
    assert told.count("\n") == 1
    assert not run_dir.exists()
    with pytest.raises(Refusal, match=r"^--lr -1.0: must be at least 0"):
        submission.main([*words, "--lr", "-1"], ROOT)


def test_a_command_that_hangs_or_fails_is_one_line() -> None:
    with pytest.raises(SlurmError, match=r"sleep: no answer within 0.1 s; is Slurm's controller up\?"):
        slurm("sleep", "5", timeout=0.1)
    with pytest.raises(SlurmError, match=r"^one two$"):
        slurm("sh", "-c", "echo one >&2; echo two >&2; exit 3")
