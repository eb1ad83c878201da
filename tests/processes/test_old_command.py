"""The interface of jobs by `mp.spawn`: python train.py -n 2 -g 4 -nr 0."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.common.processes import REFUSAL
from evenkeel.launch.launchers import topology_in
from tests.support.processes import TRAIN, finish_all, free_port, read, run, start, torchrun


@pytest.fixture(autouse=True)
def _no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("typed", "becomes"),
    [
        ("-n 1 -g 2 -nr 0 --epochs 3", "--nodes=1 --gpus=2 --node-rank=0 -- --epochs 3"),
        ("--epochs 3 -g2", "--gpus=2 -- --epochs 3"),
        ("--nodes 2:4 --node-rank 1 --master a:1 --lr 1", "--nodes=2:4 --node-rank=1 --master=a:1 -- --lr 1"),
        ("--epochs 3", ""),
        ("", ""),
    ],
)
def test_the_topology_is_taken_out_of_the_options(typed: str, becomes: str) -> None:
    assert topology_in(typed.split()) == becomes.split()


def test_the_variables_of_old_scripts_name_node_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert "--master=node0:29500" in topology_in(["-n", "2", "-nr", "1"])
    assert "--master=other" in topology_in(["-n", "2", "-nr", "1", "--master", "other"])
    assert topology_in(["-n", "1", "-g", "1"]) == ["--nodes=1", "--gpus=1", "--"]
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert "--master=node0:1234" in topology_in(["-n", "2", "-nr", "1"])


def test_one_node_and_two(tmp_path: Path) -> None:
    """On one machine; two nodes find each other as two machines would."""
    train, quick = [sys.executable, TRAIN], ["--epochs", 1, "--wandb", "disabled", "--run-dir"]
    run([*train, "-n", 1, "-g", 2, "-nr", 0, *quick, tmp_path / "one"])
    two = ["-n", 2, "-g", 1, "--master", f"127.0.0.1:{free_port()}", *quick, tmp_path / "two"]
    finish_all([start([*train, "-nr", node, *two]) for node in (0, 1)])
    assert [read(tmp_path / name)["world_sizes"] for name in ("one", "two")] == [[2], [2]]


def test_what_cannot_be_meant_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="-g"):
        topology_in(["-n", "1", "-g"])
    for words, line in (
        (["-n", 2, "-g", 1, "--master", "a"], "-nr is missing: with -n 2 give each node its own, from 0"),
        (["-g", 1, "--lr", -1, "--run-dir", tmp_path / "run"], "--lr -1.0: must be at least 0"),
    ):
        assert run([sys.executable, TRAIN, *words], expect=2).stderr == f"evenkeel: {line}\n"
    done = run(torchrun(2, TRAIN, "-n", "1", "-g", "2"), expect=-REFUSAL)
    assert "evenkeel: --nodes=1: torchrun has started the ranks; leave it out, or type python" in done.stderr
    assert list(tmp_path.iterdir()) == []
