"""The command line of `python -m evenkeel chaos`: check everything, run the experiment, leave no process, report."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ...common import display
from ...common.errors import Ended, Refusal
from ...common.naming import BIT_FLIPS
from ...common.processes import adopt_orphans
from ...config import SEEDS, MaybePath, option
from ...run.records import read_facts
from .experiment import Experiment, lines, say
from .faults import KINDS, SAFE, Fault, schedule
from .job import Job, kill_descendants
from .nodes import Lab, why_not
from .progress import Progress

INTERRUPTED = 128 + signal.SIGINT  # exit code


@dataclass(frozen=True)
class ChaosCommand:
    """Start a job, break it again and again, report the cost.

    Example: python -m evenkeel chaos -- torchrun --nproc_per_node=2 --max-restarts=3 train.py --run-dir runs/x

    What follows after `--` is the job's own command: it must start torchrun and have a --run-dir. If it ends before
    the run has finished, it is started again, as a scheduler does. Exit code 1: the run has not finished.
    """

    kill_every: Annotated[str, tyro.conf.arg(metavar="DURATION")] = "20s"
    """Mean time between two faults: 20s, 2m, or seconds. Each fault also waits for a step after the last one."""
    minutes: float = option(5.0, 1e-3, 366 * 1440)
    """Minutes after which there are no more faults."""
    count: int = option(0, 0)
    """Maximum number of faults (0: no limit)."""
    seed: int = option(0, *SEEDS)
    """Seed of the kinds of the faults, their order and intervals."""
    faults: Annotated[str, tyro.conf.arg(metavar="NAME,NAME,...", help_behavior_hint="")] = ""
    """kill, keeper, term, stop (ranks), truncate (checkpoints), agent, node; not by default: fill (disk), bitflip."""
    then: Literal["finish", "stop"] = "finish"
    """After the last fault: let the job finish, or stop it by SIGTERM."""
    nodes: int = option(1, 1, 2**16)
    """Nodes (network namespaces; needs root). In the command {node} is a node's number, {master} node 0's address."""
    run_dir: MaybePath = None
    """The run's folder. Default: the --run-dir in the command."""

    def __call__(self, command: list[str]) -> int:
        """Run the experiment, print the report, and return the exit code."""
        kinds, every = parse_faults(self.faults, self.nodes), parse_duration(self.kill_every)
        check_command(command, self.nodes)
        run_dir = self.run_dir or find_run_dir(command)
        if read_facts(run_dir / "status.json")[0].get("state") == "finished":
            raise Refusal(f"--run-dir {run_dir}: this run has finished; name another folder")
        faults = islice(schedule(kinds, every, self.seed), self.count or None)
        os.environ |= {BIT_FLIPS: str(run_dir.resolve() / ".bit-flip")} if "bitflip" in kinds else {}

        adopt_orphans()
        _on_interrupt(signal.default_int_handler)  # it raises KeyboardInterrupt
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(kill_descendants)
                lab = stack.enter_context(Lab(self.nodes)) if self.nodes > 1 else None
                stack.callback(_on_interrupt, signal.SIG_IGN)  # nothing may interrupt the clean-up
                experiment = Experiment(Job(command, lab), Progress(run_dir))
                code = self._run(experiment, faults)
                for name, value in lines(experiment):
                    display.say(f"  {name:<18}{value}")
        except KeyboardInterrupt:
            code = INTERRUPTED
        return code

    def _run(self, experiment: Experiment, faults: Iterable[Fault]) -> int:
        """Run the job from its start to its end, whatever ends it; returns the exit code."""
        try:
            experiment.job.start(*experiment.job.nodes)
            experiment.do_faults(faults, self.minutes * 60)
            if not experiment.progress.finished:
                now = "waiting for the job to finish" if self.then == "finish" else "stopping the job"
                say(f"no more faults after {len(experiment.done)}; {now}")
            while self.then == "finish" and experiment.supervise():
                pass
            code = 0 if self.then == "stop" or experiment.progress.finished else 1
        except Ended as ended:
            say(str(ended))
            code = 1
        except KeyboardInterrupt:
            say("interrupted: stopping the job; a second Ctrl-C kills it")
            code = INTERRUPTED
        experiment.job.stop(*experiment.job.running)
        experiment.progress.update()
        return code


def parse_duration(text: str) -> float:
    """Seconds in `20s`, `2m`, `1h` or a number of seconds."""
    duration = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh]?)", text)
    if not duration or not float(duration[1]):
        raise Refusal(f"--kill-every {text}: give a duration above 0, such as 20s or 2m")
    return float(duration[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[duration[2]]


def parse_faults(text: str, nodes: int) -> list[str]:
    """The kinds of faults in a comma-separated list; without a list those that are safe."""
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
    """Refuse a command that cannot be started, or not started again."""
    if sys.platform != "linux":
        raise Refusal("chaos finds processes in /proc: it needs Linux")
    if not command:
        raise Refusal(
            "no command: give the job's command after --, as in: chaos -- torchrun ... train.py --run-dir runs/x"
        )
    if shutil.which(command[0]) is None:
        raise Refusal(
            f"{command[0]}: no such program; write a file of this folder as ./{command[0]}, and make it executable"
        )
    if "--fresh" in command:
        raise Refusal("--fresh: chaos starts the command again, and each start would start over; name a new --run-dir")
    if nodes > 1 and not any("{node}" in word for word in command):
        raise Refusal(f"--nodes {nodes}: the command must have {{node}} in place of each node's number")
    if nodes > 1 and (reason := why_not()):
        raise Refusal(f"--nodes {nodes}: {reason}; run as root on Linux, or leave it out")


def find_run_dir(command: Sequence[str]) -> Path:
    """The last --run-dir in a command."""
    found = re.findall(r"\0--run[-_]dir[=\0]([^\0]+)", "\0".join(["", *command]))
    if not found:
        raise Refusal("--run-dir is missing: chaos follows the run in its folder; give it in the command or to chaos")
    return Path(found[-1])


def _on_interrupt(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handler)
