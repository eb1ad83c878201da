"""`train.py --eval-only`: the metrics of a run's newest checkpoint, or of weights in a file, on all ranks.

Reads only. It takes no lock, so the run may be at work meanwhile.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import nn

from .activity import START_UP, activity
from .arithmetic import operations_named
from .checkpoint import Checkpoints
from .config import Config
from .cut import fact_of_the_job, settle
from .data import SizedDataset
from .errors import Refusal
from .evaluation import Evaluation
from .naming import TEST, named, shown
from .placement import place
from .precision import substitute
from .records import read_config, recorded_options
from .tasks import Task
from .weights import load_weights
from .world import World


def evaluate_only(
    config: Config, task: Task, world: World, test_set: SizedDataset, network: Callable[[], nn.Module]
) -> int:
    """Evaluate, and print the metrics: a line for people, and one of JSON, an object with the key `evaluation`.

    Args:
        config: the options.
        task: what is evaluated.
        world: who takes part.
        test_set: on what.
        network: gives the model as it begins, random where --init-partial leaves it so.

    Raises:
        Refusal: there are no weights, or they do not fit the model.
    """
    run_dir = config.run_dir
    assert run_dir is not None  # resolved
    config = _cut_as_recorded(config, run_dir)
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep, task.best)
    one_node = world.local_world_size == world.world_size
    if one_node and not config.init_from and not checkpoints.newest_name():
        raise _nothing(run_dir)  # before there is a process group
    activity.enter(START_UP, "model")
    model = network()
    with world.connected(), operations_named():
        if world.broadcast(_is_its_own_origin(config, checkpoints)):
            config = replace(config, init_from=None)
        origin = _load(config, run_dir, checkpoints, model, world)
        placed = place(model, config, world.devices)
        metrics = Evaluation(task, model, test_set, config, world)()
        if world.rank == 0:
            notes = [note for note in (placed, substitute(config.precision, world.device)) if note]
            _print(origin, named(TEST, metrics), len(test_set), notes)
    return 0


def _cut_as_recorded(config: Config, run_dir: Path) -> Config:
    """With the micro-batches of the run, whose metrics are then the same to the last digit; or of no run's ranks."""
    if config.micro_batch == "auto":
        config = replace(config, micro_batch=0)
    return (
        settle(config, 1, lambda: False, recorded)
        if (recorded := recorded_options(run_dir))
        else fact_of_the_job(config)
    )


def _is_its_own_origin(config: Config, checkpoints: Checkpoints) -> bool:
    """Whether the weights that were asked for are those the run began from: then it is the run that is meant, whose
    command or config.toml has been typed with --eval-only added."""
    saved = checkpoints.folder.parent / "config.toml"
    if not (config.init_from and checkpoints.newest_name() and saved.exists()):
        return False
    return read_config(saved).get("init_from") == str(config.init_from)


def _load(config: Config, run_dir: Path, checkpoints: Checkpoints, model: nn.Module, world: World) -> str:
    """Give the model on every rank the same weights, and say where they are from.

    One rank reads: the run may be on one node only, and if it is at work, two readers might find different steps.
    """
    steps = world.gather(checkpoints.newest_name() if world.local_rank == 0 else 0)
    if not config.init_from and not max(steps):
        raise _nothing(run_dir)
    holder = 0 if config.init_from else steps.index(max(steps))
    told: tuple[str, str] | None = None
    if world.rank == holder:
        try:
            told = _read(config, run_dir, checkpoints, model), ""
        except Refusal as refusal:
            text = str(refusal)
            told = "", text if config.init_from else text.replace("--init-from", "--run-dir", 1)
    origin, refused = world.broadcast(told, holder)
    if refused:
        raise Refusal(refused)
    model.load_state_dict(world.broadcast_tensors(model.state_dict(), holder))
    return origin


def _read(config: Config, run_dir: Path, checkpoints: Checkpoints, model: nn.Module) -> str:
    if config.init_from:
        return load_weights(model, config.init_from, config.init_partial)
    while True:
        newest = checkpoints.newest_name()
        try:
            return load_weights(model, run_dir).replace("--init-from ", "", 1)
        except Refusal:
            if checkpoints.newest_name() == newest:
                raise
            # the run has written newer ones, and deleted those that were being read


def _nothing(run_dir: Path) -> Refusal:
    return Refusal(f"--eval-only: {run_dir} has no checkpoint; train first, or name weights with --init-from")


def _print(origin: str, metrics: dict[str, float], samples: int, notes: list[str]) -> None:
    weights = re.split(r": (?:all )?\d+ (?:tensors )?of the model", origin)[0]
    step = re.search(r"\bstep-(\d+)", weights)
    for note in notes:
        print(f"evenkeel: {note}")
    print(f"evenkeel: {origin}")
    print(f"evenkeel: evaluated {samples} samples: {shown(metrics)}")
    result = {
        "weights": weights,
        "step": int(step[1]) if step else None,
        "samples": samples,
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
    }
    print(json.dumps({"evaluation": result}), flush=True)
