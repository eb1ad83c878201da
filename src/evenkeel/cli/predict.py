"""`python -m evenkeel predict`: a run's model on a folder of images or a set of its task, to a CSV or Parquet file.

On any number of ranks: each computes its own micro-batches, and rank 0 writes all rows in order. Only reads the run.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import importlib.util
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..common.display import say
from ..common.errors import Ended, EndedByData, Refusal
from ..common.files import write_atomically
from ..config import Flag, MaybePath, option
from ..run.chosen import chosen
from ..run.earlier_run import recorded_options

if TYPE_CHECKING:
    from torch import Tensor

    from ..config import Config
    from ..data.dataset import SizedDataset
    from ..distributed.world import World
    from ..training.task import Task

FORMATS = (".csv", ".parquet")


@dataclass(frozen=True)
class PredictCommand:
    """Write a run's predictions to a CSV or Parquet file.

    Example: python -m evenkeel predict runs/classify --set test --output test.csv

    Predictions are made for a set of the run's task (--set), or for a folder of images (--input). Options of train.py
    that differ from the run's follow `--`, for example -- --data-dir /elsewhere. Several processes write the same rows
    faster: torchrun --standalone --nproc_per_node=2 -m evenkeel predict ...
    """

    run: tyro.conf.Positional[Path]
    """The run directory."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"], help_behavior_hint="(required)")] = Path()
    """The file to write: .csv or .parquet."""
    input: MaybePath = None
    """Predict for all images in this folder and below it, in the order of their paths."""
    set: Annotated[str, tyro.conf.arg(help_behavior_hint="", aliases=["--split"])] = ""
    """Predict for this set of the run's task: train, validation, test, or a name of its own."""
    checkpoint: str = "last"
    """last, best or a step, e.g. 460."""
    top: int = option(1, 1, 1000)
    """Number of most likely classes to write, each with its probability."""
    overwrite: Flag = False
    """Replace the output file if there is one."""

    def __call__(self, train_options: list[str]) -> int:
        """Predict, and let rank 0 write the file."""
        self._check()
        from ..common.errors import no_exit  # the following imports torch, which the help does not need
        from ..distributed.exits import leave
        from ..resilience.interruption import Interruption
        from ..run.build import prepare_process
        from ..run.eval_only import cut_as_recorded
        from ..tasks.command_line import parse_as_recorded

        config, task = parse_as_recorded(self.run, train_options)
        config = cut_as_recorded(replace(config, eval_only=True))
        Interruption(config.grace)
        with no_exit():
            world = prepare_process(config, recorded_options(self.run))
            dataset = Images(self.input, task) if self.input else self._set(task, config)
            self._predict(config, task, world, dataset)
        if world.launched:
            leave(0)
        return 0

    def _check(self) -> None:
        """Checks that do not need torch."""
        chosen(self.run, self.checkpoint)
        if self.output == Path() or (self.input is None) == (not self.set):
            raise Refusal(
                "predict: give --output FILE.csv, and either --input FOLDER or --set test (or train, validation)"
            )
        if self.output.suffix not in FORMATS:
            raise Refusal(f"--output {self.output}: must end in .csv or .parquet")
        if self.output.exists() and not (self.overwrite and self.output.is_file()):
            raise Refusal(f"--output {self.output}: exists already; name another file, or add --overwrite")
        if not self.output.parent.is_dir():
            raise Refusal(f"--output {self.output}: there is no folder {self.output.parent}; make it first")
        if self.output.suffix == ".parquet" and not importlib.util.find_spec("pyarrow"):
            raise Refusal(f"--output {self.output}: needs pyarrow; pip install pyarrow, or use .csv")

    def _set(self, task: Task, config: Config) -> SizedDataset:
        from ..training.task_data import evaluation_sets, training_set

        if self.set == "train":
            return training_set(task, config, unchanged=True)
        sets = evaluation_sets(task, config)
        if self.set not in sets:
            raise Refusal(f"--set {self.set}: the task has no such set; it has {', '.join(['train', *sets])}")
        return sets[self.set]

    def _predict(self, config: Config, task: Task, world: World, dataset: SizedDataset) -> None:
        from ..distributed.placement import place
        from ..run.build import build_model
        from ..run.eval_only import read_for_all
        from ..run.weights import read_chosen
        from ..training.evaluation import Evaluation
        from ..training.prediction import predictions
        from ..training.task_data import collated
        from ..training.task_state import TaskState

        model = build_model(config, task)
        with world.connected():
            for rank, names in enumerate(world.all_gather(getattr(dataset, "digest", ""))):
                if names != getattr(dataset, "digest", ""):
                    raise Ended(
                        f"--input {self.input}: the files on rank {rank} differ from those on rank {world.rank}"
                    )
            own = TaskState.of(task, config.seed, world)
            source, _ = read_for_all(model, world, lambda: read_chosen(model, self.run, self.checkpoint, own), 0, own)
            place(model, config, world.devices)
            batches = dataset if self.set else collated(task, dataset)
            rows = predictions(Evaluation(task, model, batches, config, world, self.set or "input"), self.top)
        if world.rank == 0:
            self._write(table(rows, dataset, task.class_names()))
            targets = rows.get("target") if self.set else None
            one_each = targets is not None and targets.dim() == 1 and "confidence" in rows
            right = f", accuracy {_share_right(rows):.4f}" if one_each else ""
            say(f"evenkeel: {len(dataset)} predictions of {source}{right} -> {self.output}")

    def _write(self, columns: dict[str, list[Any]]) -> None:
        content = io.BytesIO()
        if self.output.suffix == ".csv":
            text = io.StringIO(newline="")
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
            content.write(text.getvalue().encode(errors="backslashreplace"))
        else:
            arrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
            parquet.write_table(arrow.table(columns), content)
        try:
            write_atomically(self.output, lambda file: file.write(content.getvalue()))
        except OSError as error:
            raise Ended(f"--output {self.output}: cannot write it: {error.strerror or error}") from None


