"""A chaos experiment: faults at their times, and a job that is started again when it ends too early."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ...common.errors import REFUSED, Ended
from ...common.processes import REFUSAL
from .faults import Fault, Missed, strike
from .job import Job
from .progress import Done, Progress

TICK = 0.1  # seconds between two looks at the job
MAX_FRUITLESS = 3  # ends of the command in a row without a step between them: then it is not started again


class Experiment:
    """A job, its progress, and what was done to it.

    Methods raise `Ended` if the command is refused, or ends again and again before it does a step.
    """

    def __init__(self, job: Job, progress: Progress) -> None:
        self.job, self.progress = job, progress
        self.done: list[Done] = []
        self.missed = 0
        self._last = Done(Fault("start"), time.time(), 0)
        self._fruitless, self._progress_at_end = 0, (0, 0)

    def do_faults(self, faults: Iterable[Fault], seconds: float) -> None:
        """Do one fault after another, each at its time, but only after a step since the one before.

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
        """Wait a moment, then start again what has ended too early, as a scheduler does; False: all has ended."""
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
            raise Ended("the command was refused, which a second try does not change")
        if self._fruitless == MAX_FRUITLESS:
            raise Ended(f"the command ended {MAX_FRUITLESS} times in a row without a step, last with {code}")
        say(f"the command ended with {code} before the run was finished; starting it again")


def say(text: str) -> None:
    """Print what chaos does, told apart from the job's own lines."""
    print(f"chaos {time.strftime('%H:%M:%S')}  {text}", flush=True)
