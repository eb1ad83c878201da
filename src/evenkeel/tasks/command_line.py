"""The command line of train.py: options from dataclasses by tyro, defaults from a TOML file, errors in one line."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import tyro

from ..common.arguments import flag, one_line_errors, refuse_empty, some_options
from ..common.errors import Refusal
from ..common.naming import kind_of
from ..config import GROUPS, OPTION_NAMES, Config, check_numbers, validate
from ..run.earlier_run import is_run, is_untrained
from ..run.records import read_config
from ..training.checks import check_best
from ..training.task import Task, option_name
from ..training.whole_batch import refuse_unfit
from .registry import default_task, load_task, place_of_class, refuse_misspelt, refuse_other_parameters, refuse_own_init

TOPOLOGY = frozenset({"nodes", "gpus", "node_rank", "master"})
"""Options by which train.py hands over to a launcher (launchers.py)."""


@dataclass(frozen=True)
class _NoOptions:
    """No options of its own."""


T = TypeVar("T", bound=Task)


@overload
def parse(
    arguments: Sequence[str], task: None = None, base: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Config, Task]: ...
@overload
def parse(arguments: Sequence[str], task: type[T]) -> tuple[Config, T]: ...
def parse(
    arguments: Sequence[str], task: type[Task] | None = None, base: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Config, Task]:
    """The options of a training script, those of the task included.

    Args:
        arguments: the command line.
        task: the task of this script; default: that of --task.
        base: options of a run, by their names in config.toml, where the command line and --config have none.

    Raises:
        Refusal: an unknown option or task, an invalid value, a bad configuration file.
        SystemExit: after --help.

    >>> config, task = parse(["--epochs", "3"])
    >>> config.epochs, type(task).__name__
    (3, 'Classify')
    """
    config, chosen = options_of(arguments, task, base)
    resolved: Any = chosen if isinstance(chosen, Task) else (task or load_task(config.task))()
    resolved = resolved.resolved(_recorded(config))
    if not isinstance(resolved, Task):
        raise Refusal(f"resolved() returned {kind_of(resolved)}: it must return a task, itself if nothing changes")
    check_best(resolved.best, config.patience)
    refuse_unfit(resolved, config)
    return config, resolved


def options_of(
    arguments: Sequence[str], task: type[Task] | None = None, base: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Config, Any]:
    """The options of `parse`, and those of the task: the task itself if it has any.

    Imports what they need, so the second call is ten times as fast.
    """
    refuse_empty(arguments, Config)
    # --task and --config decide which other options there are
    early, _ = some_options(arguments, ("--task",), ("--config",))
    from_file = {**base, **(_read_file(early.config) if early.config else {})}
    if any(re.match("--micro[-_]batch", word) for word in arguments):  # replaces both options of the file
        from_file = {name: value for name, value in from_file.items() if name not in ("micro_batch", "micro_batches")}
    if task and early.task:
        raise Refusal(f"--task {early.task}: this script trains its own task, {task.__name__}; leave --task out")
    label = ""
    if not early.task and "task" not in from_file and not task:
        from_file["task"], label = default_task()
    if task:
        try:
            from_file["task"] = f"{os.path.relpath(inspect.getfile(task))}:{task.__name__}"
        except (OSError, TypeError):  # of a notebook's cell
            from_file["task"] = f"{task.__module__}:{task.__name__}"
    task_class = task or load_task(str(early.task or from_file["task"]), label)
    task_options = task_class if is_dataclass(task_class) else _NoOptions
    _check_options(task_class, task_options)
    refuse_empty(arguments, task_options)
    source = f"--config {early.config}" if early.config else "the run's config.toml"
    job_default, task_default = _with_file(from_file, source, Config, task_options)

    # a box of the help for each group of options, and one for the task's
    boxes = [group(**{it.name: getattr(job_default, it.name) for it in fields(group)}) for group in GROUPS]
    boxes.append(task_default)
    refuse_synonyms(arguments, {flag(option_name(it.name)) for box in boxes for it in fields(box)})
    hide_prefix: Any = tyro.conf.OmitArgPrefixes  # --width, not --task.width
    names = [*(group.__name__.removesuffix("Options").lower() for group in GROUPS), "task"]
    kinds = [hide_prefix[Annotated[type(box), tyro.conf.arg(help="")]] for box in boxes]
    form: Any = make_dataclass("Options", zip(names, kinds, strict=True))
    about = f"{inspect.getdoc(Config)}{_note(task_default) if {'-h', '--help'} & {*arguments} else ''}"
    synonyms = {name: here for name, here in BY_NAME.items() if here.startswith("--")}
    chosen: Any = one_line_errors(
        lambda: tyro.cli(form, default=form(*boxes), args=list(arguments), description=about),
        synonyms=synonyms | _unannotated(task_class),
    )
    *groups, task_chosen = vars(chosen).values()
    config = Config(**{name: value for group in groups for name, value in vars(group).items()}).resolved()
    config = replace(config, run_dir=_filled(config, task_chosen))
    validate(config)
    check_numbers(task_chosen)
    return config, task_chosen


def _note(options: Any) -> str:
    """A paragraph of the help about options that torchrun refuses, as abbreviations of several of its own; "": none."""
    from torch.distributed.run import get_args_parser

    known = {*re.findall(r"--[\w-]+", get_args_parser().format_help())}
    own = {flag(option_name(it.name)) for it in fields(options)} - known
    refused = sorted(it for it in own if sum(name.startswith(it) for name in known) > 1)
    return f"\n\nFor {', '.join(refused)} type torchrun ... -- train.py, else torchrun refuses it." if refused else ""


def parse_as_recorded(run: Path, arguments: Sequence[str]) -> tuple[Config, Task]:
    """As `parse`, with the options of a run as defaults; for commands that load one of its checkpoints."""
    recorded = read_config(run / "config.toml")
    # the weights come from a checkpoint, and the file of --init-from may be gone
    known = {name: value for name, value in recorded.items() if not name.startswith("init_")}
    return parse(["--run-dir", str(run), *arguments], base=known)


def _filled(config: Config, task_options: Any) -> Path:
    """The run directory with the values of options in place of their names in braces, as in runs/{task}-{lr}.

    Raises:
        Refusal: a name is unknown, or a brace is unmatched.
    """
    values = {it.name: getattr(config, it.name) for it in fields(config) if it.name not in ("run_dir", "config")}
    values["task"] = config.task.rpartition(":")[2]
    for it in fields(task_options):
        if not it.metadata.get("secret"):
            values[option_name(it.name)] = getattr(task_options, it.name)
    template = str(config.run_dir)
    for name in re.findall(r"\{([^{}]*)\}", template):
        if name not in values:
            raise Refusal(f"--run-dir {template}: there is no option {name or '{}'}; there are {', '.join(values)}")
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", template)):
        raise Refusal(f"--run-dir {template}: unmatched brace; write the names of options as {{lr}}")
    return Path(re.sub(r"\{([^{}]*)\}", lambda found: str(values[found[1]]).replace(os.sep, "-"), template))


def _recorded(config: Config) -> dict[str, Any] | None:
    """The options of the run that is continued; None for a new one."""
    assert config.run_dir is not None  # resolved
    saved, goes_on = config.run_dir / "config.toml", not config.fresh and not is_untrained(config.run_dir)
    return read_config(saved) if goes_on and is_run(config.run_dir) and saved.is_file() else None


def _unannotated(task_class: type[Task]) -> dict[str, str]:
    """Names of class attributes that would be options with a type, and what to do."""
    values = {name: it for name, it in vars(task_class).items() if type(it) in (bool, int, float, str)}
    known = {*inspect.get_annotations(task_class), *dir(Task)}
    values = {name: it for name, it in values.items() if name not in known and not name.startswith("_")}
    return {
        flag(name): f"to annotate it in {task_class.__name__} ({name}: {type(it).__name__} = {it!r})"
        for name, it in values.items()
    }


def _check_options(task_class: type[Task], options: type) -> None:
    """Refuse a task's options that tyro would ignore or cannot offer.

    Raises:
        Refusal: @dataclass ignores a field or a default; an option has the name of one of train.py's, or no default; a
            method or __init__ has other parameters than Task's, or a misspelt name.
    """
    refuse_misspelt(task_class)
    refuse_own_init(task_class)
    refuse_other_parameters(task_class)
    known: set[str] = {option.name for option in fields(options)}
    for cls in (cls for cls in task_class.__mro__ if issubclass(cls, Task)):
        annotated = inspect.get_annotations(cls)
        own = {name for name in annotated if not re.search(r"\b(ClassVar|Final)\b", str(annotated[name]))}
        if "__dataclass_fields__" in vars(cls):
            ignored = known - own
            known -= own  # what its parents say of them does not count
        else:
            ignored = known | {name for name in own if not name.startswith("_") and not hasattr(Task, name)}
        if names := [name for name in vars(cls) if name in ignored]:
            raise Refusal(
                f"task {cls.__name__}: its {names[0]} has no effect as an option; decorate the class with @dataclass "
                f"and annotate the name ({names[0]}: int = 3), or annotate it as ClassVar if it is not an option"
            )
    for option in fields(options):
        text = f"task {options.__name__}: its option {flag(option_name(option.name))}"
        if option_name(option.name) in OPTION_NAMES | TOPOLOGY:
            raise Refusal(f"{text} exists already in train.py; rename the field{place_of_class(options)}")
        if callable(getattr(Task, option.name, None)):
            raise Refusal(f"{text} hides the method {option.name}() of Task; rename the field")
        if option.default is MISSING and option.default_factory is MISSING:
            raise Refusal(f"{text} has no default; give it one")


def _read_file(path: str) -> dict[str, Any]:
    try:
        return read_config(Path(path))
    except Refusal as refusal:
        raise Refusal(f"--config {refusal}") from None


def _with_file(values: dict[str, Any], source: str, *classes: type) -> list[Any]:
    """Instances of the option classes, with the values of a file in place of their defaults.

    Raises:
        Refusal: the file has a key that none of the classes has, or a value of another type.
    """
    found: list[dict[str, Any]] = []
    for cls in classes:
        hints = get_type_hints(cls)
        found.append({})
        for option in fields(cls):
            if (name := option_name(option.name)) not in values:
                continue
            value, hint = values[name], hints[option.name]
            if value == "" != option.default:
                raise Refusal(f'{source}: {name} = "" is empty; give a value, or leave it out')
            try:
                found[-1][option.name] = _from_toml(value, hint)
            except (TypeError, ValueError):
                shown = str(hint) if get_origin(hint) else getattr(hint, "__name__", str(hint))
                expected = re.sub(r"\b(typing|pathlib(\._local)?)\.", "", shown)
                raise Refusal(f"{source}: {name} = {value!r} has the wrong type; expected {expected}") from None
    if unknown := sorted(set(values) - {option_name(name) for options in found for name in options}):
        raise Refusal(f"{source}: unknown key '{unknown[0]}'; keys are option names, e.g. batch_size")
    try:
        return [cls(**options) for cls, options in zip(classes, found, strict=True)]
    except ValueError as error:  # from a task's own check of its options
        raise Refusal(f"{source}: {error}") from None


def _from_toml(value: Any, hint: Any) -> Any:
    """A TOML value as an option of this type; TypeError or ValueError if it does not fit."""
    origin, options = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for option in options:
            with contextlib.suppress(TypeError, ValueError):
                return _from_toml(value, option)
    if origin is Literal and any(value == option and type(value) is type(option) for option in options):
        return value
    if origin in (list, tuple) and isinstance(value, list):
        any_length = origin is list or options[-1] is Ellipsis
        hints = options[:1] * len(value) if any_length else options
        return origin(_from_toml(item, each) for item, each in zip(value, hints, strict=True))
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is Any or type(value) is hint or (hint is float and type(value) is int):
        return value
    raise TypeError


CONTINUES = "not needed: the same command continues where it stopped (--fresh starts over)"
LAUNCHED = "an option of launch/single_node.py and the other launchers, before the --; plain torchrun has its own"
FROM_TORCHRUN = "not needed: torchrun sets it for each process"

SYNONYMS = {
    "--learning-rate --base-lr --lrate --optimizer.lr": "--lr",
    "--wd --l2": "--weight-decay",
    "--norm-weight-decay": "--decay-norms; without it norms and biases are not decayed",
    "--grad-clip --clip-grad --max-grad-norm --gradient-clip-val --clip-grad-norm --training.max-norm": "--clip-norm",
    "--clip-mode --clip-value --gradient-clip-algorithm": "not supported: --clip-norm clips by the gradient's 2-norm",
    "--sched --lr-scheduler-type --lr-scheduler.decay-type": "--schedule",
    "--warmup-epochs --warmup-ratio --lr-warmup-epochs --lr-scheduler.warmup-steps": "--warmup-steps, in steps",
    "--lr-step-size --lr-gamma --min-lr --decay-epochs": "no option: a task may bring its own schedulers",
    "--opt-betas --adam-beta1 --adam-beta2 --beta1 --beta2 --optimizer.beta1 --optimizer.beta2": "--betas, both",
    "--layer-decay --opt-eps": "no option: a task may bring its own optimizers",
    "--model-ema --ema-decay --model-ema-decay --model-ema-steps": "--ema",
    "-b --bs --batch --global-batch-size --per-device-train-batch-size "
    "--training.global-batch-size": "--batch-size, of all processes together",
    "--gradient-accumulation-steps --accumulate-grad-batches --grad-accum --accum-iter "
    "--grad-accum-steps": "--micro-batches, of all processes together; or --micro-batch, of one at a time",
    "--micro-batch-size --microbatch-size --training.local-batch-size": "--micro-batch",
    "--per-device-eval-batch-size --val-batch-size --validation-batch-size": "no option: that of --micro-batch",
    "--num-train-epochs --trainer.max-epochs": "--epochs",
    "--iterations --max-iter --total-steps --training.steps": "--max-steps",
    "--do-train --do-eval --validation.enable": "not needed: it trains and evaluates (--eval-only does not train)",
    "--training.seq-len": "an option of --task lm, by its bare name",
    "--start-epoch --resume --resume-from --resume-from-checkpoint --auto-resume --continue": CONTINUES,
    "--ckpt --ckpt-path --checkpoint-path --load --weights --pretrained-weights --finetune "
    "--initial-checkpoint --checkpoint.initial-load-path": "--init-from for weights to start from; a run of your own "
    "continues by the same command",
    "--restart --overwrite --overwrite-output-dir --no-resume": "--fresh",
    "--output-dir --out-dir --output --logdir --log-dir --save-dir --work-dir --exp-dir --checkpoint-dir": "--run-dir",
    "--save-every --save-steps --save-freq --save-interval --checkpoint-interval --ckpt-every --recovery-interval "
    "--checkpoint.interval": "--checkpoint-every",
    "--checkpoint.enable --checkpoint.async-mode": "not needed: they are always on, in the background",
    "--save-total-limit --keep-last --max-checkpoints --checkpoint-hist --checkpoint.keep-latest-k": "--keep",
    "--save-top-k": "--keep-best",
    "--load-best-model-at-end --metric-for-best-model --greater-is-better --eval-metric": "no option: the best "
    "checkpoint stays; the task's `best` names the metric",
    "--log-interval --logging-steps --print-freq -p --log-freq --log-steps --print-every "
    "--metrics.log-freq": "--log-every",
    "--eval-interval --eval-steps --eval-freq --val-interval --val-freq --val-check-interval "
    "--validation.freq": "--eval-every",
    "-e --evaluate --eval --test-only --validate --test": "--eval-only",
    "--early-stopping --early-stopping-patience": "--patience",
    "--amp --mixed-precision --autocast --use-amp --amp-dtype "
    "--training.mixed-precision-param": "--precision bf16 or --precision fp16",
    "--fp16 --half --float16 --opt-level --apex": "--precision fp16",
    "--bf16 --bfloat16": "--precision bf16",
    "--allow-tf32 --tf32": "--precision tf32",
    "--torch-compile --jit --torchcompile --compile.enable": "--compile",
    "--fsdp --deepspeed --zero-stage --parallelism.data-parallel-shard-degree --parallelism.tensor-parallel-degree "
    "--parallelism.pipeline-parallel-degree --parallelism.context-parallel-degree": "not supported: a process has "
    "the whole network (--model-parallel: on several GPUs, which take turns)",
    "--gradient-checkpointing --grad-checkpointing --activation-checkpointing "
    "--activation-checkpoint.mode": "--checkpoint-activations",
    "--sync-bn --syncbn": "--sync-batchnorm",
    "-j --dataloader-num-workers": "--num-workers",
    "--dataloader-drop-last": "--drop-last",
    "--group-by-length": "a part of the task: its order(epoch) returns `buckets(lengths, size)`",
    "--random-seed --manual-seed": "--seed",
    "--use-deterministic-algorithms": "--deterministic",
    "--fast-dev-run --overfit-batches --debug": "--limit-batches",
    "--use-wandb --log-wandb --metrics.enable-wandb": "--wandb",
    "--report-to --logger": "--wandb, --tensorboard, --csv or --tracker",
    "--no-wandb": "--wandb disabled",
    "--profiler --profiling.enable-profiling": "--profile FIRST:LAST",
    "--push-to-hub": "not supported: model.pt in the run's folder is a bare state dict",
    "--metrics.enable-tensorboard": "--tensorboard",
    "--data-parallel --dp": "--strategy dp",
    "--ddp --distributed --multiprocessing-distributed": f"{FROM_TORCHRUN}; --strategy ddp is the default",
    "--local-rank --rank --world-size --use-env --dist-url --dist-backend --init-method --backend --master-addr "
    "--master-port": FROM_TORCHRUN,
    "-g -n -nr --gpu --gpu-ids --gpu-id --num-gpus --devices --trainer.devices --nproc --nproc-per-node --nnodes "
    "--num-nodes --nodes --gpus --node-rank --dry-run --doctor --max-restarts --num-processes --num-machines "
    "--parallelism.data-parallel-replicate-degree": LAUNCHED,
    "--device --cuda --no-cuda --accelerator": "no option: GPUs where there are any (CUDA_VISIBLE_DEVICES chooses)",
    "--config-file --cfg": "--config",
    "-a --arch --network --backbone --net --model-name "
    "--model-name-or-path": "--model (--task classify); your own: --task FILE.py:CLASS",
    "--model": "a part of the task: its class makes the network; --model is an option of --task classify",
    "--data --data-path --data-root --dataset-path --root --train-dir": "--data-dir, with --dataset (--task classify)",
    "--training.dataset --training.dataset-path": "text files on a disk, which --task lm takes",
    "--data-dir --dataset": "a part of the task: its class opens the data; they are options of --task classify",
    "--imgsz --input-size --crop-size --img-size --train-crop-size --val-crop-size "
    "--val-resize-size": "--image-size (--task classify)",
    "--aa --auto-augment --augmentation": "--augment (--task classify)",
    "--mixup-alpha": "--mixup (--task classify)",
    "--cutmix-alpha": "--cutmix (--task classify)",
    "--smoothing": "--label-smoothing (--task classify)",
    "--drop-path --drop-path-rate --drop": "a part of the network, which the task makes",
    "--ra-sampler --aug-repeats": "not supported: each sample comes exactly once per epoch",
    "--random-erase --reprob --color-jitter --hflip --vflip": "no option: use --augment, or do it in your data set",
    "--fake-data --synthetic --dummy": "--dataset fake (--task classify)",
}
"""Names of options in other tools -> what to type here, or why nothing; for names where tyro suggests none, or a wrong
one (--fake-samples for --amp)."""

BY_NAME = {name: here for names, here in SYNONYMS.items() for name in names.split()}


def refuse_synonyms(arguments: Sequence[str], options: set[str]) -> None:
    """Refuse the name of another tool, with the one here; `options` are those that exist, as ``--batch-size``."""
    for argument in arguments:
        typed = argument.partition("=")[0]
        name = typed.replace("_", "-")
        if name in BY_NAME and name not in options:
            here = BY_NAME[name]
            raise Refusal(f"{typed}: {'here it is ' * here.startswith('--')}{here} (--help lists all options)")
