"""Topology -> command, what the launchers refuse, and single-node runs of real torchrun processes."""

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from evenkeel.common import network
from evenkeel.common.errors import REFUSED, Refusal
from evenkeel.common.network import Link, find_link, meet
from evenkeel.config import Config
from evenkeel.distributed.exits import exit_code
from evenkeel.launch import launchers
from evenkeel.launch.topology import Command, Topology, parse_master, parse_nodes, torchrun
from tests.support.processes import LIMIT, free_port, run
from tests.support.processes import ROOT as REPOSITORY

SINGLE = str(REPOSITORY / "launch" / "single_node.py")
HERE = Link("127.0.0.1")


def command(topology: Topology, link: Link = HERE, *args: str, cores: int = 8, **environ: str) -> Command:
    return torchrun(topology, link, Path("train.py"), args, cores=cores, environ=environ)


def option(made: Command, name: str) -> str:
    return made.argv[made.argv.index(name) + 1]


def test_one_node() -> None:
    made = command(Topology(gpus=4), HERE, "--epochs", "5")
    assert made.argv[:3] == (sys.executable, "-m", "evenkeel.launch.agent")
    assert made.argv[-4:] == ("--", "train.py", "--epochs", "5")
    given = [option(made, name) for name in ("--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-endpoint")]
    assert given == ["1", "4", "3", "127.0.0.1:0"], "a free port, chosen by the kernel"
    assert "is_host=1," in option(made, "--rdzv-conf")
    store, patience = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "45"}
    assert made.env == {**store, **patience, "OMP_NUM_THREADS": "2"}
    threads = [command(Topology(gpus), cores=cores).env["OMP_NUM_THREADS"] for cores, gpus in ((8, 3), (2, 4), (1, 1))]
    assert threads == ["2", "1", "1"]
    names = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", *patience)
    mine = {**dict.fromkeys(names, "7"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0"}
    made = command(Topology(4), Link("127.0.0.1", "eth0"), **mine)
    assert made.env == store, "what the user has set stays, but for the store"


def test_nodes_of_a_job_differ_in_what_only_they_know() -> None:
    first = command(Topology(4, 2, 4, 0, "head", 1234), Link("head", "eth0"))
    third = command(Topology(4, 2, 4, 2, "head", 1234), Link("10.0.0.3", "eth1"))
    for name, value in {"--nnodes": "2:4", "--rdzv-endpoint": "head:1234", "--rdzv-id": "evenkeel-1234"}.items():
        assert option(first, name) == option(third, name) == value
    assert option(first, "--rdzv-conf").replace("is_host=1", "is_host=0") == option(third, "--rdzv-conf")
    assert (option(first, "--local-addr"), option(third, "--local-addr")) == ("head", "10.0.0.3")
    assert (first.env["GLOO_SOCKET_IFNAME"], third.env["GLOO_SOCKET_IFNAME"]) == ("eth0", "eth1")
    other = command(Topology(1, 2, 2, 0, "fd00::1", 7, run_id="tide"))
    assert (option(other, "--rdzv-endpoint"), option(other, "--rdzv-id")) == ("[fd00::1]:7", "tide")


def test_torchrun_gets_every_argument_as_it_is() -> None:
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.run import parse_args

    # --log and --signal would be ambiguous abbreviations to torchrun's argparse
    args = ["--log", "x", "--signal", "a b", "it's", '"', "$HOME ${local_rank} $$", "*", "", "--", "-m"]
    parsed = parse_args(command(Topology(2), HERE, *args).argv[3:])
    assert parsed.training_script == "train.py"
    assert macros.substitute(parsed.training_script_args, "3") == args


def test_reading_nodes_and_master() -> None:
    assert [parse_nodes(text) for text in ("3", "2:4")] == [(3, 3), (2, 4)]
    read = [parse_master(text) for text in ("node-0.cluster", "10.0.0.1:80", "[fd00::1]:80")]
    assert read == [("node-0.cluster", 29500), ("10.0.0.1", 80), ("fd00::1", 80)]


NODES = ["-n", "2", "--master", "127.0.0.1"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["-g", "0"], "--gpus 0"),
        (["-g", "-1"], "--gpus -1"),
        (["-g", "x"], "-g/--gpus x: must be a whole number"),
        (["-n", "0"], "-n 0"),
        (["-n", "4:2", "-nr", "0", "--master", "a"], "-n 4:2"),
        (["-n", "two"], "-n two"),
        (["-n", "2", "-nr", "0"], "--master is missing"),
        (NODES, "-nr is missing"),
        ([*NODES, "-nr", "2"], "0..1"),
        ([*NODES, "-nr", "-1"], "--node-rank -1"),
        (["-n", "2:4", "--master", "a", "--node-rank", "4"], "0..3"),
        (["-nr", "1"], "0..0"),
        (["-n", "2", "-nr", "0", "--master", "a:0"], "port 0"),
        (["-n", "2", "-nr", "0", "--master", "a:65536"], "65536"),
        (["-n", "2", "-nr", "0", "--master", "a:b"], "a:b"),
        (["-n", "2", "-nr", "0", "--master", "a b"], "a b"),
        (["-n", "2", "-nr", "0", "--master", "::1"], "brackets"),
        (["-n", "2", "-nr", "0", "--master", "name.invalid"], "name.invalid"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (["--epochs", "5"], "--epochs"),
        (["--script", "/no/such.py"], "/no/such.py"),
        (["--script", ""], "--script is empty (an unset shell variable?): give a value or leave it out"),
        (["--script="], "--script is empty"),
        (["-n", "2", "-nr", "0", "--master", ""], "--master is empty"),
        (["-n", "", "-nr", "0"], "-n : "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Command, "execute", lambda self: pytest.fail("started"))
    script = [] if "--script" in argv else ["--script", __file__]
    assert exit_code(lambda: launchers.main([*argv, *script], REPOSITORY / "train.py")) == REFUSED
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "no GPU here" not in line]
    assert out == ""
    assert len(lines) == 1, err
    assert lines[0].startswith("evenkeel: ")
    assert words in lines[0]


def count(gpus: int | None, each: int = 1, share: bool = False) -> int:
    return launchers.processes_of_node(replace(Config(), model_parallel=each, share_gpu=share), gpus)


def test_processes_for_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert [count(None), count(3), count(None, 2), count(2, 2), count(None, 3)] == [4, 3, 2, 1, 1]
    assert [count(5, share=True), count(None, share=True), count(None, 5, share=True)] == [5, 4, 1]
    assert [count(10, 5, share=True), count(2, share=True)] == [2, 2]
    for gpus, each, line in (
        (5, 1, r"-g 5.*CUDA_VISIBLE_DEVICES.*0,1,2,3"),
        (3, 2, r"-g 3: each process uses 2 GPUs"),
        (None, 5, r"1 process on this node with 5 GPUs each .* but 4 visible GPUs"),
    ):
        with pytest.raises(Refusal, match=line):
            count(gpus, each)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [count(5), count(5, 2)] == [5, 5], "on the CPU nothing is divided"
    assert capsys.readouterr().err == ""
    assert count(None) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.parametrize("node", [0, 1])
def test_a_dry_run_needs_no_other_node(node: int, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-n", "2", "-g", "2", "-nr", str(node), "--master", "no-such-host.invalid", "--script", __file__]
    assert launchers.main([*argv, "--dry-run"], REPOSITORY / "train.py") == 0
    printed, said = capsys.readouterr()
    meeting = f"--rdzv-endpoint no-such-host.invalid:29500 --rdzv-id evenkeel-29500 --rdzv-conf is_host={1 - node},"
    assert meeting in printed
    assert "--local-addr" not in printed
    assert said.startswith("evenkeel: --master no-such-host.invalid: cannot be reached from this node: ")
    assert said.endswith("; the command below lacks this node's address\n")
    assert exit_code(lambda: launchers.main(argv, REPOSITORY / "train.py")) == REFUSED


def test_the_kernel_knows_the_address_and_the_interface() -> None:
    assert find_link("127.0.0.1", 29500, is_master=False) == Link("127.0.0.1", "lo")
    assert find_link("localhost", 29500, is_master=True) == Link("localhost", "lo")


def test_a_master_whose_name_is_loopback_on_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian: node 0 resolves its own name to 127.0.1.1, but must not bind gloo to that."""
    resolved = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: resolved)
    routes = {"127.0.1.1": "127.0.0.1", "192.0.2.1": "10.0.0.1"}
    monkeypatch.setattr(network, "_source_address", lambda family, target: routes[target[0]])
    monkeypatch.setattr(network, "_interface", {"127.0.0.1": "lo", "10.0.0.1": "eth0"}.get)
    assert find_link("head", 29500, is_master=True) == Link("head", "eth0")
    routes["192.0.2.1"] = "127.0.0.1"
    with pytest.raises(Refusal, match=r"--master head: is 127.0.0.1 on this node"):
        find_link("head", 29500, is_master=True)


def test_meeting_the_master() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        meet("127.0.0.1", port, is_master=False, patience=5)
        with pytest.raises(Refusal, match=f"port {port} of this node.*in use"):
            meet("127.0.0.1", port, is_master=True, patience=5)
    meet("127.0.0.1", port, is_master=True, patience=5)
    with pytest.raises(Refusal, match=f"nothing answered on port {port}"):
        meet("127.0.0.1", port, is_master=False, patience=0.1)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A copy of the launcher outside of the checkout."""
    (tmp_path / "launch").mkdir()
    shutil.copy(Path(SINGLE).with_name("interpreter.py"), tmp_path / "launch")
    return Path(shutil.copy(SINGLE, tmp_path / "launch"))


def test_without_evenkeel_the_checkouts_python_takes_over(elsewhere: Path) -> None:
    python = elsewhere.parents[1] / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    done = run([sys.executable, "-E", "-s", "-S", elsewhere, "-g", 4])  # -S: without installed packages
    assert done.stdout == f"{elsewhere} -g 4\n"


def test_a_damaged_environment_is_tried_once(elsewhere: Path) -> None:
    """Without pyvenv.cfg its Python does not know the packages."""
    (elsewhere.parents[1] / ".venv" / "bin").mkdir(parents=True)
    (elsewhere.parents[1] / ".venv" / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    argv = [Path(sys.executable).resolve(), elsewhere, "-g", "4"]
    env = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(REPOSITORY / "none")}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20)
    assert done.stderr == "evenkeel: is not installed here; run: make setup\n"


TYPED = ("launch/single_node.py", "slurm/submit.py", "docker/run.py", "k8s/submit.py --image none")


@pytest.mark.parametrize("launcher", [it for it in TYPED if (REPOSITORY / it.split()[0]).exists()])
def test_a_dry_run_whose_reader_has_left_is_no_error(launcher: str) -> None:
    """As after `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    argv = [sys.executable, *launcher.split(), "--dry-run"]
    done = subprocess.run(argv, cwd=REPOSITORY, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    os.close(writing)
    assert (done.returncode, "Broken pipe" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize("found", [False, True], ids=["nothing", "only src"])
@pytest.mark.parametrize("typed", ["launch/single_node.py", "train.py", "-m evenkeel"])
def test_without_the_environment_there_is_one_line_with_the_remedy(elsewhere: Path, typed: str, found: bool) -> None:
    """Of a Python without packages, which may find our own through PYTHONPATH."""
    shutil.copy(REPOSITORY / "train.py", elsewhere.parents[1])
    source = {"PYTHONPATH": str(REPOSITORY / "src")} if found else {}
    argv = [sys.executable, "-s", "-S", *typed.split()]
    done = subprocess.run(argv, cwd=elsewhere.parents[1], env=source, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    if typed == "launch/single_node.py":
        assert line == "evenkeel: is not installed here; run: make setup"
    elif found or typed == "train.py":
        assert "type `. .venv/bin/activate`, or first `make setup`" in line
    else:
        assert line.endswith(": No module named evenkeel"), "which Python itself says"


def test_options_by_name_become_words() -> None:
    assert launchers.option_words("batch_size", 4) == ["--batch-size=4"]
    assert launchers.option_words("betas", (0.9, 0.95)) == ["--betas", "0.9", "0.95"]
    assert [launchers.option_words("compile", value) for value in (True, False)] == [["--compile"], []]
    assert [launchers.option_words("of_a_task", value) for value in (True, False)] == [
        ["--of-a-task"],
        ["--no-of-a-task"],
    ]
    assert launchers.option_words("init_from", None) == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--gpu 2", "--gpus"),
        ("--nproc_per_node 2", "--gpus"),
        ("--nodse 2", "--nodes"),
        ("--node 2", "--nodes"),
        ("--epochs 5", "-- --epochs"),
        ("--batch-sise=8", "-- --batch-size"),
    ],
)
def test_the_name_of_another_programs_option(words: str, meant: str) -> None:
    with pytest.raises(Refusal, match=rf"Unrecognized options: .*; did you mean {meant}\? \(see --help"):
        launchers.parse_arguments(launchers.MultiNode, words.split())
