"""A cluster without an API server: what scheduler, kubelet, DNS and Job controller do with the YAML of one Job.

A pod is a set of Linux namespaces (the nodes of `evenkeel chaos`), with an address that no pod had before it. Places
are machines with room for one pod. The rules are those of the documentation of batch/v1 (Indexed Job, podFailurePolicy,
successPolicy, podReplacementPolicy Failed, which goes with the second, suspend) and of a pod's end (SIGTERM, the
grace period, SIGKILL). Not emulated: images, users, volumes other than runs/, limits, and waits between retries. An
emptyDir for runs/ is a new folder of app/disks for each pod, which the others do not see.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.expansion import variables_of, words_of
from tests.support.nodes import Lab
from tests.support.processes import LIMIT, ROOT, environment

DNS_LAG = 3.0
"""Seconds after which a new pod's name has an address, for itself as well."""

DOMAIN = ".default.svc.cluster.local"
"""What follows a Service's name; kubelet tells a pod's resolver to add it."""

UID = dict.fromkeys(("batch.kubernetes.io/controller-uid", "jobset.sigs.k8s.io/jobset-uid"), "5c5e3a50-31")


@dataclass
class Pod:
    index: int
    phase: str = "Pending"
    node: int = -1  # of the lab; from when it has a place
    began: float = 0.0
    process: subprocess.Popen[Any] | None = None
    code: int | None = None  # None also where the node was lost with the answer
    conditions: set[str] = field(default_factory=set)
    kill_at: float = 0.0  # when its grace period is over; 0: it is not being deleted
    probe: subprocess.Popen[Any] | None = None
    probed: float = 0.0  # when the last one ended
    ill: int = 0  # probes in a row that have failed
    counted: bool = False  # the Job controller has seen its end

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


