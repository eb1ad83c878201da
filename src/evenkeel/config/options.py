"""The options of `train.py`. They describe the whole job, never a single rank."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

Flag = Annotated[tyro.conf.FlagCreatePairsOff[bool], tyro.conf.arg(help_behavior_hint="")]
MaybePath = Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")]
NAME = tyro.conf.arg(metavar="NAME")  # for an option whose help text lists its values, so that tyro does not

Bounds = tuple[float, float]  # the least and the most that a number may be
COUNT = 10**12  # more than any number of samples, steps or epochs that anyone can mean
FINITE, BELOW_1 = sys.float_info.max, math.nextafter(1, 0)
SEEDS: Bounds = (0, 2**63 - 1)
WEEK = 7 * 86400

FLOOR = 2.0**-14
"""Minimum loss scale, float16's smallest normal number. If a gradient still overflows, another remedy is needed."""


def option(
    default: Any,
    least: float | None = None,
    most: float = COUNT,
    *,
    change: Literal["refused", "warned", "free", "unsaved"] = "refused",
) -> Any:
    """The dataclass field of an option.

    Args:
        default: its default.
        least: the smallest number that it may be; None: any that fits into 64 bits.
        most: the largest.
        change: whether it may change when a run is continued. "refused": no, it shapes the result. "warned": yes, with
            a warning, because a run that is out of memory must be able to go on. It decides how a batch is cut, not
            which samples it has, so dropout, mixing, BatchNorm's groups and the last bits change. "free": yes.
            "unsaved": it is for one start, not for the run, and is not written to config.toml.
    """
    bounds = {} if least is None else {"bounds": (least, most)}
    return field(default=default, metadata={"change": change} | bounds)


# Docstrings below fields are the help texts. One line each: tyro would keep the line breaks of longer ones.


@dataclass(frozen=True)
class RunOptions:
    """What is trained, where and for how long."""

    task: str = "classify"
    """What to train: classify, regress, segment, lm, or your own class as FILE.py:CLASS or PACKAGE.MODULE:CLASS."""
    run_dir: MaybePath = option(None, change="unsaved")
    """Folder for everything that the run writes; may name options: 'runs/{task}-{lr}'. Default: runs/TASK."""
    config: MaybePath = option(None, change="unsaved")
    """Read options from this TOML file. The command line overrides it."""
    epochs: int = option(20, 1)
    """Passes over the training data."""
    max_steps: int = option(0, 0)
    """Stop after N optimizer steps, e.g. 1000 (0: no limit)."""
    fresh: Flag = option(False, change="unsaved")
    """Start over. A run in the run directory is moved aside, not deleted."""
    eval_only: Flag = option(False, change="unsaved")
    """Do not train: print the metrics of --checkpoint, or of --init-from. Writes nothing."""
    checkpoint: str = option("last", change="unsaved")
    """With --eval-only: which checkpoint of the run; last, best or a step, e.g. 460."""
    eval_every: int = option(0, 0, change="free")
    """Evaluate every N steps, e.g. 500 (0: after each epoch)."""
    patience: int = option(0, 0)
    """Finish early after this many evaluations without an improvement, e.g. 5 (0 disables it)."""


@dataclass(frozen=True)
class DataOptions:
    """How the data is cut and loaded. The task defines the data."""

    batch_size: int = option(64, 1)
    """Samples of one optimizer step, over all processes."""
    micro_batch: Annotated[int | Literal["auto"], tyro.conf.arg(metavar="N|auto")] = option(0, 0, change="warned")
    """Samples that a process computes at a time, e.g. 16; auto: as many as fit (0: one part per process)."""
    micro_batches: int = option(0, 0, change="warned")
    """Divide each batch into this many micro-batches, in place of --micro-batch (0: as --micro-batch says)."""
    batch_tokens: int = option(0, 0)
    """Also limit the tokens of a batch, padding included, e.g. 8192; needs --micro-batches (0: no limit)."""
    shares: Annotated[str, tyro.conf.arg(metavar="equal|auto|N:N...", help_behavior_hint="")] = option(
        "equal", change="free"
    )
    """Micro-batches of each process: equal; auto: by measured speed; or in proportion, e.g. 2:1."""
    num_workers: int = option(0, 0, 1024, change="free")
    """Data-loading processes per training process, e.g. 4 (0: load in the training process)."""
    other_data: Flag = option(False, change="unsaved")
    """Continue even if the samples differ from those at the start of the run, or between processes."""
    validation: float = option(0.0, 0, BELOW_1)
    """Share of the training data for validation, e.g. 0.1; the test data is then used at the end only (0: none)."""
    drop_last: Flag = False
    """Leave out the last samples of an epoch if they do not fill a batch; each epoch leaves out others."""
    limit_batches: int = option(0, 0)
    """For a quick trial: use only this many batches of training data, and as many test samples, e.g. 10 (0: all)."""