class Images:
    """The image files in a folder and below it, in the order of their paths, as the task reads them."""

    def __init__(self, folder: Path, task: Task) -> None:
        from torchvision.datasets.folder import IMG_EXTENSIONS

        if not folder.is_dir():
            raise Refusal(f"--input {folder}: no such folder")
        found = (path for path in folder.rglob("*") if path.suffix.lower() in IMG_EXTENSIONS and path.is_file())
        self.folder, self.task, self.paths = folder, task, sorted(it.relative_to(folder).as_posix() for it in found)
        if not self.paths:
            raise Refusal(f"--input {folder}: has no images; supported: {' '.join(IMG_EXTENSIONS)}")
        names = "\n".join(self.paths).encode(errors="surrogateescape")
        self.digest = hashlib.sha256(names).hexdigest()

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        path = self.folder / self.paths[index]
        try:
            return self.task.read_image(path)
        except (EndedByData, Refusal, MemoryError):
            raise
        except Exception as error:
            raise EndedByData(f"{path} cannot be used: {type(error).__name__}: {error}") from None


def table(rows: dict[str, Tensor], dataset: Any, classes: Any) -> dict[str, list[Any]]:
    """The columns of the file: path or index, predictions, and the target if it is known."""
    columns = {"path": dataset.paths} if isinstance(dataset, Images) else {"index": [*range(len(dataset))]}
    by_class = "confidence" in rows
    later: dict[str, list[Any]] = {}  # the second most likely class and so on
    for name, values in rows.items():
        if name == "target" and "path" in columns:
            continue
        named = classes if by_class and name in ("prediction", "target") else None
        for number, column in enumerate(values.reshape(len(values), -1).unbind(1)):
            if by_class and name in ("prediction", "confidence"):
                place, title = (columns, name) if number == 0 else (later, f"{name}_{number + 1}")
            else:
                place, title = columns, name if values.dim() == 1 or values.shape[1] == 1 else f"{name}_{number}"
            place[title] = [_plain(value, named) for value in column.tolist()]
    return columns | dict(sorted(later.items(), key=lambda item: (int(item[0].rpartition("_")[2]), item[0] < "d")))


def _plain(value: Any, classes: Any) -> Any:
    """A number as it is written; the name of a class; None: the class is not known."""
    if isinstance(value, float):
        return float(f"{value:.6g}")  # the last bits differ between machines
    if not classes or isinstance(value, bool):
        return value
    return classes[value] if 0 <= value < len(classes) else None


def _share_right(rows: dict[str, Tensor]) -> float:
    known = rows["target"] >= 0  # an image that does not decode has no class
    return float((rows["prediction"][:, 0] == rows["target"])[known].double().mean())
