"""GPUs of this node by nvidia-smi, and other processes on them. Without GPUs everything runs on the CPU.

Tested on recorded output of nvidia-smi only.
"""

from __future__ import annotations

import contextlib
import csv
import os
import pwd
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ...common.processes import stat
from ...distributed.devices import GPU_DEVICES, describe, device_name
from ...distributed.world import World
from .findings import Finding, judged
from .software import cuda


def ask(*arguments: str) -> str:
    """The output of nvidia-smi; empty if it is not installed. Raises CalledProcessError."""
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=8, check=True).stdout  # noqa: S607
    except FileNotFoundError:
        return ""


def query(what: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """`nvidia-smi --query-WHAT=FIELDS`, a dictionary for each line; malformed lines are left out."""
    said = ask(f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in row] for row in csv.reader(said.splitlines())]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


GPU = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
PROCESS = ("gpu_uuid", "pid", "used_memory")


def gpus() -> Iterator[Finding]:
    """The GPUs of this node, their driver and CUDA, and their processes."""
    try:
        found = query("gpu", GPU)
        processes = query("compute-apps", PROCESS) if found else []
        header = re.search(r"CUDA Version:\s*([\d.]+)", ask()) if found else None
    except subprocess.SubprocessError as error:
        value = f"nvidia-smi fails: {str(getattr(error, 'stdout', '') or error).strip()[:200]}"
        yield Finding("FAIL", "GPUs", value, "it lists the GPUs", "nvidia-smi    # and: dmesg | grep -i nvrm")
        return
    if not found:
        there = GPU_DEVICES.exists()
        value = f"{GPU_DEVICES} exists, but no nvidia-smi" if there else "none: ranks compute on the CPU"
        yield judged("GPUs", value, "nvidia-smi lists them", "docker run --gpus all ...", warn=there)
        return
    for gpu in found:
        value = f"{gpu['name']}, {gpu['memory.used']} of {gpu['memory.total']} MiB used, {gpu['uuid']}"
        yield judged(f"GPU {gpu['index']}", value)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    names = ", ".join(device_name(torch.device("cuda", number)) for number in range(torch.cuda.device_count()))
    yield judged("CUDA_VISIBLE_DEVICES", f"{visible}: {names or 'none'}")
    yield from cuda(found[0]["driver_version"], header[1] if header else "")
    yield judge_processes(processes, {gpu["uuid"]: gpu["index"] for gpu in found})


def judge_processes(rows: Sequence[dict[str, str]], numbers: dict[str, str]) -> Finding:
    """Others' processes on the GPUs, which are often left over from a job that was killed.

    Args:
        rows: of nvidia-smi, with the fields of PROCESS.
        numbers: a GPU's number by its uuid.
    """
    others = {}
    for row in rows:
        pid = int(row["pid"]) if row["pid"].isdigit() else 0
        known, owner, age = stat(pid), "?", 0.0
        if pid == os.getpid() or ("RANK" in os.environ and known and known.parent == os.getppid()):
            continue  # a rank of this job
        with contextlib.suppress(OSError, KeyError):  # a container hides it, or its user has no name
            begun = Path(f"/proc/{pid}").stat()
            owner, age = str(begun.st_uid), time.time() - begun.st_mtime
            owner = pwd.getpwuid(begun.st_uid).pw_name
        gpu, memory = numbers.get(row["gpu_uuid"], "?"), row["used_memory"]
        others[pid] = f"GPU {gpu}: pid {pid} of {owner}, {age / 60:.0f} min old, {memory} MiB"
    return judged(
        "processes on GPUs",
        "; ".join(others.values()) or "none but this job's",
        "none: they take memory and time",
        f"ps -o pid,user,etime,args -p {','.join(map(str, others))}    # left over? kill {' '.join(map(str, others))}",
        warn=others,
    )


def own_device(world: World) -> Iterator[Finding]:
    """What this rank computes on, by torch's number and the machine's."""
    if world.device.type == "cuda":
        yield judged("device", str(describe(world.device)))
