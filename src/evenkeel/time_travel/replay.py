"""Run a part of a run again, in a folder of its own, on this process or, called by ranks.py, on several."""

from __future__ import annotations

import contextlib
import io
import logging
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from ..common.errors import Ended, Refusal
from ..common.files import write_json
from ..common.phases import activity
from ..config import Config
from ..data.data_digest import TRAINING
from ..data.sampler import Step
from ..launch.fit import OWN_LOOPS
from ..resilience.resident import Resident
from ..run.chain import samples_of, whole_steps
from ..run.checkpoint import Checkpoints
from ..run.earlier_run import is_run
from ..run.ending import Ending
from ..run.fingerprint import MICRO_BATCH, Fingerprint, describe, differences, read_cut
from ..run.manifest import step_of
from ..run.records import read_config, read_facts, read_records
from ..run.run import Run
from ..tasks.command_line import parse
from ..training.digest import digests
from ..training.nonfinite import NonFinite
from ..training.task import Task
from .agreement import Recorded, agreement
from .look import Look, merged

COPIED = ("micro_batch", "micro_batches", "threads", "samples", "order", "orders", "digests", "total_steps")
"""Facts of status.json by which a run is continued."""

OFF: dict[str, Any] = {
    "wandb": "disabled", "tensorboard": False, "csv": False, "save_predictions": False, "wandb_report": False,
    "checkpoint_every": 0, "keep_every": 0, "digest_every": 0, "hang_timeout": 0.0, "keeper": "off", "replicate": 0,
    "strict_bits": False, "num_workers": 0, "shares": "equal", "verify_every": 0,
}  # fmt: skip
"""Options that a replay sets; none changes a bit of a step."""

Visit = Callable[[Any, Any, int], object]
"""Is called with model, batch and number of the step, for each micro-batch of the steps looked into."""


@dataclass(frozen=True)
class Asked:
    """What to replay."""

    run_dir: Path
    """The run; nothing in it changes."""
    first: int
    """The first step to look into, counted from 1 as in messages and logs."""
    last: int
    """The last one."""
    script: Path
    """Its `train(run)` is the loop."""
    words: Sequence[str]
    """Options of train.py that differ from the run's, such as --data-dir."""
    begin: int | None = None
    """The last step whose checkpoint may be read; None: the one before `first`."""
    save_samples: Path | None = None
    """Write the samples of these steps into this folder, which exists."""


@dataclass
class Replay:
    """What a replay has found."""

    started: int
    """The step of the checkpoint from which it began; 0: from the start."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """What `Look` has found in each step."""
    agrees: bool = True
    agreement: str = ""
    other: str = ""
    """How code and libraries differ from the run's, in a line."""
    ended: str = ""
    """Why the replay did not get to the last step, if it did not."""
    again: Recorded = field(default_factory=Recorded)
    names: list[list[str]] = field(default_factory=list)
    """For each optimizer the names of its parameters, in the order in which a checkpoint counts them."""

    def noting(self, reason: str) -> Replay:
        """The same, saying so if the run ended where the replay did; `reason` is the run's."""
        if self.agrees and self.ended and self.ended in reason:
            before = f"; before it, {self.agreement}" if self.again.digests else ""
            self.agreement = f"agrees: the run ended at that step too{before}"
        return self


def replay(asked: Asked, visit: Visit | None = None) -> Replay:
    """Run again from the newest kept checkpoint before step `first`, and look into the steps `first` to `last`.

    With `first` = `last` + 1 it looks into none, but has the digests of all steps to `last`.

    Raises:
        Refusal: there is no such run or step.
        Ended: the run cannot be continued here.
    """
    with prepared(asked) as (folder, reason):
        return replay_in(folder, asked, visit).noting(reason)


