"""No sample skipped, none seen twice, whatever the ranks do: the sampler, and the batches behind it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import LIMIT, run, wait_until_gone

LOADER = """
import multiprocessing, os, signal, sys, time, torch
from evenkeel.data.dataset import InMemory
from evenkeel.data.loader import make_loader
from evenkeel.data.sampler import ElasticSampler

def batches_of(workers):
    sampler = ElasticSampler(range(40), 4, 4, num_replicas=1, rank=0)
    return make_loader(InMemory(torch.arange(40)), sampler, "train", workers, torch.device("cpu"))
"""

FAILING = f"""{LOADER}
if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    batches = batches_of(1)
    stream = iter(batches)
    next(stream)
    print(batches._iterator._workers[0].pid, flush=True)
    input()
    print(len(list(stream)))
    raise ValueError("the traceback keeps the loader alive")
"""


# a worker that is not forked has threads of BLAS, and a signal may go to any of them
@pytest.mark.parametrize(("start_method", "threads"), [("fork", "1"), ("spawn", "4")])
def test_workers_ignore_signals_and_end_with_a_failing_parent(tmp_path: Path, start_method: str, threads: str) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    env = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, script, start_method], env=env, text=True, **pipes)
    try:
        worker = int(process.stdout.readline())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, number)
        out, err = process.communicate("go on\n", timeout=LIMIT)  # forever, if the parent waited for the worker
    finally:
        process.kill()
    assert out == "9\n"
    assert err.endswith("ValueError: the traceback keeps the loader alive\n"), err  # and nothing about workers
    assert process.returncode == 1
    wait_until_gone([worker])


KILLED_AT_ONCE = f"""{LOADER}
os.register_at_fork(
    after_in_parent=lambda: os.kill(os.getpid(), signal.SIGKILL),
    after_in_child=lambda: (print(os.getpid(), flush=True), time.sleep(1)),
)
iter(batches_of(1))
"""


def test_a_loader_process_ends_although_its_parent_was_killed_before_it_had_begun() -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED_AT_ONCE], stdout=subprocess.PIPE, text=True)
    with process:
        wait_until_gone([int(process.stdout.readline())], limit=30)
    assert process.returncode == -signal.SIGKILL


LEAVING = f"""{LOADER}
from evenkeel.common.processes import clean_up_before_exit
stream = iter(batches_of(2))
next(stream)
clean_up_before_exit()
print("left", flush=True)
os._exit(0)
"""


def test_a_process_kills_its_loader_processes_without_an_error_about_it() -> None:
    """torch's signal handler raises one for each that is killed, in the midst of whatever the process does then."""
    done = run([sys.executable, "-c", LEAVING])
    assert (done.stdout, done.stderr) == ("left\n", "")


CUT_OFF = f"""{LOADER}
from multiprocessing import connection, resource_sharer

def cut_off(place):
    connection.SocketClient(place[0]).close()  # as the kernel does for a process that is being killed
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGKILL)

resource_sharer._resource_sharer.get_connection = cut_off
next(iter(batches_of(1)))
"""


@pytest.mark.parametrize(("seconds", "said"), [(0.5, False), (3, True)], ids=["killed", "alive"])
def test_a_loader_process_says_nothing_of_a_training_process_that_was_killed(seconds: float, said: bool) -> None:
    """It is cut off while it hands over a tensor. The control: one that lives on hears of it."""
    done = run([sys.executable, "-c", CUT_OFF, str(seconds)], expect=-signal.SIGKILL)
    assert ("Traceback" in done.stderr) == said, done.stderr
