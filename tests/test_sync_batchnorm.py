"""BatchNorm over the global batch: as plain BatchNorm on one process that computes the batch at once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from evenkeel.errors import Refusal
from evenkeel.plan import Plan
from evenkeel.segment import PooledNorm, segmenter
from evenkeel.sync_batchnorm import SyncBatchNorm, peers_of, synchronise
from evenkeel.world import World

from .processes import TRAIN, checked, finish, finish_all, fork_ranks, kill_group, read, wait_until
from .test_precision import job, step_of

WORKER = Path(__file__).with_name("sync_batchnorm_worker.py")
CPU = torch.device("cpu")


@pytest.mark.multiprocess
def test_all_kinds_of_layers_agree_with_plain_ones(tmp_path: Path) -> None:
    """Outputs, all gradients and running statistics, on three ranks and an idle one, relative to float64."""
    finish_all(fork_ranks(4, WORKER, tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) == 12
    for name, distances in found.items():
        # what float32 has of numbers around 1e4, and what bfloat16 has of any
        limit = {"bfloat16": 2e-2, "large mean": 2e-3, "float64": 1e-12}.get(name, 1e-5)
        assert max(distances.values()) < limit, (name, distances)
        assert "gradient of x" in distances
        assert ("running_var" in distances) == (name != "without statistics")


def test_one_micro_batch_is_plain_batchnorm_in_every_bit() -> None:
    x = torch.randn(6, 4)
    models = [nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    synchronise(models[1], Plan(6, 6, 6, 1), World(0, 0, 1, 1, CPU, launched=False))
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    outputs = [model(x) for model in models]
    assert torch.equal(*outputs)
    assert peers_of(models[0]) is None
    for model in models:
        model.eval()
    assert torch.equal(models[0](x), models[1](x))
    for name, buffer in models[0].state_dict().items():
        assert torch.equal(buffer, models[1].state_dict()[name])


def test_what_cannot_be_synchronised_is_refused() -> None:
    alone, plan = World(0, 0, 2, 2, CPU, launched=True), Plan(101, 12, 3, 1)
    with pytest.raises(
        Refusal, match=r"has 4 micro-batches .* only 2; start 4 ranks, or a new run with --micro-batch 6"
    ):
        synchronise(nn.BatchNorm1d(3), plan, alone)
    with pytest.raises(Refusal, match="the model has no BatchNorm layer"):
        synchronise(nn.Linear(3, 3), plan, alone)
    on_gpu = World(0, 0, 4, 4, torch.device("cuda", 0), launched=True)
    with pytest.raises(Refusal, match="--sync-batchnorm --reduce tree: may dead-lock on GPUs"):
        synchronise(nn.BatchNorm1d(3), plan, on_gpu, "tree")
    with pytest.raises(Refusal, match="--sync-batchnorm: may dead-lock on GPUs with a task's unused_parameters"):
        synchronise(nn.BatchNorm1d(3), plan, on_gpu, unused=True)


class Odd(nn.BatchNorm2d):
    """May compute anything."""


class Odder(PooledNorm):
    """Does not say what it becomes, whatever its base class says."""


@pytest.mark.parametrize("kind", [Odd, Odder])
def test_a_batchnorm_of_its_own_kind_is_refused_by_name_and_nothing_is_changed(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.ReLU(), kind(3)))
    with pytest.raises(Refusal, match=rf"--sync-batchnorm: 1\.1 is a {kind.__name__}, a BatchNorm of its own kind"):
        synchronise(model, Plan(6, 6, 6, 1), World(0, 0, 1, 1, CPU, launched=False))
    assert type(model[0]) is nn.BatchNorm2d


def test_deeplabs_pooled_layer_is_synchronised_and_still_takes_a_single_sample() -> None:
    net = segmenter("small")
    names = list(net.state_dict())
    synchronise(net, Plan(6, 6, 6, 1), World(0, 0, 1, 1, CPU, launched=False))
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert all(isinstance(norm, SyncBatchNorm) for norm in norms)
    assert sum(isinstance(norm, PooledNorm) for norm in norms) == 1
    assert list(net.state_dict()) == names
    assert net(torch.rand(1, 3, 32, 32))["out"].isfinite().all()


@pytest.mark.multiprocess
def test_a_run_is_that_of_one_process_with_the_whole_batch_and_the_same_bits_on_any_number_of_ranks(
    tmp_path: Path,
) -> None:
    """Three micro-batches and idle ranks; in the last step of an epoch two micro-batches, one of a single sample."""
    # a plain SGD, because Adam divides by the size of gradients that are only rounding errors
    recipe = ["--dropout", 0, "--clip-norm", 1, "--optimizer", "sgd", "--lr", 0.05, "--reduce", "tree"]
    plain, control = tmp_path / "plain", tmp_path / "control"
    finish_all(fork_ranks(0, TRAIN, *job(plain, *recipe, "--micro-batch", 12)))
    finish_all(fork_ranks(0, TRAIN, *job(control, *recipe, "--micro-batch", 3)))
    sync = [*recipe, "--micro-batch", 4, "--sync-batchnorm", "--checkpoint-every", 4]
    finish_all(fork_ranks(3, TRAIN, *job(tmp_path / "3", *sync)))

    # stopped and killed on the way, and refused on too few ranks
    run_dir, slow = tmp_path / "run", tmp_path / "slow"
    options = job(run_dir, *sync, "--slow", slow)
    slow.touch()
    for ranks, number in ((4, signal.SIGKILL), (3, signal.SIGTERM)):
        started, before = fork_ranks(ranks, TRAIN, *options), step_of(run_dir)
        wait_until(lambda before=before: step_of(run_dir) >= before + 3, "three steps")  # type: ignore[misc]
        os.kill(started[-1].pid, number)
        for process in started:
            finish(process)
    slow.unlink()
    first, second = fork_ranks(2, TRAIN, *options)
    refused = checked(finish(first), 2)
    kill_group(second)  # which leaves the speaking to the first, and waits for torchrun to end it
    assert "needs a rank of its own, but there are only 2; start 3 ranks" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    finish_all(fork_ranks(5, TRAIN, *options))
    assert read(run_dir)["world_sizes"] == [4, 3, 5]
    assert read(run_dir)["weights_sha256"] == read(tmp_path / "3")["weights_sha256"]

    expected = torch.load(plain / "model.pt", weights_only=True)
    for folder, close in ((run_dir, True), (control, False)):
        got = torch.load(folder / "model.pt", weights_only=True)
        assert got.keys() == expected.keys()
        furthest = max(distance(got[name], expected[name]) for name in got)
        assert (furthest < 1e-4) == close, (folder.name, furthest)


def distance(got: Tensor, expected: Tensor) -> float:
    """Relative, in the 2-norm."""
    return float((got.double() - expected.double()).norm() / max(float(expected.double().norm()), 1e-6))
