"""Real jobs with `--mirror` that lose disks, and their store: they go on from the newest whole checkpoint."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest

from evenkeel.mirror.attach import TRIES
from evenkeel.resilience import heartbeat
from tests.support import needs, s3
from tests.support.processes import (
    ROOT,
    TRAIN,
    Variables,
    evenkeel,
    finish,
    free_port,
    run,
    start,
    wait_beside,
    wait_until,
    wait_until_gone,
)
from tests.support.s3 import port  # noqa: F401  (a fixture)
from tests.support.small_runs import (
    children,
    job,
    kill_workers_and_agent,
    options,
    starts,
    steps_of,
    told_step,
    trained,
    weights_of,
)

STEPS = 27


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    run([sys.executable, TRAIN, "-g", 1, *words(folder, "", pause=0)])
    return weights_of(folder)


def words(run_dir: Path, url: str, *more: object, pause: float = 0.3) -> list[str]:
    shape = ("--reduce", "tree", "--checkpoint-every", 3, "--keep", 2, "--pause", pause)
    return job(run_dir, *shape, *(["--mirror", url] if url else []), *more)


def launched(
    proxy: s3.Proxy | int, *options: object, nodes: str = "-g 1", more: Variables | None = None
) -> subprocess.Popen[str]:
    where = proxy if isinstance(proxy, int) else proxy.port
    env = s3.variables(where) | {"EVENKEEL_LAUNCH": "the-same-job"} | dict(more or {})
    return start([sys.executable, ROOT / "launch" / "multi_node.py", *nodes.split(), "--", *options], env=env)


def steps_in(port: int, url: str) -> list[int]:
    fs = fsspec.filesystem("s3", **s3.options(port), use_listings_cache=False, skip_instance_cache=True)
    names = fs.find(f"{url.removeprefix('s3://')}/checkpoints")
    return sorted(int(name.split("/")[-2][5:]) for name in names if name.endswith("/manifest.json"))


def copier_of(process: subprocess.Popen[str]) -> int:
    def found() -> Any:
        lines = ((pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in children(process.pid))
        return [pid for pid, line in lines if b"evenkeel.mirror.copying" in line]

    (pid,) = wait_until(found, "the process that copies")
    return int(pid)


def test_a_job_that_lost_its_disk_goes_on_from_the_whole_upload(port: int, tmp_path: Path, undisturbed: str) -> None:
    url, proxy, run_dir = s3.new_url(), s3.Proxy(port), tmp_path / "run"
    process = launched(proxy, *words(run_dir, url))
    wait_beside(process, lambda: steps_in(port, url), "a checkpoint there")
    proxy.limit = 3000  # less than state.pt
    wait_beside(process, proxy.stopped.is_set, "an upload that hangs")
    copier_of(process)
    kill_workers_and_agent(process)
    shutil.rmtree(run_dir)
    whole = steps_in(port, url)[-1]
    done = finish(launched(port, *words(run_dir, url)))
    assert done.returncode == 0, done.stderr
    assert f"fetched step {whole}\n" in done.stderr
    assert f"{url}: has step {STEPS}, the newest here" in done.stderr
    assert weights_of(run_dir) == undisturbed
    listed = evenkeel("checkpoint", "list", url, env=s3.variables(port)).stdout.splitlines()
    assert listed[-1].split()[0] == str(STEPS)
    assert evenkeel("checkpoint", "verify", url, env=s3.variables(port)).stdout.count(": ok") == len(listed) - 1
    evenkeel("report", url, "--output", tmp_path / "page.html", env=s3.variables(port))
    evenkeel("checkpoint", "export", url, "--output", tmp_path / "model.pt", env=s3.variables(port))
    assert "<svg" in (tmp_path / "page.html").read_text()
    assert (tmp_path / "model.pt").exists()
    assert s3.SECRET not in "".join(path.read_text(errors="replace") for path in run_dir.glob("*.*")) + done.stderr


def test_a_store_that_is_away_for_a_while_delays_nothing(port: int, tmp_path: Path, undisturbed: str) -> None:
    url, proxy, run_dir = s3.new_url(), s3.Proxy(port), tmp_path / "run"
    process = launched(proxy, *words(run_dir, url))
    wait_beside(process, lambda: steps_in(port, url), "a checkpoint there")
    proxy.away()
    step = told_step(run_dir)
    wait_beside(process, lambda: told_step(run_dir) >= step + 9, "nine steps without the store")
    proxy.back()
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"{url}: is away: .*; the job goes on, .*\n.*{url}: can be reached again", done.stderr)
    assert steps_in(port, url)[-1] == STEPS
    assert weights_of(run_dir) == undisturbed


def test_a_store_that_stays_away_is_said_at_the_end(port: int, tmp_path: Path) -> None:
    url, proxy, run_dir = s3.new_url(), s3.Proxy(port), tmp_path / "run"
    process = launched(proxy, *words(run_dir, url, "--grace", 3))
    wait_beside(process, lambda: steps_in(port, url), "a checkpoint there")
    proxy.away()
    done = finish(process, 60)
    assert done.returncode == 0, done.stderr
    assert f"{url}: has not step {STEPS}, which is in {run_dir} on " in done.stderr


@pytest.mark.parametrize("ended", [False, True])
def test_a_copying_process_that_was_killed_is_started_again(ended: bool, port: int, tmp_path: Path) -> None:
    """Also after the ranks' end, of which only the one before was told. The control is the next test."""
    url, proxy, run_dir = s3.new_url(), s3.Proxy(port), tmp_path / "run"
    process = launched(proxy, *words(run_dir, url, pause=0.1))
    wait_beside(process, lambda: steps_in(port, url), "a checkpoint there")
    if ended:
        proxy.limit = 3000  # less than state.pt
        wait_beside(process, proxy.stopped.is_set, "an upload that hangs")
        wait_beside(process, lambda: children(process.pid) == [copier_of(process)], "the end of the ranks")
        time.sleep(1)  # it has read that
        proxy.limit = 0
    os.kill(copier_of(process), signal.SIGKILL)
    done = finish(process, 60)
    assert done.returncode == 0, done.stderr
    assert f"evenkeel: {url}: the process that copies has ended early (-9); it is started again" in done.stderr
    assert f"evenkeel: {url}: has step {STEPS}, the newest here" in done.stderr
    assert steps_in(port, url)[-1] == STEPS


