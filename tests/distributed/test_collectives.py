"""Collectives of a task's own: which calls are refused, and which are not."""

import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as with_gradient
from torch import Tensor, nn
from torch.distributed import all_gather  # as a task may import it
from torch.utils.data.distributed import DistributedSampler

from evenkeel.common.errors import EndedHere, Refusal
from evenkeel.config import Config
from evenkeel.distributed.collectives import before_the_group, no_collectives
from evenkeel.distributed.sync_batchnorm import BusyRanks
from evenkeel.distributed.world import World
from evenkeel.run.build import build_model
from tests.support.processes import free_port


@pytest.fixture(params=["one process", "a process group"])
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "one process":
        yield
        return
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    gc.collect()  # a traceback that holds the group, which must not be freed in a fork of a later test
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("all_gather", lambda x: all_gather([x], x)),
        ("all_gather_into_tensor", lambda x: dist.all_gather_into_tensor(x.clone(), x)),
        ("_all_gather_base", lambda x: dist._all_gather_base(x.clone(), x)),
        ("all_gather_object", lambda x: dist.all_gather_object([None], x)),
        ("all_reduce", lambda x: dist.all_reduce(x, async_op=True)),
        ("all_to_all_single", lambda x: dist.all_to_all_single(x.clone(), x)),
        ("broadcast", lambda x: dist.broadcast(x, 0)),
        ("barrier", lambda x: dist.barrier()),
        ("isend", lambda x: dist.isend(x, 0)),
        ("all_gather", lambda x: with_gradient.all_gather(x)),
        ("all_gather_tensor", lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD or [0])),
        ("all_reduce", lambda x: functional.all_reduce(x, "sum", dist.group.WORLD or [0])),
    ],
)
def test_a_collective_is_refused_before_it_waits(group: None, name: str, call: Callable[[Tensor], object]) -> None:
    with pytest.raises(EndedHere) as refused, no_collectives("loss()"):
        call(torch.ones(1))
    assert str(refused.value).startswith(f"loss() calls {name}")
    assert f" of torch.distributed at {__file__}:" in str(refused.value)


def test_what_is_asked_and_what_is_our_own_is_let_through() -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    try:
        with no_collectives("loss()"):
            assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "gloo")
            assert BusyRanks().all_gather(torch.ones(2)).shape == (1, 2)
            with no_collectives(""):  # what a task allows
                dist.barrier()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_the_size_of_a_group_that_there_is_not_and_an_error_of_another_kind() -> None:
    with pytest.raises(EndedHere) as ended, no_collectives("loss()"):
        dist.get_world_size()
    assert str(ended.value).startswith("loss() calls get_world_size of torch.distributed at ")
    assert "one process alone has no process group; ask is_initialized() first" in str(ended.value)
    with pytest.raises(ValueError, match="of the task"), no_collectives("loss()"):
        raise ValueError("of the task")
    with pytest.raises(ValueError, match="has not been initialized"), no_collectives(""):
        dist.get_world_size()


@pytest.mark.parametrize("group", ["a process group"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.bfloat16])
def test_a_state_is_sent_with_tensors_of_any_type(group: None, dtype: torch.dtype) -> None:
    """gloo refuses some, and a run with them could not be resumed."""
    world = World(0, 0, 1, 1, torch.device("cpu"), launched=True)
    tensors = [torch.ones(2, 3).to(dtype).t(), torch.ones(()).to(dtype), torch.ones(0).to(dtype)]
    found = world.broadcast_tensors({"it": tensors})["it"]
    assert [(it.dtype, it.shape) for it in found] == [(it.dtype, it.shape) for it in tensors]
    assert [it.float().tolist() for it in found if not it.is_complex()] == [
        it.float().tolist() for it in tensors if not it.is_complex()
    ]


def test_ddp_and_a_distributed_sampler_in_a_task_are_refused_in_a_line() -> None:
    task = SimpleNamespace(model=lambda: nn.parallel.DistributedDataParallel(nn.Linear(1, 1)))
    with pytest.raises(Refusal, match=rf"model\(\) at {__file__}:\d+ needs a process group.*: leave out DDP") as model:
        build_model(Config(), cast(Any, task))
    assert "\n" not in str(model.value)
    line = r"train_dataset\(\).* leave out DDP, DistributedSampler"
    with pytest.raises(Refusal, match=line), before_the_group("train_dataset"):
        DistributedSampler([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mine"), before_the_group("model"):
        raise ValueError("mine")