@dataclass(frozen=True)
class ModelOptions:
    """Weights, and how they are laid out and averaged."""

    init_from: MaybePath = None
    """Start from these weights: a file of torch.save or safetensors, a run directory, or a step folder."""
    init_partial: Flag = False
    """Let --init-from load the tensors that fit, and list those that stay random."""
    freeze: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="")] = ()
    """Do not train these modules or parameters, e.g. features.0 '*.bias'."""
    ema: float = option(0.0, 0, BELOW_1)
    """Evaluate and export a moving average of the weights with this decay, e.g. 0.999 (0 disables it)."""
    sync_batchnorm: Flag = False
    """BatchNorm statistics over the whole batch. Needs one process per micro-batch."""
    channels_last: Flag = False
    """Channels-last memory format, often faster for convolutions."""
    checkpoint_activations: Flag = option(False, change="free")
    """Compute blocks of the network again in the backward pass: less memory, more time, the same bits."""
    compile: Flag = False
    """Use torch.compile. Needs g++ on a CPU and Triton on a GPU."""
    place: str = option("", change="free")
    """Put networks of the model on different GPUs of each process, e.g. segmenter=0,discriminator=1."""
    model_parallel: int = option(1, 1, 1024, change="free")
    """Split the network over this many GPUs of each process."""
    shard: Annotated[Literal["off", "on"] | int, tyro.conf.arg(metavar="off|on|N")] = option("off", 2, change="free")
    """Divide weights, gradients and optimizer state among all ranks, or each N (FSDP2, HSDP). Needs --reduce tree."""
    replicate: int = option(0, 0, 1, change="free")
    """1: with --shard on, copy each rank's state to another node after each step; a lost node then costs no step."""
    strategy: Annotated[Literal["ddp", "dp"], NAME] = option("ddp", change="warned")
    """ddp: one process per GPU. dp: nn.DataParallel, one process for all visible GPUs, which is slower."""
    share_gpu: Flag = option(False, change="free")
    """Let several processes share a GPU, to try out a larger job; slow, because gloo replaces NCCL."""


@dataclass(frozen=True)
class OptimizerOptions:
    """The update of the weights."""

    optimizer: Annotated[Literal["sgd", "adam", "adamw", "muon"], NAME] = "adamw"
    """sgd (Nesterov momentum), adam, adamw or muon (matrices, adamw for the rest), unless the task brings its own."""
    betas: Annotated[tuple[float, float], tyro.conf.arg(metavar="B1 B2")] = option((0.9, 0.999), 0, BELOW_1)
    """Decay of the averages of the gradient and of its square, of adam, adamw and muon's adamw, e.g. 0.9 0.95."""
    momentum: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = option(None, 0, BELOW_1)
    """Momentum of sgd (default 0.9; 0: none) and muon (default 0.95)."""
    lr: float = option(2e-3, 0, FINITE)
    """Peak learning rate, e.g. 0.001."""
    schedule: Annotated[Literal["constant", "linear", "cosine", "step", "poly"], NAME] = "cosine"
    """Learning rate: constant; linear, cosine or poly (power 0.9) to 0; step: x 0.1 after each third of the run."""
    warmup_steps: int = option(0, 0)
    """Raise the learning rate linearly from 0 over this many steps, e.g. 500."""
    weight_decay: float = option(0.01, 0, FINITE)
    """Weight decay: decoupled (adamw) or as an L2 penalty (sgd, adam), e.g. 0.05."""
    decay_norms: Flag = False
    """Apply weight decay to norms and biases too."""
    clip_norm: float = option(0.0, 0, math.inf)
    """Clip the 2-norm of the whole gradient to this, e.g. 1.0 (0 disables it)."""


