"""The command line of `python -m evenkeel check`: examine the task, run the jobs, print the table, leave nothing."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from ...common.arguments import is_typed
from ...common.display import say
from ...common.errors import Refusal
from ...config import MaybePath
from .jobs import JobFailed, Jobs, Waiting, alike, last_message, together
from .rows import FAILED, MEASURED, PASSED, UNCHECKED, Row
from .verdicts import Left, of_probes

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED, HALTED = 128 + signal.SIGINT, "interrupted"
JOBS = 8
STEPS, EPOCH = 12, 5
"""Steps of a job, and of an epoch unless --limit-batches says otherwise."""
KILLED, STOPPED, RESIZED = 7, 1, 7
"""Steps, from 0, that are interrupted in mid-epoch."""

OWN = ("run-dir", "max-steps", "epochs", "reduce", "digest-every", "log-every", "checkpoint-every", "wandb", "fresh",
       "eval-only", "profile", "patience", "config", "nodes", "gpus")  # fmt: skip
"""Options of train.py that check sets itself or does not support."""


@dataclass(frozen=True)
class CheckCommand:
    """Prove the promises for your own task by short real jobs.

    Example: python -m evenkeel check --task my_job.py:MyTask -- --batch-size 32

    Options of train.py follow `--`. The command reads your data, calls your loss and metrics, and runs eight short jobs
    in a temporary folder, some of which it kills or stops. With a small model this takes about two minutes on two idle
    cores. Exit code 0: no check failed, 1: some failed, 2: refused, 130: interrupted.
    """

    task: Annotated[str, tyro.conf.arg(help_behavior_hint="")] = ""
    """Task to check: a built-in one, FILE.py:CLASS or PACKAGE.MODULE:CLASS. Default: that of train.py."""
    script: Path = Path("train.py")
    """The training script."""
    keep: MaybePath = None
    """Folder for the jobs, to keep. Default: a temporary folder, deleted unless a check fails."""

    def __call__(self, train_options: list[str]) -> int:
        """Check, and print the table."""
        began = time.monotonic()
        for number in STOPS:
            signal.signal(number, signal.default_int_handler)  # it raises KeyboardInterrupt
        try:
            rows = self.rows(train_options)
        except KeyboardInterrupt:
            rows = []
        interrupted = not rows or any(row.figure == HALTED for row in rows)
        if interrupted:
            say("evenkeel: interrupted; all jobs have been ended", to_stderr=True)
        if not rows:
            return INTERRUPTED
        say(as_table(rows))
        counts = Counter(row.result for row in rows)
        totals = ", ".join(f"{counts[it]} {it}" for it in (PASSED, FAILED, UNCHECKED))
        say(f"evenkeel: checked in {time.monotonic() - began:.0f} s: {totals}")
        return INTERRUPTED if interrupted else int(any(row.result == FAILED for row in rows))

    def rows(self, options: Sequence[str]) -> list[Row]:
        """Do all checks.

        Raises:
            Refusal: the task or an option is wrong; no job has been run.
        """
        self._refuse(options)
        limit = [] if is_typed("limit-batches", options) else [f"--limit-batches={EPOCH}"]
        given = [*options, *limit, "--wandb=disabled", f"--max-steps={STEPS}", "--epochs=1000000"]
        task = [f"--task={self.task}"] if self.task else []
        source = self.task.rpartition(":")[0]
        own = source.endswith(".py") and self.script.resolve() == Path(source).resolve()  # it takes no --task
        folder = Path(tempfile.mkdtemp(prefix="evenkeel-check-")) if self.keep is None else self.keep
        folder.mkdir(parents=True, exist_ok=True)
        jobs, rows = Jobs(folder, self.script, given if own else [*task, *given]), list[Row]()
        try:
            rows = Check(jobs, [*task, *given]).rows()
        finally:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # nothing may interrupt the clean-up
            jobs.end_all()
            if self.keep or any(row.result == FAILED for row in rows):
                say(f"evenkeel: the jobs and their output are in {folder}", to_stderr=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return rows

    def _refuse(self, options: Sequence[str]) -> None:
        if not self.script.is_file():
            raise Refusal(f"--script {self.script}: no such file; run this in the folder of train.py, or name it")
        for name in OWN:
            if is_typed(name, options):
                raise Refusal(f"-- --{name}: check sets it for its short jobs; leave it out")
        if is_typed("task", options):
            raise Refusal("-- --task: give it before the --, as in: check --task my_job.py:MyTask -- --batch-size 32")
        if self.keep and self.keep.exists():
            raise Refusal(f"--keep {self.keep}: exists already; name another folder")


class Check:
    """The checks of one task.

    Args:
        jobs: of this check.
        options: of train.py, --task among them.
    """

    def __init__(self, jobs: Jobs, options: Sequence[str]) -> None:
        self.jobs, self.options, self.began = jobs, options, time.monotonic()
        self.missing: dict[str, str] = {}
        self.begun = 0  # number of jobs so far

    def rows(self) -> list[Row]:
        """Examine the task, run the jobs, and judge their results."""
        probes = self._probe()
        first, rows = probes[0], [*of_probes(probes)]
        where = self._where(first)
        for row in rows:
            self._say(f"{row.name}: {row.result}" + (f": {row.figure}" if row.result != PASSED else ""))
        fixed = [] if first["typed"] else [f"--micro-batches={first['cut']}"]
        fixed += ["--log-every=1", "--checkpoint-every=5"]
        tree, ring, job = [*fixed, "--reduce=tree", "--digest-every=1"], [*fixed, "--reduce=ring"], self.jobs.job
        todo = {f"tree-{ranks}": job(f"tree-{ranks}", [ranks], tree) for ranks in (2, 3, 1)}
        todo["stop"] = job("stop", [2, 2, 3], tree, {STOPPED: signal.SIGTERM, RESIZED: signal.SIGTERM})
        todo["kill"] = job("kill", [2], tree, {KILLED: signal.SIGKILL})
        todo |= {f"ring-{ranks}": job(f"ring-{ranks}", [ranks], ring) for ranks in (3, 1, 2)}
        why = "first fix the data on each rank" if rows[1].result == FAILED else ""
        why = why or ("--strategy dp is one process" if first["strategy"] == "dp" else "")
        why = why or ("--sync-batchnorm ties the cut to the number of ranks" if first["sync_batchnorm"] else "")
        self.missing = dict.fromkeys(todo, f"not run: {why or HALTED}")
        alone = {"ring-2": todo.pop("ring-2")}  # for its times
        with contextlib.suppress(KeyboardInterrupt, JobFailed):  # the rows that are known are printed
            self._do({} if why else todo, 2)
            self._do({} if why else alone, 1)
        breaks = [
            ("kill -9", "rank 1 of 2 killed", "kill", 1, KILLED),
            ("stop", "SIGTERM, resumed on 2 ranks", "stop", 1, STOPPED),
            ("resize", "SIGTERM on 2 ranks, resumed on 3", "stop", 2, RESIZED),
        ]
        return [where, *rows, *Left(self.jobs.folder, self.missing, first).rows(breaks)]

    def _probe(self) -> list[dict[str, Any]]:
        """What three processes find out about the task, each as one rank."""
        self._say(f"first the task's data, loss and metrics, then {JOBS} short jobs; some are killed or stopped")
        self._say("in all about two minutes with a small model on two idle cores")
        outputs, looks = [self.jobs.folder / f"probe-{rank}" for rank in range(3)], {}
        for rank, output in enumerate(outputs):
            env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
            process = self.jobs.popen(["-m", f"{__package__}.probe", f"{output}.json", *self.options], output, env)
            looks[str(output)] = self.jobs.ended(process, output)
        for name, why in together(looks, 3):
            if why:
                raise Refusal(last_message(Path(name)))
        return [json.loads(Path(f"{output}.json").read_text()) for output in outputs]

    def _where(self, probe: dict[str, Any]) -> Row:
        """Where the jobs compute: on the CPU unless each rank has a GPU, or --share-gpu."""
        gpus, figure = probe["gpus"], f"{probe['gpus']} GPUs" + (", shared" if probe["share_gpu"] else "")
        if gpus < 3 and not (gpus and probe["share_gpu"]):
            self.jobs.env["CUDA_VISIBLE_DEVICES"] = ""
            figure = "CPU, gloo" + (f" (3 ranks would need 3 GPUs, not {gpus}, or --share-gpu)" if gpus else "")
        cut = "micro-batches as typed" if probe["typed"] else f"{probe['cut']} micro-batches"
        return Row("where", "jobs of 1, 2 and 3 ranks", MEASURED, f"{figure}; batch {probe['batch_size']}, {cut}")

    def _do(self, jobs: Mapping[str, Waiting], at_most: int) -> None:
        """Run jobs in parallel, with a line when one begins or fails; raises JobFailed if two fail alike."""
        for name, why in together(jobs, at_most):
            self.begun += why is None
            kind, _, ranks = name.partition("-")
            what = {"kill": "kill -9 of rank 1 of 2", "stop": "SIGTERM, resumed on 2 ranks; SIGTERM, resumed on 3"}
            text = what.get(name, f"--reduce {kind} on {ranks} rank{'s' * (ranks != '1')}")
            if why is not None:
                del self.missing[name]
            twin = next((it for it in self.missing.values() if why and alike(it, why)), None)
            self.missing |= {name: twin or why} if why else {}
            if why != "":
                self._say(f"{text}: {why}" if why else f"job {self.begun} of {JOBS}: {text}")
            if twin:
                left = [it for it, text in self.missing.items() if text.endswith(HALTED)]
                self.missing |= dict.fromkeys(left, "not run: two jobs have failed with the same error")
                raise JobFailed

    def _say(self, text: str) -> None:
        say(f"evenkeel: {time.monotonic() - self.began:5.1f} s  {text}", to_stderr=True)


def as_table(rows: Sequence[Row]) -> str:
    """The rows in columns, with the remedy below each that failed."""
    wide, mid = (max(len(row[column]) for row in rows) for column in (0, 2))
    lines = []
    for number, row in enumerate(rows):
        again = row.result == FAILED and row.figure in [it.figure for it in rows[:number]]
        figure = "the same error" if again else row.figure
        lines.append(f"{row.name:<{wide}}  {row.result:<{mid}}  {row.compared}: {figure}")
        lines += [f"{'':{wide}}  -> {row.remedy}"] if row.remedy else []
    return "\n".join(lines)
