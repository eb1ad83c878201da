"""What Slurm sends to whom, and which jobs come back: measured, because requeues are designed around it.

Each job has a batch script, a child of that (as srun is one), a task on each node, and a child of each task. They write
down every signal and ignore it, so that only SIGKILL ends them. `pytest -s` prints who heard what and when.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.support.processes import wait_until

BATCH, BESIDE, TASK, CHILD = "batch script", "its child", "task", "task's child"
STEP = {TASK, CHILD}
ALL = {BATCH, BESIDE, TASK, CHILD}

# Options by environment: NAME of the job; THEN what a job does that ends when it is warned: exit, or requeue.
LISTEN = """#!{python}
import os, signal, subprocess, sys, time

who = sys.argv[1] if len(sys.argv) > 1 else "batch script"
folder, name, then = os.environ["FOLDER"], os.environ["NAME"], os.environ["THEN"]
life = os.environ.get("SLURM_RESTART_COUNT", "0")
log = os.open(f"{{folder}}/{{name}}.{{life}}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
me = [sys.executable, f"{{folder}}/listen.py"]

def note(what):
    os.write(log, f"{{time.time()}}|{{who}}|{{os.uname().nodename}}|{{what}}\\n".encode())

def hear(number, frame):
    heard = signal.Signals(number).name.removeprefix("SIG")
    note(heard)
    if then and heard == "USR2" and who.startswith("task"):
        os._exit(75)

for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, hear)
note("START")
if who == "batch script":
    beside = subprocess.Popen([*me, "its child"])
    note(f"srun ended with {{subprocess.call(['srun', '--ntasks-per-node=1', *me, 'task'])}}")
    if then:
        beside.kill()
        if then == "requeue":
            subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], timeout=60)
        sys.exit(75)
elif who == "task":
    subprocess.Popen([*me, "task's child"])
while True:
    time.sleep(0.1)
"""


class Jobs:
    """The jobs by their names, and what was heard in each of their lives."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.ids: dict[str, str] = {}
        self.script = folder / "listen.py"
        self.script.write_text(LISTEN.format(python=sys.executable))

    def submit(self, name: str, node: str, *options: str, then: str = "") -> None:
        env = {"FOLDER": str(self.folder), "NAME": name, "THEN": then}
        nodes = [f"--nodelist={node}", f"--nodes={1 + node.count(',')}", "--ntasks-per-node=1"]
        self.ids[name] = self.cluster.submit(self.script, *nodes, *options, env=env)

    def preempt(self, node: str) -> str:
        """Take all of a node for a moment, as soon as whoever has it is out."""
        whole = ["--partition=high", f"--nodelist={node}", "--nodes=1", "--ntasks=2", "--output=/dev/null"]
        return self.cluster.slurm("sbatch", "--parsable", *whole, "--wrap", "sleep 1").strip()

    def lines(self, name: str, life: int = 0) -> list[tuple[float, str, str, str]]:
        """Time, who, where, what."""
        path = self.folder / f"{name}.{life}"
        found = [line.split("|") for line in path.read_text().splitlines()] if path.exists() else []
        return sorted((float(at), who, node, what) for at, who, node, what in found)

    def heard(self, name: str, what: str, life: int = 0) -> set[str]:
        return {who for _, who, _, heard in self.lines(name, life) if heard == what}

    def first(self, name: str, what: str, who: str) -> float:
        """When somebody first heard it, anywhere."""
        return next(at for at, hearer, _, heard in self.lines(name) if (hearer, heard) == (who, what))

    def wait(self, what: str, done: Callable[[], bool]) -> None:
        wait_until(done, what, 120, lambda: self, every=0.1)

    def started(self, name: str, life: int = 0, nodes: int = 1) -> None:
        count = 2 + 2 * nodes
        self.wait(f"start of {name}", lambda: [what for *_, what in self.lines(name, life)].count("START") == count)

    def __str__(self) -> str:
        text = []
        for path in sorted(self.folder.glob("*.[0-9]")):
            text.append(f"--- {path.stem}, life {path.suffix[1:]}")
            lines = self.lines(path.stem, int(path.suffix[1:]))
            text += [f"{at - lines[0][0]:7.2f} s  {node}  {who:13} {what}" for at, who, node, what in lines]
        return "\n".join(text)


