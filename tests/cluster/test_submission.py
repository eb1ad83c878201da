"""From what is typed to what starts: refusals, the copy of the code, both ways to submit, interactive allocations."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.launch.slurm import submission
from tests.cluster.cluster import Cluster
from tests.cluster.jobs import ended, recorded, sbatch, submit, submitted
from tests.support import processes
from tests.support.copies import copy_of_the_template
from tests.support.processes import ROOT, read
from tests.support.readme import blocks

REFUSED = {
    "-n 5": "-n 5: partition low has 4 nodes; ask for fewer",
    "-n 4:1": "-n 4:1: give a number of nodes, or MIN:MAX with 1 <= MIN <= MAX",
    "-g 3": "-g 3: a node of partition low has 2 GPUs; ask for fewer",
    "--partition nowhere": "--partition nowhere: does not exist; the cluster has low, lowhard, short, high",
    "--time 2h": "--time 02:00:00: partition low allows 01:00:00; ask for less: a job that reaches its limit is "
    "requeued and continues",
    "--time soon": "--time soon: give minutes, H:MM:SS or D-HH:MM:SS, or 90m, 12h, 2d",
    "--mem plenty": "--mem plenty: give a number with K, M, G or T, such as 64G",
    "--array-seeds 3": "--array-seeds 3: give FIRST:END with FIRST < END, 10000 at most; 0:4 means seeds 0, 1, 2 and 3",
    "--nodelist node9": "Slurm refuses the job: .*[Ii]nvalid node name",
    "--constraint none": "Slurm refuses the job: .*feature",
    "--mem 900G": "Slurm refuses the job: .*([Mm]emory|not available)",
    "-- --batch-size 0": "--batch-size 0: must be at least 1",
    "-- --epoch 3": "Unrecognized options: --epoch; did you mean --epochs",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused(words: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environment()["SLURM_CONF"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match=REFUSED[words]) as refused:
        submission.main(words.split(), ROOT)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("runs/*/slurm")), "nothing is written"


def test_a_refusal_is_one_line_and_exit_code_2(cluster: Cluster, tmp_path: Path) -> None:
    other = tmp_path / "other"
    processes.run([sys.executable, "train.py", *recorded(other, "--wandb", "disabled", "--max-steps", 1)])
    done = submit(cluster, "-n", 2, "-g", 1, "--", *recorded(other, "--seed", 1), expect=2)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "has another run: --seed was 0 and is now 1" in done.stderr or "--max-steps" in done.stderr
    assert cluster.slurm("squeue", "--noheader") == ""


def test_a_dry_run_prints_the_script_and_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    words = ["-n", "2:4", "-g", 2, "--qos", "normal", "--setup", "module load cuda", "--container", "image.sqsh"]
    script = submit(cluster, *words, "--dry-run", "--", "--run-dir", tmp_path / "a run").stdout
    for line in ("#SBATCH --nodes=2-4", "#SBATCH --gpus-per-node=2", "#SBATCH --signal=USR2@90", "#SBATCH --requeue"):
        assert line in script.splitlines()
    assert "#SBATCH --qos=normal" in script
    assert "module load cuda" in script.splitlines()
    assert "--container-image=image.sqsh" in script
    assert not list(tmp_path.iterdir())
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


DUMP = """
import json, os, sys
from dataclasses import dataclass
from pathlib import Path
from evenkeel.tasks.classify import Classify

@dataclass
class Dump(Classify):
    '''Writes down how it was started.'''
    note: str = ""

    def train_dataset(self):
        if os.environ.get("RANK") == "0":
            ours = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC_", "SUBMITIT_"))}
            limits = os.sched_getaffinity(0), os.umask(0o22)
            facts = {"argv": sys.argv[1:], "environment": ours, "note": self.note, "limits": repr(limits)}
            Path(os.environ["DUMP"]).write_text(json.dumps(facts))
        return super().train_dataset()
