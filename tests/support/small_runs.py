"""Small runs that many tests start, and how far they have come."""

import fcntl
import json
import os
import signal
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.common.processes import process_name
from evenkeel.data.plan import Plan
from tests.support import processes, recording_task
from tests.support.recording_task import SAMPLES

SUPPORT = processes.ROOT / "tests" / "support"
OLD_RUNS = processes.ROOT / "tests" / "fixtures" / "runs"

TASK = f"{SUPPORT / 'recording_task.py'}:Recorded"
BUG = "ZeroDivisionError: a bug in the user's loss"
_BEFORE = Path(recording_task.__file__).read_text().partition(BUG.partition(": ")[2])[0]
BUG += f" at {recording_task.__file__}:{_BEFORE.count(chr(10)) + 1}"
ODD_TASKS = SUPPORT / "odd_tasks.py"

EPOCHS, BATCH, MICRO = 3, 12, 3  # 27 steps, 9 an epoch, the last of 5 samples
PLAN = Plan(SAMPLES, BATCH, MICRO, EPOCHS)


def options(task: str, run_dir: Path, *more: object) -> list[str]:
    """Options of a run without W&B."""
    return [str(word) for word in ("--task", task, "--run-dir", run_dir, "--wandb", "disabled", *more)]


def job_of(task: str, shape: str) -> Callable[..., list[str]]:
    """What makes options of runs of a task, built in or FILE:CLASS of tests/support: (run_dir, *more, task=another
    class of the same file). `shape` has the options that all have."""
    file, _, usual = task.rpartition(":")

    def made(run_dir: Path, *more: object, task: str = usual) -> list[str]:
        return options(f"{SUPPORT / file}:{task}" if file else task, run_dir, *shape.split(), *more)

    return made


SHAPE = f"--epochs {EPOCHS} --batch-size {BATCH} --micro-batch {MICRO} --log-every 1"
job = job_of("recording_task.py:Recorded", SHAPE)
recipe_job = job_of("recipe_task.py:Recipe", SHAPE)
"""With BatchNorm and dropout."""
small_job = job_of("small_task.py:Small", "--epochs 2 --batch-size 24 --micro-batch 4 --reduce tree --log-every 1")
"""Eight steps."""


def kept_job(run_dir: Path, *more: object) -> list[str]:
    """Options of a run of the recording task with keepers."""
    return job(run_dir, "--keeper", "on", *more)


def odd_job(task: str, run_dir: Path, *more: object) -> list[str]:
    """Options of a run of a task of odd_tasks.py: four steps, the last of one sample."""
    return options(f"{ODD_TASKS}:{task}", run_dir, "--batch-size", 4, "--micro-batch", 2, "--epochs", 1, *more)


def trained(ranks: int, options: Iterable[object]) -> list[processes.Done]:
    """Train to a good end on so many forked ranks; 0: in one process without a process group."""
    return processes.finish_all(processes.fork_ranks(ranks, processes.TRAIN, *options))


def ended(process: processes.Process) -> processes.Done:
    return processes.checked(processes.finish(process), 0)


def signal_ranks(ranks: list[processes.Process], number: signal.Signals, victims: int = 0) -> list[int]:
    """Send a signal to the last so many ranks of a job (0: to all), wait for the ends of all; their exit codes."""
    for rank in ranks[-victims:]:
        rank.send_signal(number)
    return [processes.finish(rank).returncode for rank in ranks]


def signal_ranks_at(
    step: int, run_dir: Path, ranks: list[processes.Process], number: signal.Signals, victims: int = 0
) -> list[int]:
    """The same when a step stands in the metrics of the run."""
    wait_for_step(run_dir, step, ranks[0])
    return signal_ranks(ranks, number, victims)


def interrupt(
    ranks: int,
    run_dir: Path,
    words: Iterable[object],
    step: int,
    number: signal.Signals = signal.SIGKILL,
    victims: int = 0,
    slow: Path | None = None,
) -> None:
    """Train on so many ranks, slowly while there is the file `slow`, and at a step send the last so many a signal."""
    if slow:
        slow.touch()
    signal_ranks_at(step, run_dir, processes.fork_ranks(ranks, processes.TRAIN, *words), number, victims)
    if slow:
        slow.unlink()


def failed(ranks: int, options: Iterable[object], code: int = 1) -> list[processes.Done]:
    """Train on so many forked ranks, all of which must end with this exit code, each by itself."""
    return processes.finish_all(processes.fork_ranks(ranks, processes.TRAIN, *options), code)