@dataclass(frozen=True)
class PrecisionOptions:
    """Arithmetic of the forward and backward passes. Weights are always in float32."""

    precision: Annotated[Literal["fp32", "tf32", "bf16", "fp16"], NAME] = "fp32"
    """fp32; tf32: fp32 with faster, coarser matrix products on GPUs; bf16 or fp16: autocast."""
    loss_scale: float = 65536.0
    """Initial loss scale with fp16, a power of two."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints, and what happens when something goes wrong."""

    checkpoint_every: int = option(100, 0, change="free")
    """Save a checkpoint every N steps (0: only when the run stops, which always saves one)."""
    keep: int = option(2, 1, change="free")
    """Newest checkpoints to keep, besides the best ones."""
    keep_best: int = option(1, 1, change="free")
    """Best checkpoints to keep, by the metric that the task's `best` names."""
    keep_every: int = option(0, 0, change="free")
    """Also save a checkpoint every N steps and never delete it, e.g. 1000 (0: none)."""
    mirror: Annotated[str, tyro.conf.arg(metavar="URL", help_behavior_hint="")] = option("", change="unsaved")
    """Also copy complete checkpoints to this address, and start from its newest one, e.g. s3://bucket/run."""
    grace: float = option(25.0, 1, WEEK, change="free")
    """Maximum seconds from a stop signal to the end of the process, saved or not. torchrun kills it after 30."""
    hang_timeout: float = option(600.0, 0, WEEK, change="free")
    """Seconds without progress after which a hanging job saves its last step and ends (0 disables it)."""
    keeper: Annotated[Literal["on", "off"], NAME] = option("on", change="free")
    """on: killed ranks restart in place; off: torchrun restarts them."""
    keeper_restarts: int = option(3, 0, change="free")
    """Maximum consecutive in-place restarts without progress."""
    keeper_memory: Annotated[Literal["on", "off"], NAME] = option("on", change="free")
    """on: restart from the last step, in memory (one copy of the state per rank); off: from the disk."""
    on_nonfinite: Annotated[Literal["stop", "skip"], NAME] = option("stop", change="free")
    """If the loss or gradient is NaN or infinite: stop (end the run before that step) or skip (omit the step)."""
    verify_every: int = option(0, 0, change="free")
    """Every N steps ranks check each other's gradients and weights, e.g. 100, to find a faulty GPU (0: never)."""


@dataclass(frozen=True)
class LoggingOptions:
    """What is reported."""

    log_every: int = option(10, 1, change="free")
    """Record the metrics every N steps. A console without a progress bar shows one such line per 5 seconds."""
    tensorboard: Flag = option(False, change="free")
    """Also write the metrics for TensorBoard (extra `tensorboard`)."""
    csv: Flag = option(False, change="free")
    """Also write the metrics to metrics.csv in the run directory."""
    save_predictions: Flag = option(False, change="free")
    """Save the predictions of the last evaluation for `evenkeel report`."""
    wandb: Annotated[Literal["auto", "online", "offline", "disabled"], NAME] = option("auto", change="free")
    """Weights & Biases: online, offline, disabled; auto: online if there is a key (WANDB_API_KEY or `wandb login`)."""
    tracker: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="FILE.py:CLASS", help_behavior_hint="")
    ] = option((), change="free")
    """A tracker of your own, a class with log(metrics, step) and close(status). May be given several times."""
    wandb_report: Flag = option(False, change="free")
    """At the end send the page of `evenkeel report` to Weights & Biases."""
    profile: Annotated[str, tyro.conf.arg(metavar="FIRST:LAST", help_behavior_hint="")] = option("", change="unsaved")
    """Record a trace of these steps, e.g. 20:25 for the five after step 20 (`evenkeel profile` merges the ranks)."""
    memory_snapshot: Flag = option(False, change="unsaved")
    """With --profile on GPUs: also record memory, for pytorch.org/memory_viz."""


