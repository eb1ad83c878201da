"""`python -m evenkeel checkpoint`: look at a run's checkpoints, check them, take the model out of one.

Changes nothing in the run: what is damaged is named and stays where it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import Progress

from .checkpoint import (
    Checkpoints,
    Damaged,
    is_step_folder,
    load,
    read_manifest,
    step_folders,
    step_of,
    unpack,
    verify,
)
from .config import Flag
from .errors import Ended, Refusal
from .files import write_atomically
from .naming import shown

if TYPE_CHECKING:
    from torch import Tensor

CheckpointsPath = tyro.conf.Positional[Path]
Step = Annotated[int | None, tyro.conf.arg(metavar="N")]
Row = tuple[str, str, str, str, str]
"""Cells of a line of `list`."""


@dataclass(frozen=True)
class ListCheckpoints:
    """A line for each checkpoint, oldest first, and for those that were set aside as damaged.

    Says which one is the best and which the newest. Believes the manifests; `verify` reads the files too.
    """

    path: CheckpointsPath
    """A run directory, its checkpoints folder, or one step-* folder."""

    def __call__(self) -> int:
        """Print the table."""
        found = find(self.path)
        best, newest = _best_and_newest(found.folder)
        rows = [_row(path, path == best, path == newest) for path in found.paths]
        rows += [_row_aside(path) for path in found.aside]
        if not rows:
            raise found.nothing()
        header = ("STEP", "KIND", "WRITTEN", "SIZE", "")
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for step, *cells in [header, *rows]:
            line = [step.rjust(widths[0]), *map(str.ljust, cells, widths[1:])]
            print("  ".join(line).rstrip())
        return 0


@dataclass(frozen=True)
class InspectCheckpoint:
    """What the newest checkpoint holds: files, the model's tensors, the size of the optimizers' state."""

    path: CheckpointsPath
    """A run directory, its checkpoints folder, or one step-* folder."""
    step: Step = None
    """Step of another one than the newest."""

    def __call__(self) -> int:
        """Print it."""
        path = find(self.path).chosen(self.step)
        state, manifest = _load(path), read_manifest(path)
        host = f" on {manifest.host}" * bool(manifest.host)
        print(f"{path}: {manifest.kind} of step {manifest.step}, written {_when(manifest.time)}{host}")
        print(f"metrics: {shown(manifest.metrics) or 'no evaluation at this step'}")
        for name, written in manifest.files.items():
            print(f"file {name}: {decimal(written.bytes)}, sha256 {written.sha256}")
        model = list(_tensors(state["model"]))
        elements = sum(tensor.numel() for _, tensor in model)
        print(f"model: {elements:,} parameters, buffers counted too")
        width = max((len(name) for name, _ in model), default=0)
        for name, tensor in model:
            print(f"  {name.ljust(width)}  {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
        for number, optimizer in enumerate(state["optimizers"]):
            held = [tensor for _, tensor in _tensors(optimizer)]
            print(f"optimizer {number}: {len(held)} tensors, {sum(tensor.nbytes for tensor in held):,} bytes")
        if "ema" in state:
            held = [tensor for _, tensor in _tensors(state["ema"])]
            print(f"averaged weights: {len(held)} tensors, {sum(tensor.nbytes for tensor in held):,} bytes")
        if "scaler" in state:
            scale, overflows = (state["scaler"][name].item() for name in ("scale", "overflows"))
            print(f"loss scale: {scale:g}, {overflows} steps were left out because of it")
        if "stopping" in state:
            memory = state["stopping"]
            print(f"early stopping: best {memory['best']}, {memory['stale']} evaluations since")
        return 0


@dataclass(frozen=True)
class VerifyCheckpoints:
    """Read every file of every checkpoint, compare it with its manifest and load it. Exit code 1 if one is damaged."""

    path: CheckpointsPath
    """A run directory, its checkpoints folder, or one step-* folder."""

    def __call__(self) -> int:
        """Print a line for each."""
        found = find(self.path)
        if not found.paths:
            raise found.nothing()
        damaged = [_verify_aloud(path) for path in found.paths]
        return int(any(damaged))


@dataclass(frozen=True)
class ExportModel:
    """Write the model of the newest checkpoint to a file that loads anywhere, and print its sha256.

    torch.load("model.pt", weights_only=True) then gives its state dict, on the CPU. The sha256 is that of the
    bare weights; at a run's last step it is weights_sha256 in summary.json. Of a run with --ema it is the averaged
    weights that are written.
    """

    path: CheckpointsPath
    """A run directory, its checkpoints folder, or one step-* folder."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The file to write; it must not exist."""
    step: Step = None
    """Step of another one than the newest."""
    form: Annotated[Literal["bare", "dp", "safetensors"], tyro.conf.arg(name="as")] = "bare"
    """bare: names as in the model; dp: with the prefix `module.` of DataParallel; safetensors: bare, in that format."""
    raw: Flag = False
    """The weights that the optimizer works on, where --ema has averaged ones."""

    def __call__(self) -> int:
        """Write it."""
        path = find(self.path).chosen(self.step)
        if self.output.exists():
            raise Refusal(f"--output {self.output}: exists already; name another file")
        if not self.output.parent.is_dir():
            raise Refusal(f"--output {self.output}: there is no folder {self.output.parent}; make it first")
        from .average import averaged  # imports torch, which the other commands can do without
        from .state import sha256
        from .weights import write

        state = _load(path)
        weights = state["model"] if self.raw else averaged(state)
        try:
            write_atomically(self.output, lambda file: write(weights, self.form, file))
        except OSError as error:
            raise Ended(f"--output {self.output}: cannot be written: {error.strerror or error}") from None
        print(f"{path} -> {self.output}, sha256 of the weights {sha256(weights)}")
        return 0