"""


def test_sbatch_and_submit_start_the_same(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dump.py").write_text(DUMP)
    note = """two words, "quotes", 'more', $HOME, `date`; \\ and * """
    found: list = []
    for way in ("submit", "sbatch"):
        run_dir = tmp_path / f"{way} it"
        monkeypatch.setenv("DUMP", str(tmp_path / f"{way}.json"))
        options = ["--task", f"{tmp_path / 'dump.py'}:Dump", "--note", note, "--max-steps", "2", "--wandb", "disabled"]
        options += ["--run-dir", str(run_dir)]
        if way == "submit":
            job = submitted(cluster, "-n", 1, "-g", 2, "--time", 10, "--name", "evenkeel", "--", *options, cwd=ROOT)
        else:
            words = ["-N1", "--gpus-per-node=2", "-c2", "-t10", f"--chdir={ROOT}", f"--output={tmp_path}/slurm-%j.out"]
            job = sbatch(cluster, words, options, tmp_path)
        script = cluster.slurm("scontrol", "write", "batch_script", job, "-")
        assert "signal=USR2@90" in script
        assert "--requeue" in script
        shown = ended(cluster, job, run_dir)
        facts = json.loads((tmp_path / f"{way}.json").read_text())
        assert facts["note"] == note
        assert facts["argv"] == options
        facts["Requeue"], facts["limit"] = shown["Requeue"], shown["TimeLimit"]
        found.append(facts)
    by_submit, by_sbatch = found
    one, other = by_submit["environment"], by_sbatch["environment"]
    differ = {name for name in one | other if one.get(name) != other.get(name)}
    of_this_job = {"SLURM_JOB_ID", "SLURM_JOBID", "EVENKEEL_LAUNCH", "EVENKEEL_MASTER", "MASTER_PORT", "DUMP", "RANK"}
    of_this_job |= {"EVENKEEL_KEPT_STORE", "EVENKEEL_WRONG_NODES"}  # its pid, and its file of nodes
    of_the_copy = {"EVENKEEL_CODE", "EVENKEEL_ORIGIN", "PYTHONPATH", "SLURM_SUBMIT_DIR", "OLDPWD", "_"}
    by_the_way = {"SLURM_TASK_PID", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_GTIDS", "SLURM_STEP_LAUNCHER_PORT"}
    by_the_way |= {"SLURM_SRUN_COMM_PORT", "SLURM_LAUNCH_NODE_IPADDR", "SRUN_DEBUG", "SLURM_UNBUFFEREDIO", "SHLVL"}
    by_the_way |= {"EVENKEEL_PYTHON", "PYTEST_CURRENT_TEST", "PYTEST_VERSION"}
    assert differ - of_this_job - of_the_copy - by_the_way == set()
    for name in ("limits", "Requeue", "limit"):
        assert by_submit[name] == by_sbatch[name], name


def test_a_queued_job_runs_the_code_as_it_was_submitted(cluster: Cluster, tmp_path: Path, run_dir: Path) -> None:
    """Every file that matters is spoilt while the job waits: the launcher's, the package's, train.py, the task's."""
    checkout = copy_of_the_template(tmp_path / "checkout")
    (checkout / "README.md").write_text("changed\n")
    options = recorded(run_dir, "--wandb", "disabled", "--task", "tests/support/recording_task.py:Recorded", epochs=1)
    del options[:2]
    cluster.drain(*cluster.nodes)
    env = cluster.environment({"PYTHONPATH": str(checkout / "src")})
    command = [sys.executable, "slurm/submit.py", "-n", "2", "-g", "1", "--", *options]
    done = processes.run(command, checkout, env)
    job = done.stdout.partition("job ")[2].split()[0]
    spoilt = [*checkout.glob("src/evenkeel/**/*.py"), *checkout.glob("slurm/*"), checkout / "train.py"]
    for path in [*spoilt, checkout / "tests" / "support" / "recording_task.py"]:
        path.write_text("exit 3 # spoilt\n")
    cluster.resume(*cluster.nodes)
    ended(cluster, job, run_dir)
    assert read(run_dir)["state"] == "finished"
    (diff,), (revision,) = run_dir.glob("slurm/*/code.diff"), run_dir.glob("slurm/*/code.revision")
    assert "+changed" in diff.read_text()
    assert revision.read_text().strip().endswith("-dirty")
    assert read(run_dir / "slurm", "job.json")["revision"] == revision.read_text().strip()


