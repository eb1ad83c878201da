"""docker/run.py: from a topology to the engine's command line; and the main process of a container, without one."""

import json
import os
import re
import shlex
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evenkeel.common.errors import REFUSED, Refusal
from evenkeel.distributed.exits import exit_code
from evenkeel.launch.docker import container_job
from evenkeel.launch.docker.container_job import hold_places, refuse_unwritable, warn_of_small_shm
from evenkeel.launch.docker.docker_run import ContainerNode, Host, command, main
from evenkeel.launch.launchers import parse_arguments
from evenkeel.launch.topology import SHUTDOWN_SECONDS, refuse_useless_gpus
from evenkeel.resilience.heartbeat import VARIABLE
from tests.support import needs, processes
from tests.support.processes import ROOT, Done, Process, checked, finish, start

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


def test_one_node(tmp_path: Path) -> None:
    argv = engine_command("-g", "2", "--runs", str(tmp_path), "--", "--epochs", "5")
    image = argv.index("evenkeel")
    assert argv[:2] == ["docker", "run"]
    assert argv[image:] == ["evenkeel", "launch", "--gpus", "2", "--", "--epochs", "5"]
    assert {word for word in argv[2:image] if not word.startswith("--env=EVENKEEL_LAUNCH=")} == {
        *("--rm", "--user=1234:1235", "--read-only", "--tmpfs=/tmp:rw,exec,mode=1777", "--cap-drop=ALL"),
        *("--security-opt=no-new-privileges", "--shm-size=8192m", f"--stop-timeout={SHUTDOWN_SECONDS + 15}"),
        f"--mount=type=bind,source={tmp_path},target=/app/runs",
    }


