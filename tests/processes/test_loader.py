"""No sample skipped, none seen twice, whatever the ranks do: the sampler, and the batches behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import small_runs
from tests.support.processes import LIMIT, ROOT, TRAIN, finish, fork, run, wait_until_gone

FAILING = """
import multiprocessing, sys, torch
from evenkeel.data.dataset import InMemory
from evenkeel.data.loader import loader
from evenkeel.data.sampler import ElasticSampler

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    sampler = ElasticSampler(range(40), 4, 4, num_replicas=1, rank=0)
    batches = loader(InMemory(torch.arange(40)), sampler, "train", 1, torch.device("cpu"))
    stream = iter(batches)
    next(stream)
    print(batches._iterator._workers[0].pid, flush=True)
    input()
    print(len(list(stream)))
    raise ValueError("the traceback keeps the loader alive")
"""


# a worker that is not forked has threads of BLAS, and a signal may go to any of them
@pytest.mark.parametrize(("start_method", "threads"), [("fork", "1"), ("spawn", "4")])
def test_workers_ignore_signals_from_outside_and_end_with_a_failing_parent(
    tmp_path: Path, start_method: str, threads: str
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    process = subprocess.Popen(
        [sys.executable, script, start_method],
        env=os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
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


LEAVING = """
import os, torch
from evenkeel.common.processes import leave_nothing
from evenkeel.data.dataset import InMemory
from evenkeel.data.loader import loader
from evenkeel.data.sampler import ElasticSampler

sampler = ElasticSampler(range(40), 4, 4, num_replicas=1, rank=0)
stream = iter(loader(InMemory(torch.arange(40)), sampler, "train", 2, torch.device("cpu")))
next(stream)
leave_nothing()
print("left", flush=True)
os._exit(0)
"""


def test_a_process_kills_its_loader_processes_without_an_error_about_it() -> None:
    """torch's signal handler raises one for each that is killed, in the midst of whatever the process does then."""
    done = run([sys.executable, "-c", LEAVING])
    assert (done.stdout, done.stderr) == ("left\n", "")


CUT_OFF = """
import os, signal, sys, time
from multiprocessing import connection, resource_sharer
import torch
from evenkeel.data.dataset import InMemory
from evenkeel.data.loader import loader
from evenkeel.data.sampler import ElasticSampler

def cut_off(place):
    connection.SocketClient(place[0]).close()  # as the kernel does for a process that is being killed
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGKILL)

resource_sharer._resource_sharer.get_connection = cut_off
sampler = ElasticSampler(range(40), 4, 4, num_replicas=1, rank=0)
next(iter(loader(InMemory(torch.arange(40)), sampler, "train", 1, torch.device("cpu"))))
"""


@pytest.mark.parametrize(("seconds", "said"), [(0.5, False), (3, True)], ids=["killed", "alive"])
def test_a_loader_process_says_nothing_of_a_training_process_that_was_killed(seconds: float, said: bool) -> None:
    """It is cut off while it hands over a tensor. The control: one that lives on hears of it."""
    done = run([sys.executable, "-c", CUT_OFF, str(seconds)], expect=-signal.SIGKILL)
    assert ("Traceback" in done.stderr) == said, done.stderr


WATCHING = """
import logging, os
from dataclasses import dataclass
import torch
from torch.utils.data import get_worker_info
from evenkeel.data.loader import Seeded
from tests.support.recording_task import Recorded

class Watched(torch.utils.data.Dataset):
    def __init__(self, task, name):
        self.task, self.name = task, name
    def __len__(self):
        return 24
    def __getitem__(self, number):
        if (loader := get_worker_info()) and isinstance(loader.dataset, Seeded):  # and not what each start compares
            with open(os.environ["WATCHED"], "a") as file:
                file.write(f"{self.name} {torch.equal(*self.task.weights)}\\n")
            logging.getLogger("evenkeel.watched").info("sample %d of %s", number, self.name)
        return torch.zeros(4), number

@dataclass
class Watching(Recorded):
    def train_dataset(self):
        return Watched(self, "train")
    def test_dataset(self):
        return Watched(self, "test")
    def model(self):
        model = super().model()
        weight = next(model.parameters())
        self.weights = weight.detach(), weight.detach().clone()
        return model
"""


def test_loader_processes_of_the_training_data_are_forked_before_a_state_is_loaded(tmp_path: Path) -> None:
    """Of which they would keep a copy; and after the logs are there. The control: the evaluation's come later."""
    (tmp_path / "watching.py").write_text(WATCHING)
    seen, options = tmp_path / "seen", ["--num-workers", 1, "--epochs", 2, "--batch-size", 8, "--micro-batch", 4]
    options += ["--pause", 0.2, "--log-every", 1]
    job = small_runs.options(f"{tmp_path / 'watching.py'}:Watching", run_dir := tmp_path / "run", *options)
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "WATCHED": str(seen)}
    process = fork(TRAIN, *job, env=env)
    small_runs.wait_for_step(run_dir, 2, process)
    process.send_signal(signal.SIGTERM)
    assert finish(process).returncode == 75
    seen.unlink()
    assert finish(fork(TRAIN, *job, env=env)).returncode == 0
    assert set(seen.read_text().splitlines()) == {"train True", "test False"}
    assert " sample 3 of train" in (run_dir / "logs" / "attempt-0002" / "rank-0.log").read_text()
