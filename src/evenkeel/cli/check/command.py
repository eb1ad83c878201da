"""The command line of `python -m evenkeel check`: probe the task, run the jobs, print the table, leave nothing."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common.display import say
from ...common.errors import REFUSED, Refusal
from ...config import MaybePath
from . import verdicts
from .jobs import Jobs, Waiting, last_words, together
from .rows import FAILED, MEASURED, Row
from .verdicts import RANKS, Left

INTERRUPTED = 128 + signal.SIGINT
STEPS, EPOCH = 12, 5
"""Steps of a job, and of an epoch unless --limit-batches says otherwise."""
KILLED, STOPPED, RESIZED = 7, 2, 8
"""Steps from 0 that are broken off: the third, eighth and ninth, all in mid-epoch."""

OWN = ("run-dir", "max-steps", "epochs", "reduce", "digest-every", "log-every", "checkpoint-every", "wandb", "fresh",
       "eval-only", "profile", "patience", "config", "nodes", "gpus")  # fmt: skip
"""Options of train.py that check sets itself, or cannot work with."""


@dataclass(frozen=True)
class CheckCommand:
    """Prove the promises for your own task by short real jobs: samples, numbers, kills, stops, resizes, evaluation.

    Example: python -m evenkeel check --task my_job.py:MyTask -- --batch-size 32

    What follows after `--` are options of train.py. It takes about two minutes on two quiet cores. Exit code 0: all
    checks have passed, 1: some have failed. All runs are in a temporary folder.
    """

    task: str = "classify"
    """What to check, as for train.py: a built-in task, FILE.py:CLASS or PACKAGE.MODULE:CLASS."""
    script: Path = Path("train.py")
    """The training script."""
    keep: MaybePath = None
    """Keep the jobs' folders here. Default: a temporary folder, kept only if a check fails."""

    def __call__(self, train_options: list[str]) -> int:
        """Check, and print the table."""
        try:
            rows = self.rows(train_options)
        except KeyboardInterrupt:
            say("evenkeel: interrupted; all jobs are ended", to_stderr=True)
            return INTERRUPTED
        say(as_table(rows))
        return int(any(row.result == FAILED for row in rows))

    def rows(self, options: Sequence[str]) -> list[Row]:
        """Do all checks.

        Raises:
            Refusal: the task or an option cannot be meant; nothing has been started but a look at the task.
        """
        self._refuse(options)
        limit = [] if named(options, "limit-batches") else [f"--limit-batches={EPOCH}"]
        given = [*options, *limit, "--wandb=disabled", f"--max-steps={STEPS}", "--epochs=1000000"]
        with self._folder() as (folder, done):
            # a script with a task of its own takes no --task
            own = (
                self.task.rpartition(":")[0].endswith(".py")
                and self.script.resolve() == Path(self.task.rpartition(":")[0]).resolve()
            )
            jobs = Jobs(
                folder, self.script, given if own else [f"--task={self.task}", *given], {"OMP_NUM_THREADS": "1"}
            )
            try:
                rows = Check(jobs, [f"--task={self.task}", *given]).rows()
            finally:
                with uninterrupted():
                    jobs.end_all()
            done(all(row.result != FAILED for row in rows))
        return rows

    def _refuse(self, options: Sequence[str]) -> None:
        if not self.script.is_file():
            raise Refusal(f"--script {self.script}: no such file; run this in the folder of train.py, or name it")
        for name in OWN:
            if named(options, name):
                raise Refusal(f"-- --{name}: check sets it for its short jobs; leave it out")
        if named(options, "task"):
            raise Refusal("-- --task: give it before the --, as in: check --task my_job.py:MyTask -- --batch-size 32")
        if self.keep and self.keep.exists():
            raise Refusal(f"--keep {self.keep}: exists already; name another folder")

    @contextmanager
    def _folder(self) -> Iterator[tuple[Path, Callable[[bool], None]]]:
        """The folder of the jobs, and a function to tell whether all has passed. A temporary one stays if not."""
        made = not self.keep
        folder = Path(tempfile.mkdtemp(prefix="evenkeel-check-")) if self.keep is None else self.keep
        folder.mkdir(parents=True, exist_ok=True)
        told: list[bool] = []
        try:
            yield folder, told.append
        finally:
            if made and told != [False]:
                with uninterrupted():
                    shutil.rmtree(folder, ignore_errors=True)
            else:
                say(f"evenkeel: the jobs and their output are in {folder}", to_stderr=True)


