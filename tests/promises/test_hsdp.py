"""--shard N: the state is divided among each N consecutive ranks, with the bits of one rank.

That a lost node costs no step, because ranks of other nodes have its rows, is in test_replicate.py.
"""

import signal
from pathlib import Path

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.config import Config, shard_size
from evenkeel.run.sharded_resume import others_have_each_nodes_rows
from evenkeel.tasks.command_line import parse
from tests.promises import test_shard
from tests.promises.test_shard import results
from tests.promises.test_sharded_state import RARE, job, log_of, one_rank, slowed  # noqa: F401  (fixtures)
from tests.support import needs
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, fork_ranks, start, torchrun

pytestmark = needs.sharding

TWO = [*RARE, "--shard", 2]


@pytest.mark.parametrize(("ranks", "size", "micro_batches"), [(4, 2, 7), needs.slow(4, 2, 12), needs.long(6, 3, 7)])
def test_a_step_has_the_bits_of_one_rank(tmp_path: Path, ranks: int, size: int, micro_batches: int) -> None:
    """With 7 micro-batches some ranks of a replica are idle, or all; three ranks send two sums of theirs."""
    found = runs.results_of(ranks, "sharded_worker.py", tmp_path, "bits", micro_batches, size)
    one = runs.results_of(1, "sharded_worker.py", tmp_path, "bits", micro_batches)
    for way in ("gradients", "norm", "clipped", "foreach"):
        assert found[way] == one[way], way
    if micro_batches == 12:
        assert found["control: gradients"] != one["gradients"], "FSDP2's own HSDP"


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (4, ["--shard", 2, "--clip-norm", 0.5, "--ema", 0.9, "--digest-every", 2]),
        needs.slow(4, ["--shard", 2, "--precision", "bf16", "--checkpoint-activations"]),
        needs.long(6, ["--shard", 3, "--optimizer", "sgd", "--batch-size", 6]),
    ],
)
def test_a_run_has_the_bits_and_metrics_of_one_rank(tmp_path: Path, ranks: int, more: list) -> None:
    runs.trained(ranks, test_shard.job(tmp_path / "divided", *more))
    runs.trained(1, test_shard.job(tmp_path / "one", *more, "--shard", "on"))
    assert results(tmp_path / "divided") == results(tmp_path / "one")
    (step, *_) = sorted((tmp_path / "divided" / "checkpoints").glob("step-*"))
    assert len(list(step.glob("state-*.pt"))) == more[1], "only the first replica writes"


@pytest.mark.slow
def test_killed_ranks_cost_no_step_that_all_have(run_dir: Path, one_rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRIKES", "loss:1:1 optimizer:2:3 copy:3:5 loss:all:7")
    runs.ended(start(torchrun(4, TRAIN, *job(run_dir, *TWO), restarts=0)))
    assert sorted(set(runs.starts(run_dir))) == [0, 1, 3, 4, 7]
    assert runs.weights_of(run_dir) == one_rank


@pytest.mark.slow
def test_four_ranks_may_be_two_then_three_then_four(run_dir: Path, one_rank: str) -> None:
    begins = []
    for ranks, step, shard in ((4, 2, 2), (2, 5, 2), (3, 8, "on")):
        began = runs.told_step(run_dir)
        words = job(run_dir, *RARE, "--shard", shard)
        runs.signal_ranks_at(max(step, began + 1), run_dir, fork_ranks(ranks, TRAIN, *words), signal.SIGTERM)
        begins.append(runs.told_step(run_dir))
    runs.trained(4, job(run_dir, *TWO))
    assert runs.starts(run_dir) == [0, *begins], "all steps that were finished were saved, and none was done twice"
    assert runs.weights_of(run_dir) == one_rank
    assert "is void" not in log_of(run_dir), "the bits are the same"


@pytest.mark.parametrize(
    ("local_ranks", "size", "safe"),
    [
        ([0, 1, 0, 1], 2, True),
        ([0, 1, 0, 1], 4, False),
        ([0, 1, 2, 3], 2, False),  # one node has all
        ([0, 1, 2, 0], 2, False),  # the other one has one of two parts
        ([0, 1, 0, 1, 0, 1, 0, 1], 4, True),  # each replica has two nodes
    ],
)
def test_whether_a_lost_node_costs_steps_depends_on_replicas(local_ranks: list[int], size: int, safe: bool) -> None:
    assert others_have_each_nodes_rows(local_ranks, size) == safe


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    assert runs.refusal(test_shard.job(tmp_path / "run", "--shard", 2)) == (
        "--shard 2: 1 rank is no multiple of it; start 2 or 4 ranks, or give --shard on"
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(Refusal, match=r"^--shard 3: 4 ranks are no multiple of it; start 3 or 6 ranks"):
        shard_size(Config(shard=3), 4)
    for words, line in (
        (["1"], "--shard 1: must be at least 2"),
        (["2", "--replicate", "1"], "--shard 2 --replicate 1: other ranks have each rank's rows already"),
    ):
        with pytest.raises(Refusal, match=line):
            parse(["--reduce", "tree", "--shard", *words])
    assert parse(["--reduce", "tree", "--shard", "8"])[0].shard == 8
