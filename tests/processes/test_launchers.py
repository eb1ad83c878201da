"""Topology -> command, what the launchers refuse, and single-node runs of real torchrun processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.errors import REFUSED
from evenkeel.common.processes import count_cores
from evenkeel.resilience.interruption import STOPPED
from tests.launch.test_topology import REPOSITORY, SINGLE
from tests.support.processes import LIMIT, finish, free_port, running, start, wait_until

MULTI = str(REPOSITORY / "launch" / "multi_node.py")


# ------------------------------------------------------------------------------------------- real runs

REPORTER = """
import json, os, sys
from pathlib import Path
out = Path(os.environ["OUT"]) / f"rank{os.environ['RANK']}.json"
out.write_text(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ)}))
"""


# Says which signal it got, and ends; or says it and does not end.
LISTENER = """
import os, signal, sys, time
from pathlib import Path
out = Path(os.environ["OUT"]) / f"rank{os.environ['RANK']}"
signals = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
out.with_suffix(".pid").write_text(str(os.getpid()))
out.with_suffix(".signal").write_text(signal.Signals(signal.sigwait(signals)).name)
while "stubborn" in sys.argv:
    time.sleep(1)
"""


# Rank 1 crashes in the first attempt, while rank 0 waits for it in a collective.
CRASHER = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
count = torch.ones(1)
dist.all_reduce(count)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(7)
dist.all_reduce(count)
(Path(os.environ["OUT"]) / f"rank{dist.get_rank()}").write_text(str(int(count)))
dist.destroy_process_group()
"""


class Launched:
    """A launcher that runs a worker script, with what the user's shell would give it."""

    def __init__(self, folder: Path, script: str, options: list[str], args: list[str], **environ: str) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "worker.py").write_text(script)
        self.folder = folder
        self.argv = [SINGLE, *options, "--script", str(folder / "worker.py"), "--", *args]
        unset = ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
        self.environ = {k: v for k, v in os.environ.items() if k not in unset}
        self.environ |= {"OUT": str(folder), "CUDA_VISIBLE_DEVICES": "", **environ}

    def run(self, argv: list[str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv or self.argv, env=self.environ, capture_output=True, text=True, timeout=LIMIT, check=False
        )

    def start(self) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("w") as log:
            return subprocess.Popen(self.argv, env=self.environ, stdout=log, stderr=log)

    def reports(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def pids(self, number: int) -> list[int]:
        """Wait for this many workers, and return their process ids."""

        def texts() -> list[str]:
            return [text for path in self.folder.glob("rank*.pid") if (text := path.read_text())]

        wait_until(lambda: len(texts()) == number, f"{number} workers; see {self.folder / 'log'}")
        return [int(text) for text in texts()]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    made: list[Launched] = []

    def make(script: str, options: list[str], args: list[str] | None = None, **environ: str) -> Launched:
        made.append(Launched(tmp_path / str(len(made)), script, options, args or [], **environ))
        return made[-1]

    yield make
    for path in tmp_path.glob("*/rank*.pid"):  # only if a test has failed
        if running(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_workers_find_what_was_promised(launched: Callable[..., Launched]) -> None:
    args = ["--name", "a b", "it's", '"x"', "$HOME", "--log", "--"]
    job = launched(REPORTER, ["-g", "2"], args)
    done = job.run()
    assert done.returncode == 0, done.stderr
    reports = job.reports()
    assert [report["argv"] for report in reports] == [args, args]
    for rank, environ in enumerate(report["environ"] for report in reports):
        assert (environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert environ["MASTER_ADDR"] == "127.0.0.1"
        assert environ["TORCHELASTIC_MAX_RESTARTS"] == "3"
        assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert environ["OMP_NUM_THREADS"] == str(max(1, count_cores() // 2))
        assert "SIGUSR2" in environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    assert "OMP_NUM_THREADS" not in done.stderr  # torchrun's banner


def test_the_printed_command_does_the_same(launched: Callable[..., Launched]) -> None:
    job = launched(REPORTER, ["-g", "1", "--dry-run"], ["a b", "$HOME"], OMP_NUM_THREADS="3")
    printed = job.run()
    assert (printed.returncode, printed.stderr, job.reports()) == (0, "", [])
    about, command, also, plain = printed.stdout.splitlines()
    assert about.startswith("# torchrun, run by evenkeel's agent")
    assert " -m evenkeel.launch.agent --nnodes 1 " in command
    assert also.startswith("# the same by torchrun itself")
    assert re.match(r"# TORCH_\S+ .*bin/torchrun --nnodes 1 ", plain)
    for typed in (printed.stdout, plain.removeprefix("# ")):
        assert job.run(["sh", "-c", typed]).returncode == 0
        (report,) = job.reports()
        assert report["argv"] == ["a b", "$HOME"]
        environ = report["environ"]
        assert environ["OMP_NUM_THREADS"] == "3"
        assert environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert "SIGUSR2" in environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
        (job.folder / "rank0.json").unlink()


def test_a_restart_works_and_the_exit_code_says_how_it_ended(launched: Callable[..., Launched]) -> None:
    job = launched(CRASHER, ["-g", "2", "--max-restarts", "1"])
    done = job.run()
    assert done.returncode == 0, done.stderr
    assert [path.read_text() for path in sorted(job.folder.glob("rank*"))] == ["4", "4"]

    done = launched("raise SystemExit(7)", ["-g", "1", "--max-restarts", "0"]).run()
    assert done.returncode == 7
    assert "exitcode  : 7" in done.stderr


def test_signals_reach_the_workers_and_leave_none_behind(launched: Callable[..., Launched]) -> None:
    """Three jobs at once, which also shows that their ports do not collide."""
    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    jobs = [launched(LISTENER, ["-g", "2"]) for _ in signals]
    launchers = [job.start() for job in jobs]
    pids = [pid for job in jobs for pid in job.pids(2)]
    for process, number in zip(launchers, signals, strict=True):
        process.send_signal(number)
    for job, process, number in zip(jobs, launchers, signals, strict=True):
        assert process.wait(timeout=LIMIT) == STOPPED
        assert [p.read_text() for p in job.folder.glob("*.signal")] == [number.name] * 2
    assert not [pid for pid in pids if running(pid)]


def test_a_worker_that_will_not_end_is_killed(launched: Callable[..., Launched]) -> None:
    job = launched(LISTENER, ["-g", "1"], ["stubborn"], TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    process = job.start()
    (pid,) = job.pids(1)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=30) == STOPPED  # torchrun's own patience, under our launchers 45
    assert not running(pid)


def test_refused_before_any_process(tmp_path: Path) -> None:
    argv = [MULTI, "-n", "2", "-nr", "2", "--master", "127.0.0.1", "--", "--out", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert done.stderr == "evenkeel: -nr 2: with -n 2 a node rank is in 0..1\n"
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_it_waits_for_node_0() -> None:
    words = ["-n", "2", "-g", "1", "-nr", "1", "--master", f"127.0.0.1:{free_port()}"]
    process = start([sys.executable, str(REPOSITORY / "launch" / "multi_node.py"), *words])
    assert process.stderr is not None
    assert process.stderr.readline().startswith("evenkeel: waiting for node 0 at 127.0.0.1 port ")
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.returncode, done.stderr) == (130, "")
