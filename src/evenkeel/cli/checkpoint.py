"""`python -m evenkeel checkpoint`: list, inspect, verify and export the checkpoints of a run.

Nothing in the run changes: a damaged checkpoint is reported and stays where it is.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.filesize import decimal

from ..common.display import aligned, say
from ..common.errors import Ended, Refusal
from ..common.files import MOST, write_atomically
from ..common.naming import shown
from ..config import Flag, MaybePath, option
from ..run.checkpoint import Checkpoints
from ..run.chosen import best_in
from ..run.manifest import Manifest, is_step_folder, load, read_manifest, step_folders, step_of
from ..run.state_files import DAMAGED, WRONG, Damaged, Want

PLACES = "name a run directory, its checkpoints folder or one step-* folder"

Place = Annotated[
    tyro.conf.Positional[Path], tyro.conf.arg(help="A run directory, its checkpoints folder, or one step-* folder.")
]
HELP = "Step of the checkpoint. Default: the newest one."
Step = Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="", help=HELP)]


@dataclass(frozen=True)
class ListCheckpoints:
    """Print a line for each checkpoint, oldest first, and why it is kept: the best, the newest, each N-th.

    Reads the manifests only; `verify` reads the files too. Checkpoints set aside as damaged come last.
    """

    path: Place

    def __call__(self) -> int:
        """Print the table."""
        paths = find(self.path, aside=True)
        folder = paths[0].parent
        newest, best = Checkpoints(folder, 1).newest_manifest(), best_in(folder)
        rows = [("STEP", "KIND", "WRITTEN", "SIZE", ""), *(_row(path, newest, best) for path in paths)]
        width = max(len(step) for step, *_ in rows)
        say("\n".join(aligned([(step.rjust(width), *cells) for step, *cells in rows])))
        return 0


@dataclass(frozen=True)
class InspectCheckpoint:
    """Print the contents of the newest checkpoint: files, the model's tensors, the size of the optimizer state."""

    path: Place
    step: Step = option(None, 0)

    def __call__(self) -> int:
        """Print it."""
        path = choose(self.path, self.step)
        state, manifest = _load(path, "shapes"), read_manifest(path)
        from ..training.staging import named_tensors  # imports torch, which `list` does without

        host = f" on {manifest.host}" if manifest.host else ""
        say(f"{path}: {manifest.kind} of step {manifest.step}, written {_when(manifest)}{host}")
        say(f"metrics: {shown(manifest.metrics) or 'no evaluation at this step'}")
        for name, written in manifest.files.items():
            say(f"file {name}: {decimal(written.bytes)}, sha256 {written.sha256}")
        model = named_tensors(state["model"])
        width = max(map(len, model), default=0)
        say(f"model: {sum(tensor.numel() for tensor in model.values()):,} parameters, buffers counted too")
        for name, tensor in model.items():
            say(f"  {name.ljust(width)}  {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
        for name in [name for name in state if name not in ("step", "model")]:
            tensors = named_tensors(state[name]).values()
            size = f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors):,} bytes"
            say(f"{name}: {size if tensors else state[name]}")
        return 0


@dataclass(frozen=True)
class VerifyCheckpoints:
    """Read every file of every checkpoint, compare it with its manifest and load it. Exit code 1: one is damaged."""

    path: Place

    def __call__(self) -> int:
        """Print a line for each."""
        code = 0
        for path in find(self.path):
            try:
                load(path, "shapes")
                say(f"{path.name}: ok, {_size(read_manifest(path))}")
            except Damaged as damage:
                if path.exists():  # a run at work has not deleted it meanwhile
                    say(f"{path.name}: DAMAGED: {damage}")
                    code = 1
        return code