def test_a_run_directory_of_each_node_and_a_folder_that_some_do_not_see(cluster: Cluster, tmp_path: Path) -> None:
    """The run's folder may be on the nodes' own disks. The job's may not, and the job says so in a line."""
    run_dir = cluster.local / "run"
    options = recorded(run_dir, "--wandb", "disabled", epochs=1)
    job = submitted(cluster, "-n", 2, "-g", 1, "--folder", tmp_path / "shared", "--", *options)
    ended(cluster, job, tmp_path / "shared")
    shutil.rmtree(run_dir, ignore_errors=True)  # what submit.py has looked at here is another disk's
    disks = [cluster.disk(node) / "run" for node in cluster.nodes if (cluster.disk(node) / "run").exists()]
    assert len(disks) == 2
    assert [read(disk)["state"] for disk in disks if (disk / "summary.json").exists()] == ["finished"]
    assert [read(disk, "status.json")["world_sizes"] for disk in disks] == [[2], [2]]

    script = tmp_path / "blind.sh"
    script.write_text(f"#!/bin/bash\nsource {submission.JOB_SCRIPT}\nevenkeel_probe {cluster.local}/only-here\n")
    (cluster.disk(1) / "only-here").mkdir()
    job = cluster.submit(script, "-N2", "--nodelist=node[1-2]")
    assert cluster.wait_for(job, "FAILED")["ExitCode"] == "2:0"
    (line,) = (tmp_path / f"blind.{job}.log").read_text().splitlines()
    assert line.startswith(f"evenkeel: {cluster.local}/only-here: is not visible on node2; name a --run-dir or")


@pytest.mark.long
def test_an_interactive_allocation(cluster: Cluster, tmp_path: Path) -> None:
    """salloc: node.py on both nodes; torchrun as people type it; tasks without torchrun are told what to type."""
    names = ("node", "torchrun")
    options = {name: " ".join(recorded(tmp_path / name, "--wandb", "disabled", epochs=1)) for name in names}
    alone = "--standalone --nproc_per_node=2"
    lines = f"""
        srun --ntasks-per-node=1 slurm/node.py -g 1 -- {options["node"]} || echo "node.py: $?"
        srun -N1 -n1 torchrun {alone} train.py {options["torchrun"]} || echo "torchrun: $?"
        srun -n2 python train.py --run-dir {tmp_path}/bare; echo "bare: $?"
        slurm/node.py; echo "no step: $?"
    """
    command = ["salloc", "-N2", "--gpus-per-node=2", "-c2", "bash", "-c", lines]
    done = processes.run(command, ROOT, cluster.environment(), limit=300)
    said = done.stdout + done.stderr
    assert read(tmp_path / "node")["world_sizes"] == [2], said
    assert read(tmp_path / "torchrun")["world_sizes"] == [2], said
    assert "srun started 2 tasks of train.py without torchrun; start one task for each node: srun" in said
    assert "bare: 2" in said
    assert "no step: 2" in said
    assert not (tmp_path / "bare").exists()


def test_the_lines_of_the_readme(cluster: Cluster, tmp_path: Path) -> None:
    (block,) = blocks("bash slurm")
    lines = block.splitlines()
    assert len(lines) == 3
    checkout = copy_of_the_template(tmp_path / "checkout")
    (checkout / ".venv").symlink_to(Path(sys.prefix))
    env = cluster.environment({"PYTHONPATH": str(checkout / "src")})
    by_submit, status, by_file = (processes.run(["bash", "-c", line], checkout, env, limit=300) for line in lines)
    assert "accuracy" in by_submit.stdout, "--follow shows the log"
    assert "finished" in status.stdout
    assert read(checkout / "runs" / "cluster")["world_sizes"] == [4]
    ended(cluster, by_file.stdout.split()[-1], checkout / "runs" / "by-file")
    assert read(checkout / "runs" / "by-file")["world_sizes"] == [4]


@pytest.mark.long
def test_a_failure_of_the_doctor_on_one_node_ends_the_job_and_follow_shows_it(cluster: Cluster, tmp_path: Path) -> None:
    """The fault: 64 MB of shared memory on the first node, where --setup is run. Then the same job without it."""
    for size, code in (("64m", 1), ("2g", 0)):
        run_dir = tmp_path / size
        setup = ["--setup", f"mount -o remount,size={size} /dev/shm"]
        options = recorded(run_dir, "--num-workers", 1, epochs=1)
        done = submit(cluster, "-n", 2, "-g", 1, "--doctor", "--follow", *setup, "--", *options, expect=code)
        job = done.stdout.partition("\njob ")[2].split()[0]
        shown = cluster.show(job)
        assert shown["Restarts"] == "0"
        assert shown["JobState"] == ("FAILED" if code else "COMPLETED")
        assert ("FAIL  /dev/shm" in done.stdout) == bool(code), done.stdout
        assert ("evenkeel: --doctor: the job is not started" in done.stdout) == bool(code)
        assert (run_dir / "status.json").exists() != bool(code)
        if code:
            assert shown["ExitCode"] == "1:0"
            assert "(node node1)" in done.stdout, "one node has it"
            assert " 1 FAIL in " in done.stdout
        else:
            assert " 0 FAIL in " in done.stdout
            assert read(run_dir)["step"] == 9
