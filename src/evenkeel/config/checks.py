"""Options that cannot be meant, or exclude each other: refused in one line."""

from __future__ import annotations

import math
import os
import re
from dataclasses import Field, fields
from typing import Any

from ..common.arguments import flag
from ..common.errors import Refusal
from .options import BELOW_1, FINITE, FLOOR, Config


def check_numbers(options: Any) -> None:
    """Refuse numbers of a dataclass that are beyond the bounds of their :func:`option`."""
    for it in fields(options):
        found = getattr(options, it.name)
        for value in found if isinstance(found, tuple) else (found,):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                _check_number(it, value)


def _check_number(option: Field[Any], value: float) -> None:
    widest = (-math.inf, math.inf) if isinstance(value, float) else (-(2**63), 2**63 - 1)
    least, most = option.metadata.get("bounds", widest)
    if not least <= value <= most:
        side, bound = ("most", most) if value > most else ("least", least)  # NaN as well
        must = {FINITE: "finite", BELOW_1: "below 1", -math.inf: "a number"}.get(bound, f"at {side} {bound}")
        raise Refusal(f"{flag(option.name.rstrip('_'))} {str(value)[:40]}: must be {must}")


def validate(config: Config, samples: int | None = None) -> None:
    """Refuse impossible options and contradictions; with `samples`, also a batch above the training data."""
    check_numbers(config)
    if not (FLOOR <= config.loss_scale < 2**127 and math.frexp(config.loss_scale)[0] == 0.5):
        raise Refusal(f"--loss-scale {config.loss_scale:g}: must be a power of two from 2**-14 to 2**126, e.g. 65536")
    if config.eval_only and config.fresh:
        raise Refusal("--eval-only --fresh: one evaluates a run, the other starts over; choose one")
    if config.mirror and config.fresh:
        raise Refusal("--mirror --fresh: what is there would be fetched again; leave --fresh out, and name another URL")
    if config.checkpoint != "last" and (config.init_from or not config.eval_only):
        other = "--init-from" if config.init_from else "without --eval-only"
        raise Refusal(f"--checkpoint {config.checkpoint} {other}: it is for --eval-only; --init-from names weights")
    size, parts = config.batch_size, {"--micro-batch": config.micro_batch, "--micro-batches": config.micro_batches}
    if all(parts.values()):
        typed = " ".join(f"{name} {value}" for name, value in parts.items())
        raise Refusal(f"{typed}: these are the size and the number of a step's parts; leave one of them out")
    for name, value in parts.items():
        if value != "auto" and value > size:
            raise Refusal(f"{name} {value}: is above --batch-size {size}; a micro-batch is a part of the batch")
    if config.batch_tokens and not config.micro_batches:
        raise Refusal(f"--batch-tokens {config.batch_tokens}: needs a number of micro-batches: add --micro-batches 8")
    synced = {"--drop-last": config.drop_last, "--sync-batchnorm": config.sync_batchnorm}
    if config.batch_tokens and (other := next((name for name, it in synced.items() if it), "")):
        raise Refusal(f"--batch-tokens {config.batch_tokens} {other}: needs steps of one size; leave one of them out")
    if samples == 0:
        raise Refusal(f"--task {config.task}: its training data is empty (train_dataset() has length 0)")
    if samples is not None and size > samples:
        raise Refusal(f"--batch-size {size}: the training data has only {samples} samples; use at most that")
    if path := config.init_from:
        found = os.access(path, os.F_OK)
        if not found and (config.fresh or not (config.run_dir and any(config.run_dir.glob("checkpoints/step-*")))):
            raise Refusal(f"--init-from {path}: no such file or folder")
        if found and not (path.is_file() or path.is_dir()):  # reading a pipe may never end
            raise Refusal(f"--init-from {path}: is neither a file nor a folder, but a pipe or a device")
    elif config.init_partial:
        raise Refusal("--init-partial: there is no --init-from; name a file or leave it out")
    shares_of(config)
    window = profile_window(config)
    if config.memory_snapshot and not window:
        raise Refusal("--memory-snapshot: needs the steps too, for example --profile 20:25")
    _check_devices(config)
    _check_verification(config)
    _check_sharding(config)


def profile_window(config: Config) -> range:
    """The steps of --profile, counted from 0; empty without it. Refused unless it is FIRST:LAST with FIRST < LAST."""
    numbers = re.fullmatch("([0-9]{1,12}):([0-9]{1,12})", config.profile)
    window = range(int(numbers[1]), int(numbers[2])) if numbers else range(0)
    if config.profile and not window:
        raise Refusal(f"--profile {config.profile[:40]}: give FIRST:LAST with FIRST below LAST, for example 20:25")
    return window


def shares_of(config: Config) -> list[int]:
    """The numbers of --shares; empty for equal and auto. Refused if it is something else."""
    text = config.shares
    if text in ("equal", "auto"):
        return []
    numbers = [int(part) if re.fullmatch("[0-9]{1,6}", part) else 0 for part in text.split(":")]
    if len(numbers) < 2 or not all(numbers):
        raise Refusal(f"--shares {text[:40]}: give equal, auto, or a number from 1 on for each process, e.g. 2:1")
    return numbers


