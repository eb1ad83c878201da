"""`--strategy dp`: `nn.DataParallel`, one process that divides each micro-batch among all visible GPUs.

    model = parallel(ModelWithLoss(model, task), strategy, device)  # the module itself, or divided among several GPUs
    loss = model(batch if isinstance(model, Parallel) else transfer(batch))

The loss is computed on each GPU, so only numbers come back to the first one. Shares are weighted by their samples: the
mean of the GPUs' means would be wrong for unequal shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import Ended, Refusal
from ..data.batch import tensors_in, to_device, with_parts
from ..data.randomness import derive
from .devices import device_name


def replicas(strategy: str, device: torch.device) -> list[torch.device]:
    """The devices among which a process divides its micro-batches: all GPUs with --strategy dp, else its own one."""
    if strategy != "dp" or device.type != "cuda":
        return [device]
    return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def refuse_company(processes: int, gpus: int) -> None:
    """Refuse --strategy dp in a job of several processes: each would take all the GPUs that torch sees here."""
    if processes > 1:
        here = ", ".join(device_name(torch.device("cuda", number)) for number in range(gpus)) or "none"
        raise Refusal(
            f"--strategy dp: uses one process for all visible GPUs (here: {here}), and this job has "
            f"{processes} processes; start one (python train.py, -g 1), choose GPUs with CUDA_VISIBLE_DEVICES, or use "
            "the default --strategy ddp"
        )


def chunks(samples: int, devices: int) -> list[int]:
    """The samples of a micro-batch that each device gets, as `torch.chunk` divides: the last devices may get none.

    >>> chunks(30, 4), chunks(10, 4), chunks(5, 4)
    ([8, 8, 8, 6], [3, 3, 3, 1], [2, 2, 1])
    """
    size = -(-samples // devices)
    return [min(size, samples - start) for start in range(0, samples, size)]


def samples_in(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor that has one."""
    for tensor in tensors_in(batch):
        if tensor.dim():
            return len(tensor)
    raise Ended(f"--strategy dp: cannot divide {type(batch).__name__}, a batch without tensors, among GPUs; use ddp")


def divide(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch of any structure into consecutive parts of these many samples.

    `nn.DataParallel` divides tensors in dicts, lists and tuples only; each GPU would get a whole list of texts.
    """
    ends = list(accumulate(sizes))
    return [rows_of(batch, slice(end - size, end), ends[-1]) for size, end in zip(sizes, ends, strict=True)]


def rows_of(batch: Any, where: slice | list[int], samples: int) -> Any:
    """The batch with these of its samples, of which it has so many."""
    if isinstance(batch, Tensor):
        return batch[where] if batch.dim() and len(batch) == samples else batch
    if isinstance(batch, (list, tuple)) and len(batch) == samples and not tensors_in(batch):
        # one text for each sample, for example
        return batch[where] if isinstance(where, slice) else type(batch)([batch[number] for number in where])
    return with_parts(batch, lambda part: rows_of(part, where, samples))


class Share(nn.Module):
    """The part of each GPU: the sums of the losses over its samples, each of shape [1, ...]."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the means, times the number of samples."""
        found, samples = self.loss(batch), samples_in(batch)
        return tuple(mean[None] * samples for mean in (found if isinstance(found, tuple) else (found,)))


class Parallel(nn.DataParallel[Share]):
    """Returns the mean losses of a batch, divided among several GPUs of this process; `loss` is on the first one."""

    def __init__(self, loss: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__(Share(loss), device_ids=[device.index for device in devices])
        self.devices = devices

    def forward(self, batch: Any) -> Tensor | tuple[Tensor, ...]:
        """Return what the loss does for a batch on the CPU or the first GPU."""
        totals: tuple[Tensor, ...] = super().forward(batch)
        means = tuple(total.sum(0) / samples_in(batch) for total in totals)
        return means if len(means) > 1 else means[0]

    def scatter(self, inputs: Any, _kwargs: Any, _device_ids: Any) -> tuple[list[Any], list[Any]]:
        """Divide the batch, and seed each GPU."""
        (batch,) = inputs
        parts = divide(batch, chunks(samples_in(batch), len(self.devices)))
        moved = [(to_device(part, device),) for part, device in zip(parts, self.devices, strict=False)]
        for number, device in enumerate(self.devices[: len(moved)]):  # else all draw the same dropout
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derive(torch.initial_seed(), "replica", number))
        return moved, [{}] * len(moved)


def parallel(loss: nn.Module, strategy: str, device: torch.device) -> nn.Module:
    """Return a module that computes the mean loss of a batch on all devices that the strategy gives this process."""
    devices = replicas(strategy, device)
    return loss if len(devices) == 1 else Parallel(loss, devices)
