"""What of Slurm's side needs no Slurm: requests, times, the agent's verdict, the copy of the code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evenkeel import agent
from evenkeel.errors import Refusal
from evenkeel.slurm import submission
from evenkeel.slurm.cluster import Partition, Request, parse_limit, parse_time
from evenkeel.slurm.code import LARGEST, copy_code
from evenkeel.slurm.commands import SlurmError, slurm

from . import processes
from .processes import ROOT

GPU = Partition("gpu", default=True, up=True, nodes=4, gpus=8, minutes=24 * 60)
CPU = Partition("cpu", default=False, up=True, nodes=100, gpus=0, minutes=None)
DOWN = Partition("old", default=False, up=False, nodes=4, gpus=8, minutes=None)


def test_a_request_gets_the_clusters_defaults() -> None:
    assert Request(2, 2, None, None, None).against([GPU, CPU]) == Request(2, 2, 8, "gpu", 24 * 60)
    assert Request(2, 2, None, "cpu", None).against([GPU, CPU]) == Request(2, 2, None, "cpu", 24 * 60)
    assert Request(1, 4, 3, "cpu", 9).against([GPU, CPU]) == Request(1, 4, 3, "cpu", 9)


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (Request(5, 5, 1, None, None), "-n 5: partition gpu has 4 nodes"),
        (Request(1, 5, 1, None, None), "-n 5: partition gpu has 4 nodes"),
        (Request(1, 1, 9, None, None), "-g 9: a node of partition gpu has 8 GPUs"),
        (Request(1, 1, 0, None, None), "-g 0: a node needs at least one process"),
        (Request(1, 1, 1, "no", None), "--partition no: does not exist; the cluster has gpu, cpu, old"),
        (Request(1, 1, 1, "old", None), "--partition old: is not up"),
        (Request(1, 1, 1, "gpu", 1441), "--time 1-00:01:00: partition gpu allows 1-00:00:00"),
    ],
)
def test_a_request_that_cannot_be_had(request_: Request, line: str) -> None:
    with pytest.raises(Refusal, match=line):
        request_.against([GPU, CPU, DOWN])


def test_without_a_default_partition_one_must_be_named() -> None:
    with pytest.raises(Refusal, match="--partition is missing: the cluster has no default one; it has cpu"):
        Request(1, 1, 1, None, None).against([CPU])


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("90m", 90), ("12h", 720), ("2d", 2880), ("1:30:00", 90), ("30:30", 31), ("2-12", 3600),
     ("1-0:30", 1470), ("1-0:0:30", 1441)],
)  # fmt: skip
def test_times_as_people_write_them(text: str, minutes: int) -> None:
    assert parse_time(text) == minutes


@pytest.mark.parametrize("text", ["", "0", "-5", "soon", "1.5h", "1:2:3:4"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(Refusal, match="--time"):
        parse_time(text)


@pytest.mark.parametrize(
    ("text", "minutes"), [("infinite", None), ("30:00", 30), ("1:00:00", 60), ("2-00:00:00", 2880), ("n/a", None)]
)
def test_limits_as_sinfo_writes_them(text: str, minutes: int | None) -> None:
    assert parse_limit(text) == minutes


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([75, 75], 75),
        ([1, 75], 1),  # torchrun stops the others after a failure
        ([1, -15], 1),
        ([1, 2], 2),
        ([75, 2], 2),
        ([1, -9], 137),
        ([75, -9], 137),
        ([1, 1], 1),
        ([-11, 1], 139),
        ([3, 75], 3),
    ],
)
def test_the_verdict_over_a_nodes_ranks(codes: list[int], code: int) -> None:
    assert agent.verdict(codes) == code


@pytest.mark.multiprocess
def test_the_agent_tells_how_a_job_ended_where_torchrun_does_not(tmp_path: Path) -> None:
    """Refused, failed, stopped before there is a rank; with the traceback of the rank that failed first."""
    script = tmp_path / "job.py"
    script.write_text(
        "import os, sys, time\n"
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    code = int(sys.argv[1])\n"
        "    if code == 1 and os.environ['RANK'] == '1':\n"
        "        raise ValueError('the first')\n"
        "    time.sleep(1.5 if code == 1 else 0)\n"
        "    if code == 1:\n"
        "        raise RuntimeError('lost a peer')\n"
        "    sys.exit(code)\n"
        "main()\n"
    )
    logs = tmp_path / "logs"
    options = ["--standalone", "--nproc-per-node=2", f"--log-dir={logs}", str(script)]
    for code in (0, 2, 75, 1):
        processes.run([sys.executable, "-m", "evenkeel.agent", *options, str(code)], expect=code)
    assert "ValueError: the first" in agent.first_error([logs])
    processes.run([sys.executable, "-m", "torch.distributed.run", *options, "75"], expect=1)  # the control


@pytest.mark.multiprocess
def test_an_agent_that_still_waits_for_others_ends_as_stopped() -> None:
    options = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=is_host=1"]
    line = (
        "import sys, evenkeel.agent as a; a.heed_signals(); print('ready', flush=True); sys.exit(a.main(sys.argv[1:]))"
    )
    process = processes.start([sys.executable, "-c", line, *options, "train.py"])
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    assert processes.finish(process).returncode == 75


def test_first_error_leaves_out_what_is_half_written(tmp_path: Path) -> None:
    for name, text in (("0", '{"mess'), ("1", json.dumps({"message": "plain words"}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "error.json").write_text(text)
    assert agent.first_error([tmp_path]) == "plain words"
    assert agent.first_error([tmp_path / "0"]) == ""


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
    assert {path.name: path.read_text() for path in copy.rglob("*.py")} == {
        "train.py": "4",
        "new.py": "2",
        "task.py": "5",
    }
    assert not (copy / "data").exists()
    assert not (copy / "large.bin").exists()
    assert b"+4" in (tmp_path / "slurm" / "code.diff").read_bytes()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--array-seeds 0:3 --follow", "--follow: shows one job"),
        ("--array-seeds 0:3 --container x", "--container: not with --array-seeds"),
        ("--max-requeues -1", "--max-requeues -1: must be at least 0"),
        ("--cpus-per-gpu 0", "--cpus-per-gpu 0: must be at least 1"),
        ("--mem much", "--mem much: give a number"),
        ("--partitoin x", "perhaps --partition"),
    ],
)
def test_options_that_cannot_be_meant(words: str, line: str) -> None:
    with pytest.raises(Refusal, match=line):
        submission.main(words.split(), ROOT)


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refusal, match="no Slurm on this machine: sinfo: not found"):
        submission.main(["-n", "2"], ROOT)


def test_a_command_that_hangs_or_fails_is_one_line() -> None:
    with pytest.raises(SlurmError, match=r"sleep: no answer within 0.1 s; is Slurm's controller up\?"):
        slurm("sleep", "5", timeout=0.1)
    with pytest.raises(SlurmError, match=r"^one two$"):
        slurm("sh", "-c", "echo one >&2; echo two >&2; exit 3")


@pytest.mark.multiprocess
def test_scripts_are_plain_bash() -> None:
    for name in ("job.sh", "train.sbatch"):
        subprocess.run(["bash", "-n", str(ROOT / "slurm" / name)], check=True)
    done = processes.run([sys.executable, "slurm/node.py", "--", "--epochs", "1"], expect=2)
    assert done.stderr.startswith("evenkeel: slurm/node.py is a task of a Slurm job: srun --ntasks-per-node=1")
    assert os.access(ROOT / "slurm" / "submit.py", os.X_OK)
