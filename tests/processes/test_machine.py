"""What a rank has of its machine: CPU threads, devices, and the memory that its steps have freed."""

import os
import re
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel.common.processes import count_cores
from evenkeel.distributed.devices import describe
from evenkeel.training.staging import Staging
from evenkeel.training.state import State
from tests.distributed.test_devices import CPU, gpu
from tests.processes.test_old_runs import OPTIONS
from tests.support.processes import TRAIN, checked, finish, read, run, run_forked, start, torchrun
from tests.support.small_runs import OLD_RUNS, job
from tests.training.test_staging import CPU

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


MACOS = """
import os, signal, sys, types
for module, names in (
    (os, "eventfd memfd_create pidfd_open posix_fadvise posix_fallocate sched_getaffinity sched_setaffinity"),
    (signal, "pidfd_send_signal sigtimedwait sigwaitinfo SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT"),
):
    for name in names.split():
        vars(module).pop(name, None)
sys.modules["triton"] = None
sys.modules["_scproxy"] = types.SimpleNamespace(_get_proxies=dict, _get_proxy_settings=dict)
sys.platform = "darwin"
"""


def test_a_job_trains_without_what_only_linux_has(tmp_path: Path, run_dir: Path) -> None:
    """As on a Mac, except /proc. `launch/single_node.py` is what `make train` calls."""
    (tmp_path / "sitecustomize.py").write_text(MACOS)
    words = ["-g", "2", "--max-restarts", "0", "--", *job(run_dir, "--max-steps", "2")]
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    run([sys.executable, TRAIN.parent / "launch" / "single_node.py", *words], env=env)
    assert read(run_dir)["step"] == 2


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


STEPS = """
import resource, sys, torch
from evenkeel.common.memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "ours":
    print(keep_freed_memory())
# above 32 MiB: glibc raises its own threshold up to there, by what has been freed before
inputs = torch.ones(12 << 20)
def step():
    (inputs * 2).sum()
for _ in range(20):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


def steps(side: str, **environment: str) -> list[str]:
    """What the program prints, the page faults of a step last."""
    clean = dict.fromkeys(name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_")))
    return run([sys.executable, "-c", STEPS, side], env={**clean, **environment}).stdout.split()


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(os, "confstr"), reason="needs glibc")
def test_a_step_asks_the_kernel_for_few_pages_and_without_it_for_thousands() -> None:
    said, faults = steps("ours")
    assert said == "True"
    theirs = int(steps("theirs")[0])
    assert theirs > 1000
    assert int(faults) < theirs / 3


def test_what_the_environment_says_stays() -> None:
    assert steps("ours", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


def page_faults(work: Any) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    kept = work()
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    del kept
    return faults


def test_only_the_first_copy_asks_the_kernel_for_memory() -> None:
    """And the control: a copy into new memory asks each time, which takes longer than copying. In a process where no
    test before has had freed memory kept."""
    run([sys.executable, "-c", "from tests.processes.test_machine import compare_page_faults as it; it()"])


def compare_page_faults() -> None:
    state = State(nn.Linear(4000, 4000), [])  # too much for malloc to keep when it is freed
    staging = Staging(CPU)
    state.capture(staging=staging)
    for _ in range(3):
        again, new = page_faults(lambda: state.capture(staging=staging)), page_faults(state.capture)
        assert 5 * again < new
