"""The floating-point operations and the tokens of a sample, for MFU and tokens/s.

MFU (model FLOPs utilization) is the model's own operations per second divided by the devices' peak (Chowdhery et
al., "PaLM", 2022, appendix B). They are counted once, by `torch.utils.flop_counter`, on a copy of the model without
memory or values (torch's "meta" device), so the training is not touched.
"""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import torch
from torch import nn

from ..config import Config
from ..data.batch import to_device
from ..data.randomness import generators_kept
from ..distributed.data_parallel import replicas
from ..distributed.world import World
from .checks import checked_losses, takes
from .recomputation import without_recomputation
from .task import Task

PEAKS: dict[str, dict[str, float]] = {
    "(H200|H100)(?! PCIe| NVL)": {"fp32": 67, "tf32": 495, "bf16": 989, "fp16": 989},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756},
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    "L40S": {"fp32": 91.6, "tf32": 183, "bf16": 362, "fp16": 362},
    "L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121},
    "V100-SXM2": {"fp32": 15.7, "fp16": 125},
    "V100-PCIE": {"fp32": 14, "fp16": 112},
    "T4": {"fp32": 8.1, "fp16": 65},
    "RTX 4090(?! Laptop| D)": {"fp32": 82.6, "tf32": 82.6, "bf16": 165, "fp16": 165},
    "RTX 3090(?! Ti)": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
}
"""Dense TFLOP/s by --precision, of a GPU whose name contains the pattern as a word; 16 bit with sums in 32. From
NVIDIA's data sheets, and for RTX cards the Ampere GA102 and Ada white papers; figures with sparsity are halved."""


def per_sample(
    task: Task, model: nn.Module, batch: Any, samples: int, config: Config, world: World
) -> dict[str, float]:
    """The factors from samples/s to "tokens_per_s" and to "mfu". Unknown ones are left out, without a warning.

    Args:
        task: its loss, and its tokens.
        model: as it is trained.
        batch: a micro-batch.
        samples: in it.
        config: --precision and --strategy.
        world: all devices are assumed to be like this rank's.
    """
    found: dict[str, float] = {}
    try:
        if tokens := task.tokens(batch):
            found["tokens_per_s"] = tokens / samples
        gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
        # not with --sync-batchnorm: this rank alone would exchange statistics; and not if the loss gets the step,
        # because steps may cost differently
        countable = not config.sync_batchnorm and not takes(task.loss, "step")
        if (top := peak(gpu, config.precision)) and countable:
            devices = world.world_size * max(len(world.devices), len(replicas(config.strategy, world.device)))
            found["mfu"] = flops(task, model, batch) / samples / (top * devices)
    except Exception as error:  # the model cannot be copied, or the loss reads values
        logging.getLogger(__name__).info("no MFU or tokens/s: %s: %s", type(error).__name__, error)
    return found


def peak(name: str, precision: str) -> float:
    """Peak FLOP/s of a GPU, 0.0 if it is not known.

    >>> peak("NVIDIA A100-SXM4-80GB", "bf16"), peak("NVIDIA A10", "bf16")
    (312000000000000.0, 0.0)
    """
    known = (figures for pattern, figures in PEAKS.items() if re.search(rf"\b({pattern})\b", name))
    return next(known, {}).get(precision, 0.0) * 1e12


def flops(task: Task, model: nn.Module, batch: Any) -> int:
    """Operations of forward and backward for a batch; a multiplication and an addition are two."""
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton, so not at the start

    meta = torch.device("meta")
    tensors = {id(it): it.detach().to(meta).requires_grad_(it.requires_grad) for it in model.buffers()}
    tensors |= {id(it): nn.Parameter(it.detach().to(meta), it.requires_grad) for it in model.parameters()}
    # uses these instead of copying its own; MFU does not count what is computed again
    twin = without_recomputation(copy.deepcopy(model, tensors))
    eager: Any = torch.compiler.set_stance("force_eager")  # or --compile would compile for the device meta
    with eager, generators_kept(), FlopCounterMode(display=False) as counter:
        loss, _ = checked_losses(task.loss(twin, to_device(batch, meta)))
        loss.backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())
