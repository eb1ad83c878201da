"""A chaos experiment: faults at their times, and a scheduler's patience in starting the job again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import REFUSED, Ended
from ..processes import REFUSAL
from .faults import Fault, Missed, aim
from .job import Job
from .progress import Progress

TICK = 0.1
"""Seconds between two looks at the job."""

MAX_FRUITLESS = 3
"""Ends of the command in a row without a step between them, after which it is not started again."""

FAREWELL = 15.0
"""Seconds that the other nodes have to end after node 0 has finished the run."""


@dataclass(frozen=True)
class Done:
    """A fault that happened."""

    fault: Fault
    time: float
    """Seconds since the epoch."""
    step: int
    """The last step told of at the time."""


class Experiment:
    """A job, what it tells, and what was done to it.

    Args:
        job: not started yet.
        progress: of its run.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.done: list[Done] = []
        self.missed = 0
        self._fruitless = 0
        self._begun = time.time()
        self._progress_at_end = (0, 0)

    def begin(self) -> None:
        """Start the command on all nodes."""
        for node in self.job.nodes:
            self.job.start(node)

    def torment(self, faults: Iterable[Fault], seconds: float) -> None:
        """Do one fault after another, each after its time and only when the job has got over the one before.

        Args:
            faults: in order.
            seconds: no fault happens later than this.

        Raises:
            Ended: the command ends again and again before it does a step.
        """
        deadline = time.monotonic() + seconds
        for fault in faults:
            if not self._until_recovered(time.monotonic() + fault.after, deadline):
                return
            self._do(fault)
        self._until_recovered(time.monotonic(), deadline)

    def wait(self) -> None:
        """Until the run is finished.

        Raises:
            Ended: the command ends again and again before it does a step.
        """
        while self.tend():
            pass

    def tend(self) -> bool:
        """Look after the job for a moment, as a scheduler does: start again what has ended too early.

        Returns:
            Whether there is anything left to look after.

        Raises:
            Ended: the command ends again and again before it does a step.
        """
        time.sleep(TICK)
        self.progress.update()
        ended = self.job.ended()
        if self.progress.finished:
            if 0 in ended:
                self._take_leave()
        elif 0 in ended:  # the rendezvous is gone, and with it the job on every node
            self.job.stop()
            self._count_end(ended[0])
            self.begin()
        else:
            for node, code in ended.items():
                say(f"the command on node {node} ended with {code}; starting it again")
                self.job.forget(node)
                self.job.start(node)
        return bool(self.job.running)

    def _until_recovered(self, earliest: float, deadline: float) -> bool:
        """Look after the job until it has got over the last fault; False if it or the time is over before."""
        while time.monotonic() < earliest or not self._recovered():
            if time.monotonic() >= deadline or not self.tend():
                return False
        return time.monotonic() < deadline

    def _recovered(self) -> bool:
        """Whether the job has done a step since the last fault, or since it was started first."""
        if not self.done:
            return self.progress.recovered(self._begun, 0, restarted=True)
        last = self.done[-1]
        return self.progress.recovered(last.time, last.step, restarted=last.fault.restarts)

    def _do(self, fault: Fault) -> None:
        self.progress.update()
        step = self.progress.step
        try:
            blow = aim(fault, self.job, self.progress.run_dir)
        except Missed as missed:
            self.missed += 1
            say(f"{fault.kind:8} missed: {missed}")
            return
        say(f"{fault.kind:8} {blow.whom}, at step {step}")
        self.done.append(Done(fault, time.time(), step))
        blow.strike()

    def _count_end(self, code: int) -> None:
        """An end before the run was finished.

        Raises:
            Ended: another start would make no sense.
        """
        self.progress.update()
        progress = (len(self.progress.of("train")), self.progress.step)
        self._fruitless = self._fruitless + 1 if progress == self._progress_at_end else 0
        self._progress_at_end = progress
        if code in (REFUSED, -REFUSAL):
            raise Ended("the command was refused, which a second try does not change")
        if self._fruitless == MAX_FRUITLESS:
            raise Ended(f"the command ended {MAX_FRUITLESS} times in a row without a step, last with {code}")
        say(f"the command ended with {code} before the run was finished; starting it again")

    def _take_leave(self) -> None:
        deadline = time.monotonic() + FAREWELL
        while len(self.job.ended()) < len(self.job.running) and time.monotonic() < deadline:
            time.sleep(TICK)
        self.job.stop()


def say(text: str) -> None:
    """A line about what chaos does, told apart from the job's own."""
    print(f"chaos {time.strftime('%H:%M:%S')}  {text}", flush=True)
