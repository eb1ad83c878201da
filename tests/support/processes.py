"""Start the real thing: torchrun and train.py as a user would, with a time limit and no survivors."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.forked import Forked

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train.py"
EVENKEEL = [sys.executable, "-m", "evenkeel"]
Process, Done = subprocess.Popen[str], subprocess.CompletedProcess[str]
LIMIT = 240.0
"""Seconds after which something does not come any more. Far more than it takes on a busy machine: only a failure waits
so long."""


def torchrun(ranks: int, *arguments: object, restarts: int = 0) -> list[str]:
    """The command a user types on one node."""
    options = ["--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *map(str, arguments)]


Variables = Mapping[str, str | None]
"""More environment variables; None takes one out."""


def environment(extra: Variables | None = None) -> dict[str, str]:
    """This process's, with one thread a rank, and without W&B accounts, make's options, a terminal's size, what pytest
    says, and what torch sets in it when its compiler is imported."""
    private = ("WANDB_", "MAKE", "MFLAGS", "ARGS", "COLUMNS", "LINES", "PYTEST_", "TORCHINDUCTOR_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(private)}
    both = kept | {"OMP_NUM_THREADS": "1", "NETRC": os.devnull} | dict(extra or {})
    return {name: value for name, value in both.items() if value is not None}


def start(command: Sequence[object], cwd: Path = ROOT, env: Variables | None = None) -> Process:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def fork(*arguments: object, env: Variables | None = None, cwd: Path = ROOT, warm: bool = False) -> Process:
    """As `start([sys.executable, ...])`, but forked from a process that has imported torch, and `warm` evenkeel too."""
    started: Any = Forked([str(argument) for argument in arguments], environment(env), cwd, warm)
    return started  # as much of a Popen as is needed here


def fork_ranks(ranks: int, *arguments: object) -> list[Process]:
    """Start the ranks of a job without torchrun, which is not what is tested then, nor the imports. 0 ranks: one
    process by itself."""
    if ranks == 0:
        return [fork(*arguments, warm=True)]
    return [fork(*arguments, env=variables, warm=True) for variables in rank_variables(ranks)]


def rank_variables(ranks: int) -> list[dict[str, str]]:
    """What torchrun would tell each rank of a node."""
    port, size = str(free_port()), str(ranks)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def finish_all(started: Sequence[Process], code: int = 0) -> list[Done]:
    """Wait for the ranks of a job, all of which must end with this exit code, each by itself."""
    try:
        return [checked(finish(process), code) for process in started]
    finally:
        for process in started:
            kill_group(process)


def finish(process: Process, limit: float | None = None) -> Done:
    limit = limit or LIMIT
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
        raise AssertionError(f"no end after {limit} s\n{out}\n{err}") from None
    finally:
        kill_group(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def stop(process: Process, number: signal.Signals = signal.SIGTERM, expect: int | None = None) -> Done:
    process.send_signal(number)
    return checked(finish(process), expect)


def run(
    command: Sequence[object],
    cwd: Path = ROOT,
    env: Variables | None = None,
    limit: float | None = None,
    expect: int | None = 0,
) -> Done:
    """Run a command to its end and check its exit code (None: any)."""
    return checked(finish(start(command, cwd, env), limit), expect)


def evenkeel(*arguments: object, env: Variables | None = None, expect: int | None = 0) -> Done:
    """Type `python -m evenkeel ...`."""
    return run([*EVENKEEL, *arguments], env=env, expect=expect)


def run_forked(*arguments: object, expect: int | None = 0, warm: bool = False) -> Done:
    """As `run([sys.executable, ...])`, but forked from a process that has imported torch, and `warm` evenkeel too."""
    return checked(finish(fork(*arguments, warm=warm)), expect)


def checked(done: Done, expect: int | None) -> Done:
    """A process with the exit code that was expected (None: any)."""
    if expect is not None:
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def kill_group(process: subprocess.Popen[Any]) -> None:
    """SIGKILL everything a process started that is still in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def wait_until(
    condition: Callable[[], Any],
    what: str,
    limit: float | None = None,
    more: Callable[[], object] = str,
    every: float = 0.01,
) -> Any:
    """Ask for a condition `every` so many seconds until it is true, and return it. If it does not come within `limit`
    seconds (None: LIMIT), say `what`, and what `more` returns then."""
    limit = limit or LIMIT
    deadline = time.monotonic() + limit
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {limit:g} s: {what}\n{more()}"
        time.sleep(every)
    return found


def wait_beside(process: Process, condition: Callable[[], object], what: str) -> None:
    """Wait for a condition before which a process must not end."""
    wait_until(lambda: condition() or process.poll() is not None, what)
    assert condition(), (what, process.communicate())


def running(pid: int) -> bool:
    """Whether a process is there and not a zombie, which nobody may ever bury in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: Sequence[int], limit: float | None = None) -> None:
    """Wait for the end of processes that are not children of this one."""
    wait_until(lambda: not any(map(running, pids)), f"the end of {pids}", limit)


def free_port() -> int:
    """A port that nobody has. Not one that the kernel gives away: it might give it to the next who asks."""
    for port in random.SystemRandom().sample(range(20000, 29500), 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl, without one that is being written just now."""
    whole, _, _ = (run_dir / "metrics.jsonl").read_text().rpartition("\n")
    return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == kind]


def names_in(folder: Path) -> list[str]:
    """All names in a folder of checkpoints but the lock's."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def bytes_of(folder: Path) -> dict[Path, bytes]:
    """The contents of all files below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def contents_of(folder: Path) -> dict[Path, tuple[int, int]]:
    """All that is below a folder, by size and time of change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")]}


def read(run_dir: Path, name: str = "summary.json") -> dict[str, Any]:
    """One of a run's JSON files."""
    return json.loads((run_dir / name).read_text())
