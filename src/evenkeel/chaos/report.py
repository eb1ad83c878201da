"""What an experiment has shown: of the faults, of the steps, and of the time that they cost."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Refusal
from ..plan import Plan
from ..records import read_config, read_facts
from .experiment import Done, Experiment
from .progress import Progress


@dataclass(frozen=True)
class Steps:
    """Steps of a run since chaos began."""

    first: int
    """Steps that the run had done before."""
    done: int
    """Steps that it has done now."""
    total: int
    """Steps that it is to do."""
    repeated: int
    """Lines for a step that has one already: each is a finished step that was lost and done again."""
    untold: int
    """Lines that are missing. The step is done, but rank 0 was killed before it could write of it."""
    interval: int
    """Steps for each line, --log-every."""


def count_steps(progress: Progress) -> Steps:
    """Count the steps in the records of a run."""
    told = Counter(int(record["step"]) for record in progress.of("train"))
    first = min((int(record["step"]) for record in progress.of("start")), default=0)
    status = progress.status
    done = max([first, *told, int(status.get("step", 0))])
    interval = _log_every(progress.run_dir)
    due = {step for step in range(first + 1, done + 1) if step % interval == 0}
    return Steps(
        first=first,
        done=done,
        total=int(status.get("total_steps", 0)),
        repeated=told.total() - len(told),
        untold=len(due - told.keys()),
        interval=interval,
    )


def seconds_to_step(done: Sequence[Done], progress: Progress) -> list[float]:
    """For each fault that was followed by a step, the seconds to it."""
    moments = [(d.time, progress.first_step_after(d.time, restarted=d.fault.restarts)) for d in done]
    return [step - fault for fault, step in moments if step is not None]


def expected_samples(run_dir: Path) -> int:
    """Samples that the whole run hands out, from its options and the size of its data set.

    Raises:
        Refusal: there are no options, or they are not those of train.py.
    """
    from ..cli import parse  # imports torch, which nothing else here needs
    from ..data import of_task

    config, task = parse(["--config", str(run_dir / "config.toml")])
    samples = len(of_task(task, config, "train"))
    plan = Plan.of(config, samples)
    status, _ = read_facts(run_dir / "status.json")
    return plan.samples_seen(status["step"] if status.get("stopped_early") else plan.total_steps)


def lines(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """The report, as pairs of what and how much."""
    progress, done = experiment.progress, experiment.done
    kinds = Counter(d.fault.kind for d in done)
    missed = f" (and {experiment.missed} that found nothing to hit)" if experiment.missed else ""
    yield "run", progress.status.get("state", "never started")
    yield "faults", f"{len(done)}: {', '.join(f'{kind} {n}' for kind, n in sorted(kinds.items())) or 'none'}{missed}"
    yield "starts", f"{experiment.job.starts} of the command, {len(progress.of('start'))} of its ranks"
    yield from _about_steps(count_steps(progress))
    summary = read_facts(progress.run_dir / "summary.json")[0] if progress.finished else {}
    if "samples_seen" in summary:
        yield "samples", f"{summary['samples_seen']} seen, {_expected(progress.run_dir)} expected"
    if seconds := seconds_to_step(done, progress):
        yield "fault to step", f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    yield from _about_time(summary)
    if "weights_sha256" in summary:
        yield "weights", f"sha256 {summary['weights_sha256']}"


def _about_steps(steps: Steps) -> Iterator[tuple[str, str]]:
    each = f" lines of {steps.interval} steps" if steps.interval > 1 else ""
    before = f", {steps.first} of them before" if steps.first else ""
    yield "steps done", f"{steps.done} of {steps.total}{before}"
    yield "lost, done again", f"{steps.repeated}{each}"
    yield "done, but untold", f"{steps.untold}{each}"


def _about_time(summary: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "goodput" in summary:
        yield "goodput", f"{summary['goodput']:.1%}"
    if "ledger" in summary:
        yield "seconds", ", ".join(f"{account} {seconds:.1f}" for account, seconds in summary["ledger"].items())


def _expected(run_dir: Path) -> str:
    try:
        return str(expected_samples(run_dir))
    except Exception as error:  # the data may be gone by now, and the report must not be
        return f"unknown ({type(error).__name__}: {error})"


def _log_every(run_dir: Path) -> int:
    with contextlib.suppress(Refusal):  # a job that is not ours may have no config.toml
        return int(read_config(run_dir / "config.toml").get("log_every", 1))
    return 1
