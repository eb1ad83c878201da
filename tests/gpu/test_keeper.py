"""A rank that computes on a GPU is forked again by its keeper, which has no context on any."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from tests.support import processes
from tests.support.processes import TRAIN, read, records, run, start, torchrun
from tests.support.small_runs import job, keepers_of, wait_for_step, weights_of, workers_of


def opens_a_gpu(pid: int) -> bool:
    """Whether a process has a device file of NVIDIA's driver for a GPU open."""
    names = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    return any(name.startswith("/dev/nvidia") and name[len("/dev/nvidia") :].isdigit() for name in names)


def test_a_killed_rank_gets_its_gpu_again_and_its_keeper_never_has_one(tmp_path: Path) -> None:
    ranks, rare = min(2, torch.cuda.device_count()), ["--deterministic", "--checkpoint-every", 1, "--eval-every", 1000]
    run(torchrun(ranks, TRAIN, *job(tmp_path / "undisturbed", *rare)))
    run_dir = tmp_path / "run"
    process = start(torchrun(ranks, TRAIN, *job(run_dir, *rare, "--pause", 0.1)))
    wait_for_step(run_dir, 3, process)
    keepers, trainers = keepers_of(process), workers_of(process)
    assert all(map(opens_a_gpu, trainers.values())), "the control"
    assert not any(map(opens_a_gpu, keepers.values()))
    killed = max(trainers)
    os.kill(trainers[killed], signal.SIGKILL)
    wait_for_step(run_dir, records(run_dir, "train")[-1]["step"] + 3, process)
    assert keepers_of(process) == keepers
    assert processes.finish(process).returncode == 0
    assert read(run_dir)["restarts"] == read(run_dir)["restarts_in_place"] == 1
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
