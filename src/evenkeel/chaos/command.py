"""The command line of `python -m evenkeel chaos`: check all, run the experiment, leave no process, report."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..errors import Ended, Refusal
from ..records import read_facts
from . import report, tree
from .experiment import Experiment, say
from .faults import KINDS, SAFE, Fault, schedule
from .job import Job
from .nodes import Lab, why_not
from .progress import Progress

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENDINGS = {"finish": "waiting for the job to finish", "stop": "stopping the job"}


class Interrupted(Exception):  # noqa: N818
    """Somebody wants chaos to end."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class ChaosCommand:
    """Start a job, break something of it again and again, and report what that has cost.

    The job's own command comes after `--`. It needs torchrun somewhere, and a --run-dir:

      python -m evenkeel chaos -- torchrun --standalone --nproc_per_node=2 --max-restarts=3 train.py --run-dir runs/x

    When the command ends too early it is started again, as a scheduler would. Each fault is printed as it happens.
    The exit code is 0 if the run was finished, or stopped because --then asked for that, and 1 if not.
    """

    kill_every: Annotated[str, tyro.conf.arg(metavar="DURATION")] = "20s"
    """Mean time between two faults: 20s, 2m or seconds. Each waits for a step after the one before it, too."""
    minutes: float = 5.0
    """After so long nothing more is done to the job."""
    count: int = 0
    """Do at most so many faults. 0: no limit."""
    seed: int = 0
    """Decides which faults come in which order, and at which intervals."""
    faults: Annotated[str, tyro.conf.arg(metavar="NAME,NAME,...")] = ""
    """kill, term, stop (a rank), truncate (a checkpoint), agent, fill (the disk), node. Default: all but fill."""
    then: Literal["finish", "stop"] = "finish"
    """What comes after the last fault: let the job finish, or stop it by SIGTERM."""
    nodes: int = 1
    """Nodes (network namespaces; needs root); in the command {node} is a node's number, {master} node 0's address."""
    run_dir: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = None
    """The run's folder. Default: the --run-dir in the command."""

    def __call__(self, command: list[str]) -> int:
        """Run the experiment, print the report, and return the exit code."""
        kinds, every = parse_faults(self.faults, self.nodes), parse_duration(self.kill_every)
        check_command(command, self.nodes)
        run_dir = find_run_dir(self.run_dir, command)
        self._check(run_dir)
        faults = islice(schedule(kinds, every, self.seed), self.count or None)

        tree.adopt_orphans()
        for number in INTERRUPTS:
            signal.signal(number, _interrupt)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(tree.kill_descendants)
                lab = stack.enter_context(Lab(self.nodes)) if self.nodes > 1 else None
                stack.callback(_ignore_interrupts)  # nothing may get between us and the cleaning up
                experiment = Experiment(Job(command, lab), Progress(run_dir))
                code = self._run(experiment, faults)
                for name, value in report.lines(experiment):
                    print(f"  {name:<18}{value}", flush=True)
        except Interrupted as again:
            code = 128 + again.number
        return code

    def _run(self, experiment: Experiment, faults: Iterable[Fault]) -> int:
        """From the start of the job to its end, whatever ends it; returns the exit code."""
        try:
            experiment.begin()
            experiment.torment(faults, self.minutes * 60)
            if not experiment.progress.finished:
                say(f"no more faults after {len(experiment.done)}; {ENDINGS[self.then]}")
            if self.then == "finish":
                experiment.wait()
            code = 0 if self.then == "stop" or experiment.progress.finished else 1
        except Ended as ended:
            say(str(ended))
            code = 1
        except Interrupted as interrupted:
            say(f"{signal.Signals(interrupted.number).name}: stopping the job; a second one kills it")
            code = 128 + interrupted.number
        experiment.job.stop()
        experiment.progress.update()
        return code

    def _check(self, run_dir: Path) -> None:
        if read_facts(run_dir / "status.json")[0].get("state") == "finished":
            raise Refusal(f"--run-dir {run_dir}: this run has finished; name another folder")
        if self.nodes > 1 and (reason := why_not()):
            raise Refusal(f"--nodes {self.nodes}: {reason}; run as root on Linux, or leave it out")


def parse_duration(text: str) -> float:
    """Seconds in `20s`, `2m`, `1h` or a number of seconds."""
    duration = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh]?)", text)
    if not duration or not float(duration[1]):
        raise Refusal(f"--kill-every {text}: give a duration above 0, such as 20s or 2m")
    return float(duration[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[duration[2]]


def parse_faults(text: str, nodes: int) -> list[str]:
    """The kinds of faults in a list with commas between them; those that are safe, if it is empty."""
    if not text:
        return [*SAFE, "node"] if nodes > 1 else [*SAFE]
    kinds = text.split(",")
    for kind in kinds:
        if kind not in KINDS:
            raise Refusal(f"--faults {kind}: there is no such fault; choose from {', '.join(KINDS)}")
    if "node" in kinds and nodes == 1:
        raise Refusal("--faults node: needs several nodes; add --nodes 3, say")
    return kinds


def check_command(command: Sequence[str], nodes: int) -> None:
    """Refuse what cannot be started, or started again."""
    if sys.platform != "linux":
        raise Refusal("chaos finds processes in /proc: it needs Linux")
    if not command:
        raise Refusal("no command: give the job's own after --, as in: chaos -- torchrun ... train.py --run-dir runs/x")
    if shutil.which(command[0]) is None:
        raise Refusal(f"{command[0]}: no such program; a file here is named ./{command[0]} and must be executable")
    if "--fresh" in command:
        raise Refusal("--fresh: chaos starts the command again, and each start would start over; name a new --run-dir")
    if nodes > 1 and not any("{node}" in word for word in command):
        raise Refusal(f"--nodes {nodes}: the command must say {{node}} where each node's own number belongs")


def find_run_dir(named: Path | None, command: Sequence[str]) -> Path:
    """The run's folder: as named to chaos, else the last --run-dir in the command."""
    found = named
    for word, following in zip(command, [*command[1:], ""], strict=True):
        flag, _, value = word.partition("=")
        if named is None and flag in ("--run-dir", "--run_dir") and (value or following):
            found = Path(value or following)
    if found is None:
        raise Refusal("--run-dir is missing: chaos follows the run in its folder; give it in the command or to chaos")
    return found


def _interrupt(number: int, _frame: object) -> None:
    raise Interrupted(number)


def _ignore_interrupts() -> None:
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)
