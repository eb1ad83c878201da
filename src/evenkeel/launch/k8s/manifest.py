"""The objects of a job, made by pure functions: a Service and an Indexed Job, or a TrainJob of Kubeflow Trainer v2.

Indexed: pod I of job J is called J-I, also when it is made again, and by the Service the others find it at J-I.J. So
they meet at J-0.J, whichever pod is the oldest. A field that is None is left out.

Sources: the API of batch/v1 (podFailurePolicy is stable since Kubernetes 1.31, successPolicy since 1.33 and on by
default since 1.31), Kueue's and Kubeflow Trainer's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...common.errors import REFUSED
from ...config import Config
from ...resilience import heartbeat
from ...resilience.interruption import STOPPED
from ..docker import container
from ..launchers import PASSED_ON
from ..topology import DEFAULT_PORT, SHUTDOWN_SECONDS, endpoint
from .options import Submit
from .text import escaped

CONTAINER = "node"  # Kubeflow's runtimes call it so
BACKOFF_LIMIT = 6  # failures of all pods together that end a job; Kubernetes' own default
CLAIM = "evenkeel-runs"
AFTER_GRACE = 15  # seconds for process 1, trackers and loaders to end, as docker/run.py gives them
PROBE = {"initialDelaySeconds": 30, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 3}  # HEALTHCHECK's
SECRETS = ("WANDB_API_KEY",)  # never as a value

Json = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a command line asks for, checked."""

    name: str
    typed: Submit
    train_args: Sequence[str]
    config: Config
    nodes: tuple[int, int]  # least and most
    processes: int  # of each node
    seconds: int | None  # --time
    environ: Mapping[str, str]  # of who submits it


def objects(job: Job) -> list[Json]:
    """The objects to apply."""
    if job.typed.kind == "trainjob":
        return [_train_job(job)]
    return [*([_service(job)] if job.nodes[1] > 1 else []), _job(job)]


