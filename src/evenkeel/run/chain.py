"""The ledger of --digest-every: each record is chained to the one before it, so that `audit` sees what was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import fields
from itertools import islice
from typing import Any

from ..config import CUTTING, HARMLESS, Config
from ..data.sampler import ElasticSampler
from ..data.streams import stream_of

CHAINED = ("step", "options", "samples", "loss", "digests")
"""What a record's chain covers, besides the chain before it."""


def chained(previous: str, record: Mapping[str, Any]) -> str:
    """The chain of a record: sha256 over the chain before it ("" before the first) and what it records."""
    text = json.dumps([previous, *map(record.get, CHAINED)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def options_digest(options: Mapping[str, Any], harmless: Set[str]) -> str:
    """Of the options that shape the result, as config.toml has them; a run of constant rate may be prolonged."""
    free = HARMLESS | CUTTING | harmless | ({"epochs", "max_steps"} if options["schedule"] == "constant" else set())
    usual = {it.name: it.default for it in fields(Config)}  # without these, an option newer than the run is no change
    counts = {name: it for name, it in options.items() if name not in free and it != usual.get(name)}
    return hashlib.sha256(json.dumps(counts, sort_keys=True).encode()).hexdigest()[:16]


def whole_steps(dataset: Any, config: Config, micro_batch: int, micro_batches: int) -> ElasticSampler:
    """The sampler of one rank that computes all, with the run's cut of a step."""
    return ElasticSampler(
        dataset, config.batch_size, micro_batch, num_replicas=1, rank=0,
        seed=config.seed, micro_batches=micro_batches, drop_last=config.drop_last,
    )  # fmt: skip


def samples_of(sampler: ElasticSampler, step: int) -> list[list[int]]:
    """The numbers of a step's samples, by micro-batch; `sampler` is made by `whole_steps`."""
    sampler.set_epoch(*sampler.plan.locate(step))
    return [list(part) for part in islice(iter(sampler), len(sampler.micro_batches(step)))]


def samples_digest(sampler: ElasticSampler, step: int) -> str:
    """Of the numbers of a step's samples, in order; "" for a stream, whose samples have none.

    Args:
        sampler: made by `whole_steps`.
        step: counted from 1.
    """
    if stream_of(sampler.dataset):
        return ""
    numbers = [sample for part in samples_of(sampler, step - 1) for sample in part]
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]