def refusal(options: Iterable[object], code: int = 2) -> str:
    """The only line by which train.py ends; with code 1 it is one of a failure."""
    return the_line(processes.run_forked(processes.TRAIN, *options, expect=code, warm=True).stderr)


def model_of(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "model.pt", weights_only=True)


def evaluation_of(first: processes.Done) -> dict[str, Any]:
    """What rank 0 has printed of an `--eval-only`."""
    return json.loads(first.stdout.splitlines()[-1])["evaluation"]


def results_of(ranks: int, worker: str, folder: Path, *arguments: object) -> Any:
    """Run a script of tests/support on so many ranks: what the first has written as JSON to its first argument."""
    path = folder / f"{worker}-{ranks}.json"
    processes.finish_all(processes.fork_ranks(ranks, SUPPORT / worker, path, *arguments))
    return json.loads(path.read_text())


def steps_of(run_dir: Path) -> list[int]:
    return [record["step"] for record in processes.records(run_dir, "train")]


def no_step_is_done_twice(run_dir: Path) -> bool:
    """One may be missing: rank 0 may die between a commit and the line for it, and another rank has saved the step."""
    return len(set(steps_of(run_dir))) == len(steps_of(run_dir))


OWN = {"PYTHONPATH": f"{processes.ROOT}:{processes.ROOT / 'src'}"}
"""The environment of a job of :func:`own_task`."""


def own_task(folder: Path, body: str = "pass", before: str = "") -> str:
    """Write a recording task of a test's own; the value of --task."""
    imports = "import ctypes, os, signal, threading, time\nfrom tests.support.recording_task import Recorded\n"
    body = textwrap.indent(textwrap.dedent(body).strip(), "    ")
    (folder / "own.py").write_text(f"{imports}{before}\n\nclass Own(Recorded):\n{body}\n")
    return f"{folder / 'own.py'}:Own"


SLOW_DISK = """
import fcntl
fsync = os.fsync

def slowly(file):
    for _ in range({slices} * os.readlink(f"/proc/self/fd/{{file}}").endswith("/state.pt")):
        with open({disk!r}, "a") as disk:
            fcntl.flock(disk, fcntl.LOCK_EX)
            time.sleep(0.1)
        time.sleep(0.001)
    fsync(file)

os.fsync = slowly
"""


def slow_disk(folder: Path, seconds: float, body: str = "pass") -> str:
    """As `own_task`; the disk takes a state in so many seconds, or several at once in as many times as long."""
    return own_task(folder, body, SLOW_DISK.format(slices=round(10 * seconds), disk=str(folder / "disk")))


class Records:
    """Folders for what the attempts of a run write down, by a link: the option that names the folder is the run's."""

    def __init__(self, link: Path) -> None:
        self.link, self.folders = link, list[Path]()

    def of_another_attempt(self) -> None:
        """Point the link at a new folder."""
        self.folders.append(self.link.with_name(f"{self.link.name}-{len(self.folders)}"))
        self.folders[-1].mkdir()
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(self.folders[-1])

    def handed_out(self, plan: Plan, run_dir: Path, worlds: Sequence[int]) -> Counter[tuple[int, int]]:
        """(epoch, sample) -> times that the attempts, each on so many ranks, have read it for steps that count."""
        counts: Counter[tuple[int, int]] = Counter()
        begins = starts(run_dir)
        ends = [*begins[1:], plan.total_steps]
        for folder, first, end, world_size in zip(self.folders, begins, ends, worlds, strict=True):
            for rank in range(world_size):
                numbers = (int(word) for path in folder.glob(f"rank-{rank}*") for word in path.read_text().split())
                for step in range(first, end):
                    for micro in plan.micro_batches(step, rank, world_size):
                        counts.update((plan.locate(step)[0], next(numbers)) for _ in range(micro.size))
        return counts


def each_once(epochs: int, samples: int) -> Counter[tuple[int, int]]:
    return Counter((epoch, sample) for epoch in range(epochs) for sample in range(samples))


def weights_of(run_dir: Path) -> str:
    """The sha256 of a finished run's weights."""
    return str(processes.read(run_dir)["weights_sha256"])


def weights_undisturbed(ranks: int, words: Callable[..., list[str]], *more: object, scope: Any = "module") -> Any:
    """A fixture: the fingerprint of the weights of a run on so many ranks that nobody disturbs."""

    @pytest.fixture(scope=scope)
    def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
        run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
        trained(ranks, words(run_dir, *more))
        return weights_of(run_dir)

    return weights