class Cluster:
    """One Job on some places. It moves on in :meth:`until`."""

    def __init__(self, lab: Lab, manifest: str, app: Path, places: int) -> None:
        kinds = {it["kind"]: it for it in yaml.safe_load_all(manifest)}
        self.lab, self.app, self.places = lab, app, places
        self.service, self.job = kinds.get("Service"), kinds["Job"]
        self.spec = self.job["spec"]
        self.pods = list[Pod]()
        self.failed, self.ignored = 0, 0
        self.dns_lag, self.began = DNS_LAG, time.monotonic()
        self.end = ""  # Complete, or why the Job failed
        self.secrets = dict[str, dict[str, str]]()
        self._free = list(lab.nodes)

    @property
    def active(self) -> dict[int, Pod]:
        """Index -> the pod that is not over."""
        return {pod.index: pod for pod in self.pods if not pod.over}

    def machine(self) -> int:
        """A node of the lab that is no place for pods, such as one for a bucket."""
        return self._free.pop()

    def made(self, index: int) -> int:
        """How many pods there have been of this index."""
        return sum(pod.index == index for pod in self.pods)

    def log(self, index: int) -> str:
        """What all pods of this index have printed."""
        path = self.app / f"pod-{index}.log"
        return path.read_text() if path.exists() else ""

    def until(self, condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            logs = "\n".join(f"--- pod {index}\n{self.log(index)[-2500:]}" for index in range(self.spec["completions"]))
            assert time.monotonic() < deadline, f"waited for {what} in vain: {self.pods}\n{logs}"
            self._kubelet()
            self._controller()
            self._scheduler()
            self._dns()
            time.sleep(0.1)

    def delete(self, pod: Pod, grace: float | None = None) -> None:
        """`kubectl delete pod`: SIGTERM, and SIGKILL after the grace period."""
        grace = self.spec["template"]["spec"]["terminationGracePeriodSeconds"] if grace is None else grace
        if not pod.over and not pod.kill_at:
            pod.kill_at = time.monotonic() + grace
            if pod.process:
                self.lab.signal(pod.process, signal.SIGTERM)
            else:
                pod.phase = "Failed"  # it had no place

    def evict(self, pod: Pod) -> None:
        """The eviction API, a drain, or preemption by the scheduler."""
        pod.conditions.add("DisruptionTarget")
        self.delete(pod)

    def lose_machine(self, pod: Pod, for_good: bool = False) -> None:
        """Its machine is gone, and its node object too, so that the pod is over."""
        self.lab.kill_node(pod.node)
        pod.conditions.add("DisruptionTarget")
        pod.phase = "Failed"
        self.places -= for_good

    def suspend(self) -> None:
        """As Kueue does to take a place back."""
        self.spec["suspend"] = True

    def resume(self, nodes: int) -> None:
        """As Kueue does, on a number of pods that may be another."""
        self.spec |= {"suspend": False, "parallelism": nodes, "completions": nodes}

    def _kubelet(self) -> None:
        """Notice ends, and end what must end."""
        for pod in self.active.values():
            if pod.process is None:
                continue
            if pod.kill_at and time.monotonic() > pod.kill_at:
                pod.process.kill()
            code = pod.process.poll()
            if code is not None:
                pod.code = 128 - code if code < 0 else code
                pod.phase = "Failed" if pod.code else "Succeeded"
                self.lab.kill_node(pod.node)  # the end of process 1 is that of the container
            else:
                self._check(pod)

    def _check(self, pod: Pod) -> None:
        """The liveness probe; a container that fails it gets SIGTERM and its grace period."""
        (container,) = self.spec["template"]["spec"]["containers"]
        now, probe = time.monotonic(), container["livenessProbe"]
        due = max(pod.began + probe["initialDelaySeconds"], pod.probed + probe["periodSeconds"])
        if pod.probe is None and now > due:
            quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            pod.probe = self.lab.popen(pod.node, probe["exec"]["command"], cwd=self.app, env=self._image(pod), **quiet)
        elif pod.probe and (code := pod.probe.poll()) is not None:
            pod.probe, pod.probed, pod.ill = None, now, pod.ill + 1 if code else 0
            if pod.ill >= probe["failureThreshold"]:
                self.delete(pod)

    def _controller(self) -> None:
        for pod in self.pods:
            if pod.over and not pod.counted:
                pod.counted = True
                self._count(pod)
        succeeded = {pod.index for pod in self.pods if pod.phase == "Succeeded"}
        policy = self.spec.get("successPolicy", {"rules": [{"succeededCount": self.spec["completions"]}]})
        if not self.end and len(succeeded) >= policy["rules"][0]["succeededCount"]:
            self.end = "Complete"
        if not self.end and time.monotonic() > self.began + self.spec.get("activeDeadlineSeconds", 1e9):
            self.end = "DeadlineExceeded"
        if not self.end and self.failed > self.spec["backoffLimit"]:
            self.end = "BackoffLimitExceeded"
        if self.end or self.spec.get("suspend"):
            for pod in list(self.active.values()):
                self.delete(pod)
            return
        wanted = set(range(self.spec["completions"])) - succeeded - set(self.active)
        for index in sorted(wanted)[: self.spec["parallelism"] - len(self.active)]:
            self.pods.append(Pod(index))

    def _count(self, pod: Pod) -> None:
        """The pod failure policy: the first rule that fits."""
        if pod.phase == "Succeeded" or self.end:
            return
        rules = self.spec.get("podFailurePolicy", {"rules": []})["rules"]
        rule = next((rule for rule in rules if _fits(rule, pod)), {"action": "Count"})
        if rule["action"] == "FailJob":
            self.end = "PodFailurePolicy"
        elif rule["action"] == "Ignore":
            self.ignored += 1
        else:
            self.failed += 1

    def _scheduler(self) -> None:
        """Give free places to the pods that have waited longest."""
        running = sum(pod.process is not None for pod in self.active.values())
        waiting = [pod for pod in self.active.values() if pod.process is None]
        for pod in waiting[: max(0, self.places - running)]:
            self._start(pod)

    def _start(self, pod: Pod) -> None:
        """What kubelet and the container engine do for a new pod."""
        pod.node, pod.began, pod.phase = self._free.pop(0), time.monotonic(), "Running"
        template = self.spec["template"]["spec"]
        (container,) = template["containers"]
        name = f"{self.job['metadata']['name']}-{pod.index}"
        assert template["restartPolicy"] == "Never"
        self.lab.run(pod.node, ["hostname", name])
        self.lab.write_hosts(pod.node, self._own_names(pod))
        variables = variables_of(container, pod.index, UID)
        for it in container.get("envFrom", ()):
            variables |= self.secrets[it["secretRef"]["name"]]
        if {"name": "runs", "emptyDir": {}} in template["volumes"]:
            disk = self.app / "disks" / f"{pod.index}-{self.made(pod.index)}"
            disk.mkdir(parents=True)
            self.lab.run(pod.node, ["mount", "--bind", str(disk), str(self.app / "runs")])
        with (self.app / f"pod-{pod.index}.log").open("a") as out:
            words = words_of(container, variables)
            options: Any = {"cwd": self.app, "env": self._image(pod) | variables, "stdout": out, "stderr": out}
            pod.process = self.lab.popen(pod.node, words, **options)

    def _image(self, pod: Pod) -> dict[str, str]:
        """The environment of the image and the engine."""
        path, name = f"{Path(sys.executable).parent}:/usr/bin:/bin", self._full_name(pod).partition(".")[0]
        own = {"PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HOME": "/", "HOSTNAME": name}
        return own | {key: value for key, value in environment().items() if key == "OMP_NUM_THREADS"}

    def _dns(self) -> None:
        """The names by the Service, which come a moment after the pods; also for pods that are not ready."""
        lines = ""
        for pod in self.active.values():
            if self.service and pod.process and time.monotonic() > pod.began + self.dns_lag:
                assert self.service["spec"]["publishNotReadyAddresses"], "none of them is ever ready"
                full = self._full_name(pod)
                lines += f"{self.lab.address(pod.node)} {full} {full.removesuffix(DOMAIN)}\n"
        for pod in self.active.values():
            if pod.process:
                self.lab.write_hosts(pod.node, self._own_names(pod) + lines)

    def _own_names(self, pod: Pod) -> str:
        """What kubelet writes into /etc/hosts before the container starts."""
        full = self._full_name(pod)
        return f"127.0.0.1 localhost\n{self.lab.address(pod.node)} {full} {full.partition('.')[0]}\n"

    def _full_name(self, pod: Pod) -> str:
        host, subdomain = f"{self.job['metadata']['name']}-{pod.index}", self.spec["template"]["spec"].get("subdomain")
        return f"{host}.{subdomain}{DOMAIN}" if subdomain else host


def _fits(rule: dict[str, Any], pod: Pod) -> bool:
    if on := rule.get("onExitCodes"):
        return pod.code not in (0, None) and (pod.code in on["values"]) == (on["operator"] == "In")
    return any(it["type"] in pod.conditions for it in rule["onPodConditions"])


@contextmanager
def running(manifest: str, app: Path, places: int) -> Iterator[Cluster]:
    """A cluster that runs a Job; its pods may be made again about ten times altogether."""
    with Lab(14) as lab:
        yield Cluster(lab, manifest, app, places)
