"""A chaos experiment: faults at their times, restarts of a job that ends too early, and the report."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ...common import display
from ...common.errors import REFUSED, Ended, Refusal
from ...common.processes import REFUSAL
from ...data.plan import Plan
from ...run.records import read_config, read_facts
from .faults import Fault, Missed, strike
from .job import Job
from .progress import Done, Progress

TICK = 0.1  # seconds between two looks at the job
LATE = 10.0  # seconds for the other nodes to end when node 0 has finished the run
MAX_FRUITLESS = 3  # consecutive ends of the command without a step, after which it is not started again


class Experiment:
    """A job, its progress, and the faults so far.

    Methods raise `Ended` if the command is refused, or ends again and again before it does a step.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.done: list[Done] = []
        self.missed = 0
        self._last = Done(Fault("start"), time.time(), 0)
        self._fruitless, self._progress_at_end = 0, (0, 0)
        self._over = 0.0

    def do_faults(self, faults: Iterable[Fault], seconds: float) -> None:
        """Do one fault after another, each at its time, but only after a step since the last fault.

        Args:
            faults: in order.
            seconds: no fault happens later than this.
        """
        deadline = time.monotonic() + seconds
        for fault in faults:
            if not self._until_recovered(time.monotonic() + fault.after, deadline):
                return
            self._do(fault)
        self._until_recovered(time.monotonic(), deadline)

    def supervise(self) -> bool:
        """Wait a moment, then restart what has ended too early, as a scheduler does; False: all has ended."""
        time.sleep(TICK)
        self.progress.update()
        ended = self.job.ended()
        if 0 in ended and not self.progress.finished:  # the rendezvous is gone, and with it the job on every node
            self.job.stop(*self.job.running)
            self._count_end(ended[0])
            self.job.start(*self.job.nodes)
            return True
        for node, code in ended.items():
            self.job.stop(node)
            if not self.progress.finished:
                say(f"the command on node {node} ended with {code}; starting it again")
                self.job.start(node)
        if self.progress.finished and 0 not in self.job.running:
            self._over = self._over or time.monotonic()
            if time.monotonic() > self._over + LATE:  # a node that came back too late would wait for node 0 for ever
                self.job.stop(*self.job.running)
        return bool(self.job.running)

    def _until_recovered(self, earliest: float, deadline: float) -> bool:
        """Supervise the job until it has done a step since the last fault; False: it has ended, or the time is over."""
        while time.monotonic() < earliest or not self.progress.recovered(self._last):
            if time.monotonic() >= deadline or not self.supervise():
                return False
        return time.monotonic() < deadline

    def _do(self, fault: Fault) -> None:
        self.progress.update()
        step = self.progress.step

        def announce(victim: str) -> None:
            say(f"{fault.kind:8} {victim}, at step {step}")
            self._last = Done(fault, time.time(), step)
            self.done.append(self._last)

        try:
            strike(fault, self.job, self.progress.run_dir, announce)
        except Missed as missed:
            self.missed += 1
            say(f"{fault.kind:8} missed: {missed}")

    def _count_end(self, code: int) -> None:
        """Decide whether the command, which has ended too early, may be started again."""
        self.progress.update()
        progress = (len(self.progress.of("train")), self.progress.step)
        self._fruitless = self._fruitless + 1 if progress == self._progress_at_end else 0
        self._progress_at_end = progress
        if code in (REFUSED, -REFUSAL):
            raise Ended("the command was refused; a second try would not change that")
        if self._fruitless == MAX_FRUITLESS:
            raise Ended(f"the command ended {MAX_FRUITLESS} times in a row without a step, last with {code}")
        say(f"the command ended with {code} before the run was finished; starting it again")


def say(text: str) -> None:
    """Print what chaos does, with a prefix that the job's own lines lack."""
    display.say(f"chaos {time.strftime('%H:%M:%S')}  {text}")


def lines(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """The report, from the files in the job's folder, as pairs of a name and a value."""
    progress, done, missed = experiment.progress, experiment.done, experiment.missed
    kinds = Counter(it.fault.kind for it in done)
    named = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())) or "none"
    yield "run", progress.status.get("state", "never started")
    yield "faults", f"{len(done)}: {named}" + (f" (and {missed} without a victim)" if missed else "")
    yield "starts", f"{experiment.job.starts} of the command, {len(progress.of('start'))} of its ranks"
    yield from steps(progress)
    summary = read_facts(progress.run_dir / "summary.json")[0] if progress.finished else {}
    if "samples_seen" in summary:
        yield "samples", f"{summary['samples_seen']} seen, {_expected_samples(progress)} expected"
    if seconds := seconds_to_step(done, progress):
        yield "fault to step", f"median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s"
    if "goodput" in summary:
        yield "goodput", f"{summary['goodput']:.1%}"
    if in_place := summary.get("restarts_in_place"):
        yield "in place", f"{in_place} of {summary['restarts']} restarts"
    if "ledger" in summary:
        yield "seconds", ", ".join(f"{account} {spent:.1f}" for account, spent in summary["ledger"].items())
    if "weights_sha256" in summary:
        yield "weights", f"sha256 {summary['weights_sha256']}"


def steps(progress: Progress) -> Iterator[tuple[str, str]]:
    """The report on steps, counted in the lines of metrics.jsonl."""
    every = 1
    with contextlib.suppress(Refusal):  # another program's job may have no config.toml
        every = int(read_config(progress.run_dir / "config.toml").get("log_every", 1))
    logged = Counter(int(record["step"]) for record in progress.of("train"))
    first = min((int(record["step"]) for record in progress.of("start")), default=0)
    done = max([first, *logged, int(progress.status.get("step", 0))])
    due = {step for step in range(first + 1, done + 1) if step % every == 0}
    each = f" (of the lines logged each {every} steps)" if every > 1 else ""
    total = progress.status.get("total_steps", 0)
    yield "steps done", f"{done} of {total}" + (f", {first} of them before" if first else "")
    yield "lost, done again", f"{logged.total() - len(logged)}{each}"
    yield "done, not logged", f"{len(due - logged.keys())}{each}"  # rank 0 was killed before it could write the line


def seconds_to_step(done: Sequence[Done], progress: Progress) -> list[float]:
    """Seconds from each fault to the next step, if there was one."""
    pairs = [(it.time, progress.first_step_after(it)) for it in done]
    return [step - fault for fault, step in pairs if step is not None]


def _expected_samples(progress: Progress) -> str:
    """Samples that the whole run hands out, from its options and the size of its data set."""
    try:
        from ...data.order import positions_in, token_batches
        from ...tasks.command_line import parse  # imports torch, which nothing else here needs
        from ...training.task_data import training_set

        config, task = parse(["--config", str(progress.run_dir / "config.toml")])
        data, status = training_set(task, config), progress.status
        plan = Plan.of(config, positions_in(data), token_batches(data))
        return str(plan.samples_seen(status["step"] if status.get("stopped_early") else plan.total_steps))
    except Exception as error:  # the data may be gone by now; print the rest of the report
        return f"unknown ({type(error).__name__}: {error})"
