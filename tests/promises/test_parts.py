"""Parts of a loss are means over the global batch on any number of ranks, as the loss is."""

import csv
from pathlib import Path
from statistics import mean

import pytest
import torch

from evenkeel.data.dataset import InMemory
from evenkeel.data.sampler import ElasticSampler
from tests.support.processes import records
from tests.support.recipe_task import SAMPLES
from tests.support.small_runs import recipe_job, trained

BATCH, MICRO = 14, 3  # micro-batches of 3, 3, 3, 3, 2; the last step of an epoch has 3 samples, on one rank
RANKS = (0, 1, 2, 3)


def job(run_dir: Path, *more: object) -> list[str]:
    return recipe_job(run_dir, "--epochs", 2, "--batch-size", BATCH, "--csv", *more, task="Parts")


def by_hand(ranks: int) -> tuple[dict[int, float], dict[int, float]]:
    """The mean target of each step's samples; and of the ranks' means, as loops do it that log `all_reduce(AVG)`."""
    samples = InMemory(torch.zeros(SAMPLES))
    exact, naive, step = {}, {}, 0
    samplers = [ElasticSampler(samples, BATCH, MICRO, num_replicas=ranks, rank=r, seed=0) for r in range(ranks)]
    for epoch in range(2):
        for each in samplers:
            each.set_epoch(epoch)
        of_ranks = [list(each) for each in samplers]
        for number in samplers[0].steps():
            shares = []
            for each, batches in zip(samplers, of_ranks, strict=True):
                mine = len(each.micro_batches(number))
                shares.append([float(index) / SAMPLES for batch in batches[:mine] for index in batch])
                del batches[:mine]
            step += 1
            exact[step] = mean(value for share in shares for value in share)
            naive[step] = mean(mean(share) for share in shares if share)
    return exact, naive


@pytest.mark.parametrize("reduce", ["tree", pytest.param("ring", marks=pytest.mark.slow)])
def test_parts_are_the_same_on_any_number_of_ranks(tmp_path: Path, reduce: str) -> None:
    told = []
    for ranks in RANKS:
        done = trained(ranks, job(tmp_path / str(ranks), "--reduce", reduce))
        assert "train/noisy/half 0.5000" in done[0].stdout
        told.append({record["step"]: record for record in records(tmp_path / str(ranks), "train")})
    exact, naive = by_hand(2)
    assert told[0].keys() == exact.keys()
    for found in told:
        for step, record in found.items():
            assert record["train/same"] == record["train/loss"], "in every bit"
            assert record["train/target"] == pytest.approx(exact[step], rel=1e-6)
            assert record["train/noisy/half"] == pytest.approx(0.5)
            if reduce == "tree":
                assert record["train/target"] == told[0][step]["train/target"], "in every bit"
    assert any(naive[step] != pytest.approx(exact[step], rel=1e-3) for step in exact), "the control: a mean over ranks"
    with (tmp_path / "2" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["train/target"]) for row in rows if row["train/target"]] == [
        record["train/target"] for record in told[2].values()
    ]