class Check:
    """The checks of one task.

    Args:
        jobs: of this check.
        options: of train.py, --task among them.
    """

    def __init__(self, jobs: Jobs, options: Sequence[str]) -> None:
        self.jobs, self.options, self.began = jobs, options, time.monotonic()

    def rows(self) -> list[Row]:
        """Probe, then run, then judge."""
        probes = self._probe()
        first = probes[0]
        rows = [verdicts.data_at_each_read(first), verdicts.data_on_each_rank(probes), verdicts.no_hidden_state(first)]
        rows += [verdicts.of_the_cut(first, "loss"), verdicts.of_the_cut(first, "metrics")]
        for row in rows:
            self._say(f"{row.name}: {row.result}")
        return [self._where(first), *rows, *self._run(first, rows[1].result == FAILED)]

    def _probe(self) -> list[dict[str, Any]]:
        """What three processes find of the task, each as if it were a rank."""
        self._say("looking at the task: data, loss and metrics")
        outputs = [self.jobs.folder / f"probe-{rank}" for rank in range(3)]
        ranks = [
            {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3"}
            for rank in range(3)
        ]
        module = ["-m", f"{__package__}.probe"]
        started = [
            self.jobs.popen([*module, f"{output}.json", *self.options], output, env)
            for output, env in zip(outputs, ranks, strict=True)
        ]
        waits = {
            str(output): self.jobs.ended(process, output, "the look at the task")
            for process, output in zip(started, outputs, strict=True)
        }
        failed = [(name, why) for name, why in together(waits, 3) if why]
        for name, why in failed:
            refused = any(it.returncode == REFUSED for it in started)
            raise Refusal(last_words(Path(name)) if refused else f"--task: {why}")
        return [json.loads(Path(f"{output}.json").read_text()) for output in outputs]

    def _where(self, probe: dict[str, Any]) -> Row:
        """Where the jobs compute; without a GPU for each rank on the CPU, unless they are to share."""
        gpus = probe["gpus"]
        row = Row("where", "jobs of 1, 2 and 3 ranks", MEASURED, f"{gpus} GPUs, NCCL")
        if gpus < max(RANKS) and not (gpus and probe["share_gpu"]):
            self.jobs.env["CUDA_VISIBLE_DEVICES"] = ""
            few = f"; 3 ranks need as many GPUs, and there are {gpus}: add --share-gpu to use them" * bool(gpus)
            row = row._replace(figure=f"CPU, gloo{few}")
        elif gpus < max(RANKS):
            row = row._replace(figure=f"{gpus} GPUs, shared, gloo")
        cut = "its own micro-batches" if probe["typed"] else f"{probe['cut']} micro-batches"
        return row._replace(figure=f"{row.figure}; a batch of {probe['batch_size']} in {cut}")

    def _run(self, probe: dict[str, Any], stop: bool) -> list[Row]:
        """Run all jobs, unless there is no use in it, and judge what they leave."""
        cut = [] if probe["typed"] else [f"--micro-batches={probe['cut']}"]
        noted = [*cut, "--digest-every=1", "--log-every=1", "--checkpoint-every=5"]
        tree, ring = [*noted, "--reduce=tree"], [*noted, "--reduce=ring"]
        jobs = self.jobs
        todo: dict[str, Waiting] = {
            f"tree-{ranks}": jobs.undisturbed(f"tree-{ranks}", ranks, tree) for ranks in (2, 3, 1)
        }
        todo |= {
            "stop": jobs.stopped("stop", [2, 2, 3], [STOPPED, RESIZED], tree),
            "kill": jobs.killed("kill", 2, KILLED, tree),
        }
        todo |= {f"ring-{ranks}": jobs.undisturbed(f"ring-{ranks}", ranks, ring) for ranks in (3, 2, 1)}
        failed: dict[str, str] = {}
        if stop:
            failed = dict.fromkeys([*todo, "timed"], "not run: first see to the data of each rank")
        elif probe["strategy"] == "dp" or probe["sync_batchnorm"]:
            why = (
                "--strategy dp is one process"
                if probe["strategy"] == "dp"
                else "--sync-batchnorm ties the cut to the ranks"
            )
            failed = dict.fromkeys([*todo, "timed"], f"not run: {why}; check the task without it")
        for name, told in together({name: it for name, it in todo.items() if name not in failed}, 2):
            self._tell(name, told, failed)
        timed = jobs.undisturbed("timed", 2, [*cut, "--checkpoint-every=5"], timed=True)
        for name, told in together({} if "timed" in failed else {"timed": timed}, 1):  # alone, for its times
            self._tell(name, told, failed)
        left = Left(jobs.folder, failed, probe)
        return [
            left.same_samples(), left.same_numbers(), left.same_bits(), left.exact_evaluation(),
            left.survived("kill -9", "rank 1 of 2 killed", "kill", 1, KILLED),
            left.survived("stop", "SIGTERM on 2 ranks", "stop", 1, STOPPED, RESIZED),
            left.survived("resize", "SIGTERM on 2 ranks, on with 3,", "stop", 2, RESIZED),
            left.cost(),
        ]  # fmt: skip

    def _tell(self, name: str, why: str | None, failed: dict[str, str]) -> None:
        """A line when a job begins, and one if it fails."""
        kind, _, ranks = name.partition("-")
        what = {
            "tree": f"{ranks} ranks, --reduce tree", "ring": f"{ranks} ranks, --reduce ring", 
            "kill": "kill -9 of rank 1 of 2",
            "stop": "SIGTERM on 2 ranks, continued on 2; SIGTERM, continued on 3",
            "timed": "2 ranks, where the time goes",
        }[kind]  # fmt: skip
        if why is None:
            self._say(what)
        elif why:
            failed[name] = why
            self._say(f"{what}: {why}")

    def _say(self, text: str) -> None:
        say(f"evenkeel: {time.monotonic() - self.began:5.1f} s  {text}", to_stderr=True)


def named(options: Sequence[str], name: str) -> bool:
    """Whether an option is among the words of a command line."""
    return any(word.partition("=")[0].replace("_", "-") == f"--{name}" for word in options)


def as_table(rows: Sequence[Row]) -> str:
    """The rows in columns, with the remedy below each that failed."""
    widths = [max(len(row[column]) for row in rows) for column in (0, 2)]
    lines = []
    for row in rows:
        lines.append(f"{row.name:<{widths[0]}}  {row.result:<{widths[1]}}  {row.compared}: {row.figure}")
        lines += [f"{'':{widths[0]}}  -> {row.remedy}"] * bool(row.remedy)
    return "\n".join(lines)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A context in which Ctrl-C waits. For the main thread."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