@dataclass(frozen=True)
class CheckpointCommand:
    """List a run's checkpoints, look into one, check that they are whole, take the model out of one.

    python -m evenkeel checkpoint list runs/classify
    """

    action: tyro.conf.OmitSubcommandPrefixes[
        Annotated[ListCheckpoints, tyro.conf.subcommand("list")]
        | Annotated[InspectCheckpoint, tyro.conf.subcommand("inspect")]
        | Annotated[VerifyCheckpoints, tyro.conf.subcommand("verify")]
        | Annotated[ExportModel, tyro.conf.subcommand("export")]
    ]

    def __call__(self, train_options: list[str]) -> int:
        """Do it; there are no options of train.py here."""
        if train_options:
            raise Refusal(f"-- {' '.join(train_options)}: only `plan` takes options of train.py; leave them out")
        return self.action()


@dataclass(frozen=True)
class Found:
    """The checkpoints that a path means."""

    path: Path
    """As the user gave it."""
    folder: Path
    """Where they are."""
    paths: list[Path]
    """Everything with a checkpoint's name, by step."""
    aside: list[Path]
    """Damaged ones that were set aside."""

    def chosen(self, step: int | None) -> Path:
        """The one of a step, or the newest.

        Raises:
            Refusal: there is none.
        """
        if not self.paths:
            raise self.nothing()
        steps = {step_of(path): path for path in self.paths}
        if step is not None and step not in steps:
            raise Refusal(f"--step {step}: {self.path} has no such checkpoint; there are {', '.join(map(str, steps))}")
        return self.paths[-1] if step is None else steps[step]

    def nothing(self) -> Refusal:
        """That there is none."""
        aside = f", but {len(self.aside)} set aside as damaged-*" * bool(self.aside)
        return Refusal(f"{self.path}: no checkpoint there{aside}; {PLACES}")


PLACES = "name a run directory, its checkpoints folder or one step-* folder"


def find(path: Path) -> Found:
    """What a path means: a run directory, its checkpoints folder, or one checkpoint.

    Raises:
        Refusal: there is no such folder, or it may not be read.
    """
    try:
        if is_step_folder(path.resolve()) and path.is_dir():
            return Found(path, path.resolve().parent, [path.resolve()], [])
        nested = path / "checkpoints"
        folder = nested if nested.is_dir() else path
        aside = sorted(entry for entry in folder.iterdir() if entry.name.startswith("damaged-step-"))
    except OSError as error:
        raise Refusal(f"{path}: {error.strerror}; {PLACES}") from None
    return Found(path, folder, step_folders(folder), aside)


def _best_and_newest(folder: Path) -> tuple[Path | None, Path | None]:
    """By the metric of the run, which the newest manifest names."""
    for path in reversed(step_folders(folder)):
        with contextlib.suppress(Damaged):
            best_by = read_manifest(path).best_by
            return (Checkpoints(folder, 1, best_by).best_path() if best_by else None), path
    return None, None


def _row(path: Path, best: bool, newest: bool) -> Row:
    try:
        manifest = read_manifest(path)
    except Damaged as damage:
        return str(step_of(path)), "damaged", "", "", str(damage)
    size = sum(written.bytes for written in manifest.files.values())
    notes = [shown(manifest.metrics), "(best)" * best, "(newest)" * newest]
    return str(manifest.step), manifest.kind, _when(manifest.time), decimal(size), "  ".join(filter(None, notes))


def _row_aside(path: Path) -> Row:
    step = path.name.removeprefix("damaged-step-").partition("-")[0]
    return step.lstrip("0") or "0", "set aside", "", "", path.name


def _verify_aloud(path: Path) -> bool:
    """Verify one checkpoint, showing the progress on a terminal, and say what came of it; True: it is damaged."""
    console = Console(stderr=True)
    try:
        size = sum(written.bytes for written in read_manifest(path).files.values())
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(path.name, total=size)
            verify(path, partial(progress.advance, task))
        unpack(path, in_place=True)
    except Damaged as damage:
        print(f"{path.name}: DAMAGED: {damage}")
        return True
    print(f"{path.name}: ok, {decimal(size)}")
    return False


def _load(path: Path) -> dict[str, Any]:
    try:
        return load(path)
    except Damaged as damage:
        raise Ended(f"damaged: {damage}; --step chooses another one") from None


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors in nested dicts and lists, with their dotted names."""
    import torch

    if isinstance(tree, torch.Tensor):
        yield name, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
