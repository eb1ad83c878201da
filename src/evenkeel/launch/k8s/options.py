"""The options of ``k8s/submit.py``: the words are those of the other launchers where they mean the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from ...config import Flag, option
from ..launchers import Gpus
from ..topology import JOIN_SECONDS

Words = Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


@dataclass(frozen=True)
class Submit:
    """Submit a training job to Kubernetes. Options after -- are passed to train.py.

      k8s/submit.py -n 2 -g 8 --image IMAGE -- --epochs 90 --run-dir runs/big   2 pods, 8 GPUs and processes each
      k8s/submit.py -n 2:4 -g 8 --time 4h --follow --image IMAGE -- ...         2 to 4 pods, as many as have a place
      k8s/submit.py -n 2 -g 8 --queue research --image IMAGE -- ...             in a queue of Kueue
      k8s/submit.py -n 2 -g 2 --gpu-resource none --image IMAGE --dry-run -- ...   on CPUs; print the YAML

    A pod that is evicted saves its last finished step, is made again, and continues. The image holds your code
    as docs/docker.md says, and the claim of --runs the runs.
    """

    image: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """Name of the image, as the cluster pulls it."""
    nodes: Annotated[str, tyro.conf.arg(aliases=["-n"], metavar="N|MIN:MAX")] = "1"
    """Number of nodes, a pod each. MIN:MAX for an elastic job, which may lose and gain pods while it runs."""
    gpus: Gpus = option(None, 1, 1024)
    """GPUs per node, each with a process (unless --place says otherwise). Default: 1. Without GPUs: processes, 2."""
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = option(3, 0)
    """Maximum restarts of a pod's processes after the death of one of them or of another pod."""
    join_timeout: Annotated[int, tyro.conf.arg(metavar="SECONDS")] = option(JOIN_SECONDS, 1, JOIN_SECONDS)
    """Seconds that pods wait for each other. Then they give back their places, and are made again."""
    time: Annotated[str | None, tyro.conf.arg(metavar="TIME", help_behavior_hint="")] = None
    """Time limit of the job, with all restarts: minutes, H:MM:SS, D-HH:MM:SS, or 90m, 12h, 2d. Default: none."""
    cpus_per_gpu: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = option(None, 1, 4096)
    """CPU cores per process that a node must have free. Default: --num-workers + 1."""
    mem: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """Memory that a node must have free, such as 64G."""
    shm_size: Annotated[str | None, tyro.conf.arg(metavar="SIZE", help_behavior_hint="")] = None
    """Size of /dev/shm, such as 8G. Default: half of the node's memory."""
    gpu_resource: Words = "nvidia.com/gpu"
    """The cluster's name for a GPU; `none` for processes on CPUs."""
    rdma: Annotated[str, tyro.conf.arg(metavar="NAME[=N]", help_behavior_hint="")] = ""
    """The cluster's name for an RDMA adapter, such as rdma/hca_shared_devices_a, and how many per node (1)."""
    runs: Words = ""
    """Persistent volume claim for runs, mounted as runs/ by all pods. Default: evenkeel-runs; with --mirror none: each
    pod has a disk of its own."""
    data: Words = ""
    """Persistent volume claim with data, mounted read-only as data/."""
    user: Annotated[str, tyro.conf.arg(metavar="UID[:GID]", help_behavior_hint="")] = "1000:1000"
    """User and group of the processes, and the group of the claims. Not root."""
    wandb_secret: Words = ""
    """Secret whose key WANDB_API_KEY is the W&B key."""
    secret: Words = ""
    """Secret whose keys become environment variables, such as AWS_ACCESS_KEY_ID for --mirror."""
    service_account: Words = ""
    """Service account of the pods, such as one that may read and write a bucket."""
    queue: Words = ""
    """Queue of Kueue; the job waits there until it is admitted as a whole."""
    kind: Literal["job", "trainjob"] = "job"
    """trainjob: a TrainJob of Kubeflow Trainer v2, with a fixed number of nodes."""
    runtime: Words = "torch-distributed"
    """Runtime of a TrainJob."""
    name: Words = ""
    """Name of the job. Default: that of the run directory."""
    namespace: Words = ""
    """Namespace. Default: kubectl's current one."""
    follow: Flag = False
    """Show the job's state and log until it ends. Ctrl-C leaves it running."""
    dry_run: Flag = False
    """Print the YAML for kubectl and submit nothing; needs neither kubectl nor a cluster."""
