"""How many CPU threads a rank has where no option says it, and its devices: what is said of them, who asks for them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from evenkeel.common.processes import count_cores
from evenkeel.distributed.devices import describe
from tests.distributed.test_devices import CPU, gpu
from tests.processes.test_old_runs import OPTIONS
from tests.support.processes import TRAIN, checked, finish, read, run, run_forked, start, torchrun
from tests.support.small_runs import OLD_RUNS, job

PROGRAM = """
import os
from evenkeel.training.determinism import threads_of_a_rank
print(*(threads_of_a_rank(exact, ranks) for exact, ranks in ((False, 1), (False, 10**6), (True, 1))))
"""


def threads(*command: str, **variables: str) -> set[str]:
    """What the program prints, for a whole node and a very small part of one, and for exact bits."""
    return set(run(command, env={"OMP_NUM_THREADS": None, **variables}).stdout.splitlines())


def test_the_cores_are_divided_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    cores = str(count_cores())
    alone, many = [sys.executable, str(program)], torchrun(2, program)
    assert threads(*alone) == {f"{cores} 1 1"}
    # torchrun's own OMP_NUM_THREADS=1 is nobody's wish
    assert threads(*many) == {f"{cores} 1 1"}
    # the control: the same number, from the user
    assert threads(*many, OMP_NUM_THREADS="1") == {"1 1 1"}
    assert threads(*alone, OMP_NUM_THREADS="2") == {"2 2 1"}


def test_a_continued_run_keeps_its_count(run_dir: Path) -> None:
    """The environment of these tests says one thread."""
    long = ["--schedule", "constant", "--max-steps"]
    for more, expected in (([*long, 2, "--threads", 2], 2), ([*long, 4], 2), ([*long, 6, "--threads", 1], 1)):
        run_forked(TRAIN, *job(run_dir, *more))
        assert read(run_dir, "status.json")["threads"] == expected
    run_forked(TRAIN, *job(run_dir, *long, 8, "--fresh"))
    assert read(run_dir, "status.json")["threads"] == 1


def test_a_run_of_an_older_version_keeps_its_count(tmp_path: Path) -> None:
    """Only its manifests know it: one thread on each of 2 ranks."""
    run_dir = shutil.copytree(OLD_RUNS / "defaults", tmp_path / "run")
    options = ["--run-dir", run_dir, *OPTIONS, "--augment", "basic"]
    run([sys.executable, str(TRAIN), *map(str, options)], env={"OMP_NUM_THREADS": "2"})
    assert read(run_dir, "status.json")["threads"] == 1


NO_WANDB = ["--wandb", "disabled", "--run-dir"]


def test_each_rank_writes_down_its_device(tmp_path: Path) -> None:
    run_forked(TRAIN, "--max-steps", 1, *NO_WANDB, tmp_path)
    log = (tmp_path / "logs" / "attempt-0001" / "rank-0.log").read_text()
    assert f"this rank has {describe(gpu(0) if torch.cuda.is_available() else CPU).line}\n" in log


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built without CUDA")
def test_a_keeper_asks_no_driver_of_gpus_which_its_forks_could_not_use_then(tmp_path: Path) -> None:
    """By the dynamic linker: CUDA's runtime loads the driver's library in the first call that needs a driver."""
    told = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": str(tmp_path / "linker")}
    process = start([sys.executable, TRAIN, "--max-steps", 1, *NO_WANDB, tmp_path / "run"], env=told)
    checked(finish(process), 0)
    pattern = r"(\d+):\s+file=(lib(?:cuda|nvidia-ml)\.so)\S* \[0\];\s+dynamically loaded by (\S+)"
    loaded = re.findall(pattern, (tmp_path / f"linker.{process.pid}").read_text())
    # cuBLAS and cuSPARSELt look for it as they are loaded, which is no call
    asked = {int(pid) for pid, _, by in loaded if not re.search("libcublas|libcusparse", by)}
    assert len(asked) == 1, "the control: the trainer does ask"
    assert process.pid not in asked
