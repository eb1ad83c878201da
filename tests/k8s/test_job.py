"""The Job that k8s/submit.py makes, in an emulated cluster: what happens to its pods, and what becomes of the run.

No real API server has run it; cluster.py says what is emulated.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.k8s.cluster import Cluster, running
from tests.support import s3
from tests.support import small_runs as runs
from tests.support.processes import LIMIT, TRAIN, environment, read, records, run, wait_until

SHAPE = ["--task", runs.TASK, "--wandb", "disabled", "--epochs", 3, "--batch-size", 12, "--micro-batch", 3]
SHAPE += ["--log-every", 1, "--eval-every", 1000, "--checkpoint-every", 0, "--reduce", "tree"]


undisturbed = runs.weights_undisturbed(1, lambda run_dir: [*SHAPE, "--run-dir", run_dir])


class Trial:
    """A job in a cluster: slow until :meth:`hurry`."""

    def __init__(self, cluster: Cluster, app: Path, manifest: str) -> None:
        self.manifest = manifest
        self.cluster, self.run_dir, self.hold = cluster, app / "runs" / "run", app / "hold"

    def train(self, world_size: int, steps: int = 2) -> None:
        """Until so many ranks have done some steps together."""

        def done() -> bool:
            if not (self.run_dir / "metrics.jsonl").exists():
                return False
            begun = records(self.run_dir, "start")[-1:]
            since = [it for it in records(self.run_dir, "train") if begun and it["time"] > begun[0]["time"]]
            return bool(begun) and begun[0]["world_size"] == world_size and len(since) >= steps

        self.cluster.until(done, f"{steps} steps on {world_size} ranks")

    def finish(self, end: str = "Complete") -> None:
        """Until the Job is over."""
        self.hold.unlink(missing_ok=True)
        self.cluster.until(lambda: self.cluster.end and not self.cluster.active, f"the end: {end}")
        assert self.cluster.end == end, [self.cluster.log(index) for index in range(4)]

    def check(self, weights: str) -> None:
        """Finish: each sample was used once an epoch, no step was done twice, no bit has changed, no pod has failed."""
        self.finish()
        assert self.cluster.failed == 0, [self.cluster.log(index) for index in range(4)]
        assert read(self.run_dir)["samples_seen"] == runs.PLAN.epochs * runs.SAMPLES
        assert runs.no_step_is_done_twice(self.run_dir)
        assert runs.weights_of(self.run_dir) == weights


@contextmanager
def trial(
    app: Path, nodes: str, places: int, *more: object, submit: tuple[str, ...] = (), change: Callable[[str], str] = str
) -> Iterator[Trial]:
    """What k8s/submit.py prints, in a cluster with room for so many pods."""
    app.mkdir()
    (app / "train.py").symlink_to(TRAIN)
    (app / "runs").mkdir()
    (app / "hold").touch()
    slow = ["--pause", 0.3, "--hold", app / "hold", *more]
    head = [sys.executable, "k8s/submit.py", "--image", "evenkeel", "-n", nodes, "-g", 1, "--gpu-resource", "none"]
    typed = run([*head, *submit, "--dry-run", "--", *SHAPE, "--run-dir", "runs/run", *slow])
    with running(change(typed.stdout), app, places) as cluster:
        yield Trial(cluster, app, typed.stdout)


class Bucket:
    """A real S3 server on a machine of the cluster, and a Secret with its key."""

    PORT = 9000

    def __init__(self, cluster: Cluster) -> None:
        self.lab, self.node = cluster.lab, cluster.machine()
        address = f"http://{self.lab.address(self.node)}:{self.PORT}"
        cluster.secrets["bucket"] = s3.variables(0) | {"AWS_ENDPOINT_URL": address}
        self.env = environment(cluster.secrets["bucket"])
        server = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(self.PORT)]
        self.lab.popen(self.node, server, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(lambda: self._do("fs.mkdir('runs'); print('made')"), "the server")

    def steps(self) -> list[int]:
        """Of the checkpoints that are whole there."""
        names = self._do("print(*fs.find('runs/big/checkpoints'))").split()
        return sorted(int(name.split("/")[-2][5:]) for name in names if name.endswith("/manifest.json"))

    def _do(self, line: str) -> str:
        code = f"import fsspec; fs = fsspec.filesystem('s3')\n{line}"
        job = self.lab.popen(
            self.node, [sys.executable, "-c", code], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        return str(job.communicate(timeout=LIMIT)[0].decode())


def usual(cluster: Cluster) -> None:
    """Put the usual command into a Job: torchrun as its documentation has it, and a loop that saves once an epoch."""
    (container,) = cluster.spec["template"]["spec"]["containers"]
    name = cluster.job["metadata"]["name"]
    options = (
        f"--nnodes=2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint={name}-0.{name}:29500"
    )
    container["command"] = ["torchrun", *options.split()]
    container["args"] = [str(runs.SUPPORT / "stock_loop.py"), "--run-dir", "runs/run", "2", "144", "0.7"]
    del cluster.spec["podFailurePolicy"]
    cluster.dns_lag = 0.0


@pytest.mark.long
def test_the_control_the_usual_manifest_repeats_steps(tmp_path: Path) -> None:
    with trial(tmp_path / "app", "2", 2) as it:
        usual(it.cluster)
        it.cluster.until(lambda: runs.told_step(it.run_dir) >= 4, "some steps")
        it.cluster.delete(it.cluster.active[1])
        it.cluster.until(lambda: it.cluster.made(1) == 2, "another pod 1")
        it.finish()
        assert not runs.no_step_is_done_twice(it.run_dir)
        assert it.cluster.failed >= 1, "a deletion counts as a failure"


def test_a_pod_is_deleted_another_evicted_and_both_are_made_again(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path / "app", "2", 2) as it:
        it.train(2)
        deleted = it.cluster.active[1]
        it.cluster.delete(deleted)
        it.cluster.until(lambda: len(runs.starts(it.run_dir)) == 2, "another start, with another pod 1")
        it.train(2)
        assert it.cluster.made(0) == 1, "pod 0 has stayed"
        evicted = it.cluster.active[0]
        it.cluster.evict(evicted)
        it.cluster.until(lambda: evicted.over, "its end")
        assert deleted.code == evicted.code == 75, "each has saved within its grace period"
        it.check(undisturbed)


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "ranks", "lost", "made"), [("1:3", 3, 2, [1, 1, 2]), ("2", 2, 0, [2, 2])])
def test_a_machine_is_lost_and_its_pod_is_made_again_elsewhere(
    tmp_path: Path, undisturbed: str, nodes: str, ranks: int, lost: int, made: list[int]
) -> None:
    """Pod 0 hosts the rendezvous and is met again under its name, so the others end too, without being counted."""
    with trial(tmp_path / "app", nodes, ranks) as it:
        it.train(ranks)
        it.cluster.lose_machine(it.cluster.active[lost])
        it.cluster.until(lambda: it.cluster.made(ranks - 1) == 2, "another last pod")
        it.train(ranks)
        it.check(undisturbed)
        assert [it.cluster.made(index) for index in range(ranks)] == made
        assert ("node 0 is lost" in it.cluster.log(1)) == (lost == 0)


@pytest.mark.long
def test_the_machine_of_pod_0_is_lost_for_good_and_it_gets_another_place(tmp_path: Path, undisturbed: str) -> None:
    """The others end with it. It has waited longest, so it is the first to get a place; one of them stays Pending."""
    with trial(tmp_path / "app", "2:3", 3) as it:
        it.train(3)
        it.cluster.lose_machine(it.cluster.active[0], for_good=True)
        it.cluster.until(lambda: it.cluster.made(1) + it.cluster.made(2) == 4, "the others' end")
        it.train(2)
        it.check(undisturbed)
        assert it.cluster.made(0) == 2


def test_a_pod_is_deleted_without_another_place_and_the_others_go_on(tmp_path: Path, undisturbed: str) -> None:
    """An elastic job, whose values have what Kubernetes, YAML and a shell would change."""
    odd = "runs/a $(HOME) $$ 'größe' \"x\": #\n"
    with trial(tmp_path / "app", "2:3", 3, "--record", odd) as it:
        (tmp_path / "app" / odd).mkdir()
        it.train(3)
        it.cluster.places = 2
        it.cluster.delete(it.cluster.active[2])
        it.train(2)
        assert it.cluster.active[2].phase == "Pending"
        it.check(undisturbed)
        assert it.cluster.made(0) == it.cluster.made(1) == 1
        assert {path.name.rpartition("-")[0] for path in (tmp_path / "app" / odd).iterdir()} == {
            "rank-0",
            "rank-1",
            "rank-2",
        }


def newest_disk(app: Path) -> Path:
    """The run of the pod whose rank 0 wrote last."""
    found = [*(app / "disks").glob("*/run/metrics.jsonl")]
    return max(found, key=lambda path: path.stat().st_mtime).parent if found else app / "none"


@contextmanager
def on_their_own_disks(tmp_path: Path, without_mirror: bool = False) -> Iterator[Trial]:
    """Three pods without a shared disk, two of which are lost with their disks when the bucket has a checkpoint."""
    mirror = ("--mirror", "s3://runs/big")

    def change(text: str) -> str:
        for word in mirror * without_mirror:
            text = re.sub(rf'^ +- "?{word}"?\n', "", text, flags=re.MULTILINE)
        return text

    more = ("--checkpoint-every", 2, *mirror)
    with trial(tmp_path / "app", "3", 3, *more, submit=("--secret", "bucket"), change=change) as it:
        bucket = Bucket(it.cluster)
        if without_mirror:
            it.cluster.until(lambda: runs.told_step(newest_disk(tmp_path / "app")) >= 4, "some steps")
        else:
            it.cluster.until(bucket.steps, "a checkpoint in the bucket")
        for index in (0, 2):
            it.cluster.lose_machine(it.cluster.active[index])
        it.finish()
        it.run_dir = newest_disk(tmp_path / "app")
        yield it


def test_three_pods_without_a_shared_disk_lose_two_of_their_disks(tmp_path: Path, undisturbed: str) -> None:
    """The third saves, is made again too, with an empty disk like all, and what it has saved is in the bucket."""
    with on_their_own_disks(tmp_path) as it:
        it.check(undisturbed)
        assert "fetched step" in it.cluster.log(0)
        assert s3.SECRET not in it.manifest


@pytest.mark.long
def test_the_control_without_the_mirror_they_begin_anew(tmp_path: Path, undisturbed: str) -> None:
    with on_their_own_disks(tmp_path, without_mirror=True) as it:
        assert runs.starts(it.run_dir) == [0], "nothing is left of the first attempt"
        assert runs.weights_of(it.run_dir) == undisturbed


def as_trainer_does(text: str) -> str:
    """The Job that Kubeflow Trainer makes of a TrainJob, with the variables of its torch plugin, as far as they go."""
    (wanted,) = yaml.safe_load_all(text)
    trainer, name = wanted["spec"]["trainer"], wanted["metadata"]["name"]
    pet = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
    pet |= {"PET_NODE_RANK": "$(JOB_COMPLETION_INDEX)", "PET_MASTER_ADDR": f"{name}-node-0-0.{name}"}
    env = [{"name": key, "value": value} for key, value in {**pet, "PET_MASTER_PORT": "29500"}.items()]
    probe = {"livenessProbe": {"initialDelaySeconds": 600, "periodSeconds": 600}}
    container = {**trainer, **probe, "env": [*env, *trainer["env"]]}
    (patch,) = wanted["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"] | {"restartPolicy": "Never", "subdomain": name}
    spec = {"completions": trainer["numNodes"], "parallelism": trainer["numNodes"], "backoffLimit": 0}
    spec |= {"template": {"spec": pod | {"containers": [container]}}}
    service = {"kind": "Service", "spec": {"publishNotReadyAddresses": True}}
    return yaml.safe_dump_all([service, {"kind": "Job", "metadata": {"name": f"{name}-node-0"}, "spec": spec}])


def test_a_trainjob_trains(tmp_path: Path, undisturbed: str) -> None:
    submit = ("--kind", "trainjob", "--max-restarts", "1")
    with trial(tmp_path / "app", "2", 2, submit=submit, change=as_trainer_does) as it:
        it.train(2)
        it.check(undisturbed)
        assert len(it.cluster.pods) == 2


@pytest.mark.long
def test_one_pod_stays_pending_and_the_job_begins_and_ends_without_it(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path / "app", "2:4", 3) as it:
        it.train(3)
        assert it.cluster.active[3].phase == "Pending"
        it.check(undisturbed)
        assert runs.starts(it.run_dir) == [0]


@pytest.mark.long
def test_fewer_pods_than_the_least_give_back_their_places(tmp_path: Path, undisturbed: str) -> None:
    """They wait for the others, end with 75, and are made again; when there is a place for the last, all begin."""
    with trial(tmp_path / "app", "3", 2, submit=("--join-timeout", "8")) as it:
        it.cluster.until(lambda: it.cluster.ignored >= 2, "the end of those that waited")
        assert not (it.run_dir / "metrics.jsonl").exists()
        assert {pod.code for pod in it.cluster.pods if pod.over} == {75}, it.cluster.log(0)
        it.cluster.places = 3
        it.train(3)
        it.check(undisturbed)


def test_the_job_is_suspended_and_resumed_on_fewer_pods(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path / "app", "2:3", 3) as it:
        it.train(3)
        it.cluster.suspend()
        it.cluster.until(lambda: not it.cluster.active, "the end of all pods")
        saved = read(it.run_dir, "status.json")
        assert saved["state"] == "stopped"
        assert saved["step"] == runs.told_step(it.run_dir) > 0
        it.cluster.resume(2)
        it.train(2)
        assert runs.starts(it.run_dir)[-1] == saved["step"]
        it.check(undisturbed)


@pytest.mark.long
def test_the_time_is_over_and_the_job_is_submitted_again(tmp_path: Path, undisturbed: str) -> None:
    app = tmp_path / "app"
    with trial(app, "2", 2, "--pause", 2, submit=("--time", "1m")) as it:
        it.train(2)
        it.cluster.until(lambda: it.cluster.end and not it.cluster.active, "the end of its time")
        assert it.cluster.end == "DeadlineExceeded"
        saved = read(it.run_dir, "status.json")
        assert saved["state"] == "stopped"
    with running(it.manifest.replace("activeDeadlineSeconds: 60", "activeDeadlineSeconds: 6000"), app, 2) as cluster:
        again = Trial(cluster, app, it.manifest)
        again.check(undisturbed)
    assert runs.starts(it.run_dir) == [0, saved["step"]]


def test_a_refusal_fails_the_job_at_once(tmp_path: Path) -> None:
    with trial(tmp_path / "app", "2", 2) as it:
        runs.trained(1, [*SHAPE, "--run-dir", it.run_dir, "--max-steps", 1, "--seed", 7])
        it.finish("PodFailurePolicy")
        assert it.cluster.made(0) == it.cluster.made(1) == 1, "nothing is made again"
        assert "another run" in it.cluster.log(0) or "--seed" in it.cluster.log(0), it.cluster.log(0)


@pytest.mark.long
def test_a_rank_that_is_killed_starts_again_in_its_pod(tmp_path: Path, undisturbed: str) -> None:
    with trial(tmp_path / "app", "2", 2) as it:
        it.train(2)
        it.cluster.lab.run(it.cluster.active[1].node, ["pkill", "-KILL", "-x", "trainer"])
        it.cluster.until(lambda: len(runs.starts(it.run_dir)) == 2, "another start")
        it.check(undisturbed)
        assert len(it.cluster.pods) == 2


def test_crashes_are_counted(tmp_path: Path) -> None:
    with trial(tmp_path / "app", "1", 1, "--fail-at", 2, submit=("--max-restarts", "0")) as it:
        it.cluster.spec["backoffLimit"] = 1
        it.finish("BackoffLimitExceeded")
        assert it.cluster.made(0) == 2
        assert it.cluster.ignored == 0


@pytest.mark.long
def test_a_pod_with_a_frozen_rank_is_ended_by_the_probe_and_made_again(tmp_path: Path, undisturbed: str) -> None:
    """The job's own watch for hangs is off."""
    with trial(tmp_path / "app", "2", 2, "--hang-timeout", 0) as it:
        it.train(2)
        frozen = it.cluster.active[1]
        it.cluster.lab.run(frozen.node, ["pkill", "-STOP", "-x", "trainer"])
        it.cluster.until(lambda: it.cluster.made(1) == 2, "another pod 1")
        assert frozen.ill >= 3
        it.train(2)
        it.check(undisturbed)
