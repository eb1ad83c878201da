"""What a run is: the options of `train.py`, all of them facts about the job and none about its ranks."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from .errors import Refusal

Flag = Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]

NAME = tyro.conf.arg(metavar="NAME")
"""Of an option whose help lists its values: they need not stand beside it."""

FLOOR = 2.0**-14
"""The least loss scale, float16's smallest normal number. A gradient that overflows even so is no matter of scale."""


# One line for each help text: tyro would keep the breaks of longer ones.


@dataclass(frozen=True)
class Run:
    """What is trained, where and for how long."""

    task: str = "classify"
    """What to train: classify, regress, segment, or your own class as FILE.py:CLASS or PACKAGE.MODULE:CLASS."""
    run_dir: MaybePath = None
    """Folder for all that the run leaves: checkpoints, metrics, logs, the final model. Default: runs/TASK."""
    config: MaybePath = None
    """Read options from this TOML file. The command line overrides it."""
    epochs: int = 20
    """Passes over the training data."""
    max_steps: int = 0
    """Stop after this many optimizer steps. 0: no limit."""
    fresh: Flag = False
    """Start over. A run in the run directory is moved aside, not deleted."""
    eval_only: Flag = False
    """Train nothing: print the metrics of the run's newest checkpoint, or of --init-from. Changes nothing."""
    eval_every: int = 0
    """Steps between two evaluations. 0: after each epoch."""
    patience: int = 0
    """Evaluations without a better one to finish after. 0: none."""


@dataclass(frozen=True)
class Data:
    """How the data is cut and loaded; what it is, the task says."""

    batch_size: int = 64
    """Samples of one optimizer step, over all processes."""
    micro_batch: Annotated[int | Literal["auto"], tyro.conf.arg(metavar="N|auto")] = 0
    """Samples a process computes at a time; bounds memory. 0: as few parts as feed all processes; auto: largest."""
    micro_batches: int = 0
    """Instead of --micro-batch: cut each step into this many."""
    num_workers: int = 0
    """Loading processes for each training process."""
    other_data: Flag = False
    """Go on although samples are not what they were when the run began, or not the same for all processes."""
    limit_batches: int = 0
    """For a smoke run: only this many batches of the training data, and as many test samples. 0: all."""


@dataclass(frozen=True)
class Model:
    """Weights, and how they are laid out and averaged."""

    init_from: MaybePath = None
    """Start from these weights: a file of torch.save or safetensors, a run directory or a step folder."""
    init_partial: Flag = False
    """Let --init-from take what fits, and say what stays random."""
    freeze: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Modules or parameters that do not learn, with * for any text: features.0 or *.bias, for example."""
    ema: float = 0.0
    """Decay of averaged weights, 0.999 for example, which are then evaluated and exported. 0: none."""
    sync_batchnorm: Flag = False
    """BatchNorm over the global batch. Needs a rank for each micro-batch."""
    channels_last: Flag = False
    """Channels last in memory: often faster for convolutions."""
    compile: Flag = False
    """torch.compile. Needs g++ on a CPU and Triton on a GPU."""
    place: str = ""
    """Networks on GPUs of their own in each process, as NAME=0,OTHER=1."""
    model_parallel: int = 1
    """Cut the network over this many GPUs of each process."""
    strategy: Annotated[Literal["ddp", "dp"], NAME] = "ddp"
    """ddp: a process for each GPU. dp: nn.DataParallel, one process for all visible GPUs, which is slower."""


@dataclass(frozen=True)
class Optimizer:
    """The update of the weights."""

    optimizer: Annotated[Literal["sgd", "adam", "adamw"], NAME] = "adamw"
    """sgd (Nesterov momentum 0.9), adam or adamw. A task may bring its own instead."""
    lr: float = 2e-3
    """Peak learning rate."""
    schedule: Annotated[Literal["constant", "linear", "cosine", "step", "poly"], NAME] = "cosine"
    """constant; linear or cosine to 0; poly, linear to the power 0.9; step, a tenth after each third."""
    warmup_steps: int = 0
    """Steps of linear rise of the learning rate from 0."""
    weight_decay: float = 0.01
    """L2 penalty (sgd, adam) or decoupled decay (adamw)."""
    decay_norms: Flag = False
    """Decay norms and biases too."""
    clip_norm: float = 0.0
    """Largest 2-norm of the whole gradient. 0: no clipping."""


@dataclass(frozen=True)
class Precision:
    """Numbers of the forward and backward passes. Weights are in float32 always."""

    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], NAME] = "fp32"
    """fp32; tf32: the same with faster, coarser products on GPUs; bf16 or fp16: autocast."""
    loss_scale: float = 65536.0
    """First factor of the loss with fp16, a power of two."""


@dataclass(frozen=True)
class Checkpoints:
    """What is saved, and what happens when something goes wrong."""

    checkpoint_every: int = 100
    """Steps between two; there is one at each stop anyway."""
    keep: int = 2
    """Newest checkpoints to keep, besides the best."""
    grace: float = 25.0
    """Seconds from a signal to the end of the process, saved or not. torchrun kills after 30."""
    hang_timeout: float = 600.0
    """Seconds without progress after which a job is taken to hang, saved and ended. 0: never."""
    on_nonfinite: Annotated[Literal["stop", "skip"], NAME] = "stop"
    """When a loss or the gradient is NaN or infinite. stop: end before that step; skip: leave it out."""


@dataclass(frozen=True)
class Logging:
    """What is told."""

    log_every: int = 10
    """Steps between two lines of metrics."""
    wandb: Annotated[Literal["auto", "online", "offline", "disabled"], NAME] = "auto"
    """auto: online where there is a key (WANDB_API_KEY or `wandb login`), else off; online; offline; disabled."""


@dataclass(frozen=True)
class Reproducibility:
    """What the bits of the result depend on."""

    seed: int = 0
    """Of weights, order, augmentation, dropout."""
    deterministic: Flag = False
    """Only algorithms that give the same bits each time on one machine."""
    reduce: Annotated[Literal["ring", "tree"], NAME] = "ring"
    """Order of adding gradients up. ring: the stock one; tree: same bits on any number of processes."""
    threads: int = 0
    """CPU threads of each process. 0: what the run began with; a new one divides the cores, or takes 1."""
    strict_bits: Flag = False
    """Refuse to continue where machine, libraries or code differ from the checkpoint's; else a warning."""
    digest_every: int = 0
    """Steps between two digests of every tensor, for `python -m evenkeel compare`. 0: none."""


