"""Runs as Slurm's jobs: what `status` and `follow` say of them, over requeues and to every end."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from evenkeel.cli.status import Runs, RunStatus
from evenkeel.launch.slurm import jobs
from evenkeel.launch.slurm.jobs import UNKNOWN, JobRecord, ask
from tests.cluster.cluster import Cluster
from tests.support.processes import TRAIN, read, run, wait_until
from tests.support.small_runs import job
from tests.support.terminal import Terminal

SCRIPT = """#!/bin/bash
exec {python} -m evenkeel.launch.agent --standalone --nproc_per_node=1 --max-restarts=0 \\
  --log-dir={errors}/$SLURM_JOB_ID/start-${{SLURM_RESTART_COUNT:-0}}/node-0 {train}
"""


@pytest.fixture(autouse=True)
def _on_the_login_node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process asks the cluster as well."""
    monkeypatch.setenv("SLURM_CONF", cluster.environment()["SLURM_CONF"])


def submit(cluster: Cluster, run_dir: Path, *more: object) -> str:
    """Submit a run as one process on one node, and leave the record that submit.py leaves."""
    before, folder = time.time(), run_dir / "slurm"
    folder.mkdir(parents=True)
    script = folder / "job.sh"
    train = shlex.join([str(TRAIN), *job(run_dir, "--checkpoint-every", 1, *more)])
    script.write_text(SCRIPT.format(python=sys.executable, errors=folder / "errors", train=train))
    job_id = cluster.submit(script, "-N1")
    record(run_dir, job_id, before)
    return job_id


def record(run_dir: Path, job_id: str, submitted: float) -> None:
    folder = run_dir / "slurm"
    log = str(folder / f"job.{job_id}.log")
    names = {"job_id": job_id, "run_dir": str(run_dir), "folder": str(folder), "log": log}
    JobRecord(**names, nodes="1", revision="", submitted=submitted).save()


def follow(cluster: Cluster, run_dir: Path) -> Terminal:
    return Terminal([sys.executable, "-m", "evenkeel", "follow", str(run_dir)], columns=250, env=cluster.environment())


def look(run_dir: Path) -> RunStatus:
    (it,) = Runs([run_dir]).look()
    return it


def wait_for(run_dir: Path, state: str, step: int = 0) -> RunStatus:
    def there() -> bool:
        it = look(run_dir)
        assert it.state == state or it.state not in ("failed", "stopped", "finished"), (it, logs(run_dir))
        return it.state == state and it.step >= step

    wait_until(there, state, more=lambda: (look(run_dir), logs(run_dir)), every=0.3)
    return look(run_dir)


def logs(run_dir: Path) -> str:
    return "".join(path.read_text()[-3000:] for path in (run_dir / "slurm").glob("*.log"))


def test_a_job_is_followed_over_its_requeue_to_the_end(cluster: Cluster, run_dir: Path) -> None:
    job_id = submit(cluster, run_dir, "--pause", 0.05)
    with follow(cluster, run_dir) as terminal:
        it = wait_for(run_dir, "running", step=3)
        assert (it.job_id, it.job.state, it.job.requeues) == (job_id, "RUNNING", 0)
        terminal.read_until(rf"job {job_id}: running on {it.job.nodes}\n")
        terminal.read_until(r"step 1/27 ")
        cluster.slurm("scontrol", "requeuehold", job_id)
        it = wait_for(run_dir, "queued")
        assert it.job.requeues == 1
        assert it.step >= 3
        terminal.read_until(rf"job {job_id}: requeued, start 2: (completing|pending) \([\w ]+\)\n")
        cluster.slurm("scontrol", "release", job_id)
        assert terminal.end() == 0
        out = terminal.text
    first, second = out.split("requeued, start 2", 1)
    assert "1 rank, step 0/27" in first
    assert "attempt 2, 1 rank, step" in second
    assert f"job {job_id}: running on " in second
    assert out.endswith(f"job {job_id}: finished at step 27 -> {run_dir}\n")
    it = look(run_dir)
    assert (it.state, it.starts, it.job.state, it.job.requeues) == ("finished", 2, "COMPLETED", 1)
    status = [sys.executable, "-m", "evenkeel", "status", str(run_dir)]
    (row,) = run(status, env=cluster.environment()).stdout.splitlines()[1:]
    assert row.split()[1:6] == ["finished", job_id, "completed", "27/27", "100%"]


