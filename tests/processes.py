"""Start the real thing: torchrun and train.py as a user would, with a time limit and no survivors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "train.py"
LIMIT = 120.0


def torchrun(ranks: int, *arguments: object, restarts: int = 0) -> list[str]:
    """The command a user types on one node."""
    options = ["--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *map(str, arguments)]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's, without anybody's W&B account, the options of `make test` and a terminal's size, and with one
    thread a rank."""
    private = ("WANDB_", "MAKE", "MFLAGS", "ARGS", "COLUMNS", "LINES")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(private)}
    return kept | {"OMP_NUM_THREADS": "1", "NETRC": os.devnull} | dict(extra or {})


def start(command: Sequence[str], cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    """Wait for a process and end what is left of its group."""
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill_group(process)
        out, err = process.communicate()
        raise AssertionError(f"no end after {limit} s\n{out}\n{err}") from None
    finally:
        kill_group(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run(
    command: Sequence[str],
    cwd: Path = ROOT,
    env: Mapping[str, str] | None = None,
    limit: float = LIMIT,
    expect: int | None = 0,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and check its exit code (None: any)."""
    done = finish(start(command, cwd, env), limit)
    if expect is not None:
        assert done.returncode == expect, f"exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def kill_group(process: subprocess.Popen[Any]) -> None:
    """SIGKILL everything a process started that is still in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in a run's metrics.jsonl, without one that is being written just now."""
    whole, _, _ = (run_dir / "metrics.jsonl").read_text().rpartition("\n")
    return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == kind]


def read(run_dir: Path, name: str = "summary.json") -> dict[str, Any]:
    """One of a run's JSON files."""
    value: dict[str, Any] = json.loads((run_dir / name).read_text())
    return value
