#!/usr/bin/env python3
"""What a checkpoint costs the training: `Run.checkpoint`, beside saving in the loop and beside one copy in memory.

    python benchmarks/checkpoint.py

Ways to deal with the same state, weights and AdamW's moments, in turns:

- ours: copied beside the next step's forward and backward passes into memory that is kept, and written by another
  thread. What counts is how long the training is kept: by `Run.checkpoint`, by the next commit, which waits for the
  copy, and by the later step that notes the result;
- capture: the whole copy into memory that is kept, which is the stall where there is no work beside it;
- saving in the loop, as most templates do: `torch.save`, flush, fsync;
- one copy, the floor: the same bytes at once, in one piece, into memory that has been used before;
- new memory: a capture that asks for its memory each time.

Prints medians and ratios, and how long small passes take alone and beside the copying and writing, which need processor
time as well. One thread, as under torchrun.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from torch import nn
from torchvision.models import resnet18

from evenkeel.common.errors import Refusal
from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.exits import exit_code
from evenkeel.distributed.world import World
from evenkeel.run.attempt import Attempt
from evenkeel.run.run import Run
from evenkeel.tasks.classify import Classify
from evenkeel.training.state import State


@dataclass(frozen=True)
class Options:
    """Compare ways to save a state."""

    models: tuple[str, ...] = ("resnet18", "transformer")
    """resnet18: 12 million parameters; transformer: 100 million."""
    saves: int = 5
    """Saves of each kind that are measured."""
    folder: Path = Path()
    """Where to write, on the kind of disk that is asked about. It is left as it was."""


def transformer() -> nn.Module:
    """An encoder of the size of BERT base."""
    layer = nn.TransformerEncoderLayer(768, nhead=12, dim_feedforward=3072, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=12, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(20_000, 768), encoder)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "resnet18": (resnet18, lambda: torch.randn(2, 3, 112, 112)),
    "transformer": (transformer, lambda: torch.randint(20_000, (1, 16))),
}
"""Name -> how to make the model, and a small batch."""


def trained(model: nn.Module) -> State:
    """The state after one step; more steps without gradients count and change nothing."""
    state = State(model, [torch.optim.AdamW(model.parameters())])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    state.commit(torch.tensor(1.0), [group.committed for group in state.buffers.groups])
    state.clear_gradients()
    return state


def started(config: Config, state: State) -> Run:
    """A run with this state, before its first step."""
    attempt = Attempt(config, Classify(), Plan.of(config, 1437), World.from_environment(), {}, lambda _recorded: config)
    attempt.begin(lambda: (1, ""))
    run = Run(attempt, Classify(), state)
    run._resume()
    return run


def size(branch: Any) -> int:
    """Bytes of the tensors in a tree."""
    if isinstance(branch, torch.Tensor):
        return branch.nbytes
    parts = branch.values() if isinstance(branch, dict) else branch if isinstance(branch, list) else ()
    return sum(map(size, parts))


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def ours(run: Run, state: State, beside: Callable[[], object]) -> tuple[float, float]:
    """The stall of one checkpoint, and how long the work beside it took."""
    state.clear_gradients()
    stall = seconds(lambda: run.checkpointer.after_step({}))
    work = seconds(beside)
    state.clear_gradients()
    unmoved = [group.committed for group in state.buffers.groups]
    stall += seconds(lambda: state.commit(torch.tensor(1.0), unmoved))  # has nothing to do but to wait
    while not run.checkpointer.saver.done:
        time.sleep(0.01)
    return stall + seconds(run.checkpointer.take_result), work  # as the next step does


def capture(run: Run, state: State) -> None:
    """Copy into memory that is kept."""
    run.checkpointer.saver._staging.reserve()  # the writer has given it back
    state.capture(staging=run.checkpointer.saver._staging)
    run.checkpointer.saver._staging.release()


def in_the_loop(state: State, path: Path) -> None:
    """Save as most templates do."""
    with path.open("wb") as file:
        torch.save({"model": state.model.state_dict(), "optimizer": state.optimizers[0].state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def measure(name: str, saves: int, folder: Path) -> None:
    """Save a model's state in all ways and print what it took."""
    model, batch = MODELS[name][0](), MODELS[name][1]()
    state = trained(model)
    config = Config(run_dir=folder / name, epochs=10**6, checkpoint_every=1, keep=1, wandb="disabled").resolved()
    run = started(config, state)

    def passes() -> None:
        model(batch).square().mean().backward()

    size_of_state = size(state.capture())
    one_piece = torch.ones(size_of_state // 4)
    floor = one_piece.clone()
    turns: list[dict[str, float]] = []
    for _ in range(saves + 1):
        alone = seconds(passes)
        stall, beside = ours(run, state, passes)
        turn = {
            "ours": stall,
            "saving in the loop": seconds(lambda: in_the_loop(state, folder / "state.pt")),
            "capture": seconds(lambda: capture(run, state)),
            "one copy": seconds(lambda: floor.copy_(one_piece)),
            "new memory": seconds(state.capture),
            "passes alone": alone,
            "passes beside": beside,
        }
        turns.append(turn)
    times = {way: [turn[way] for turn in turns[1:]] for way in turns[0]}  # the first asks for memory
    medians = {way: median(took) for way, took in times.items()}
    print(f"\n{name}: {size_of_state / 1e6:.0f} MB; medians of {saves}")
    for way, took in medians.items():
        print(f"  {way:<22}{took * 1e3:>10.1f} ms   {min(times[way]) * 1e3:.1f} .. {max(times[way]) * 1e3:.1f}")
    for a, b in (
        ("ours", "one copy"),
        ("ours", "saving in the loop"),
        ("capture", "one copy"),
        ("new memory", "one copy"),
        ("passes beside", "passes alone"),
    ):
        print(f"  {a} / {b} = {medians[a] / medians[b]:.3f}")


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) * 1024


def main(options: Options) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    for name in options.models:
        if name not in MODELS:
            raise Refusal(f"--models {name}: unknown; there are {', '.join(MODELS)}")
        with torch.device("meta"):
            parameters = sum(p.numel() for p in MODELS[name][0]().parameters())
        # weights and two moments each in the model, the kept copy, a new copy, and the two sides of the floor
        needed, available = 5 * 3 * 4 * parameters, available_bytes()
        print(f"{name}: needs about {needed / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available")
        if needed > available:
            raise Refusal(f"--models {name}: needs {needed / 1e9:.1f} GB of memory; leave it out")
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(name, options.saves, Path(folder))


if __name__ == "__main__":
    raise SystemExit(exit_code(lambda: main(tyro.cli(Options))))