def test_a_copying_process_that_is_killed_again_and_again_is_missed_at_the_end(port: int, tmp_path: Path) -> None:
    url, run_dir = s3.new_url(), tmp_path / "run"
    process = launched(port, *words(run_dir, url, pause=0.1))
    wait_beside(process, lambda: steps_in(port, url), "a checkpoint there")
    for _ in range(TRIES + 1):
        os.kill(copier := copier_of(process), signal.SIGKILL)
        wait_until_gone([copier])
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the process that copies has ended early (-9); it is started again") == TRIES
    lost = f"the process that copies has ended early (-9); the newest checkpoints may be in {run_dir} only"
    assert f"evenkeel: {url}: {lost}" in done.stderr


def test_a_rescue_is_there_within_the_grace(port: int, tmp_path: Path, undisturbed: str) -> None:
    url, run_dir = s3.new_url(), tmp_path / "run"
    process = launched(port, *words(run_dir, url, "--checkpoint-every", 0))
    wait_beside(process, lambda: told_step(run_dir) >= 5, "step 5")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert (done.returncode, time.monotonic() - began < 25) == (75, True), done.stderr
    (rescued,) = steps_in(port, url)
    shutil.rmtree(run_dir)
    done = finish(launched(port, *words(run_dir, url)))
    assert f"fetched step {rescued}\n" in done.stderr
    assert weights_of(run_dir) == undisturbed


def test_three_nodes_lose_two_of_their_disks(port: int, tmp_path: Path, undisturbed: str) -> None:
    """The last node's disk stays; without the mirror the run would begin anew, or at that node's last rescue."""
    url, disks = s3.new_url(), [tmp_path / str(node) for node in range(3)]

    def nodes() -> list[subprocess.Popen[str]]:
        shape = f"-n 3 -g 1 --master 127.0.0.1:{free_port()}"
        return [launched(port, *words(disk, url), nodes=f"{shape} -nr {n}") for n, disk in enumerate(disks)]

    first = nodes()
    wait_beside(first[0], lambda: steps_in(port, url), "a checkpoint there")
    for process in first:
        kill_workers_and_agent(process)
    whole = steps_in(port, url)[-1]
    full = [disk for disk in disks if [*disk.glob("checkpoints/step-*")]]
    for disk in [*full, *(disk for disk in disks if disk not in full)][:2]:
        shutil.rmtree(disk)
    ends = [finish(process) for process in nodes()]
    assert [end.returncode for end in ends] == [0, 0, 0], "\n".join(end.stderr for end in ends)
    assert f"fetched step {whole}\n" in ends[0].stderr + ends[1].stderr
    results = [disk for disk in disks if (disk / "summary.json").exists()]
    assert [weights_of(disk) for disk in results] == [undisturbed]


