"""What of Slurm's side needs no Slurm: requests, times, the agent's verdict, the copy of the code."""

import os
import signal
import sys
from pathlib import Path

import pytest

from evenkeel.launch import agent
from tests.support import processes
from tests.support.processes import ROOT
from tests.support.small_files import torchvision_that_needs


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
        processes.run([sys.executable, "-m", "evenkeel.launch.agent", *options, str(code)], expect=code)
    assert "ValueError: the first" in agent.first_error([logs])
    processes.run([sys.executable, "-m", "torch.distributed.run", *options, "75"], expect=1)  # the control


def test_an_agent_that_still_waits_for_others_ends_as_stopped() -> None:
    options = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--rdzv-conf=is_host=1"]
    line = "import sys, evenkeel.launch.agent as a; a.heed_signals(); print('ready', flush=True); "
    line += "sys.exit(a.main(sys.argv[1:]))"
    process = processes.start([sys.executable, "-c", line, *options, "train.py"])
    assert process.stdout.readline() == "ready\n"
    processes.stop(process, signal.SIGUSR2, 75)


def test_scripts_are_plain_bash() -> None:
    pytest.importorskip("evenkeel.launch.slurm")
    for name in ("src/evenkeel/launch/slurm/job.sh", "slurm/train.sbatch"):
        processes.run(["bash", "-n", ROOT / name])
    done = processes.run([sys.executable, "slurm/node.py", "--", "--epochs", "1"], expect=2)
    assert done.stderr.startswith("evenkeel: slurm/node.py is a task of a Slurm job: srun --ntasks-per-node=1")
    assert os.access(ROOT / "slurm" / "submit.py", os.X_OK)


def test_a_node_starts_nothing_after_a_failure_of_its_doctor(tmp_path: Path) -> None:
    """A node's share of a job of one node, as Slurm starts it. The fault: a torchvision for another torch."""
    pytest.importorskip("evenkeel.launch.slurm")
    pytest.importorskip("evenkeel.cli.doctor")
    torchvision_that_needs(tmp_path, "torch==1.9.0")
    slurm = dict.fromkeys(("SLURM_JOB_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS"), "1")
    slurm |= {"SLURM_STEP_NODELIST": "here", "SLURM_NODEID": "0"}
    small = ["--batch-size", "16", "--limit-batches", "4", "--max-steps", "2", "--wandb", "disabled"]
    command = [sys.executable, "slurm/node.py", "-g", "2", "--doctor", "--", *small, "--run-dir"]
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = processes.run([*command, tmp_path / "run"], env={**slurm, "PYTHONPATH": path}, expect=1)
    assert "FAIL  torchvision" in done.stdout
    assert done.stderr.endswith("evenkeel: --doctor: the job is not started\n")
    assert not (tmp_path / "run" / "status.json").exists()
    done = processes.run([*command, tmp_path / "run"], env=slurm)
    assert " 0 FAIL in " in done.stdout
    assert processes.read(tmp_path / "run")["step"] == 2