def _check_devices(config: Config) -> None:
    """Refuse combinations that do not fit on the devices of a process."""
    dp, synced, k = config.strategy == "dp", config.sync_batchnorm, config.model_parallel
    placed_networks(config)
    if config.place and k > 1:
        raise Refusal(f"--place {config.place} --model-parallel {k}: place networks or cut one; leave one of them out")
    if config.micro_batch == "auto" and synced:
        raise Refusal(
            "--micro-batch auto --sync-batchnorm: give --micro-batch as --batch-size divided by the number of ranks"
        )
    divided = "--place" if config.place else "--model-parallel" if k > 1 else ""
    if dp and synced:
        raise Refusal("--strategy dp --sync-batchnorm: needs a rank for each micro-batch; use --strategy ddp")
    if config.shares != "equal" and (other := "--strategy dp" if dp else "--sync-batchnorm" if synced else ""):
        raise Refusal(f"--shares {config.shares} {other}: needs equal shares of a batch; leave one of them out")
    if dp and config.reduce == "tree":
        raise Refusal("--reduce tree: with --strategy dp DataParallel sums the gradients; leave one of the two out")
    if config.reduce_dtype != "fp32" and config.reduce == "tree":
        raise Refusal(f"--reduce-dtype {config.reduce_dtype} --reduce tree: its sums are exact; leave one of them out")
    if config.reduce_dtype != "fp32" and dp:
        raise Refusal(f"--reduce-dtype {config.reduce_dtype} --strategy dp: one process sends nothing; leave one out")
    if dp and divided:
        raise Refusal(f"--strategy dp {divided}: dp gives each GPU a copy of the whole network; leave one of them out")
    if config.share_gpu and dp:
        raise Refusal("--strategy dp --share-gpu: dp is a single process for all GPUs; leave one of them out")
    if config.share_gpu and config.micro_batch == "auto":
        raise Refusal("--micro-batch auto --share-gpu: what fits depends on the GPU's other processes; give a number")
    if config.compile and (other := "--strategy dp" if dp else divided):
        raise Refusal(f"--compile {other}: a compiled network is on one device of each process; leave one of them out")
    if config.compile and config.checkpoint_activations:
        raise Refusal("--compile --checkpoint-activations: a compiler itself decides what it recomputes; leave one out")
    if config.compile and synced:
        raise Refusal("--compile --sync-batchnorm: layers that exchange statistics cannot be compiled; leave one out")


def _check_verification(config: Config) -> None:
    """Refuse --verify-every where two ranks that work may still differ."""
    given = f"--verify-every {config.verify_every}"
    if config.verify_every and not config.exact:
        raise Refusal(f"{given}: compares bits, so it needs --reduce tree or --deterministic; add one of them")
    options = {"--strategy dp": config.strategy == "dp", "--sync-batchnorm": config.sync_batchnorm}
    other = next((name for name, it in (options | {"--compile": config.compile}).items() if it), "")
    if config.verify_every and other:
        raise Refusal(f"{given} {other}: one rank cannot compute another's micro-batch then; leave one of them out")


def _check_sharding(config: Config) -> None:
    """Refuse what --shard on does not support."""
    if config.shard == "off":
        if config.replicate:
            raise Refusal("--replicate 1: needs --shard on; without it every rank has the whole state")
        return
    given = f"--shard {config.shard}"
    if isinstance(config.shard, int) and config.replicate:
        raise Refusal(f"{given} --replicate 1: other ranks have each rank's rows already; leave --replicate out")
    if config.reduce != "tree":
        raise Refusal(f"{given} --reduce {config.reduce}: sums gradients in the tree's order; add --reduce tree")
    if other := unshardable(config):
        raise Refusal(f"{given} {other}: do not work together; leave one of them out")


def shard_size(config: Config, ranks: int) -> int:
    """Among how many consecutive ranks --shard divides the state; refused if that does not divide their number."""
    if isinstance(config.shard, str):
        return ranks
    if ranks % config.shard:
        raise Refusal(
            f"--shard {config.shard}: {ranks} rank{'s are' if ranks > 1 else ' is'} no multiple of it; start "
            f"{config.shard} or {2 * config.shard} ranks, or give --shard on"
        )
    return config.shard


def unshardable(config: Config) -> str:
    """The first option that does not work with --shard on, apart from --reduce; "": there is none."""
    others = {
        "--strategy dp": config.strategy == "dp",
        "--place": bool(config.place),
        "--model-parallel": config.model_parallel > 1,
        "--sync-batchnorm": config.sync_batchnorm,
        "--precision fp16": config.precision == "fp16",
        "--channels-last": config.channels_last,
        f"--shares {config.shares}": config.shares != "equal",
        "--verify-every": config.verify_every > 0,
        "--optimizer muon": config.optimizer == "muon",
    }
    return next((name for name, given in others.items() if given), "")


def placed_networks(config: Config) -> dict[str, int]:
    """Network -> number of its device within the process, from --place; refused if that is malformed."""
    found: dict[str, int] = {}
    for item in filter(None, config.place.split(",")):
        name, _, number = (part.strip() for part in item.partition("="))
        if not name or not re.fullmatch("[0-9]{1,40}", number) or name in found:
            example = "for example segmenter=0,discriminator=1"
            raise Refusal(f"--place {config.place}: '{item.strip()}' is not NETWORK=NUMBER, once for each; {example}")
        found[name] = int(number)
    used = {0, *found.values()}
    if gap := next((n for n in range(len(used)) if n not in used), None):
        raise Refusal(f"--place {config.place}: device {gap} has no network; number the devices without gaps")
    return found


def devices_per_rank(config: Config) -> int:
    """GPUs of each process, k: local rank r has numbers r * k up to r * k + k - 1."""
    return max(config.model_parallel, *(number + 1 for number in placed_networks(config).values()), 1)
