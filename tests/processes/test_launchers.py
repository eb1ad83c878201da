"""Launchers with real torchrun processes on one node: what workers get, signals, restarts and exit codes."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from evenkeel.common.processes import count_cores
from evenkeel.resilience.interruption import STOPPED
from tests.launch.test_topology import REPOSITORY, SINGLE
from tests.support.processes import Done, Process, checked, finish, free_port, run, running, start, stop, wait_until

REPORTER = """
import json, os, sys
from pathlib import Path
out = Path(os.environ["OUT"]) / f"rank{os.environ['RANK']}.json"
out.write_text(json.dumps({"argv": sys.argv[1:], "environ": dict(os.environ)}))
"""


# Says which signal it got, and does not end.
LISTENER = """
import os, signal, time
from pathlib import Path
out = Path(os.environ["OUT"]) / f"rank{os.environ['RANK']}"
signals = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
out.with_suffix(".pid").write_text(str(os.getpid()))
out.with_suffix(".signal").write_text(signal.Signals(signal.sigwait(signals)).name)
while True:
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

    def __init__(self, folder: Path, script: str, options: list[str], *args: str, **environ: str) -> None:
        folder.mkdir()
        (folder / "worker.py").write_text(script)
        self.folder = folder
        self.argv = [SINGLE, *options, "--script", folder / "worker.py", "--", *args]
        unset = ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
        self.env = {**dict.fromkeys(unset), "OUT": str(folder), "CUDA_VISIBLE_DEVICES": "", **environ}

    def run(self, argv: Sequence[object] = (), expect: int = 0) -> Done:
        return run(argv or self.argv, env=self.env, expect=expect)

    def start(self) -> Process:
        return start(self.argv, env=self.env)

    def reports(self) -> list[dict]:
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("rank*.json"))]

    def pids(self, number: int) -> list[int]:
        """Wait for this many workers, and return their process ids."""

        def texts() -> list[str]:
            return [text for path in self.folder.glob("rank*.pid") if (text := path.read_text())]

        wait_until(lambda: len(texts()) == number, f"{number} workers")
        return [int(text) for text in texts()]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    numbers = count()
    yield lambda script, options, *args, **environ: Launched(
        tmp_path / str(next(numbers)), script, options, *args, **environ
    )
    for path in tmp_path.glob("*/rank*.pid"):  # only if a test has failed
        if running(int(path.read_text())):
            os.kill(int(path.read_text()), signal.SIGKILL)


def test_workers_find_what_was_promised(launched: Callable[..., Launched]) -> None:
    args = ["--name", "a b", "it's", '"x"', "$HOME", "--log", "--"]
    job = launched(REPORTER, ["-g", "2"], *args)
    done = job.run()
    reports = job.reports()
    assert [report["argv"] for report in reports] == [args, args]
    common = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "OMP_NUM_THREADS": str(max(1, count_cores() // 2))}
    for rank, environ in enumerate(report["environ"] for report in reports):
        expected = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        assert {name: environ[name] for name in expected} == expected
        assert "SIGUSR2" in environ["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    assert "OMP_NUM_THREADS" not in done.stderr  # torchrun's banner


def test_the_printed_command_does_the_same(launched: Callable[..., Launched]) -> None:
    job = launched(REPORTER, ["-g", "1", "--dry-run"], "a b", "$HOME", OMP_NUM_THREADS="3")
    printed = job.run()
    assert (printed.stderr, job.reports()) == ("", [])
    about, plain, also, command = printed.stdout.splitlines()
    assert about.startswith("# plain torchrun")
    assert also.startswith("# the same by evenkeel's agent")
    assert " -m evenkeel.launch.agent --nnodes 1 " in command
    assert re.match(r"# TORCH_\S+ .*bin/torchrun --nnodes 1 ", plain)
    for typed in (printed.stdout, plain.removeprefix("# ")):
        job.run(["sh", "-c", typed])
        (report,) = job.reports()
        assert report["argv"] == ["a b", "$HOME"]
        assert report["environ"]["OMP_NUM_THREADS"] == "3"
        assert report["environ"]["TORCHELASTIC_USE_AGENT_STORE"] == "False"
        assert "SIGUSR2" in report["environ"]["TORCHELASTIC_SIGNALS_TO_HANDLE"]
        (job.folder / "rank0.json").unlink()


def test_a_restart_works_and_the_exit_code_says_how_it_ended(launched: Callable[..., Launched]) -> None:
    job = launched(CRASHER, ["-g", "2", "--max-restarts", "1"])
    job.run()
    assert [path.read_text() for path in sorted(job.folder.glob("rank*"))] == ["4", "4"]
    done = launched("raise SystemExit(7)", ["-g", "1", "--max-restarts", "0"]).run(expect=7)
    assert "exitcode  : 7" in done.stderr


def test_a_worker_that_will_not_end_is_killed(launched: Callable[..., Launched]) -> None:
    job = launched(LISTENER, ["-g", "2"], TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    process = job.start()
    pids = job.pids(2)
    process.send_signal(signal.SIGUSR2)
    checked(finish(process, 30), STOPPED)  # torchrun's own patience, under our launchers 45
    assert [path.read_text() for path in job.folder.glob("*.signal")] == ["SIGUSR2"] * 2
    assert not any(map(running, pids))


def test_ctrl_c_while_it_waits_for_node_0() -> None:
    words = ["-n", 2, "-g", 1, "-nr", 1, "--master", f"127.0.0.1:{free_port()}"]
    process = start([sys.executable, REPOSITORY / "launch" / "multi_node.py", *words])
    assert process.stderr.readline().startswith("evenkeel: waiting for node 0 at 127.0.0.1 port ")
    line = "stopped by SIGINT while starting; the same command goes on from here"
    assert stop(process, signal.SIGINT, 130).stderr == f"evenkeel: {line}\n"


def test_too_few_nodes_are_a_stop_that_may_be_continued() -> None:
    words = ["-n", 2, "-g", 1, "-nr", 0, "--master", f"127.0.0.1:{free_port()}", "--join-timeout", 3]
    done = run([sys.executable, REPOSITORY / "launch" / "multi_node.py", *words], expect=STOPPED)
    assert "evenkeel: too few nodes came in time (--join-timeout): " in done.stderr
    assert "Traceback" not in done.stderr
