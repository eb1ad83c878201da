"""This node: cores, shared memory, limits, variables that contradict each other, W&B."""

from __future__ import annotations

import math
import os
import resource
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ...common.naming import count_ranks
from ...common.processes import count_cores
from .findings import Finding, judged

SHM = 256 << 20
"""Bytes of /dev/shm below which loader processes are likely to die. Docker's default is 64 MB."""


def cores(ranks: int, workers: int) -> Iterator[Finding]:
    """Compare threads of this node's ranks and their loaders with its cores."""
    here, threads = count_cores(), torch.get_num_threads()
    busy = ranks * (threads + workers)
    fitting = max(1, (here - ranks * workers) // ranks)
    yield judged(
        "cores",
        f"{here} for {count_ranks(ranks)} x ({threads} threads + {workers} workers) = {busy}",
        "no more threads and workers than cores, else they wait for each other",
        f"export OMP_NUM_THREADS={fitting}"
        + (f"    # and --num-workers {max(0, here // ranks - 1)}" if workers > 0 else ""),
        warn=busy > here and (threads > 1 or workers),
    )


def shared_memory(needed: bool) -> Iterator[Finding]:
    """Shared memory, through which loader processes pass batches, and NCCL the ranks of a node.

    Args:
        needed: whether this job uses it; if not, too little memory is only a warning.
    """
    place = "/dev/shm"  # noqa: S108
    usage = shutil.disk_usage(place)
    small = usage.free < SHM
    yield judged(
        place,
        f"{usage.free >> 20} MB free of {usage.total >> 20} MB",
        f"{SHM >> 20} MB free: loader processes pass batches through it, and die of a bus error",
        "mount -o remount,size=8g /dev/shm    # in a container: docker run --shm-size 8g, or --ipc=host",
        warn=small,
        fail=small and needed,
    )


def limits() -> Iterator[Finding]:
    """Open files, processes, and locked memory where there is InfiniBand, which pins it."""
    known = [("open files", "-n", resource.RLIMIT_NOFILE, 4096), ("processes", "-u", resource.RLIMIT_NPROC, 4096)]
    if Path("/sys/class/infiniband").is_dir():
        known.append(("locked memory", "-l", resource.RLIMIT_MEMLOCK, sys.maxsize))
    for name, flag, number, least in known:
        soft, hard = (math.inf if it < 0 else it for it in resource.getrlimit(number))  # RLIM_INFINITY is -1
        wanted = "unlimited" if least == sys.maxsize else max(least, min(hard, 65536))
        expected = f"{wanted}{' (the default is too low for many loaders)' if name == 'open files' else ''}"
        remedy = f"ulimit {flag} {wanted}" + ("    # as root: the hard limit is lower" if hard < least else "")
        yield judged(f"limit of {name}", str(soft).replace("inf", "unlimited"), expected, remedy, warn=soft < least)


def variables(environ: Mapping[str, str] = os.environ, each: int = 1) -> Iterator[Finding]:
    """Contradictory variables of Slurm and torchrun; each rank has `each` GPUs."""

    def number(name: str) -> int | None:
        return int(environ[name]) if environ.get(name, "").isdigit() else None

    launched, wrong = "TORCHELASTIC_RUN_ID" in environ, []
    nodes, groups = number("SLURM_STEP_NUM_NODES"), number("GROUP_WORLD_SIZE")
    tasks, given, local = number("SLURM_STEP_NUM_TASKS"), number("SLURM_GPUS_ON_NODE"), number("LOCAL_WORLD_SIZE")
    one_each = "srun --ntasks-per-node=1 slurm/node.py -- OPTIONS"
    if tasks and nodes and tasks != nodes:
        wrong.append((f"SLURM_STEP_NUM_TASKS={tasks} on {nodes} nodes", "one task for each node", one_each))
    if launched and nodes and groups and nodes != groups:
        wrong.append((f"SLURM_STEP_NUM_NODES={nodes}, GROUP_WORLD_SIZE={groups}", "torchrun on each node", one_each))
    if launched and given and local and given != local * each:
        found = f"SLURM_GPUS_ON_NODE={given}, LOCAL_WORLD_SIZE={local}"
        wrong.append((found, "a rank for each GPU", f"torchrun --nproc_per_node={given // each} ..."))
    left = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if name in environ]
    if left and not launched:
        wrong.append((f"{' '.join(left)} without torchrun", "none: torchrun sets them", f"unset {' '.join(left)}"))
    for value, expected, remedy in wrong:
        yield Finding("WARN", "variables", value, expected, remedy)
    if not wrong:
        yield judged("variables", "Slurm's and torchrun's agree" if nodes else "none contradict")


def weights_and_biases(asked: str) -> Iterator[Finding]:
    """The effect of --wandb here; the key itself is never read."""
    from ...run.trackers import wandb_mode

    mode, why = wandb_mode(asked)
    missing = asked == "online" and wandb_mode("auto")[0] == "disabled"
    value = f"{mode}, but no key found" if missing else f"{mode}{f': {why}' if why else ''}"
    yield judged("Weights & Biases", value, "a key for --wandb online", "wandb login", warn=missing)
