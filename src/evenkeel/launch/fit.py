"""`evenkeel.fit`: train.py in one call, from Python and notebooks."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from ..common import display
from ..common.errors import FAILED, REFUSED, Ended, Refusal
from ..common.keyboard import CtrlC
from ..common.network import Link
from ..common.phases import activity
from ..common.processes import start_in_session
from ..config import Config
from ..resilience.resident import Resident
from ..run.build import build_model
from ..run.run import Run
from ..run.weights import read_weights
from ..tasks.command_line import parse
from ..tasks.registry import BUILT_IN, load_task
from ..training.determinism import float32_restored
from ..training.task import Task, option_name
from .launchers import option_words, processes_of_node
from .topology import Topology, torchrun

OWN_LOOPS = (Path(__file__).parents[3] / "train.py", Path(__file__).parents[1] / "cli/new/templates/train.py.tmpl")
"""The same file in a checkout, and in an installed package."""

BUILT_IN_FROM = load_task.__module__.rpartition(".")[0]
"""The package of the built-in tasks, which has another name in a renamed copy."""


DATA = "its train_dataset() returns the data, and options follow by name, such as epochs=5"


@contextmanager
def _in_a_line() -> Iterator[None]:
    """A user's error that nobody catches ends a program as it ends train.py: a line and an exit code, no traceback."""
    try:
        yield
    except (Refusal, Ended) as error:
        error.of_fit = True  # type: ignore[union-attr]
        if sys.excepthook is sys.__excepthook__ and not hasattr(sys, "ps1"):  # an interactive Python would end
            sys.excepthook = _say_and_exit
        raise


def _say_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not hasattr(error, "of_fit"):
        return sys.__excepthook__(kind, error, trace)
    display.say(f"evenkeel: {error}", to_stderr=True)
    raise SystemExit(REFUSED if isinstance(error, Refusal) else FAILED)


@_in_a_line()
def fit(
    task: str | type[Task], *more: Any, processes: int = 1, script: str | Path = "train.py", **options: Any
) -> tuple[dict[str, float], nn.Module]:
    """Train as train.py does, to the end of the run: the same folder, the same bits; the same call continues.

    Ctrl-C stops after the present step, saves it, and raises KeyboardInterrupt; a second one stops at once.

    >>> metrics, model = fit("regress", run_dir=folder, max_steps=2, wandb="disabled")
    1 rank, step 0/2 -> ...
    step 2/2  test/...
    evenkeel: finished in ...

    Args:
        task: as --task; or a class, which several processes must be able to import: not one of a notebook's cell.
        processes: 1: this process; more: torchrun starts them on this machine, as launch/single_node.py -g does.
        script: whose `train(run)` is the loop; if there is no train.py, that of Evenkeel.
        options: of train.py and of the task, by name: batch_size=32, compile=True, betas=(0.9, 0.95).

    Returns:
        The metrics of the last evaluation, by full names, and the trained model, on the CPU in evaluation mode.

    Raises:
        Refusal: an option or the task cannot be meant. A program that does not catch it ends with its line and code 2.
        Ended: the run cannot go on.
    """
    if "RANK" in os.environ:
        raise Refusal("fit: torchrun has started this process; start train.py by torchrun, or this program without it")
    values = [part for value in options.values() for part in (value if isinstance(value, (list, tuple)) else [value])]
    if more or any(getattr(value, "shape", ()) or isinstance(value, Dataset) for value in values):
        raise Refusal(f"fit({_shown(task)}, ...): give one task; {DATA}")
    if not isinstance(processes, int) or processes < 1:
        raise Refusal(f"fit(processes={processes!r}): must be a whole number from 1 on")
    name = task if isinstance(task, str) else _name_of(task, processes)
    loop, words = _loop(Path(script)), [f"--task={name}"] * bool(name)
    words += [word for option, value in options.items() for word in option_words(option_name(option), value)]
    config, made = parse(words) if name else parse(words, task)  # type: ignore[arg-type]
    if config.eval_only:
        raise Refusal("fit(eval_only=True): fit trains; use evaluate(*parse([...])), or leave it out")
    if processes == 1:
        with _settings_restored():
            _train_here(config, made, loop)
    else:
        _launch(loop, words, processes_of_node(config, processes))
    assert config.run_dir is not None  # resolved
    metrics = json.loads((config.run_dir / "summary.json").read_text())["metrics"]
    with _settings_restored():
        model = build_model(replace(config, init_from=None, init_partial=False), made)
    read_weights(model, config.run_dir / "model.pt")
    return metrics, model.eval()


