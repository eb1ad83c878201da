"""How far a run has come, and what the faults have cost it, from what it writes into its folder."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

from ...common.errors import Refusal
from ...data.plan import Plan
from ...run.records import read_config, read_facts
from .experiment import Experiment
from .progress import Done, Progress


def lines(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """The report, as pairs of a name and a value."""
    progress, done, missed = experiment.progress, experiment.done, experiment.missed
    kinds = Counter(it.fault.kind for it in done)
    named = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "none"
    yield "run", progress.status.get("state", "never started")
    yield "faults", f"{len(done)}: {named}" + f" (and {missed} that found nothing to hit)" * bool(missed)
    yield "starts", f"{experiment.job.starts} of the command, {len(progress.of('start'))} of its ranks"
    yield from steps(progress)
    summary = read_facts(progress.run_dir / "summary.json")[0] if progress.finished else {}
    if "samples_seen" in summary:
        yield "samples", f"{summary['samples_seen']} seen, {_expected_samples(progress)} expected"
    if seconds := seconds_to_step(done, progress):
        yield "fault to step", f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    if "goodput" in summary:
        yield "goodput", f"{summary['goodput']:.1%}"
    if "ledger" in summary:
        yield "seconds", ", ".join(f"{account} {spent:.1f}" for account, spent in summary["ledger"].items())
    if "weights_sha256" in summary:
        yield "weights", f"sha256 {summary['weights_sha256']}"


def steps(progress: Progress) -> Iterator[tuple[str, str]]:
    """What the report says of steps, counted in the lines of metrics.jsonl."""
    every = 1
    with contextlib.suppress(Refusal):  # another program's job may have no config.toml
        every = int(read_config(progress.run_dir / "config.toml").get("log_every", 1))
    told = Counter(int(record["step"]) for record in progress.of("train"))
    first = min((int(record["step"]) for record in progress.of("start")), default=0)
    done = max([first, *told, int(progress.status.get("step", 0))])
    due = {step for step in range(first + 1, done + 1) if step % every == 0}
    each = f" lines of {every} steps" * (every > 1)
    total = progress.status.get("total_steps", 0)
    yield "steps done", f"{done} of {total}" + f", {first} of them before" * bool(first)
    yield "lost, done again", f"{told.total() - len(told)}{each}"
    yield "done, but untold", f"{len(due - told.keys())}{each}"  # rank 0 was killed before it could write the line


def seconds_to_step(done: Sequence[Done], progress: Progress) -> list[float]:
    """For each fault that was followed by a step, the seconds to it."""
    pairs = [(it.time, progress.first_step_after(it)) for it in done]
    return [step - fault for fault, step in pairs if step is not None]


def _expected_samples(progress: Progress) -> str:
    """Samples that the whole run hands out, from its options and the size of its data set."""
    try:
        from ...tasks.command_line import parse  # imports torch, which nothing else here needs
        from ...training.task import training_set

        config, task = parse(["--config", str(progress.run_dir / "config.toml")])
        plan, status = Plan.of(config, len(training_set(task, config))), progress.status
        return str(plan.samples_seen(status["step"] if status.get("stopped_early") else plan.total_steps))
    except Exception as error:  # the data may be gone by now, and the rest of the report should come all the same
        return f"unknown ({type(error).__name__}: {error})"