def replay_in(folder: Path, asked: Asked, visit: Visit | None = None) -> Replay:
    """The same in a folder made by `prepared`; all ranks call it, and each returns what all have found."""
    script = asked.script
    places = (script, *OWN_LOOPS) if str(script) == "train.py" else (script,)  # the default, or one that was typed
    loop = next((path for path in places if path.exists()), script)
    result = Replay(started=_kept(folder).newest_step())
    Replayed.result, Replayed.asked, Replayed.visit = result, asked, visit
    config, task = parse(["--run-dir", str(folder), *asked.words], base=read_config(folder / "config.toml"))
    config = replace(config, **OFF, shard="off" if config.shard == "off" else "on")
    newest = _kept(asked.run_dir).newest_manifest()
    with contextlib.redirect_stdout(io.StringIO()), _opened(config, task) as run:
        if newest:
            result.other = _other(newest.fingerprint, run, loop)
        _train(run, loop)
    exact = config.reduce == "tree" and not result.other
    recorded = Recorded.of(read_records(asked.run_dir / "metrics.jsonl"))
    result.agrees, result.agreement = agreement(recorded, result.again, exact)
    return result


@contextlib.contextmanager
def prepared(asked: Asked) -> Iterator[tuple[Path, str]]:
    """A folder of its own, from which the run continues at its newest kept checkpoint that may be read, and why the run
    itself has ended.

    Raises:
        Refusal: there is no such run, or it has fewer steps than `last`.
    """
    refuse_unless_run(asked.run_dir)
    status = read_facts(asked.run_dir / "status.json")[0]
    if asked.last > (total := status.get("total_steps", asked.last)):
        raise Refusal(f"--step {asked.last}: the run has only {total} steps")
    begin = asked.first - 1 if asked.begin is None else asked.begin
    kept = [path for path in _kept(asked.run_dir).all() if step_of(path) <= begin]
    options = read_config(asked.run_dir / "config.toml")
    options |= _cut_after(max(map(step_of, kept), default=0), asked.run_dir)
    with tempfile.TemporaryDirectory(prefix="evenkeel-replay-") as name:
        _prepare(Path(name) / "run", options, status, kept)
        yield Path(name) / "run", status.get("reason", "")


def function_of(words: str) -> Visit | None:
    """The function that --python names; None for ""."""
    if not words:
        return None
    file, _, name = words.rpartition(":")
    if not Path(file).is_file():
        raise Refusal(f"--python {words}: there is no file {file or words}; give FILE.py:FUNCTION")
    function: Any = runpy.run_path(file).get(name)
    if not callable(function):
        raise Refusal(f"--python {words}: {file} has no function {name}; give FILE.py:FUNCTION")
    return function  # type: ignore[no-any-return]


def refuse_unless_run(path: Path) -> None:
    """Refuse a folder that is not a run's."""
    if not is_run(path):
        raise Refusal(f"{path}: is not a run directory; name the folder of a run")


def _other(recorded: Fingerprint, run: Run, loop: Path) -> str:
    """How code and libraries differ from the recorded ones, in a line; the program that was started does not count."""
    mains = {f"code:{Path(path).name}" for path in (loop, "__main__.py", sys.argv[0])}
    found = differences(recorded, run.attempt.provenance.fingerprint)
    return describe({part: it for part, it in found.items() if part not in mains})


def _kept(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / "checkpoints", 1)


def _cut_after(begun: int, run_dir: Path) -> dict[str, int]:
    """The options that cut a run's steps as they were after this step, if that has changed since, with its ranks."""
    for record in read_records(run_dir / "metrics.jsonl"):
        if record["kind"] == "bits" and record["step"] > begun and MICRO_BATCH in record.get("differences", {}):
            option, value = read_cut(record["differences"][MICRO_BATCH][0])
            return {"micro_batch": 0, "micro_batches": 0, option: value}
    return {}


def _prepare(folder: Path, options: dict[str, Any], status: Mapping[str, Any], kept: list[Path]) -> None:
    """A run's folder that continues from the kept checkpoints, by links to them."""
    (folder / "checkpoints").mkdir(parents=True)
    for path in kept:
        (folder / "checkpoints" / path.name).symlink_to(path.absolute())
    if kept:  # the weights come from a checkpoint, and the file of --init-from may be gone
        options = {name: value for name, value in options.items() if not name.startswith("init_")}
    (folder / "config.toml").write_text(tomli_w.dumps(options), encoding="utf-8")
    facts = {name: status[name] for name in COPIED if name in status}
    write_json(folder / "status.json", facts | {"state": "stopped", "step": 0, "world_sizes": [1], "launch": []})