@dataclass(frozen=True)
class ExportModel:
    """Write the model of the newest checkpoint to a file that loads anywhere, and print its sha256.

    Example: python -m evenkeel checkpoint export runs/classify -o model.pt

    torch.load("model.pt", weights_only=True) then returns the state dict, on the CPU. For a run with --ema it has the
    averaged weights. The sha256 is that of the weights; at the last step summary.json has the same. The task makes the
    model for --onnx and for --as transformers; options of train.py that differ from the run's follow `--`.
    """

    path: Place
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="PATH", help_behavior_hint="")] = None
    """The file to write, with --as transformers a folder; it must not exist."""
    step: Step = option(None, 0)
    form: Annotated[
        Literal["bare", "dp", "safetensors", "transformers"], tyro.conf.arg(name="as", aliases=["--format"])
    ] = "bare"
    """bare; dp: with DataParallel's prefix `module.`; safetensors; transformers: by the model's save_pretrained."""
    onnx: MaybePath = None
    """Instead write the network to this .onnx file (torch.onnx), and compare its outputs by onnxruntime."""
    raw: Flag = False
    """With --ema: write the weights that the optimizer updates, not their average."""

    def __call__(self, train_options: list[str]) -> int:
        """Write the file."""
        path, output = choose(self.path, self.step), self._output(train_options)
        from ..run.weights import write  # these import torch, which `list` does without
        from ..training.ema import averaged
        from ..training.state_dicts import sha256

        state = _load(path, "weights")
        weights = state["model"] if self.raw else averaged(state)
        note = ""
        try:
            if self.onnx or self.form == "transformers":
                note = self._with_code(path, output, weights, train_options)
            else:
                write_atomically(output, lambda file: write(weights, self.form, file))
        except OSError as error:
            raise Ended(f"--output {output}: cannot write it: {error.strerror or error}") from None
        say(f"{path} -> {output}, sha256 of the weights {sha256(weights)}{note}")
        return 0

    def _output(self, train_options: list[str]) -> Path:
        """The path to write; refused if it exists."""
        if self.onnx and (self.output or self.form != "bare"):
            raise Refusal(f"--onnx {self.onnx}: writes this file alone; leave --output and --as out")
        if train_options and not (self.onnx or self.form == "transformers"):
            raise Refusal(f"-- {' '.join(train_options)}: only --onnx and --as transformers take options of train.py")
        option, output = ("--onnx", self.onnx) if self.onnx else ("--output", self.output)
        if output is None:
            raise Refusal("export: --output FILE is missing; or give --onnx FILE")
        if os.path.lexists(output):
            raise Refusal(f"{option} {output}: exists already; name another file")
        if not output.parent.is_dir():
            raise Refusal(f"{option} {output}: there is no folder {output.parent}; make it first")
        if missing := [name for name in ("onnx", "onnxscript") if self.onnx and not find_spec(name)]:
            raise Refusal(f"--onnx {output}: needs the package {missing[0]}; pip install onnx onnxscript onnxruntime")
        return output

    def _with_code(self, path: Path, output: Path, weights: dict[str, Any], train_options: list[str]) -> str:
        from . import export

        config, task, model = export.built(path.parent.parent, weights, train_options)
        if self.onnx:
            return f"; {export.write_onnx(config, task, model, output)}"
        export.write_pretrained(model, output)
        return ""


@dataclass(frozen=True)
class CheckpointCommand:
    """List, inspect, verify or export a run's checkpoints.

    Example: python -m evenkeel checkpoint list runs/classify
    """

    action: tyro.conf.OmitArgPrefixes[
        Annotated[ListCheckpoints, tyro.conf.subcommand("list")]
        | Annotated[InspectCheckpoint, tyro.conf.subcommand("inspect")]
        | Annotated[VerifyCheckpoints, tyro.conf.subcommand("verify")]
        | Annotated[ExportModel, tyro.conf.subcommand("export")]
    ]

    def __call__(self, train_options: list[str]) -> int:
        """Run the chosen action."""
        if isinstance(self.action, ExportModel):
            return self.action(train_options)
        if train_options:
            raise Refusal(f"-- {' '.join(train_options)}: only `checkpoint export` takes options of train.py")
        return self.action()


def find(path: Path, aside: bool = False) -> list[Path]:
    """All checkpoints at a path, by step.

    Args:
        path: a run directory, its checkpoints folder, or one checkpoint.
        aside: append those that were set aside as damaged.

    Raises:
        Refusal: there is none, or the folder cannot be read.
    """
    try:
        if is_step_folder(path.resolve()) and path.is_dir():
            return [path.resolve()]
        folder = nested if (nested := path / "checkpoints").is_dir() else path
        aside_names = f"{DAMAGED}step-", f"{WRONG}step-"
        damaged = sorted(entry for entry in folder.iterdir() if entry.name.startswith(aside_names))
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}; {PLACES}") from None
    found = step_folders(folder) + damaged * aside
    if not found:
        hint = f", but {len(damaged)} set aside as damaged" if damaged else ""
        raise Refusal(f"{path}: no checkpoint there{hint}; {PLACES}")
    return found


def choose(path: Path, step: int | None) -> Path:
    """The checkpoint of a step, or the newest one.

    Raises:
        Refusal: there is none.
    """
    by_step = {step_of(found): found for found in find(path)}
    if step is not None and step not in by_step:
        raise Refusal(f"--step {step}: {path} has no such checkpoint; it has {', '.join(map(str, by_step))}")
    return by_step[max(by_step) if step is None else step]


def _row(path: Path, newest: Manifest | None, best: Path | None) -> tuple[str, str, str, str, str]:
    if not is_step_folder(path):
        return path.name.split("-")[2].lstrip("0"), "set aside", "", "", path.name
    try:
        manifest = read_manifest(path)
    except Damaged as damage:
        return str(step_of(path)), "damaged", "", "", str(damage)
    every = f"(each {manifest.keep_every})" if manifest.kept_for_ever else ""
    notes = [shown(manifest.metrics), "(best)" if path == best else "", "(newest)" if manifest == newest else "", every]
    return str(manifest.step), manifest.kind, _when(manifest), _size(manifest), "  ".join(filter(None, notes))


def _load(path: Path, want: Want) -> dict[str, Any]:
    try:
        return load(path, want)
    except Damaged as damage:
        raise Ended(f"damaged: {damage}; choose another one by --step") from None


def _when(manifest: Manifest) -> str:
    if not 0 <= manifest.time <= MOST:  # NaN too: a damaged manifest, which says nothing of the state
        return "?"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))


def _size(manifest: Manifest) -> str:
    return decimal(sum(written.bytes for written in manifest.files.values()))