GROUPS = (Run, Data, Model, Optimizer, Precision, Checkpoints, Logging, Reproducibility)
"""Of options, in the order of --help."""


@dataclass(frozen=True)
class Config(Reproducibility, Logging, Checkpoints, Precision, Optimizer, Model, Data, Run):
    """Train a task. Runs under torchrun on any number of processes, or alone as `python train.py`.

    The same command continues the run at its next step. Numbers are of the whole job, not of a process.
    """

    def resolved(self) -> Config:
        """The same with the defaults that depend on other options filled in."""
        name = self.task.rpartition(":")[2]
        return replace(self, run_dir=self.run_dir or Path("runs") / name)

    @property
    def largest_micro_batch(self) -> int | Literal["auto"]:
        """Samples that a process computes at a time, at most."""
        return self.micro_batch or -(-self.batch_size // max(1, self.micro_batches))


HARMLESS = frozenset(
    [
        "run_dir",
        "data_dir",
        "num_workers",
        "threads",
        "place",
        "model_parallel",
        "checkpoint_every",
        "grace",
        "hang_timeout",
        "on_nonfinite",
        "keep",
        "eval_every",
        "eval_only",
        "log_every",
        "digest_every",
        "strict_bits",
        "wandb",
        "fresh",
        "other_data",
        "config",
    ]
)
"""Options that may change when a run is continued. All others shape the result, a task's own included unless it says
otherwise (`Task.harmless`). A `data_dir` does not: the same data may lie elsewhere on another node."""

CUTTING = frozenset({"micro_batch", "micro_batches", "strategy"})
"""Options that may change as well, with a warning. They decide how a batch is cut and not which samples it has:
dropout, mixing, BatchNorm's groups and the last bits become others. After an out-of-memory error there must be a way
on."""

UNSAVED = frozenset({"run_dir", "fresh", "other_data", "config", "eval_only"})
"""Options about one start of a run rather than the run, so that its config.toml does not hold them."""


COUNT = 10**12
"""More than any number of samples, steps or epochs that can be meant."""

FINITE, BELOW_1 = sys.float_info.max, math.nextafter(1, 0)

BOUNDS: dict[str, tuple[float, float]] = {
    "epochs": (1, COUNT),
    "batch_size": (1, COUNT),
    "micro_batch": (0, COUNT),
    "micro_batches": (0, COUNT),
    "max_steps": (0, COUNT),
    "warmup_steps": (0, COUNT),
    "checkpoint_every": (0, COUNT),
    "eval_every": (0, COUNT),
    "digest_every": (0, COUNT),
    "log_every": (1, COUNT),
    "limit_batches": (0, COUNT),
    "patience": (0, COUNT),
    "keep": (1, COUNT),
    "seed": (0, 2**63 - 1),
    "threads": (0, 4096),
    "num_workers": (0, 1024),
    "model_parallel": (1, 1024),
    "grace": (1, 7 * 86400),
    "hang_timeout": (0, 7 * 86400),
    "lr": (0, FINITE),
    "weight_decay": (0, FINITE),
    "clip_norm": (0, math.inf),
    "ema": (0, FINITE),
}
"""Option -> the least and the most that it may be. Threads and processes: what a machine survives; seconds: a week."""

COMMAND_BOUNDS: dict[str, tuple[float, float]] = {
    "gpus": (1, 1024),
    "node_rank": (0, 2**16),
    "nodes": (1, 2**16),
    "max_restarts": (0, 10**6),
    "max_requeues": (0, 10**6),
    "cpus_per_gpu": (1, 4096),
    "world_size": (1, 2**16),
    "step": (0, COUNT),
    "minutes": (1e-3, 366 * 1440),
    "count": (0, COUNT),
    "seed": (0, 2**63 - 1),
}
"""The same of the other commands."""


def check_numbers(options: Any, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Refuse numbers beyond their bounds.

    Args:
        options: a dataclass.
        bounds: the least and the most, by field. Others must be numbers, and fit into 64 bits.

    Raises:
        Refusal: names the flag, the value and the bound.
    """
    for option in fields(options):
        value = getattr(options, option.name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        widest = (-math.inf, math.inf) if isinstance(value, float) else (-(2**63), 2**63 - 1)
        least, most = bounds.get(option.name, widest)
        if least <= value <= most:
            continue
        side, bound = ("most", most) if value > most else ("least", least)  # NaN as well
        must = {FINITE: "finite", BELOW_1: "below 1", -math.inf: "a number"}.get(bound, f"at {side} {bound}")
        raise Refusal(f"{flag(option.name.rstrip('_'))} {str(value)[:40]}: must be {must}")


def number_in(variable: str, least: int, most: int) -> int:
    """A whole number in an environment variable that is set.

    Raises:
        Refusal: it is none, or beyond its bounds.
    """
    text = os.environ[variable]
    number = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
    if number is None or not least <= number <= most:
        raise Refusal(f"{variable}={text[:40]}: must be a whole number from {least} to {most}; mend or unset it")
    return number


def validate(config: Config, samples: int | None = None, test_samples: int | None = None) -> None:
    """Refuse values that cannot be meant.

    Args:
        config: resolved options.
        samples: size of the training data, where it is known.
        test_samples: size of the test data.

    Raises:
        Refusal: names the flag, the value and the remedy.
    """
    if config.ema >= 1:
        raise Refusal(f"--ema {config.ema}: must be below 1, which would never take in a step; 0.999 is usual")
    if not (FLOOR <= config.loss_scale < 2**127 and math.frexp(config.loss_scale)[0] == 0.5):
        raise Refusal(
            f"--loss-scale {config.loss_scale:g}: must be a power of two from 2**-14 to 2**126; 65536 is usual"
        )
    check_numbers(config, BOUNDS)
    if config.eval_only and config.fresh:
        raise Refusal("--eval-only --fresh: one looks at a run, the other starts over; choose one")
    for name in ("micro_batch", "micro_batches"):
        if (value := getattr(config, name)) != "auto" and value > config.batch_size:
            raise Refusal(
                f"{flag(name)} {value}: is above --batch-size {config.batch_size}; a micro-batch is a part of the batch"
            )
    if config.micro_batch and config.micro_batches:
        raise Refusal(
            f"--micro-batch {config.micro_batch} --micro-batches {config.micro_batches}: the size and the number of "
            "the parts of a step; leave one of them out"
        )
    if config.sync_batchnorm and (config.strategy == "dp" or config.micro_batch == "auto"):
        with_what = "--strategy dp" if config.strategy == "dp" else "--micro-batch auto"
        raise Refusal(
            f"{with_what} --sync-batchnorm: statistics of the whole batch need a rank for each micro-batch; use ddp "
            "and give --micro-batch as --batch-size divided by the number of ranks"
        )
    if config.strategy == "dp" and config.reduce == "tree":
        raise Refusal(
            "--reduce tree: with --strategy dp DataParallel adds the GPUs' gradients, in an order of its own; "
            "leave one of the two out"
        )
    if samples is not None and config.batch_size > samples:
        raise Refusal(
            f"--batch-size {config.batch_size}: the training data has only {samples} samples; use at most that"
        )
    if test_samples == 0:
        raise Refusal(f"--task {config.task}: its test data is empty")
    if config.init_from:
        if not os.access(config.init_from, os.F_OK):
            raise Refusal(f"--init-from {config.init_from}: no such file or folder")
        if not (config.init_from.is_file() or config.init_from.is_dir()):  # reading a pipe may never come to its end
            raise Refusal(f"--init-from {config.init_from}: is neither a file nor a folder, but a pipe or a device")
    if config.init_partial and not config.init_from:
        raise Refusal("--init-partial: there is no --init-from that it could be about; name a file or leave it out")
    placed_networks(config)
    if config.place and config.model_parallel > 1:
        raise Refusal(
            f"--place {config.place} --model-parallel {config.model_parallel}: whole networks are placed or one is "
            "cut; leave one of them out"
        )
    if config.compile and (config.strategy == "dp" or config.place or config.model_parallel > 1):
        other = "--strategy dp" if config.strategy == "dp" else "--place" if config.place else "--model-parallel"
        raise Refusal(f"--compile {other}: a compiled network is on one device for each process; leave one of them out")
    if config.compile and config.sync_batchnorm:
        raise Refusal(
            "--compile --sync-batchnorm: its layers exchange statistics in the midst of the network, which cannot be "
            "compiled around them; leave one of the two out"
        )
    if config.strategy == "dp" and devices_per_rank(config) > 1:
        raise Refusal(
            "--strategy dp: gives each GPU a copy of the whole network, which --place and --model-parallel divide; "
            "leave one of them out"
        )


def placed_networks(config: Config) -> dict[str, int]:
    """Network -> number of its device within the process, as --place says.

    Raises:
        Refusal: it does not say that.
    """
    found: dict[str, int] = {}
    for item in filter(None, config.place.split(",")):
        name, _, number = (part.strip() for part in item.partition("="))
        if not name or not re.fullmatch("[0-9]{1,40}", number) or name in found:
            raise Refusal(
                f"--place {config.place}: '{item.strip()}' is not NETWORK=NUMBER, once for each network; for example "
                "segmenter=0,discriminator=1"
            )
        found[name] = int(number)
    used = {0, *found.values()}
    if gap := next((n for n in range(len(used)) if n not in used), None):
        raise Refusal(
            f"--place {config.place}: device {gap} has no network; number the devices of a process without gaps"
        )
    return found


def devices_per_rank(config: Config) -> int:
    """GPUs that each process has, k: local rank r has numbers r * k up to r * k + k - 1."""
    return max(config.model_parallel, *(number + 1 for number in placed_networks(config).values()), 1)


def differences(
    old: dict[str, Any], new: dict[str, Any], harmless: frozenset[str] = frozenset()
) -> list[tuple[str, Any, Any]]:
    """Options that shape the result and differ between a saved run and the present command.

    Args:
        old: the options in the run's config.toml.
        new: the present ones, as :func:`saved_options` gives them.
        harmless: options of the task that do not shape the result.

    Returns:
        (name, old value, new value) of each. The length of a run (epochs, max_steps) counts only where the
        learning rate depends on it: a run with a constant one may be prolonged. An option that did not exist when the
        run was made had its default.
    """
    free = HARMLESS | harmless | CUTTING | ({"epochs", "max_steps"} if new["schedule"] == "constant" else set())
    free -= {"eval_every"} if new.get("patience") else set()  # it then decides when the run ends
    names = [name for name in [*new, *(k for k in old if k not in new)] if name not in free]
    defaults = {f.name: list(f.default) if isinstance(f.default, tuple) else f.default for f in fields(Config)}
    before, now = ({n: options.get(n, defaults.get(n)) for n in names} for options in (old, new))
    return [(n, before[n], now[n]) for n in names if before[n] != now[n]]


def saved_options(config: Config, task_options: dict[str, Any]) -> dict[str, Any]:
    """All options as plain TOML values, those of the task beside the others; absent means None.

    Raises:
        Refusal: a task's option has a type that the file cannot hold.
    """
    options = {k: v for k, v in asdict(config).items() if k not in UNSAVED} | task_options
    return {k: _plain(k, v) for k, v in options.items() if v is not None}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(name, item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if type(value) not in (bool, int, float, str):
        raise Refusal(
            f"{flag(name)}: config.toml cannot hold its value of type {type(value).__name__}; an option is a bool, "
            "int, float, str, Path, Literal, or a list or tuple of them"
        )
    return value


def flag(name: str) -> str:
    """The command-line spelling of an option."""
    return "--" + name.replace("_", "-")


OPTION_NAMES = frozenset(f.name for f in fields(Config))