def _train_here(config: Config, task: Task, loop: Path) -> None:
    train = runpy.run_path(str(loop), run_name="evenkeel_loop")["train"]
    activity.begin(age=0)
    try:
        with _Twice() as keys, Run.open(config, task, Resident(config.grace)) as run:
            run.asked_to_stop = lambda: keys.pressed
            if not run.finished:
                train(run)
    finally:
        display.forget()


class _Twice(CtrlC):
    """The second Ctrl-C does not wait for the end of a step."""

    def _take(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def _launch(loop: Path, words: list[str], processes: int) -> None:
    """Run torchrun to its end, and print what it prints: the output of a child is not seen in every notebook."""
    command = torchrun(Topology(processes), Link("127.0.0.1"), loop, words)
    process = start_in_session(
        command.argv, env={**os.environ, **command.env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    )  # fmt: skip
    assert process.stdout
    said = ""
    try:
        for line in process.stdout:
            said = line.removeprefix("evenkeel: ").strip() if line.startswith("evenkeel: ") else said
            display.say(line.rstrip("\n"))
    finally:  # also after Ctrl-C, which a session of its own does not get
        if process.poll() is None:
            process.terminate()
            for line in process.stdout:
                display.say(line.rstrip("\n"))
        process.wait()
    if process.returncode:
        kind = Refusal if process.returncode == REFUSED else Ended
        raise kind(said or f"the ranks ended with exit code {process.returncode}")


@contextmanager
def _settings_restored() -> Iterator[None]:
    """Leave this process the settings of torch, and the generator, that it had; those of a run are for the run."""
    exact, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    benchmark = torch.backends.cudnn.benchmark
    with float32_restored():
        try:
            with torch.random.fork_rng():
                yield
        finally:
            torch.use_deterministic_algorithms(exact)
            torch.set_num_threads(threads)
            torch.backends.cudnn.benchmark = benchmark


def _loop(script: Path) -> Path:
    """The file with the loop.

    Raises:
        Refusal: it is not there, or has no train(run); it is not run to see that.
    """
    places = (script, *OWN_LOOPS) if str(script) == "train.py" else (script,)
    path = next((place for place in places if place.exists()), script)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refusal(f"fit(script={str(script)!r}): {error.strerror or error}; name a file like train.py") from None
    if "def train(run" not in text:
        raise Refusal(f"fit(script={str(script)!r}): has no train(run); name a file that has one, like train.py")
    return path


def _name_of(task: Any, processes: int) -> str:
    """The class as --task; "" if no other process could import it."""
    if not (isinstance(task, type) and issubclass(task, Task)):
        raise Refusal(f"fit({_shown(task)}): give a task's name or class; {DATA}")
    module, _, last = task.__module__.rpartition(".")
    if BUILT_IN.get(last) == task.__name__ and module == BUILT_IN_FROM:
        return last
    if task.__module__ == "__main__" or "<locals>" in task.__qualname__:
        if processes != 1:
            raise Refusal(
                f"fit(processes={processes}): other processes cannot import {_shown(task)} from a notebook or the main "
                f"program; write it to a file and give task='FILE.py:{_shown(task)}', or leave processes out"
            )
        return ""
    if module:
        return f"{task.__module__}:{task.__name__}"
    return f"{os.path.relpath(__import__(last).__file__ or '')}:{task.__name__}"


def _shown(task: Any) -> str:
    return task if isinstance(task, str) else str(getattr(task, "__name__", f"{type(task).__name__}(...)"))
