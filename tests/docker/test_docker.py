"""The image, built and run by a real engine. One file, so that one process has the engine and the image."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import evenkeel
from evenkeel.common.errors import REFUSED
from evenkeel.launch.topology import SHUTDOWN_SECONDS
from evenkeel.resilience.interruption import STOPPED
from tests.docker.conftest import IMAGE, SECRETS, Built
from tests.docker.engine import Engine, wait_for
from tests.support import processes, small_runs
from tests.support.copies import copy_of_the_template, needs_all_components
from tests.support.processes import ROOT, TRAIN, read, torchrun
from tests.support.readme import blocks
from tests.support.small_runs import SUPPORT, TASK, steps_of, told_step
from tests.support.thin import OFFLINE

pytestmark = pytest.mark.timeout(1200)

RECORDED = "recording_task.py:Recorded"
HARDENED = ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", "4242:4242"]
SHAPE = ["--batch-size", "12", "--micro-batch", "3", "--log-every", "1", "--wandb", "disabled"]
USER = 4242


def mounts(runs: Path) -> list[str]:
    """A run directory, and the slow task of the other tests."""
    return ["-v", f"{runs}:/app/runs", "-v", f"{SUPPORT / 'recording_task.py'}:/app/recording_task.py:ro"]


def starts(run_dir: Path) -> list[int]:
    """The step at which each attempt began."""
    return small_runs.starts(run_dir) if (run_dir / "metrics.jsonl").exists() else []


def goes_on_from(run_dir: Path, told: int) -> bool:
    """Whether the last start was at the step that rank 0 told of, or at the next one, which another rank may have
    finished when the signal came: the newest that any of them has saved counts."""
    first, *_, second = starts(run_dir)
    return first == 0 and second - told in (0, 1)


def no_step_is_missing(run_dir: Path) -> bool:
    """Whether the metrics have every step. One may be there twice: that during which the last was being saved. One that
    another rank has saved has no line, because rank 0, which writes them, did not come to its end."""
    steps = set(steps_of(run_dir))
    return set(range(1, max(steps) + 1)) - steps <= set(starts(run_dir))


def owners(folder: Path) -> set[int]:
    return {path.lstat().st_uid for path in [folder, *folder.rglob("*")]}


def test_the_image_is_what_it_says(built: Built) -> None:
    engine = built.engine
    facts = engine.inspect(IMAGE)
    config = facts["Config"]
    assert config["User"] == "1000:1000"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["python", "-m", "evenkeel.launch.docker.container"]
    assert config["Healthcheck"]["Test"] == ["CMD", "python", "-m", "evenkeel.resilience.heartbeat"]
    assert config["Labels"]["org.opencontainers.image.version"] == evenkeel.__version__
    assert config["Labels"]["org.opencontainers.image.revision"] == built.revision
    look = "ls /root /app /tmp; command -v gcc cc make; ls -d /opt/venv/bin/pip* /root/.cache"
    seen = engine.docker("run", "--rm", "--user", "0", "--entrypoint", "sh", IMAGE, "-c", look, expect=None).stdout
    assert sorted(seen.split()) == ["/app:", "/root:", "/tmp:", "data", "runs", "src", "train.py"]
    print(f"{facts['Size'] / 1e9:.2f} GB, built in {built.seconds:.0f} s")
    print(engine.docker("history", "--format", "{{.Size}}\t{{.CreatedBy}}", IMAGE).stdout)


def test_no_secret_is_in_any_layer(built: Built) -> None:
    driver = built.engine.inspect(IMAGE)["GraphDriver"]["Data"]
    layers = [*driver["LowerDir"].split(":"), driver["UpperDir"]]
    assert len(layers) >= 4

    def search(*words: str) -> str:
        expressions = [option for word in words for option in ("-e", word)]
        grep = ["grep", "-rlF", *expressions, *layers]
        return subprocess.run(grep, capture_output=True, text=True, env={"LC_ALL": "C", **os.environ}).stdout

    assert search(*SECRETS) == ""
    assert search("Whoever runs this may write here") == "", "the Dockerfile is no part of the image"
    assert "/app/train.py" in search("Train a task on one process or many"), "the control: what is there is found"
    told = built.engine.docker("history", "--no-trunc", IMAGE).stdout + json.dumps(built.engine.inspect(IMAGE))
    assert not any(secret in told for secret in SECRETS)


def test_a_change_of_one_line_leaves_the_packages_alone(built: Built, tmp_path: Path) -> None:
    for name in (".dockerignore", "pyproject.toml", "requirements.lock", "train.py"):
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in ("docker", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "train.py").open("a") as file:
        file.write("# a change\n")
    seconds = built.engine.build(f"{IMAGE}:changed", tmp_path)
    print(f"rebuilt in {seconds:.1f} s")
    before, after = (built.engine.inspect(name)["RootFS"]["Layers"] for name in (IMAGE, f"{IMAGE}:changed"))
    assert after[:-1] == before[:-1]
    assert after[-1] != before[-1]


def test_hardened_it_learns_the_digits_and_comes_back_after_75_and_not_after_0(built: Built, runs: Path) -> None:
    """By docker/run.py in the background. With --fresh, which must count once."""
    engine = built.engine
    run = [sys.executable, ROOT / "docker" / "run.py", "-g", 2, "--image", IMAGE, "--runs", runs, "--detach"]
    refused = engine.command(*run, "--name", "refused", "--", "--lr", "-1", expect=REFUSED)
    assert "evenkeel: --lr -1.0: must be at least 0" in refused.stderr
    assert "refused" not in engine.docker("ps", "-a", "--format", "{{.Names}}").stdout

    engine.command(*run, "--name", "hardened", "--", "--fresh", "--log-every", 1, "--run-dir", "runs/hardened")
    facts = engine.inspect("hardened")
    assert facts["Config"]["User"] == f"{USER}:{USER}", "root typed it, but the folder's owner is to have the files"
    assert facts["HostConfig"]["ReadonlyRootfs"]
    assert facts["HostConfig"]["CapDrop"] == ["ALL"]
    assert facts["Config"]["StopTimeout"] > SHUTDOWN_SECONDS
    run_dir = runs / "hardened"
    wait_for(lambda: told_step(run_dir) >= 20, "step 20", more=lambda: engine.logs("hardened"))
    engine.docker("exec", "hardened", "python", "-c", f"import os; os.kill(1, {int(signal.SIGTERM)})")
    assert engine.ended("hardened") == 0
    assert engine.inspect("hardened")["RestartCount"] == 1
    saved = re.search(r"stopped by SIGTERM; step (\d+) is saved", engine.logs("hardened"))
    assert int(saved[1]) >= 20
    assert goes_on_from(run_dir, int(saved[1]))
    assert no_step_is_missing(run_dir)
    assert read(run_dir)["metrics"]["test/accuracy"] >= 0.98
    assert owners(runs) == {USER}
    engine.docker("rm", "hardened")


def test_a_frozen_rank_is_told_and_a_stop_saves_and_a_start_goes_on(built: Built, runs: Path) -> None:
    engine, run_dir = built.engine, runs / "run"
    often = ["--health-interval=1s", "--health-retries=2", "--health-start-period=0s"]
    job = ["--task", RECORDED, *SHAPE, "--pause", 0.2, "--epochs", 100, "--max-steps", 150, "--hang-timeout", 0]
    engine.docker("run", "-d", "--name", "node", *HARDENED, *often, *mounts(runs), IMAGE, "--nproc_per_node=2",
                  "train.py", *job, "--run-dir", "runs/run")  # fmt: skip

    def health(status: str) -> str:
        now = engine.inspect("node")["State"]["Health"]
        return str(now["Log"][-1]["Output"]) if now["Status"] == status and now["Log"] else ""

    def more() -> str:
        return engine.logs("node") + json.dumps(engine.inspect("node")["State"])

    wait_for(lambda: told_step(run_dir) >= 3, "step 3", more=more)
    wait_for(lambda: "2 ranks, rank 0 in" in health("healthy"), "health", more=more)
    victim = engine.ranks("node")[1]
    os.kill(victim, signal.SIGSTOP)
    told = wait_for(lambda: health("unhealthy"), "illness", more=more)
    print(told)
    assert re.search(r"rank 1 is frozen: no heartbeat for \d+ s, last seen in .* of step \d+; process \d+: ", told)
    assert "it has been stopped (SIGSTOP)" in told
    os.kill(victim, signal.SIGCONT)
    wait_for(lambda: health("healthy"), "recovery", more=more)
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: len(starts(run_dir)) == 2 and told_step(run_dir) >= starts(run_dir)[1] + 1, "its next", more=more)
    assert read(run_dir, "status.json")["restarts_in_place"] == 1

    engine.docker("stop", "--time", 60, "node")
    assert engine.ended("node") == STOPPED
    stopped = read(run_dir, "status.json")
    assert stopped["state"] == "stopped"
    assert 3 <= stopped["step"] < 150
    engine.docker("start", "node")
    wait_for(lambda: told_step(run_dir) >= stopped["step"] + 2, "the next steps", more=more)
    assert goes_on_from(run_dir, stopped["step"])
    assert no_step_is_missing(run_dir)
    assert " Z" not in engine.docker("top", "node", "-o", "pid,stat,args").stdout
    engine.docker("stop", "--time", 60, "node")
    assert engine.ended("node") == STOPPED
    assert owners(runs) == {USER}
    engine.docker("rm", "node")


@pytest.mark.long
def test_two_nodes_by_compose_lose_one_stop_and_have_the_bits_of_two_processes(built: Built, tmp_path: Path) -> None:
    """Two containers of two ranks each on a network of their own, elastic 1:2, and the tree."""
    engine = built.engine
    job = [*SHAPE, "--reduce", "tree", "--epochs", "12", "--pause", "1", "--hold", "runs/hold"]
    processes.run(torchrun(2, TRAIN, "--task", TASK, "--run-dir", tmp_path / "here", *job))

    task = {"volumes": [f"{ROOT}/tests/support/recording_task.py:/app/recording_task.py:ro"]}
    more = {"version": "3.8", "services": {"node0": task, "node1": task}}
    (tmp_path / "more.json").write_text(json.dumps(more))
    env = {"IMAGE": IMAGE, "OPTIONS": f"--task {RECORDED} {' '.join(job)}"}
    files = ["-f", ROOT / "docker" / "compose.yaml", "-f", tmp_path / "more.json"]

    def compose(*words: str) -> str:
        done = engine.command("docker-compose", "-p", "pair", *files, *words, env=env)
        return done.stdout + done.stderr

    def container(service: str) -> str:
        return compose("ps", "-q", service).split()[0]

    def more_to_see() -> str:
        return compose("logs", "--tail", "60")

    compose("up", "--no-start", "--no-build")
    try:
        volume = Path(json.loads(engine.docker("volume", "inspect", "pair_runs").stdout)[0]["Mountpoint"])
        (volume / "hold").touch()  # as long as it is there, steps are slow: the job must not be over too soon
        compose("start")
        run_dir = volume / "compose"

        def with_nodes(count: int, since: int) -> bool:
            """Whether another attempt than those before has made two steps on so many nodes."""
            if not (run_dir / "status.json").exists() or len(starts(run_dir)) <= since:
                return False
            sizes = read(run_dir, "status.json")["world_sizes"]
            return bool(sizes[-1] == 2 * count) and told_step(run_dir) >= starts(run_dir)[-1] + 2

        wait_for(lambda: with_nodes(2, 0), "both nodes", more=more_to_see)
        before = len(starts(run_dir))
        compose("kill", "node1")
        wait_for(lambda: with_nodes(1, before), "node 0 alone", more=more_to_see)
        before = len(starts(run_dir))
        compose("start", "node1")
        wait_for(lambda: with_nodes(2, before), "node 1 again", more=more_to_see)
        compose("stop")
        assert [engine.inspect(container(name))["State"]["ExitCode"] for name in ("node0", "node1")] == [STOPPED] * 2
        stopped = read(run_dir, "status.json")
        assert stopped["state"] == "stopped"
        before = len(starts(run_dir))
        (volume / "hold").unlink()
        compose("start")
        assert [engine.ended(container(name)) for name in ("node0", "node1")] == [0, 0], more_to_see()
        assert starts(run_dir)[before] == stopped["step"]
        assert no_step_is_missing(run_dir)
        assert read(run_dir)["weights_sha256"] == read(tmp_path / "here")["weights_sha256"]
        assert owners(run_dir) == {1000}
    finally:
        compose("down", "--volumes")


def refused(engine: Engine, *words: object) -> str:
    """The one line with which a container is refused."""
    done = engine.docker("run", "--rm", *words, expect=REFUSED)
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
    return line


def test_what_would_hang_is_refused(built: Built, runs: Path) -> None:
    engine = built.engine
    line = refused(engine, "--network", "none", IMAGE, "--nproc_per_node=2", "train.py")
    assert re.search(r"^evenkeel: this container's host name \w+ does not resolve, as with --network none", line)

    job = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29511", "train.py"]
    hosts = ["--network", "host", "--hostname", "twin", "--add-host", "twin:127.0.0.1"]
    engine.docker("run", "-d", "--name", "first", *hosts, IMAGE, *job)
    abstract = "import pathlib, sys; sys.exit('@evenkeel/' not in pathlib.Path('/proc/net/unix').read_text())"

    def has_its_place() -> bool:
        return engine.docker("exec", "first", "python", "-c", abstract, expect=None).returncode == 0

    wait_for(has_its_place, "the first container's place", more=lambda: engine.logs("first"))
    line = refused(engine, *hosts, IMAGE, *job)
    assert re.match("evenkeel: another container of this job is on this network as (twin|localhost); ", line)
    engine.docker("kill", "--signal", "TERM", "first")
    assert engine.ended("first") == STOPPED, "it has waited for a second node, and ends at once when asked to"
    engine.docker("rm", "first")

    (runs / "mine").mkdir()
    line = refused(engine, *mounts(runs), IMAGE, "--nproc_per_node=2", "train.py", "--run-dir", "runs/mine/x")
    assert re.search(r"user 1000 may not write in /app/runs/mine, which belongs to 0 \(drwxr-xr-x\)", line)


def test_a_refusal_is_the_end_after_as_many_returns_as_the_engine_may(built: Built) -> None:
    """An engine that restarts on failure cannot tell 2 from 75; it must not go on for ever."""
    engine = built.engine
    engine.docker("run", "-d", "--name", "loop", "--restart=on-failure:2", IMAGE, "--nproc_per_node=1", "nothing.py")

    def over() -> bool:
        facts = engine.inspect("loop")
        return bool(facts["State"]["Status"] == "exited" and facts["RestartCount"] == 2)

    wait_for(over, "the last return", more=lambda: engine.logs("loop"))
    assert engine.inspect("loop")["State"]["ExitCode"] == REFUSED
    assert engine.logs("loop").count("evenkeel: nothing.py: no such file in this container") == 3
    engine.docker("rm", "loop")


def test_the_lines_of_the_readme(built: Built, tmp_path: Path) -> None:
    """The image is built again, from the layers that it has in common with the one before.

    Those were built in the machine's network, which is a part of their names.
    """
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    (checkout / ".venv").symlink_to(Path(sys.prefix))
    (block,) = blocks("bash docker")
    lines = block.splitlines()
    assert len(lines) == 3
    for line in lines:
        typed = line.replace("docker build", "docker build --network host")
        done = processes.run(["bash", "-c", typed], checkout, built.engine.env, limit=600)
    assert "finished" in done.stdout
    assert read(checkout / "runs" / "in-a-container")["world_sizes"] == [2]


BASE_OF_THIN = f"""FROM {IMAGE}
USER 0:0
WORKDIR /
RUN rm -r /app
ENV PATH=/usr/local/bin:/usr/bin:/bin
ENTRYPOINT []
"""
"""Python and the packages of the image above, so that the next one needs no network."""


@needs_all_components
def test_the_image_of_a_thin_project(built: Built, tmp_path: Path) -> None:
    engine = built.engine
    copy = copy_of_the_template(tmp_path / "copy")
    processes.run([sys.executable, "tools/make_it_yours.py", "tide", "--thin", "--with", "docker"], copy, OFFLINE)
    (tmp_path / "base" / "docker").mkdir(parents=True)
    (tmp_path / "base" / "docker" / "Dockerfile").write_text(BASE_OF_THIN)
    engine.build("base-of-thin", tmp_path / "base")
    words = "PIP_WORDS=--no-index --no-build-isolation"
    seconds = engine.build("tide", tmp_path / "tide", "--build-arg", "BASE_IMAGE=base-of-thin", "--build-arg", words)
    print(f"built in {seconds:.0f} s")

    look = "ls /app; python -c 'import evenkeel; print(evenkeel.__file__)'"
    seen = engine.docker("run", "--rm", "--entrypoint", "sh", "tide", "-c", look).stdout.split()
    assert seen[:-1] == ["data", "pyproject.toml", "runs", "tide", "train.py", "wheels"]
    assert seen[-1].startswith("/opt/venv/lib/"), "the package of the wheel"

    typed = [sys.executable, "docker/run.py", "-g", "2", "--image", "tide", "--", "--max-steps", "3"]
    done = processes.run([*typed, "--run-dir", "runs/thin", "--wandb", "disabled"], tmp_path / "tide", engine.env)
    assert "finished" in done.stdout
    assert read(tmp_path / "tide" / "runs" / "thin")["world_sizes"] == [2]
    assert 'task = "tide.task:Digits"' in (tmp_path / "tide" / "runs" / "thin" / "config.toml").read_text()
