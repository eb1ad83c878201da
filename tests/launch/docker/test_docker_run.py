"""docker/run.py: from a topology to the engine's command line."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evenkeel.common.errors import REFUSED, Refusal
from evenkeel.distributed.exits import exit_code
from evenkeel.launch.docker.docker_run import ContainerNode, Host, command, main
from evenkeel.launch.launchers import parse_arguments
from evenkeel.launch.topology import SHUTDOWN_SECONDS
from tests.support.processes import ROOT, environment

RUN = str(ROOT / "docker" / "run.py")


HOST = Host(uid=1234, gid=1235, root=False, gpus=False, infiniband=False, lockable=True, shm=8 << 30)


ENGINE = """#!{python}
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([sys.argv[1:], os.environ.get("WANDB_API_KEY")]) + "\\n")
sys.exit(int(os.environ["ENDS"]))
"""


def engine_command(*words: str, host: Host = HOST, **environ: str) -> list[str]:
    """What the engine would be called with."""
    typed, train_args = parse_arguments(ContainerNode, words)
    return list(command(typed, train_args, host, environ).argv)


def options(argv: list[str]) -> set[str]:
    return set(argv[2 : argv.index("launch") - 1])


def test_one_node(tmp_path: Path) -> None:
    argv = engine_command("-g", "2", "--runs", str(tmp_path), "--", "--epochs", "5")
    assert argv[:2] == ["docker", "run"]
    assert argv[argv.index("evenkeel") :] == ["evenkeel", *["launch", "--gpus", "2", "--", "--epochs", "5"]]
    launch = {word for word in options(argv) if not word.startswith("--env=EVENKEEL_LAUNCH=")}
    assert launch == {
        "--rm",
        "--user=1234:1235",
        "--read-only",
        "--tmpfs=/tmp:rw,exec,mode=1777",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--shm-size=8192m",
        f"--mount=type=bind,source={tmp_path},target=/app/runs",
        f"--stop-timeout={SHUTDOWN_SECONDS + 15}",
    }


def test_nodes_are_on_the_hosts_network_or_a_named_one() -> None:
    nodes = ["-n", "2:3", "-g", "4", "--master", "node0:1234", "--run-id", "tide"]
    first = engine_command(*nodes, "-nr", "0")
    assert "--network=host" in options(first)
    assert first[first.index("launch") :] == [
        *["launch", "--gpus", "4", "--nodes", "2:3", "--node-rank", "0"],
        *["--master", "node0:1234", "--run-id", "tide", "--"],
    ]
    first = engine_command(*nodes, "-nr", "0", "--network", "job")
    assert {"--network=job", "--network-alias=node0"} <= options(first)
    second = options(engine_command(*nodes, "-nr", "1", "--network", "job"))
    assert "--network=job" in second
    assert not [word for word in second if "alias" in word]


def test_gpus_are_those_that_are_visible() -> None:
    host = replace(HOST, gpus=True)
    assert "--gpus=all" in engine_command("-g", "2", host=host)
    assert '--gpus="device=2,3"' in engine_command("-g", "2", host=host, CUDA_VISIBLE_DEVICES="2,3")
    assert not [word for word in engine_command("-g", "2", host=host, CUDA_VISIBLE_DEVICES="") if "--gpus=" in word]
    podman = engine_command("--engine", "podman", host=host, CUDA_VISIBLE_DEVICES="2,3")
    assert {"--device=nvidia.com/gpu=2", "--device=nvidia.com/gpu=3"} < set(podman)
    assert "--device=nvidia.com/gpu=all" in engine_command("--engine", "podman", host=host)


def test_infiniband_and_the_memory_that_it_locks() -> None:
    host = replace(HOST, infiniband=True)
    assert {"--device=/dev/infiniband", "--ulimit=memlock=-1:-1"} < set(engine_command(host=host))
    host = replace(host, lockable=False)
    assert "--device=/dev/infiniband" in engine_command(host=host)
    assert not [word for word in engine_command(host=host) if "ulimit" in word], "the engine would refuse"


def test_podman_without_root_keeps_the_users_number() -> None:
    argv = engine_command("--engine", "podman")
    assert argv[:2] == ["podman", "run"]
    assert "--userns=keep-id" in argv
    assert "--userns=keep-id" not in engine_command("--engine", "podman", host=replace(HOST, root=True)), (
        "podman refuses that"
    )


def test_in_the_background_it_comes_back() -> None:
    argv = engine_command("--detach", "--name", "tide")
    assert {"--detach", "--restart=on-failure:5", "--name=tide"} < set(argv)
    assert "--rm" not in argv


def test_mounts_and_memory(tmp_path: Path) -> None:
    (tmp_path / "my job.py").touch()
    (tmp_path / "main.py").touch()
    add, main_py = str(tmp_path / "my job.py"), str(tmp_path / "main.py")
    argv = engine_command("--data", str(tmp_path), "--add", add, "--script", main_py, "--shm-size", "2g")
    assert {
        "--shm-size=2g",
        f"--mount=type=bind,source={tmp_path},target=/app/data,readonly",
        f"--mount=type=bind,source={add},target=/app/my job.py,readonly",
        f"--mount=type=bind,source={main_py},target=/app/main.py,readonly",
    } < set(argv)
    assert argv[argv.index("--script") + 1] == "main.py"
    assert "--ipc=host" in engine_command("--shm-size", "host")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--data", "/no/such"], "--data /no/such: no such folder"),
        (["--add", "/no/such.py"], "/no/such.py: no such file or folder"),
        (["--runs", "/a,b"], "/a,b: engines cannot mount a path with a comma or a quotation mark"),
        (["-n", "2", "-nr", "0"], "--master is missing: -n 2 needs the address of node 0, HOST or HOST:PORT"),
        (["-n", "2", "--master", "a"], "-nr is missing: with -n 2 give each node its own, from 0"),
        (["-g", "0"], "--gpus 0: must be at least 1"),
    ],
)
def test_refusals(words: list[str], line: str) -> None:
    with pytest.raises(Refusal) as refusal:
        engine_command(*words)
    assert str(refusal.value) == line


def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: main(["--engine", "dockr"])) == REFUSED
    assert exit_code(lambda: main(["--gpu", "2"])) == REFUSED
    first, second = capsys.readouterr().err.splitlines()
    assert "dockr" in first
    assert "--gpu" in second


def test_the_owner_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.delenv("SUDO_GID", raising=False)
    assert Host.here(tmp_path / "none").uid == os.getuid()
    if os.getuid() == 0:
        os.chown(tmp_path, 77, 78)
        host = Host.here(tmp_path)
        assert (host.uid, host.gid) == (77, 78), "root's own command, but somebody else's folder"
    monkeypatch.setenv("SUDO_UID", "55")
    monkeypatch.setenv("SUDO_GID", "56")
    own = (55, 56) if os.getuid() == 0 else (os.getuid(), os.getgid())  # a user's own variable means nothing
    assert (Host.here(tmp_path).uid, Host.here(tmp_path).gid) == own


def run(tmp_path: Path, *words: object, ends: int = 0) -> tuple[subprocess.CompletedProcess[str], list[list[object]]]:
    """Type docker/run.py where `docker` is a program that writes down what it is called with; its calls."""
    engine, calls = tmp_path / "bin" / "docker", tmp_path / "calls"
    engine.parent.mkdir(exist_ok=True)
    engine.write_text(ENGINE.format(python=sys.executable))
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    calls.write_text("")
    extra = {
        "CALLS": str(calls),
        "ENDS": str(ends),
        "WANDB_API_KEY": "sesame",
        "PATH": f"{engine.parent}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, RUN, *map(str, words)],
        cwd=tmp_path, env=environment(extra), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done, [json.loads(line) for line in calls.read_text().splitlines()]


def test_a_dry_run_prints_what_would_be_run_and_no_secret(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "-g", 2, "--dry-run", "--", "--task", "a b.py:X")
    assert done.returncode == 0
    assert not calls
    assert not (tmp_path / "runs").exists()
    assert "sesame" not in done.stdout + done.stderr
    argv = shlex.split(done.stdout)
    assert "--env=WANDB_API_KEY" in argv
    assert argv[-2:] == ["--task", "a b.py:X"]


def test_the_command_is_run_and_its_exit_code_is_ours(tmp_path: Path) -> None:
    done, (call,) = run(tmp_path, "-g", 2, ends=75)
    assert done.returncode == 75
    argv, key = call
    assert key == "sesame", "by the environment"
    assert "sesame" not in json.dumps(argv)
    assert (tmp_path / "runs").is_dir(), "the engine would make it root's"


def test_in_the_background_the_container_is_asked_first(tmp_path: Path) -> None:
    detached = ["-g", 2, "--detach", "--name", "tide", "--", "--name", "x"]
    done, calls = run(tmp_path, *detached, ends=2)
    assert done.returncode == REFUSED
    assert len(calls) == 1
    done, ((asked, _), (started, _)) = run(tmp_path, *detached)
    assert done.returncode == 0
    comes_back = {"--detach", "--restart=on-failure:5", "--name=tide"}
    assert comes_back <= set(started)  # type: ignore[call-overload]
    assert "--dry-run" not in started  # type: ignore[operator]
    assert not comes_back & set(asked)  # type: ignore[call-overload]
    assert {"--rm", "--dry-run"} < set(asked)  # type: ignore[call-overload]
    assert asked[-3:] == ["--", "--name", "x"]  # type: ignore[index]


def test_an_engine_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert exit_code(lambda: main(["--engine", "podman", "--runs", str(tmp_path / "runs")])) == REFUSED
    assert capsys.readouterr().err == "evenkeel: --engine podman: is not installed; see docs/docker.md\n"
