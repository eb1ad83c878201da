"""What it costs a step to be safe and seen: signals, heartbeats, commits and arrivals, against a step without them.

    torchrun --standalone --nproc_per_node=2 benchmarks/guards.py

Both sides train the same network in one process group, block by block in turn: with the thread that waits for
signals, a heartbeat a second through the store, the gradient's norm, and a commit that leaves out what is not
finite; and without all that, where the optimizer steps by itself. A third side has also its arrivals measured, and
exchanged every 10 steps (docs/live.md). Prints the ratios of median step times, and that of the side without against
itself, which shows how much of it is noise.

Then whole runs take turns of 50 steps, each with a checkpoint and a line in the log: as they are, with --keep-every 50
and with --digest-every 50, whose records are the ledger. None has --verify-every, which is 0 by default.
"""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import tyro
from turns import in_turn

from evenkeel.config import Config
from evenkeel.data.data_digest import TRAINING
from evenkeel.data.loader import make_loader
from evenkeel.data.plan import Plan
from evenkeel.data.sampler import ElasticSampler, by_step
from evenkeel.distributed.world import World
from evenkeel.resilience.hang import Watch
from evenkeel.resilience.interruption import Interruption
from evenkeel.run.attempt import Attempt
from evenkeel.run.build import build_model, build_state
from evenkeel.run.run import Run
from evenkeel.tasks.classify import Classify
from evenkeel.training.arrivals import Arrivals
from evenkeel.training.distributed_loss import DistributedLoss
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.state import State

BLOCK, TURN = 10, 50
"""Steps that a side takes before it is the other's turn; a whole run."""


@dataclass(frozen=True)
class Options:
    """Compare step times."""

    blocks: int = 30
    """Blocks of 10 steps of each side that are measured."""
    batch_size: int = 128
    """Global batch."""
    width: int = 64
    """Width of the network."""
    turns: int = 30
    """Turns of 50 steps of each whole run that are measured."""


def steps(guarded: bool, arrivals: Arrivals | None, task: Classify, world: World, batch_size: int) -> Iterator[None]:
    """The loop of train.py; one step for each next()."""
    torch.manual_seed(0)
    model = task.model().to(world.device)
    state = State(model, [build_optimizer(list(model.parameters()), Config())])
    train_set = task.train_dataset()
    micro_batch = batch_size // world.world_size
    sampler = ElasticSampler(train_set, batch_size, micro_batch, num_replicas=world.world_size, rank=world.rank)
    batches = make_loader(train_set, sampler, "train", 0, world.device)
    gradients = DistributedLoss(task.loss, state, world, sampler.plan, arrivals=arrivals)
    full_steps = len(train_set) // batch_size
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for step in itertools.islice(by_step(batches, sampler), full_steps):
            state.clear_gradients()
            for batch in gradients.micro_batches(step):
                gradients.backward(gradients(batch))
            if guarded:
                gradients.step(clip_grad_norm(model.parameters(), 0.0))
            else:
                state.optimizers[0].step()
            if arrivals and (step.number + 1) % BLOCK == 0:
                arrivals.exchange(step.number)
            yield


def whole_run(folder: Path, task: Classify, world: World, batch_size: int, **more: Any) -> Iterator[None]:
    """The loop of train.py with all that a run does after a step; one step for each next()."""
    config = Config(
        run_dir=folder, batch_size=batch_size, micro_batch=batch_size // world.world_size, epochs=100_000,
        wandb="disabled", eval_every=10**9, log_every=TURN, checkpoint_every=TURN, **more,
    ).resolved()  # fmt: skip
    train_set = task.train_dataset()
    plan = Plan.of(config, len(train_set))
    attempt = Attempt(config, task, plan, world, sets := {TRAINING: train_set}, lambda _recorded: config)
    state = build_state(config, task, world, plan, build_model(config, task), sets)
    attempt.begin(lambda: (1, ""))
    run = Run(attempt, task, state)
    model = run.distribute()
    for step in run.steps():
        for batch in model.micro_batches(step):
            model.backward(model(batch))
        model.step(clip_grad_norm(state.parameters, 0.0))
        run.after_step(model)
        yield


def counted(run: Iterator[None], spent: list[float]) -> Iterator[None]:
    """The same steps, with the CPU time of each in `spent`, which other programs on the machine hardly change."""
    while True:
        begun = time.process_time()
        next(run)
        spent.append(time.process_time() - begun)
        yield


def compare_runs(options: Options, task: Classify, world: World, folder: Path) -> None:
    """Measure and print what keeping and the ledger cost a run."""
    sides = {"without": {}, "without again": {}, "--keep-every": {"keep_every": TURN}, "ledger": {"digest_every": TURN}}
    spent: dict[str, list[float]] = {name: [] for name in sides}
    with redirect_stdout(io.StringIO()):  # the runs' own lines
        runs = {
            name: counted(whole_run(folder / name, task, world, options.batch_size, **more), spent[name])
            for name, more in sides.items()
        }
        seconds = in_turn(runs, options.turns, world.device, TURN)
    if world.rank == 0:
        wall = {name: median(values) for name, values in seconds.items()}
        turns = range(-options.turns * TURN, 0, TURN)
        cpu = {name: median(sum(values[at:][:TURN]) for at in turns) for name, values in spent.items()}
        print(f"step of a whole run: {wall['without'] / TURN * 1e3:.2f} ms, median of {options.turns} turns")
        for name in list(sides)[1:]:
            ratio, of_rank_0 = wall[name] / wall["without"], cpu[name] / cpu["without"]
            print(f"run {name} / run without = {ratio:.3f}, in CPU time of rank 0 {of_rank_0:.3f}")


def main(options: Options) -> None:
    """Measure and print."""
    Interruption(grace=25.0)
    world = World.from_environment()
    task = Classify(width=options.width)
    with world.connected() as store, TemporaryDirectory() as logs:
        sides = {"without": False, "without again": False, "with": True, "with, and measured": True}
        loops = {
            name: steps(guarded, Arrivals(world) if "measured" in name else None, task, world, options.batch_size)
            for name, guarded in sides.items()
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for block in range(options.blocks + 1):
            # in turn, so that none always comes after the same other one
            first = block % len(loops)
            for name in itertools.islice(itertools.cycle(loops), first, first + len(loops)):
                loop = loops[name]
                watch = Watch(600.0, world, store, Path(logs), lambda: None) if sides[name] else nullcontext()
                with watch:
                    for _ in range(BLOCK):
                        begun = time.perf_counter()
                        next(loop)
                        if world.device.type == "cuda":
                            torch.cuda.synchronize()
                        if block:  # the first is the warm-up
                            seconds[name].append(time.perf_counter() - begun)
        if world.rank == 0:
            base = median(seconds["without"])
            print(f"unguarded step: {base * 1e3:.2f} ms, median of {len(seconds['without'])}, {world.world_size} ranks")
            pairs = [("without again", "without"), ("with", "without"), ("with, and measured", "with")]
            for name, other in pairs:
                print(f"{name} / {other} = {median(seconds[name]) / median(seconds[other]):.3f}")
        folder = Path(world.broadcast(logs))
        compare_runs(options, task, world, folder)
        world.all_gather(None)  # so that the folder is there until all have ended


if __name__ == "__main__":
    main(tyro.cli(Options))