@pytest.mark.parametrize("where", ["script", "working folder"])
def test_the_image_has_the_projects_name(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `docker build -t NAME` in the README of a thin project."""
    (tmp_path / "tide" / "docker").mkdir(parents=True)
    (tmp_path / "tide" / "pyproject.toml").write_text('[project]\nname = "tide"\n')
    monkeypatch.chdir(tmp_path / "tide" if where == "working folder" else tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "tide" / "docker" / "run.py") if where == "script" else "pytest"])
    assert "tide" in engine_command("-g", "2", "--runs", "runs")
    assert "tide" not in engine_command("-g", "2", "--runs", "runs", "--image", "reef")


NODES = ["-n", "2:3", "-g", "4", "--master", "node0:1234", "--run-id", "tide"]
GPUS, WIRED = replace(HOST, gpus=True), replace(HOST, infiniband=True)
PODMAN = ["--engine", "podman"]


@pytest.mark.parametrize(
    ("words", "host", "visible", "there", "absent"),
    [
        ([*NODES, "-nr", "0"], HOST, None, ["--network=host"], ""),
        ([*NODES, "-nr", "0", "--network", "job"], HOST, None, ["--network=job", "--network-alias=node0"], ""),
        ([*NODES, "-nr", "1", "--network", "job"], HOST, None, ["--network=job"], "alias"),
        (["-g", "2"], GPUS, None, ["--gpus=all"], ""),
        (["-g", "2"], GPUS, "2,3", ['--gpus="device=2,3"'], ""),
        (["-g", "2"], GPUS, "", [], "--gpus="),
        (["-g", "2"], GPUS, "-1", [], "--gpus="),
        (PODMAN, GPUS, "NoDevFiles", [], "--device="),
        (PODMAN, GPUS, "2,3", ["--device=nvidia.com/gpu=2", "--device=nvidia.com/gpu=3"], "=all"),
        (PODMAN, GPUS, None, ["--device=nvidia.com/gpu=all"], ""),
        ([], WIRED, None, ["--device=/dev/infiniband", "--ulimit=memlock=-1:-1"], ""),
        ([], replace(WIRED, lockable=False), None, ["--device=/dev/infiniband"], "ulimit"),  # which would be refused
        (PODMAN, HOST, None, ["podman", "--userns=keep-id"], ""),
        (PODMAN, replace(HOST, root=True), None, ["podman"], "--userns"),  # podman refuses that
        (["--detach", "--name", "tide"], HOST, None, ["--detach", "--restart=on-failure:5", "--name=tide"], "--rm"),
        (["--shm-size", "host"], HOST, None, ["--ipc=host"], "--shm-size"),
    ],
)
def test_engine_options(words: list[str], host: Host, visible: str | None, there: list[str], absent: str) -> None:
    argv = engine_command(*words, host=host, **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    given = argv[: argv.index("launch")]
    assert set(there) <= set(given)
    assert not absent or not [word for word in given if absent in word]


def test_a_node_is_told_its_place() -> None:
    words = ["--gpus", "4", "--nodes", "2:3", "--node-rank", "0", "--master", "node0:1234", "--run-id", "tide", "--"]
    argv = engine_command(*NODES, "-nr", "0")
    assert argv[argv.index("launch") :] == ["launch", *words]


def test_mounts(tmp_path: Path) -> None:
    add, main_py = str(tmp_path / "my job.py"), str(tmp_path / "main.py")
    for path in (add, main_py):
        Path(path).touch()
    argv = engine_command("--data", str(tmp_path), "--add", add, "--script", main_py, "--shm-size", "2g")
    targets = {tmp_path: "data", add: "my job.py", main_py: "main.py"}
    mounts = {f"--mount=type=bind,source={path},target=/app/{name},readonly" for path, name in targets.items()}
    assert {"--shm-size=2g", *mounts} < set(argv)
    assert argv[argv.index("--script") + 1] == "main.py"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--data", "/no/such"], "--data /no/such: no such folder"),
        (["--add", "/no/such.py"], "/no/such.py: no such file or folder"),
        (["--runs", "/a,b"], "/a,b: engines cannot mount a path with a comma or a quotation mark"),
        (["-n", "2", "-nr", "0"], "--master is missing: -n 2 needs the address of node 0, HOST or HOST:PORT"),
        (["-n", "2", "--master", "a"], "-nr is missing: with -n 2 give each node its own, from 0"),
        (["-g", "0"], "--gpus 0: must be at least 1"),
        (["--env", "KEY=sesame"], "--env KEY: is not set here; export it, and give only its name"),
    ],
)
def test_refusals(words: list[str], line: str) -> None:
    with pytest.raises(Refusal) as refusal:
        engine_command(*words)
    assert str(refusal.value) == line


def test_what_cannot_be_started_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = [*PODMAN, "--runs", str(tmp_path / "runs")]
    for words, line in (
        (["--engine", "dockr"], "dockr"),
        (["--gpu", "2"], "--gpu"),
        (absent, "evenkeel: --engine podman: is not installed; see docs/docker.md"),
    ):
        assert exit_code(lambda words=words: main(words)) == REFUSED
        (said,) = capsys.readouterr().err.splitlines()
        assert line in said


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


def test_a_machine_without_shared_memory_leaves_its_size_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac. Its engine runs in a virtual machine."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Path(f"/nowhere{path}").stat())
    argv = engine_command("-g", "2", "--runs", str(tmp_path), host=Host.here(tmp_path))
    assert not any("shm-size" in word for word in argv)


def test_the_services_of_compose_have_different_gpus() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    assert re.findall(r"device_ids: (\[.*?\])", text) == ['["0"]', '["1"]']
    assert "count:" not in text


def run(tmp_path: Path, *words: object, ends: int = 0) -> tuple[Done, list]:
    """Type docker/run.py where `docker` is a program that writes down what it is called with; its calls."""
    engine, calls = tmp_path / "bin" / "docker", tmp_path / "calls"
    engine.parent.mkdir(exist_ok=True)
    engine.write_text(ENGINE.format(python=sys.executable))
    engine.chmod(0o755)
    calls.write_text("")
    env = {"CALLS": str(calls), "ENDS": str(ends), "WANDB_API_KEY": "sesame"}
    env["PATH"] = f"{engine.parent}:{os.environ['PATH']}"
    done = processes.run([sys.executable, ROOT / "docker" / "run.py", *words], cwd=tmp_path, env=env, expect=None)
    return done, [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_command_is_run_or_printed_without_a_secret_and_its_exit_code_is_ours(tmp_path: Path) -> None:
    done, calls = run(tmp_path, "-g", 2, "--env", "CALLS", "--dry-run", "--", "--task", "a b.py:X")
    assert (done.returncode, calls, (tmp_path / "runs").exists()) == (0, [], False)
    assert "sesame" not in done.stdout + done.stderr
    assert ("no GPU here" in done.stderr) != Path("/dev/nvidiactl").exists(), (
        "the line may be copied to another machine"
    )
    argv = shlex.split(done.stdout)
    assert {"--env=WANDB_API_KEY", "--env=CALLS"} < set(argv)
    assert argv[-2:] == ["--task", "a b.py:X"]
    done, ((argv, key),) = run(tmp_path, "-g", 2, ends=75)
    assert done.returncode == 75
    assert key == "sesame", "by the environment"
    assert "sesame" not in json.dumps(argv)
    assert (tmp_path / "runs").is_dir(), "the engine would make it root's"


def test_in_the_background_the_container_is_asked_first(tmp_path: Path) -> None:
    detached = ["-g", 2, "--detach", "--name", "tide", "--", "--name", "x"]
    done, calls = run(tmp_path, *detached, ends=2)
    assert (done.returncode, len(calls)) == (REFUSED, 1)
    done, ((asked, _), (started, _)) = run(tmp_path, *detached)
    assert done.returncode == 0
    comes_back = {"--detach", "--restart=on-failure:5", "--name=tide"}
    assert comes_back <= set(started)
    assert "--dry-run" not in started
    assert not comes_back & set(asked)
    assert {"--rm", "--dry-run"} < set(asked)
    assert asked[-3:] == ["--", "--name", "x"]


def container(tmp_path: Path, *arguments: object) -> Process:
    """Its main process, in the folder where the image has train.py."""
    command = [sys.executable, "-m", "evenkeel.launch.docker.container", *arguments]
    return start(command, env={VARIABLE: str(tmp_path / "beats")})


def test_help_tells_both_forms(tmp_path: Path) -> None:
    help_ = checked(finish(container(tmp_path)), 0).stdout
    assert "docker run IMAGE --nproc_per_node=2 train.py" in help_
    assert "docker run IMAGE launch -n 2" in help_


def test_names_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "nobody.invalid")
    monkeypatch.setattr(container_job, "set_environment", lambda: None)
    with pytest.raises(Refusal, match=r"host name nobody\.invalid does not resolve, as with --network none"):
        container_job.job(["launch"])


def test_two_containers_in_one_place() -> None:
    rendezvous = f"here {os.getpid()}"
    try:
        hold_places(rendezvous, "one")
        with pytest.raises(Refusal, match="another container of this job is on this network as"):
            hold_places(rendezvous, "two")  # another address, the same host name
        hold_places(f"{rendezvous} another job", "one")
    finally:
        while container_job._claims:
            container_job._claims.pop().close()
    hold_places(rendezvous, socket.gethostname())
    container_job._claims.pop().close()


def test_a_small_shm(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_small_shm(0, 64 << 20)
    warn_of_small_shm(2, 8 << 30)
    assert capsys.readouterr().err == ""
    warn_of_small_shm(2, 64 << 20)
    assert "/dev/shm, which has only 64 MB, and die of a bus error" in capsys.readouterr().err


@needs.root("be somebody else")
def test_a_run_directory_of_somebody_else(tmp_path: Path) -> None:
    os.chown(tmp_path, 1234, 1235)
    refuse_unwritable(tmp_path / "runs" / "classify")
    os.setresuid(4242, 0, 0)  # access(2) asks the real user
    try:
        with pytest.raises(Refusal, match=r"user 4242 may not write in .*, which belongs to 1234 .* --user 1234:1235"):
            refuse_unwritable(tmp_path / "runs" / "classify")
    finally:
        os.setresuid(0, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use this machine's GPUs")
def test_gpus_that_torch_cannot_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_useless_gpus(tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(Refusal, match="the driver is too old or broken, or torch is built without CUDA"):
        refuse_useless_gpus(tmp_path)
    for hidden in ("", "-1", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        refuse_useless_gpus(tmp_path)
