"""This process's place in the job: torchrun's environment, its device, and the process group.

Without torchrun's variables the process is alone: world size 1, no process group, and every collective below
returns its argument. So `python train.py` and `torchrun train.py` are one code path.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.utils._pytree import tree_map_only

from ..common import keeper_link
from ..common.arguments import number_in
from ..common.errors import REFUSED, Refusal
from ..common.phases import START_UP, activity
from .data_parallel import refuse_company
from .devices import choose, explain_devices, refuse_missing
from .exits import leave
from .rendezvous import DO_NOT_WAIT, fresh_store, job_store

T = TypeVar("T")

RESTART_TIMEOUT = timedelta(seconds=120)
"""Maximum delay of a rank that starts again in place, once it has left; then torchrun restarts the job."""


@dataclass(frozen=True)
class World:
    """This process's place among all of them."""

    rank: int
    """0 .. world_size-1, over all nodes."""
    local_rank: int
    """0 .. local_world_size-1, on this node; picks the device."""
    world_size: int
    """Processes in all."""
    local_world_size: int
    """Processes on this node."""
    device: torch.device
    """The device on which this process computes."""
    launched: bool
    """Whether torchrun started it; if not, there is no process group."""
    more_devices: tuple[torch.device, ...] = ()
    """Its other devices, if its model is on several (`placement`)."""
    shares_gpu: bool = False
    """Whether other ranks may compute on the same GPU (--share-gpu), which NCCL does not allow."""

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """All devices of this process, the first one first. On the CPU they are all the same."""
        return (self.device, *self.more_devices)

    @property
    def backend(self) -> str:
        """The backends of collectives: gloo for CPU tensors, and NCCL for CUDA tensors unless ranks share GPUs.

        Gloo takes CUDA tensors through pinned host memory, in all collectives used here.
        """
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" and not self.shares_gpu else "gloo"

    @staticmethod
    def from_environment(
        devices_per_rank: int = 1, strategy: Literal["ddp", "dp"] = "ddp", share_gpu: bool = False
    ) -> World:
        """Read torchrun's variables and pick the devices; makes no process group.

        Args:
            devices_per_rank: k; local rank r has the visible GPUs r * k up to r * k + k - 1.
            strategy: "dp" refuses more than one process.
            share_gpu: start again with the first GPU if there are too few.

        Raises:
            Refusal: there are too few visible GPUs or too many processes, or variables are missing or contradict each
                other.
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        values = [os.environ.get(name) for name in names]
        if all(value is None for value in values):
            _refuse_bare_srun()
            first, *more = _devices(0, 1, devices_per_rank, share_gpu)
            return World(0, 0, 1, 1, first, False, tuple(more), share_gpu)
        if None in values:
            shown = " ".join(f"{name}={os.environ.get(name, '(unset)')}" for name in names)
            raise Refusal(f"incomplete torchrun environment: {shown}; start with torchrun or launch/")
        world_size = number_in("WORLD_SIZE", 1, 2**20)
        rank, local_world_size = number_in("RANK", 0, world_size - 1), number_in("LOCAL_WORLD_SIZE", 1, world_size)
        local_rank = number_in("LOCAL_RANK", 0, min(rank, local_world_size - 1))
        if strategy == "dp":
            refuse_company(world_size, torch.cuda.device_count())
        first, *more = _devices(local_rank, local_world_size, devices_per_rank, share_gpu)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise Refusal(f"{name} is not set, although RANK is; start with torchrun or launch/, or unset them all")
        number_in("MASTER_PORT", 1, 65535)
        return World(rank, local_rank, world_size, local_world_size, first, True, tuple(more), share_gpu)

    @contextmanager
    def connected(
        self,
        timeout: timedelta = timedelta(minutes=10),
        delay: timedelta = timedelta(),
        leaving: timedelta = timedelta(),
    ) -> Iterator[Store | None]:
        """Keep a process group of this :attr:`backend`.

        Args:
            timeout: the longest that a rank waits for the others, at the start and in any collective.
            delay: how much later than the others rank 0 may come.
            leaving: how long a rank may take to leave the last attempt, as it saves (--grace).

        Yields:
            A store that all ranks of this attempt share, and no other attempt; None without a process group.
        """
        if not self.launched:
            yield None
            return
        activity.enter(START_UP, "connecting")
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch remembers, for `hang`
        # NCCL's monitor aborts a process whose watchdog stands still for 480 s, as in a GPU call that hangs; the watch
        # for hangs must come first, to save and explain, and `timeout` is beyond --hang-timeout
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", f"{timeout.total_seconds():.0f}")
        if "nccl" in self.backend:
            if self.more_devices:  # torch 2.15's other NCCL backend takes one GPU a process, LOCAL_RANK's
                os.environ["TORCH_DIST_USE_NCCL2"] = "0"
            # NCCL's watchdog would abort a process that has lost its peer before it has saved; torchrun's SIGTERM and
            # the watch for hangs end it instead
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        store = job_store(self.rank, self.world_size, timeout + delay)
        # while ranks start again in place, torchrun notices no lost node; so wait less
        start_timeout = min(timeout, RESTART_TIMEOUT + leaving) if keeper_link.restarts() else timeout
        store = fresh_store(store, self.rank, self.world_size, start_timeout + delay)
        if not keeper_link.has_keeper():
            store.set(DO_NOT_WAIT, "")
        dist.init_process_group(self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        yield store
        dist.destroy_process_group()  # not after an error: NCCL would wait for the peers, and they for this rank

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """Return one rank's value on all ranks; by pickle, for small things."""
        box: list[Any] = [value]
        if self.launched:
            dist.broadcast_object_list(box, src=source, device=torch.device("cpu"))
        return box[0]  # type: ignore[no-any-return]

    def all_gather(self, value: T) -> list[T]:
        """Return every rank's value on all ranks, in the order of ranks; by pickle, for small things."""
        if not self.launched:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast_tensors(self, tree: Any, source: int = 0) -> Any:
        """Return one rank's nested dicts and lists of tensors and plain data on all ranks, the tensors on the CPU.

        The other ranks pass anything. Each tensor is sent separately, so no rank needs a second copy of the whole.
        """
        if not self.launched:
            return tree
        tensors: list[Tensor] = []

        def without_data(tensor: Tensor) -> Tensor:
            tensors.append(tensor.detach().cpu().contiguous())
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        outline = self.broadcast(tree_map_only(Tensor, without_data, tree) if self.rank == source else None, source)
        sent = iter(tensors)

        def with_data(like: Tensor) -> Tensor:
            tensor = next(sent, None)
            tensor = torch.empty_like(like, device="cpu") if tensor is None else tensor
            dist.broadcast(tensor.flatten().view(torch.uint8), src=source)  # gloo does not take all types
            return tensor

        return tree_map_only(Tensor, with_data, outline)


def _refuse_bare_srun() -> None:
    """Refuse `srun -n 4 python train.py`, which would start four separate runs in one folder."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        if os.environ.get("SLURM_PROCID") != "0":
            leave(REFUSED)  # only task 0 prints it
        raise Refusal(
            f"srun started {tasks} tasks of train.py without torchrun; start one task for each node: "
            "srun --ntasks-per-node=1 slurm/node.py -- OPTIONS"
        )


def _devices(local_rank: int, local_world_size: int, each: int, shared: bool) -> list[torch.device]:
    """The local rank's GPUs, among the visible ones; the CPU if there are none."""
    gpus = torch.cuda.device_count()
    refuse_missing(gpus)
    if not gpus:
        mine = [torch.device("cpu")] * each
    elif local_world_size * each > gpus and not shared:
        raise Refusal(explain_devices(local_world_size, gpus, each))
    else:
        mine = [torch.device("cuda", (local_rank * each + i) % gpus) for i in range(each)]
        torch.cuda.set_device(mine[0])  # before the task's methods, whose bare `.cuda()` means the current one
    choose(mine)
    return mine