def test_a_bug_is_shown_and_a_kill_is_told_from_a_run_at_work(cluster: Cluster, tmp_path: Path) -> None:
    buggy, killed, refused = tmp_path / "buggy", tmp_path / "killed", tmp_path / "refused"
    bug = submit(cluster, buggy, "--fail-at", 9)
    kill = submit(cluster, killed, "--die-at", 9, "--keeper", "off")
    refusal = submit(cluster, refused, "--batch-size", 102)
    with follow(cluster, buggy) as terminal:
        assert terminal.end() == 1
        out = terminal.text
    told, _, said = out.partition(f"job {bug}: the rank that failed first says:\n")
    assert f"job {bug}: running on " in told
    traceback, _, last = said.partition(f"evenkeel: job {bug}: failed at step 2: ")
    assert traceback.startswith("Traceback (most recent call last):\n")
    # the samples of the micro-batch are a note of the error
    assert "\nZeroDivisionError: a bug in the user's loss\n(one of the samples " in traceback
    assert last.startswith("ZeroDivisionError: a bug in the user's loss (one of the samples ")
    assert "; its log is " in last
    it = look(buggy)
    assert (it.state, it.why.partition(" (")[0]) == ("failed", "ZeroDivisionError: a bug in the user's loss")

    with follow(cluster, killed) as terminal:
        assert terminal.end() == 1
        (last,) = terminal.text.splitlines()[-1:]
    assert f"job {kill}: failed: Slurm says failed (NonZeroExitCode); the run recorded no reason; its log" in last
    assert read(killed, "status.json")["state"] == "running", "the control"
    it = look(killed)
    assert (it.state, it.why) == ("lost", f"job {kill}: failed (NonZeroExitCode)")

    with follow(cluster, refused) as terminal:
        assert terminal.end() == 2
        (last,) = terminal.text.splitlines()[-1:]
    assert last == (
        f"evenkeel: job {refusal}: refused: --batch-size 102: the training data has only 101 samples; use at most that"
    )
    assert look(refused).state == "failed"


def test_jobs_that_wait_and_are_cancelled_and_forgotten(cluster: Cluster, tmp_path: Path) -> None:
    script, before = tmp_path / "job.sh", time.time()
    script.write_text("#!/bin/bash\nsleep 1\n")
    array, alone = (cluster.submit(script, "--hold", *more) for more in (["--array=0-1"], []))
    ids = {"alone": alone, "seed-0": f"{array}_0", "seed-1": f"{array}_1"}
    for name, job_id in ids.items():
        record(tmp_path / name, job_id, before)
    found = ask([*ids.values(), "99999"])
    assert list(found) == [*ids.values(), "99999"]
    assert [str(it) for it in found.values()] == ["pending (JobHeldUser)"] * 3 + ["unknown"]
    assert ask(["99999"])["99999"].state == UNKNOWN, "squeue has nothing to say but an error"
    assert [it.state for it in Runs([tmp_path]).look()] == ["queued"] * 3

    with follow(cluster, tmp_path / "alone") as terminal:
        terminal.read_until(rf"job {alone}: pending \(JobHeldUser\)")
        terminal.press_ctrl_c()
        assert terminal.end() == 130
        assert f"job {alone}: continues; " in terminal.text
    assert ask([alone])[alone].is_waiting
    lasts = ("was cancelled", "left the queue without a start, so it was cancelled")
    for name, last in zip(("alone", "seed-0"), lasts, strict=True):
        with follow(cluster, tmp_path / name) as terminal:
            terminal.read_until("JobHeldUser")
            cluster.slurm("scancel", ids[name])
            assert terminal.end() == 75, terminal.text
            assert terminal.text.endswith(f"job {ids[name]}: {last}; submit it again to continue the run\n")
    assert [(it.state, it.why) for it in Runs([tmp_path]).look()] == [
        ("stopped", f"job {alone}: cancelled"),
        ("unknown", f"job {array}_0 left no files, and Slurm does not know it"),
        ("queued", ""),
    ]

    # what sacct says is the same, when squeue has forgotten it
    known = None

    def accounted() -> bool:
        nonlocal known
        known = dict(jobs._accounted([alone])).get(alone)
        return known is not None and known.is_over

    wait_until(accounted, "the end of the job in the accounting", every=0.3)
    assert str(known) == "cancelled (by user 0)"
    assert known.nodes == ""