@contextlib.contextmanager
def _opened(config: Config, task: Task) -> Iterator[Run]:
    activity.begin(age=0)
    logging.disable(logging.WARNING)  # what they say is about a run that goes on
    try:
        with contextlib.suppress(Reached), Replayed.open(config, task, Resident(config.grace)) as run:
            if run.finished:
                raise Ended("the replay found the run finished; nothing was looked into")
            yield run
    finally:
        logging.disable(logging.NOTSET)


def _train(run: Run, loop: Path) -> None:
    try:
        train = runpy.run_path(str(loop), run_name="evenkeel_loop")["train"]
    except (OSError, KeyError):
        raise Refusal(f"--script {loop}: is not there, or has no train(run); name a file like train.py") from None
    try:
        train(run)
    except NonFinite as error:
        assert isinstance(run, Replayed)
        run.result.ended = str(error).partition(";")[0]
        raise Reached from None


class Reached(Exception):  # noqa: N818
    """The last step has been looked into."""


class Silent(Ending):
    """A replay saves and reports nothing at its end."""

    def finish(self, metrics: dict[str, float]) -> None:
        """Write nothing."""

    def failed(self, error: BaseException) -> None:
        """Save nothing."""

    def stopped(self, why: Callable[[], str]) -> None:
        """Save nothing."""


class Replayed(Run):
    """A run that is looked into at some steps, and stops after the last of them."""

    result: Replay
    asked: Asked
    visit: Visit | None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.ending = Silent(self.attempt, self.state, self.checkpointer, self.step_log)
        self.result.names = [
            [self.state.names.get(p, "") for group in optimizer.param_groups for p in group["params"]]
            for optimizer in self.state.optimizers
        ]

    def distribute(self, *arguments: Any, **named: Any) -> Any:
        """The model and its loss, watched."""
        return Watched(self, super().distribute(*arguments, **named))

    def after_step(self, model: Any, norm: Tensor | None = None) -> None:
        """Record digests, loss and norm; stop after the last step asked for."""
        step, again = self.state.step, self.result.again
        again.digests[step] = digests(self.state.tensors())
        again.logged[step] = (model.loss.item(), (model.norm if norm is None else norm).item())
        if step >= self.asked.last:
            raise Reached
        super().after_step(model, norm)

    def look(self, step: Step) -> Look | None:
        """What looks into a step, if it is one of those asked for."""
        if step.number + 1 < self.asked.first:
            return None
        plan = self.plan
        sampler = whole_steps(self.attempt.sets[TRAINING], self.config, plan.micro_batch, plan.fixed_micro_batches)
        samples = samples_of(sampler, step.number)
        return Look(self, step, [samples[it.id] for it in step.micro_batches])


class Watched:
    """A `DistributedLoss` whose steps are looked into; all else is its own."""

    def __init__(self, run: Replayed, model: Any) -> None:
        self._run, self._model = run, model
        self._look: Look | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, batch: Any) -> Tensor:
        """The mean loss of a micro-batch."""
        loss: Tensor = self._model(batch)
        return loss

    def micro_batches(self, step: Step) -> Iterator[Any]:
        """The micro-batches, each copied for the look."""
        self._look = self._run.look(step)
        for batch in self._model.micro_batches(step):
            if self._look:
                self._look.take(batch)
                if visit := type(self._run).visit:
                    visit(self._run.state.model, batch, step.number + 1)
            yield batch

    def step(self, norm: Tensor | None = None) -> None:
        """Look, then take the step."""
        if self._look is None:
            self._model.step(norm)
            return
        norm = self._norm() if norm is None else norm
        if folder := self._run.asked.save_samples:
            self._look.save(folder)
        self._look.before_commit(self._model, norm)
        self._look.facts = merged(self._run.world.all_gather(self._look.facts))
        self._run.result.steps.append(self._look.facts)
        self._model.step(norm)
        self._look.after_commit()

    def _norm(self) -> Tensor:
        from ..training.optimization import clip_grad_norm

        return clip_grad_norm(self._run.state.parameters, 0.0)
