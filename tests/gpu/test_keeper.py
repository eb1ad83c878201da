"""A rank that computes on a GPU is forked again by its keeper, which has no context on any."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.gpu import started
from tests.support.processes import read
from tests.support.small_runs import ended, job, keepers_of, starts, told_step, wait_for_step, weights_of, workers_of


def opens_a_gpu(pid: int) -> bool:
    """Whether a process has a device file of NVIDIA's driver for a GPU open."""
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has just been closed
            names.append(str(link.readlink()))
    return any(name.startswith("/dev/nvidia") and name[len("/dev/nvidia") :].isdigit() for name in names)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_gets_its_gpu_again_and_its_keeper_never_has_one(
    tmp_path: Path, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    rare = ["--deterministic", "--checkpoint-every", 1, "--eval-every", 1000]
    undisturbed, run_dir = started(ranks, *job(tmp_path / "undisturbed", *rare)), tmp_path / "run"
    process = started(ranks, *job(run_dir, *rare, "--pause", 0.1))
    wait_for_step(run_dir, 3, process)
    keepers, trainers = keepers_of(process), workers_of(process)
    assert not set(keepers.values()) & set(trainers.values()), "the ranks have gone without keepers"
    if torch.cuda.is_available():
        assert not any(map(opens_a_gpu, keepers.values()))
    control = any(map(opens_a_gpu, trainers.values()))
    done, begun = told_step(run_dir), time.monotonic()
    os.kill(trainers[max(trainers)], signal.SIGKILL)
    wait_for_step(run_dir, done + 3, process)
    record_property("from the kill to the third step after it", f"{time.monotonic() - begun:.1f} s")
    assert keepers_of(process) == keepers
    ended(process)
    ended(undisturbed)
    assert len(starts(run_dir)) == 2
    assert read(run_dir)["restarts"] == read(run_dir)["restarts_in_place"] == 1
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    assert control or not torch.cuda.is_available(), "no trainer has /dev/nvidiaN open: nothing is known of the keepers"