@pytest.mark.long  # of Slurm, not of ours
def test_what_slurm_sends_to_whom(cluster: Cluster, tmp_path: Path) -> None:
    jobs = Jobs(cluster, tmp_path)
    warned = "--signal=USR2@10"
    jobs.submit("limit", "node1,node2", "--partition=short", warned)
    jobs.submit("limit-batch", "node1", "--partition=short", "--signal=B:USR2@10")
    jobs.submit("by-hand", "node2")
    jobs.submit("grace", "node3", warned)
    jobs.submit("grace-unwarned", "node3")
    jobs.submit("ends", "node4", warned, then="exit")
    jobs.submit("requeues-itself", "node4", warned, then="requeue")
    for name in jobs.ids:
        jobs.started(name, nodes=2 if name == "limit" else 1)
    for name in ("limit", "limit-batch"):  # minutes would be too long to wait for
        cluster.slurm("scontrol", "update", f"jobid={jobs.ids[name]}", "EndTime=now+32")
    jobs.preempt("node3")
    cluster.wait_for(jobs.preempt("node4"))
    jobs.submit("hard", "node4", "--partition=lowhard", warned)
    jobs.started("hard")
    jobs.preempt("node4")

    preemption_without_grace(jobs)
    jobs_that_end_in_their_grace(jobs)
    lives = int(cluster.wait_for(jobs.ids["hard"], "RUNNING")["Restarts"])
    cluster.kill_node(4)
    signals_by_hand(jobs)
    preemption_with_grace(jobs)
    lost_node(jobs, lives)
    time_limit(jobs)
    print(f"\n{jobs}")


def signals_by_hand(jobs: Jobs) -> None:
    """`scancel --signal` reaches the steps, with --batch only the batch script, with --full all; and a requeue."""
    job = jobs.ids["by-hand"]
    for option, name, hearers in (("", "USR2", STEP), ("--batch", "INT", {BATCH}), ("--full", "USR1", ALL)):
        jobs.cluster.slurm("scancel", *filter(None, [option]), f"--signal={name}", job)
        jobs.wait(f"{name} {option}", lambda: jobs.heard("by-hand", name) == hearers)  # noqa: B023
    jobs.cluster.slurm("scontrol", "requeue", job)
    jobs.started("by-hand", life=1)
    jobs.cluster.slurm("scancel", job)
    assert jobs.cluster.wait_for(job)["JobState"] == "CANCELLED"
    for life, names in ((0, {"USR2": STEP, "INT": {BATCH}, "USR1": ALL}), (1, {"USR2": set(), "INT": set()})):
        assert {name: jobs.heard("by-hand", name, life) for name in names} == names, str(jobs)
        assert jobs.heard("by-hand", "TERM", life) == ALL, str(jobs)  # SIGKILL follows KillWait seconds later


def preemption_without_grace(jobs: Jobs) -> None:
    """The warning comes together with SIGTERM, and SIGKILL follows KillWait seconds later."""
    jobs.cluster.wait_for(jobs.ids["hard"], "PENDING", "RUNNING", restarts=1)
    assert jobs.heard("hard", "USR2") == STEP, str(jobs)
    assert jobs.heard("hard", "TERM") == ALL, str(jobs)


def preemption_with_grace(jobs: Jobs) -> None:
    """The steps are warned, with --signal by that signal and otherwise by SIGTERM; after GraceTime all get SIGTERM."""
    for name, warning in (("grace", "USR2"), ("grace-unwarned", "TERM")):
        jobs.cluster.wait_for(jobs.ids[name], "PENDING", "RUNNING", restarts=1)
        assert jobs.heard(name, "TERM") == ALL, str(jobs)
        for who in STEP:
            assert jobs.first(name, "TERM", BATCH) - jobs.first(name, warning, who) > 5, str(jobs)
    assert jobs.heard("grace", "USR2") == STEP, str(jobs)
    assert jobs.heard("grace-unwarned", "USR2") == set(), str(jobs)


def jobs_that_end_in_their_grace(jobs: Jobs) -> None:
    """They are not requeued, whatever --requeue says, unless they do it themselves."""
    ended = jobs.cluster.wait_for(jobs.ids["ends"])
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "75:0", "0")
    jobs.cluster.wait_for(jobs.ids["requeues-itself"], "PENDING", "RUNNING", restarts=1)


def lost_node(jobs: Jobs, lives: int) -> None:
    """Slurm misses a node by itself, after about 30 s, and requeues its jobs."""
    jobs.cluster.wait_for(jobs.ids["hard"], "PENDING", restarts=lives + 1)
    assert "DOWN" in jobs.cluster.node_state(4)


def time_limit(jobs: Jobs) -> None:
    """The warning goes to the steps of all nodes, or with B: only to the batch script; all get SIGTERM; no requeue."""
    for name, hearers in (("limit", STEP), ("limit-batch", {BATCH})):
        assert jobs.cluster.wait_for(jobs.ids[name])["JobState"] == "TIMEOUT"
        assert jobs.heard(name, "USR2") == hearers, str(jobs)
        assert jobs.heard(name, "TERM") == ALL, str(jobs)
    found = {(who, node) for _, who, node, what in jobs.lines("limit") if what == "USR2"}
    assert found == {(who, node) for who in STEP for node in ("node1", "node2")}
