"""--replicate 1 and --shard N: a node that is lost with its ranks and keepers costs no step that all ranks had."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.tasks.command_line import parse
from tests.promises.test_sharded_state import RARE, job, log_of, one_rank, slowed  # noqa: F401  (fixtures)
from tests.support import needs
from tests.support import small_runs as runs
from tests.support.processes import ROOT, TRAIN, Process, finish, free_port, kill_group, start, wait_beside

pytestmark = needs.sharding


def node(number: int, port: int, run_dir: Path, *more: object) -> Process:
    """One of two nodes of two ranks each, by its agent."""
    words = ["--nnodes=2", "--nproc_per_node=2", f"--node_rank={number}", "--master_addr=127.0.0.1"]
    command = [sys.executable, "-m", "torch.distributed.run", *words, f"--master_port={port}", "--max-restarts=0"]
    return start([*command, TRAIN, *job(run_dir, *RARE, *more)])


def two_nodes(run_dir: Path, *more: object) -> list[Process]:
    port = free_port()
    return [node(number, port, run_dir, *more) for number in range(2)]


def lose_a_node(run_dir: Path, *more: object, held: Path | None = None, lost: int = 1) -> None:
    """Start two nodes, and kill the agent, keepers and ranks of one after step 4, or when there is a file."""
    nodes = two_nodes(run_dir, *more)
    other, (first,) = nodes.pop(lost), nodes
    try:
        wait_beside(first, lambda: held.exists() if held else runs.told_step(run_dir) >= 4, "the moment")
        keepers = runs.keepers_of(other)
        assert sorted(keepers) == [2 * lost, 2 * lost + 1]
        for keeper in keepers.values():
            os.killpg(keeper, signal.SIGKILL)  # its trainer is in the same process group
        other.kill()
        assert finish(first).returncode != 0
    finally:
        kill_group(other)
        kill_group(first)


def goes_on_in_the_bits_of_one(run_dir: Path, one_rank: str, *more: object) -> None:
    """Two nodes run to the end, no step was done twice, and the weights are those of one rank."""
    for each in two_nodes(run_dir, *(more or ("--replicate", 1))):
        runs.ended(each)
    assert runs.no_step_is_done_twice(run_dir)
    assert runs.weights_of(run_dir) == one_rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "lost"), [(("--replicate", 1), 1), needs.long(("--shard", 2), 1), needs.long(("--shard", 2), 0)]
)
def test_a_lost_node_costs_no_step_that_all_ranks_had(run_dir: Path, one_rank: str, words: Any, lost: int) -> None:
    lose_a_node(run_dir, *words, lost=lost)
    goes_on_in_the_bits_of_one(run_dir, one_rank, *words)
    assert len(runs.starts(run_dir)) == 2
    assert runs.starts(run_dir)[1] >= 4
    assert "a lost node costs none either" in log_of(run_dir)


@pytest.mark.long
def test_fewer_ranks_go_on_at_that_step_too(run_dir: Path, one_rank: str) -> None:
    lose_a_node(run_dir, "--replicate", 1)
    runs.trained(2, job(run_dir, *RARE, "--replicate", 1))
    assert runs.starts(run_dir)[1] >= 4
    assert "copies nothing, because one node has more than half of the ranks" in log_of(run_dir)
    assert runs.weights_of(run_dir) == one_rank


@pytest.mark.long
def test_ranks_killed_in_exchanges_cost_no_step(run_dir: Path, one_rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has stored the step in its slot before, so all go on from there in place."""
    monkeypatch.setenv("STRIKES", "replica:2:3 replica:0:5 replica:all:8")
    goes_on_in_the_bits_of_one(run_dir, one_rank)
    assert sorted(set(runs.starts(run_dir))) == [0, 3, 5, 8]


@pytest.mark.parametrize("strikes", [needs.slow("hold:2:4"), needs.long("loss:1:3 hold:2:0")])
def test_a_node_killed_while_its_rows_are_on_their_way_costs_no_step_that_was_over(
    run_dir: Path, tmp_path: Path, one_rank: str, strikes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has overwritten its older copy of rank 2's rows with half of nothing: that copy does not count. Or a new
    attempt sends rows, after a kill and in place: copies of the one before count until its own are whole."""
    monkeypatch.setenv("STRIKES", strikes)
    lose_a_node(run_dir, "--replicate", 1, held=tmp_path / f"{strikes.split()[-1]}-2")
    goes_on_in_the_bits_of_one(run_dir, one_rank)
    assert runs.starts(run_dir)[-1] == 3
    assert strikes != "hold:2:4" or runs.starts(run_dir) == [0, 3]


@pytest.mark.slow
def test_the_control_without_it_the_steps_since_the_checkpoint_are_done_again(run_dir: Path, one_rank: str) -> None:
    lose_a_node(run_dir)
    runs.trained(2, job(run_dir))
    assert runs.starts(run_dir) == [0, 0]
    assert runs.weights_of(run_dir) == one_rank


def test_it_is_refused_without_shards_and_for_two_copies() -> None:
    with pytest.raises(Refusal, match="--replicate 1: needs --shard on"):
        parse(["--replicate", "1"])
    with pytest.raises(Refusal, match="--replicate"):
        parse(["--replicate", "2", "--shard", "on", "--reduce", "tree"])


@pytest.mark.slow
def test_an_elastic_job_goes_on_by_itself_with_the_nodes_that_are_left(run_dir: Path, one_rank: str) -> None:
    words = [sys.executable, ROOT / "launch" / "multi_node.py", "-n", "2:3", "-g", 1, "--master"]
    words += [f"127.0.0.1:{free_port()}", "--max-restarts", 3]
    options = job(run_dir, *RARE, "--replicate", 1)
    nodes = [start([*words, "-nr", number, "--", *options]) for number in range(3)]
    try:
        runs.wait_for_step(run_dir, 4, nodes[0])
        keepers = runs.keepers_of(nodes[2])
        for keeper in keepers.values():
            os.killpg(keeper, signal.SIGKILL)
        nodes[2].kill()
        for each in nodes[:2]:
            runs.ended(each)
    finally:
        for each in nodes:
            kill_group(each)
    assert len(keepers) == 1
    assert runs.starts(run_dir)[-1] >= 4
    assert runs.weights_of(run_dir) == one_rank