@pytest.mark.parametrize("later", [0, 1])
def test_nodes_fetch_at_the_same_time_and_wait_for_each_other(
    later: int, port: int, tmp_path: Path, undisturbed: str
) -> None:
    """For longer than --join-timeout, in which one of them is later than the other by more than that."""
    url, before, proxies = s3.new_url(), tmp_path / "before", [s3.Proxy(port) for _ in range(2)]
    process = launched(port, *words(before, url))
    wait_beside(process, lambda: steps_in(port, url), "a checkpoint there")
    process.send_signal(signal.SIGTERM)
    finish(process)
    beats = [tmp_path / f"beats-{node}" for node in range(2)]
    shape, nodes = f"-n 2 -g 1 --master 127.0.0.1:{free_port()} --join-timeout 1", []
    for node, (proxy, folder) in enumerate(zip(proxies, beats, strict=True)):
        proxy.held = b"/state.pt."
        folder.mkdir()
        options, more = words(tmp_path / str(node), url), {heartbeat.VARIABLE: str(folder)}
        nodes.append(launched(proxy, *options, nodes=f"{shape} -nr {node}", more=more))
    for node, proxy in zip(nodes, proxies, strict=True):
        wait_beside(node, proxy.stopped.is_set, "a fetch at the same time")
    time.sleep(12)
    proxies[1 - later].held = b""
    ahead = beats[1 - later]
    wait_beside(nodes[1 - later], lambda: ahead.stat().st_mtime > time.time() + 5, "a wait for the other node")
    time.sleep(5)
    proxies[later].held = b""
    ends = [finish(node) for node in nodes]
    assert [end.returncode for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)
    assert all(f"fetched step {steps_of(before)[-1]}\n" in end.stderr for end in ends)
    assert [weights_of(disk) for disk in tmp_path.glob("[01]") if (disk / "summary.json").exists()] == [undisturbed]


@needs.sharding
def test_a_sharded_run_passes_over_damaged_files(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pausing = f"{ROOT / 'tests' / 'support' / 'struck_task.py'}:Struck"

    def words(run_dir: Path, *more: object) -> list[str]:
        shape = "--reduce tree --shard on --epochs 3 --batch-size 7 --micro-batch 1 --checkpoint-every 3 --keep 9"
        return options(pausing, run_dir, *shape.split(), *more)

    def nodes(run_dir: Path, url: str) -> list[subprocess.Popen[str]]:
        shape = f"-n 2 -g 1 --master 127.0.0.1:{free_port()}"
        more = words(run_dir, "--mirror", url)
        return [launched(port, *more, nodes=f"{shape} -nr {node}") for node in range(2)]

    for name, value in {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PAUSE": "0.15"}.items():
        monkeypatch.setenv(name, value)
    run_dir, url = tmp_path / "run", s3.new_url()
    first = nodes(run_dir, url)
    wait_beside(first[0], lambda: len(steps_in(port, url)) >= 2, "two checkpoints there")
    for process in first:
        kill_workers_and_agent(process)
    shutil.rmtree(run_dir)
    *_, whole, damaged = steps_in(port, url)
    fs = fsspec.filesystem("s3", **s3.options(port), use_listings_cache=False, skip_instance_cache=True)
    (file,) = fs.glob(f"{url.removeprefix('s3://')}/checkpoints/step-{damaged:08d}/state-1-of-2.pt.*")
    content = bytearray(fs.cat_file(file))
    content[len(content) // 2] ^= 1
    fs.pipe_file(file, bytes(content))
    ends = [finish(process) for process in nodes(run_dir, url)]
    assert [end.returncode for end in ends] == [0, 0], "\n".join(end.stderr for end in ends)
    said = "".join(end.stderr for end in ends)
    assert f"step {damaged} is damaged: " in said
    assert f"fetched step {whole}\n" in said
    assert starts(run_dir)[-1] == whole
    monkeypatch.setenv("PAUSE", "0")
    trained(1, words(tmp_path / "undisturbed"))
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    assert f"{url}: has step {steps_in(port, url)[-1]}, the newest here" in said
    verified = evenkeel("checkpoint", "verify", url, env=s3.variables(port)).stdout
    assert verified.count(": ok") == len(steps_in(port, url))


def test_a_second_job_is_refused_in_a_line_and_so_is_bare_torchrun(port: int, tmp_path: Path) -> None:
    url = s3.new_url()
    process = launched(port, *words(tmp_path / "run", url, pause=1))
    wait_beside(process, lambda: steps_in(port, url), "a checkpoint there")
    other = words(tmp_path / "other", url)
    env = s3.variables(port) | {"EVENKEEL_LAUNCH": "another-job"}
    refused = run([sys.executable, TRAIN, "-g", 1, *other], env=env, expect=2)
    (line,) = refused.stderr.splitlines()
    assert line.startswith(f"evenkeel: --mirror {url}: a job on ")
    assert line.endswith("writes there; name another URL")
    assert not (tmp_path / "other").exists()
    alone = run([sys.executable, TRAIN, *other], env=env, expect=2)
    line = "evenkeel: --mirror: no process copies the checkpoints; start by launch/single_node.py"
    assert alone.stderr.startswith(line)
    process.send_signal(signal.SIGTERM)
    finish(process)
