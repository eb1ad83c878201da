"""BatchNorm over the global batch: as plain BatchNorm on one process that computes the batch at once."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from evenkeel.common.errors import Refusal
from evenkeel.data.plan import Plan
from evenkeel.distributed.sync_batchnorm import SyncBatchNorm, peers_of, synchronise
from evenkeel.distributed.world import World
from tests.support.components import optional

CPU = torch.device("cpu")


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
    with pytest.raises(Refusal, match="--sync-batchnorm: may dead-lock on GPUs with --reduce tree"):
        synchronise(nn.BatchNorm1d(3), plan, on_gpu, "tree")
    with pytest.raises(Refusal, match="--sync-batchnorm: may dead-lock on GPUs with a task's unused_parameters"):
        synchronise(nn.BatchNorm1d(3), plan, on_gpu, unused_parameters=True)
    synchronise(nn.BatchNorm1d(3), plan, replace(on_gpu, shares_gpu=True), "tree")  # gloo orders by tags


class Odd(nn.BatchNorm2d):
    """May compute anything."""


# does not say what it becomes, whatever its base class says
ODDER = [type("Odder", (pooled,), {}) for pooled in optional("tasks.segment.PooledNorm")]


@pytest.mark.parametrize("kind", [Odd, *ODDER])
def test_a_batchnorm_of_its_own_kind_is_refused_by_name_and_nothing_is_changed(kind: type[nn.Module]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(nn.ReLU(), kind(3)))
    with pytest.raises(Refusal, match=rf"--sync-batchnorm: 1\.1 is a {kind.__name__}, a custom BatchNorm"):
        synchronise(model, Plan(6, 6, 6, 1), World(0, 0, 1, 1, CPU, launched=False))
    assert type(model[0]) is nn.BatchNorm2d


def test_deeplabs_pooled_layer_is_synchronised_and_still_takes_a_single_sample() -> None:
    segment = pytest.importorskip("evenkeel.tasks.segment")
    net = segment.segmenter("small")
    names = list(net.state_dict())
    synchronise(net, Plan(6, 6, 6, 1), World(0, 0, 1, 1, CPU, launched=False))
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert all(isinstance(norm, SyncBatchNorm) for norm in norms)
    assert sum(isinstance(norm, segment.PooledNorm) for norm in norms) == 1
    assert list(net.state_dict()) == names
    assert net(torch.rand(1, 3, 32, 32))["out"].isfinite().all()