def _service(job: Job) -> Json:
    """Gives each pod a name in DNS, before it is ready too, because it gets ready by meeting the others."""
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True}
    spec |= {"selector": {"batch.kubernetes.io/job-name": job.name}, "ports": [{"port": DEFAULT_PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(job), "spec": spec}


def _job(job: Job) -> Json:
    """Restarts are the Job's, not kubelet's, so that a pod may come back on another machine."""
    least, most = job.nodes
    # Kueue may start it on fewer nodes than asked for
    partial = {"job-min-parallelism": str(least), "job-completions-equal-parallelism": "true"}
    ended_with = {"containerName": CONTAINER, "operator": "In"}
    spec = {
        "completionMode": "Indexed",
        "completions": most,
        "parallelism": most,
        "backoffLimit": BACKOFF_LIMIT,
        # One pod has ended with 0 only if all ranks have: its agent has waited for the others. Without this a pod that
        # stays Pending would keep the Job open for ever.
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        # The first rule that fits; what fits none is counted.
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {**ended_with, "values": [REFUSED]}},
                {"action": "Ignore", "onExitCodes": {**ended_with, "values": [STOPPED]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "activeDeadlineSeconds": job.seconds,
        "suspend": True if job.typed.queue else None,
        "template": {"spec": _pod(job)},
    }
    notes = {f"kueue.x-k8s.io/{name}": value for name, value in partial.items()}
    metadata = _metadata(job) | {"annotations": notes if job.typed.queue and least < most else None}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _pod(job: Job) -> Json:
    main = {
        "name": CONTAINER,
        "image": job.typed.image,
        "imagePullPolicy": "IfNotPresent",
        **_words(job, "$(JOB_COMPLETION_INDEX)", endpoint(f"{job.name}-0.{job.name}", DEFAULT_PORT)),
        "env": _variables(job, launch="batch.kubernetes.io/controller-uid"),
        "envFrom": [{"secretRef": {"name": job.typed.secret}}] if job.typed.secret else None,
        "resources": _resources(job),
        "livenessProbe": {"exec": {"command": ["python", "-m", heartbeat.__name__]}, **PROBE},
        **_container(job),
    }
    return {
        "restartPolicy": "Never",
        "subdomain": job.name if job.nodes[1] > 1 else None,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        **_common(job),
        "containers": [main],
    }


def _train_job(job: Job) -> Json:
    """A fixed number of nodes; what a TrainJob cannot say (restarts, health) is the runtime's business."""
    trainer = {
        "numNodes": job.nodes[1],
        "numProcPerNode": job.processes,
        "image": job.typed.image,
        **_words(job, "$(PET_NODE_RANK)", "$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"),
        "env": _variables(job, launch="jobset.sigs.k8s.io/jobset-uid"),
        "resourcesPerNode": _resources(job),
    }
    pod = {**_common(job), "containers": [{"name": CONTAINER, **_container(job)}]}
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    patch = {"template": {"spec": {"replicatedJobs": [node]}}}
    spec = {
        "runtimeRef": {"name": job.typed.runtime},
        "trainer": trainer,
        "activeDeadlineSeconds": job.seconds,
        "suspend": True if job.typed.queue else None,
        "runtimePatches": [{"manager": "evenkeel.dev/submit", "trainingRuntimeSpec": patch}],
    }
    kind = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return {**kind, "metadata": _metadata(job), "spec": spec}


def _metadata(job: Job) -> Json:
    labels = {"app.kubernetes.io/name": "evenkeel", "kueue.x-k8s.io/queue-name": job.typed.queue or None}
    return {"name": job.name, "namespace": job.typed.namespace or None, "labels": labels}


def _words(job: Job, rank: str, master: str) -> Json:
    """Command and arguments of a pod; `rank` and `master` are for Kubernetes to expand, all else is as typed."""
    launch = ["launch", "-g", str(job.processes), "--max-restarts", str(job.typed.max_restarts)]
    if job.nodes[1] > 1:
        launch += ["-n", job.typed.nodes, "-nr", rank, "--master", master]
        launch += ["--join-timeout", str(job.typed.join_timeout)]
    train_args = [escaped(word) for word in job.train_args]
    return {"command": ["python", "-m", container.__name__], "args": [*launch, "--", *train_args]}


def _variables(job: Job, launch: str) -> list[Json]:
    """The environment. All pods of a job are one launch, so that --fresh starts over only once."""
    uid = {"fieldRef": {"fieldPath": f"metadata.labels['{launch}']"}}
    key = {"secretKeyRef": {"name": job.typed.wandb_secret, "key": SECRETS[0]}}
    names = (name for name in sorted(job.environ) if name.startswith(PASSED_ON) and name not in SECRETS)
    return [
        {"name": "EVENKEEL_LAUNCH", "valueFrom": uid},
        *([{"name": SECRETS[0], "valueFrom": key}] if job.typed.wandb_secret else []),
        *({"name": name, "value": escaped(job.environ[name])} for name in names),
    ]


def _resources(job: Job) -> Json:
    """What a node must have free; GPUs and adapters are limits as well, because Kubernetes asks for that."""
    typed = job.typed
    adapter, _, count = typed.rdma.partition("=")
    limits = {typed.gpu_resource: str(job.processes)} if typed.gpu_resource != "none" else {}
    limits |= {adapter: count or "1"} if adapter else {}
    cpus = job.processes * (typed.cpus_per_gpu or job.config.num_workers + 1)
    requests: Json = {"cpu": str(cpus), "memory": _binary(typed.mem), **limits}
    return {"requests": requests, "limits": limits or None}


def _binary(size: str | None) -> str | None:
    """A size as Slurm reads it (M without a unit, powers of 1024) as Kubernetes does."""
    return size and (f"{size}Mi" if size.isdigit() else f"{size[:-1]}{size[-1].upper()}i")


def _common(job: Job) -> Json:
    """Of the pod: time to save, a user without rights, and volumes; the claims belong to the group."""
    user, _, group = job.typed.user.partition(":")
    security: Json = {"runAsNonRoot": True, "runAsUser": int(user), "runAsGroup": int(group or user)}
    security |= {"fsGroup": int(group or user), "fsGroupChangePolicy": "OnRootMismatch"}
    claim = job.typed.runs or ("" if job.config.mirror else CLAIM)
    volumes: Json = {"runs": {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}}
    if job.typed.data:
        volumes["data"] = {"persistentVolumeClaim": {"claimName": job.typed.data, "readOnly": True}}
    volumes["tmp"] = {"emptyDir": {}}
    volumes["shm"] = {"emptyDir": {"medium": "Memory", "sizeLimit": _binary(job.typed.shm_size)}}
    return {
        # torchrun's own time for a snapshot, or --grace, and a little more
        "terminationGracePeriodSeconds": math.ceil(max(SHUTDOWN_SECONDS, job.config.grace)) + AFTER_GRACE,
        "serviceAccountName": job.typed.service_account or None,
        "securityContext": security | {"seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": [{"name": name, **it} for name, it in volumes.items()],
    }


def _container(job: Job) -> Json:
    """Of the container: no way to more rights, and folders to write in, for the root file system is read-only."""
    caged = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    places = {"runs": "/app/runs", "tmp": "/tmp", "shm": "/dev/shm"} | ({"data": "/app/data"} if job.typed.data else {})  # noqa: S108
    return {
        "securityContext": caged,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in places.items()],
    }