@dataclass(frozen=True)
class ReproducibilityOptions:
    """What decides the bits of the result."""

    seed: int = option(0, *SEEDS)
    """Seed of the initial weights, the order of samples, augmentation and dropout."""
    deterministic: Flag = False
    """Use only algorithms that give the same bits each time on one machine."""
    reduce: Annotated[Literal["ring", "tree"], NAME] = "ring"
    """How gradients are summed. ring: as usual in DDP; tree: the same bits on any number of processes."""
    reduce_dtype: Annotated[Literal["fp32", "bf16"], NAME] = "fp32"
    """Type in which processes exchange float32 gradients. bf16: half the bytes, rounded; only with --reduce ring."""
    threads: int = option(0, 0, 4096, change="free")
    """CPU threads per process, e.g. 4 (0: as at the start of the run; a new run divides the cores, or takes 1)."""
    strict_bits: Flag = option(False, change="free")
    """Refuse to continue if machine, libraries or code have changed."""
    digest_every: int = option(0, 0, change="free")
    """Record a digest of each tensor every N steps for `evenkeel compare` (0: none). --shard gathers each tensor."""


@dataclass(frozen=True)
class Config(
    ReproducibilityOptions, LoggingOptions, CheckpointOptions, PrecisionOptions, OptimizerOptions, ModelOptions,
    DataOptions, RunOptions,
):  # fmt: skip
    """Train a task. Runs under torchrun on any number of processes, or alone as `python train.py`.

    Example: torchrun --standalone --nproc_per_node=2 train.py --epochs 5 --run-dir runs/mine

    Typed again, the same command continues the run at its next step. Numbers such as --batch-size are for the whole
    job, not per process.
    """

    def __post_init__(self) -> None:
        for it in fields(self):  # text is accepted as a path, and ~: a shell leaves it in --run-dir=~/runs
            if it.type == "MaybePath" and (given := getattr(self, it.name)) is not None:
                path = Path(given)
                object.__setattr__(self, it.name, path.expanduser() if path.parts[:1] == ("~",) else path)

    def resolved(self) -> Config:
        """A copy with the defaults that depend on other options."""
        return replace(self, run_dir=self.run_dir or Path("runs") / self.task.rpartition(":")[2])

    @property
    def exact(self) -> bool:
        """Whether the same bits are promised: deterministic kernels, one thread."""
        return self.deterministic or self.reduce == "tree"

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        return any(every and step % every == 0 for every in (self.checkpoint_every, self.keep_every))

    @property
    def largest_micro_batch(self) -> int | Literal["auto"]:
        """The most samples that a process computes at a time."""
        return self.micro_batch or -(-self.batch_size // max(1, self.micro_batches))


GROUPS: tuple[type, ...] = Config.__bases__[::-1]  # of options, in the order of --help

OPTION_NAMES = frozenset(it.name for it in fields(Config))
CUTTING, UNSAVED, _FREE = (
    frozenset(it.name for it in fields(Config) if it.metadata.get("change") == change)
    for change in ("warned", "unsaved", "free")
)
ALIKE = CUTTING | frozenset(
    {"checkpoint_every", "digest_every", "epochs", "eval_every", "fresh", "keep_every", "log_every", "max_steps"}
    | {"on_nonfinite", "profile", "replicate", "save_predictions", "shard", "shares", "strict_bits", "verify_every"}
)
"""Options that may change when a run is continued, but not from rank to rank: shares and collectives depend on them."""
HARMLESS = _FREE | UNSAVED | {"data_dir"}  # a task's option: the same data may lie elsewhere on another node
BOUNDS: dict[str, Bounds] = {it.name: it.metadata["bounds"] for it in fields(Config) if "bounds" in it.metadata}
