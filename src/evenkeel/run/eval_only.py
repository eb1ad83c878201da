"""`train.py --eval-only`: the metrics of a run's checkpoint, or of weights in a file, on all ranks.

Only reads and takes no lock, so the run may be active meanwhile.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ..common.arguments import flag
from ..common.display import say
from ..common.errors import Refusal, no_exit
from ..common.naming import shown
from ..common.phases import START_UP, activity
from ..config import Config, changed_options, saved_options
from ..data.data_digest import TRAINING
from ..data.dataset import SizedDataset
from ..distributed.placement import place
from ..distributed.world import World
from ..resilience.interruption import Interruption
from ..training.cut import decide_cut, fact_of_the_job
from ..training.determinism import operations_named
from ..training.precision import substitute
from ..training.task import Task
from ..training.task_state import TaskState
from ..training.whole_batch_evaluation import evaluation_of
from .build import build_model, prepare
from .checkpoint import Checkpoints
from .earlier_run import recorded_options
from .records import read_config
from .weights import read_chosen, read_weights

T = TypeVar("T")


def evaluate(config: Config, task: Task) -> int:
    """With --eval-only: print the metrics of a run's checkpoint, or of weights in a file. Returns 0.

    >>> evaluate(*parse(["--run-dir", folder, "--eval-only"]))  # after the run of `Run`
    evenkeel: ...
    0

    Raises:
        Refusal: there are no weights, or they do not fit the model.
    """
    Interruption(config.grace)
    with no_exit():
        world, sets = prepare(config, task, {} if config.fresh else recorded_options(config.run_dir))
        del sets[TRAINING]
        _evaluate(config, task, world, sets)
    return 0


def _evaluate(config: Config, task: Task, world: World, sets: Mapping[str, SizedDataset]) -> None:
    """Evaluate, and print the metrics: a line for people, and one of JSON, an object with the key `evaluation`."""
    run_dir = config.run_dir
    assert run_dir is not None  # resolved
    config = cut_as_recorded(config)
    checkpoints = Checkpoints(run_dir / "checkpoints", config.keep)
    nothing = Refusal(f"--eval-only: {run_dir} has no checkpoint; train first, or name weights with --init-from")
    if world.local_world_size == world.world_size and not (config.init_from or checkpoints.newest_named_step()):
        raise nothing  # before a process group exists
    activity.enter(START_UP, "model")
    model = build_model(config, task)  # random where --init-partial leaves it so
    task_state = TaskState.of(task, config.seed, world)
    with world.connected(), operations_named():
        # one rank reads: the run may be on one node only, and if it is active, two ranks might find different steps
        newest = checkpoints.newest_named_step() if world.local_rank == 0 else 0
        known = world.all_gather((newest, _began_from(run_dir)))
        steps = [step for step, _ in known]
        own_origin = steps[0] and known[0][1] == str(config.init_from)  # --eval-only added to the run's own command
        path = None if own_origin else config.init_from
        if not (path or max(steps)):
            raise nothing
        holder = 0 if path else steps.index(max(steps))

        def read() -> tuple[str, str]:
            if path:
                return read_weights(model, path, config.init_partial, task_state)
            if config.checkpoint != "last":
                return read_chosen(model, run_dir, config.checkpoint, task_state)
            return _read_newest(model, checkpoints, task_state)

        weights, how = read_for_all(model, world, read, holder, task_state)
        step = re.search(r"\bstep-(\d+)", weights)
        activity.step = int(step[1]) if step else 0  # a loss may depend on it
        placed = place(model, config, world.devices)
        metrics: dict[str, float] = {}
        for name, dataset in sets.items():
            evaluation = evaluation_of(task, model, dataset, config, world, name)
            metrics |= evaluation.named(evaluation())
    if world.rank == 0:
        samples = sum(map(len, sets.values()))
        say(f"evenkeel: {'--init-from ' if path else ''}{weights}: {how}")
        for note in filter(None, (placed, substitute(config.precision, world.device))):
            say(f"evenkeel: {note}")
        if others := "" if path else _other_options(config, task):
            say(f"evenkeel: WARNING: evaluated with {others}; add the run's options")
        say(f"evenkeel: evaluated {samples} samples: {shown(metrics)}")
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        result = {"weights": weights, "step": int(step[1]) if step else None, "samples": samples}
        say(json.dumps({"evaluation": result | {"metrics": values}}))


def cut_as_recorded(config: Config) -> Config:
    """The options with the micro-batches of the run, with which its metrics are the same to the last digit."""
    config = replace(config, micro_batch=0) if config.micro_batch == "auto" else config
    recorded = recorded_options(config.run_dir)
    return decide_cut(config, 1, lambda: False, recorded) if recorded else fact_of_the_job(config)


def read_for_all(
    model: nn.Module, world: World, read: Callable[[], T], holder: int = 0, task_state: TaskState | None = None
) -> T:
    """Let one rank load the model and what the task remembers, and send these and the result of `read`, or its refusal,
    to all."""
    found: T | Refusal | None = None
    if world.rank == holder:
        try:
            found = read()
        except Refusal as refusal:
            found = refusal
    result: Any = world.broadcast(found, holder)
    if isinstance(result, Refusal):
        raise result
    model.load_state_dict(world.broadcast_tensors(model.state_dict(), holder))
    if task_state and task_state.now is not None:
        task_state.load(world.broadcast_tensors(task_state.now, holder))
    return result  # type: ignore[no-any-return]


def _other_options(config: Config, task: Task) -> str:
    """The options of the task, and --seed, that differ from the run's, with both values."""
    assert config.run_dir is not None  # resolved
    recorded = _saved(config.run_dir)
    changed = changed_options(recorded, saved_options(config, task.options()), task.harmless) if recorded else []
    its = {*task.options(), "seed"}
    return ", ".join(f"{flag(name)} {now} (the run: {before})" for name, before, now in changed if name in its)


def _began_from(run_dir: Path) -> str:
    return str(_saved(run_dir).get("init_from", ""))


def _saved(run_dir: Path) -> dict[str, Any]:
    """The run's options; empty if there is no run."""
    saved = run_dir / "config.toml"
    return read_config(saved) if saved.exists() else {}


def _read_newest(model: nn.Module, checkpoints: Checkpoints, task_state: TaskState | None) -> tuple[str, str]:
    while True:
        newest = checkpoints.newest_named_step()
        try:
            return read_weights(model, checkpoints.folder.parent, task_state=task_state)
        except Refusal as refusal:
            if checkpoints.newest_named_step() == newest:
                raise Refusal(str(refusal).replace("--init-from", "--run-dir", 1)) from None
            # the run has written newer ones, and deleted those that were being read