def the_line(err: str) -> str:
    (line,) = err.splitlines()
    assert line.startswith("evenkeel: ")
    return line.removeprefix("evenkeel: ")


def starts(run_dir: Path) -> list[int]:
    """The steps at which a run's attempts began."""
    return [record["step"] for record in processes.records(run_dir, "start")]


def told_step(run_dir: Path) -> int:
    """The last step in a run's metrics; 0 if there is none."""
    return max(steps_of(run_dir), default=0) if (run_dir / "metrics.jsonl").exists() else 0


def saved_step(run_dir: Path) -> int:
    """The newest step that has a checkpoint or a snapshot; 0 if none has."""
    return max((int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*")), default=0)


def wait_for_start(run_dir: Path, count: int) -> None:
    processes.wait_until(lambda: len(starts(run_dir)) >= count, f"start {count}")


def wait_for_step(run_dir: Path, step: int, process: processes.Process) -> None:
    processes.wait_beside(process, lambda: told_step(run_dir) >= step, f"step {step}")


def stop_at(
    run_dir: Path,
    step: int,
    process: processes.Process,
    number: signal.Signals = signal.SIGTERM,
    expect: int | None = None,
) -> processes.Done:
    """Send a process a signal after a step of its run, and wait for its end."""
    wait_for_step(run_dir, step, process)
    return processes.stop(process, number, expect)


def children(pid: int) -> list[int]:
    """Of a process, all threads' together."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for some in found for child in some]


def workers_of(agent: processes.Process) -> dict[int, int]:
    """Rank -> pid of what trains below a torchrun agent: the forks of keepers, or without keepers its children."""
    started = ranks_of(agent.pid)
    return started | {rank: pid for keeper in started.values() for rank, pid in ranks_of(keeper, "trainer").items()}


def trainer_of(process: processes.Process) -> int:
    """What trains of a `python train.py`: the fork of a keeper, or without one the process itself."""
    forked = [pid for pid in children(process.pid) if process_name(pid) == "trainer"]
    return forked[0] if forked else process.pid


def keepers_of(agent: processes.Process) -> dict[int, int]:
    """Rank -> pid of the processes that a torchrun agent has started."""
    return ranks_of(agent.pid)


BOTH_WAYS = pytest.mark.parametrize("dies", ["trainer", pytest.param("keeper", marks=pytest.mark.long)])
"""A rank that dies starts again in place, or with its keeper by torchrun."""


def pids_of(agent: processes.Process, dies: str) -> dict[int, int]:
    """Rank -> pid of its trainer or of its keeper, as in BOTH_WAYS."""
    return workers_of(agent) if dies == "trainer" else keepers_of(agent)


def restarts_of(run_dir: Path) -> tuple[int, int]:
    """How often the ranks of a finished run have started again by torchrun, and how often in place."""
    summary = processes.read(run_dir)
    return summary["restarts"] - summary["restarts_in_place"], summary["restarts_in_place"]


def ranks_of(parent: int, name: str = "") -> dict[int, int]:
    """Rank -> pid of a process's children, those of this name."""
    found = {}
    for pid in children(parent):
        if name and process_name(pid) != name:
            continue
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has just ended
        ranks = [int(v.removeprefix(b"RANK=")) for v in variables if v.startswith(b"RANK=")]
        found.update(dict.fromkeys(ranks, pid))
    return found


def kill_workers_and_agent(process: processes.Process) -> None:
    """SIGKILL a whole job at once: torchrun puts each worker into a session of its own."""
    for pid in children(process.pid):
        os.killpg(pid, signal.SIGKILL)
    process.kill()
    process.communicate()


def kill_at(step: int, run_dir: Path, process: processes.Process) -> None:
    """The same at a step, when the last checkpoint before it is on the disk, of one in two steps."""
    wait_for_step(run_dir, step, process)
    processes.wait_until(lambda: saved_step(run_dir) >= step - 2, f"the last checkpoint before step {step}")
    kill_workers_and_agent(process)


@contextmanager
def locked(run_dir: Path) -> Iterator[Path]:
    """Keep writers of checkpoints out, as a slow disk does; for ten seconds, and then they write beside it. Yields the
    file that is locked."""
    lock = run_dir / "checkpoints" / ".lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(descriptor)


def bytes_in_memory(pid: int) -> int:
    """Of all that a process has for states."""
    return sum(states_in_memory(pid))


def states_in_memory(pid: int) -> list[int]:
    """The bytes of each state that a process has in memory."""
    sizes = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if "memfd:state" in str(link.readlink()):
                sizes.append(link.stat().st_size)
    return sizes
