"""`python -m evenkeel sweep FILE.toml`: one run for each combination of some options, and a table of their metrics.

The file has a table `grid`, of lists, and perhaps a table `fixed`, of values:

    [fixed]
    task = "regress"
    epochs = 5
    [grid]
    lr = [0.1, 0.01]
    seed = [1, 2, 3]

Each run is a torchrun job as the launchers start it, in a folder of its own below --run-dir. So the same command
continues a sweep: finished runs stay, interrupted ones go on at the next step.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..common.arguments import flag
from ..common.display import aligned, say
from ..common.errors import FAILED, Refusal
from ..common.network import Link
from ..common.processes import count_cores, start_in_session
from ..config import Flag, MaybePath, option
from ..launch.launchers import check_train_options, option_words
from ..launch.topology import Command, Topology, refuse_useless_gpus, torchrun
from ..resilience.interruption import STOPPED
from ..run.records import read_config, read_facts

OWN = {"run_dir", "config", "fresh", "eval_only"}
"""Options that a file may not name."""


@dataclass(frozen=True)
class Setting:
    """One run of a sweep."""

    chosen: Mapping[str, Any]
    """Its values of the grid's options."""
    run_dir: Path
    options: tuple[str, ...]
    """Of train.py."""

    @property
    def finished(self) -> bool:
        """Whether it has been run to its end."""
        return (self.run_dir / "summary.json").exists()


@dataclass(frozen=True)
class SweepCommand:
    """Train with each combination of some options; compare the metrics.

    Example: python -m evenkeel sweep sweep.toml -j 2

    The file has lists of values in a table [grid] and single values in [fixed]; options are written as in config.toml.
    The same command continues a sweep. Ctrl-C stops its jobs, which save their last step. Exit code 0: all runs have
    finished, 75: it was stopped, 1: one has failed.
    """

    file: tyro.conf.Positional[Path]
    """A TOML file with the options."""
    jobs: Annotated[int, tyro.conf.arg(aliases=["-j"], metavar="N")] = option(1, 1, 1024)
    """Runs at a time; they share the machine's GPUs or cores equally."""
    gpus: Annotated[int | None, tyro.conf.arg(aliases=["-g"], metavar="N", help_behavior_hint="")] = option(
        None, 1, 1024
    )
    """GPUs of each run, or processes without GPUs. Default: all GPUs divided by -j; one process without GPUs."""
    over: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ("seed",)
    """Options over which the table has mean and deviation, e.g. seed fold."""
    run_dir: MaybePath = None
    """Folder of the runs. Default: runs/ and the file's name."""
    script: Path = Path("train.py")
    """The training script."""
    dry_run: Flag = False
    """Print the commands; start nothing."""

    def __call__(self) -> int:
        """Run what is not finished, and print the table."""
        if not self.script.is_file():
            raise Refusal(f"--script {self.script}: no such file; run this in the folder of train.py, or name it")
        settings = self._settings()
        places = list(self._places())
        todo = [it for it in settings if not it.finished]
        if self.dry_run:
            for number, setting in enumerate(todo):
                say(str(self._command(setting, places[number % len(places)])))
            return 0
        codes = self._run(todo, places) if todo else {}
        say("\n".join(table(settings, self.over)))
        return next((code for code in (FAILED, STOPPED) if code in codes.values()), 0)

    def _settings(self) -> list[Setting]:
        """All runs, each checked as train.py would; refused unless a finished one had the same options."""
        fixed, grid = read(self.file)
        folder = self.run_dir or Path("runs") / self.file.stem
        found: list[Setting] = []
        mirrors = set[str]()
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values, strict=True))
            run_dir = folder / name_of(chosen)
            typed = [word for name, value in (fixed | chosen).items() for word in option_words(name, value)]
            options = (*typed, f"--run-dir={run_dir}")
            if any(run_dir == other.run_dir for other in found):
                raise Refusal(f"{self.file}: two runs would be {run_dir}; give each value of a list once")
            if (url := check_train_options(options).mirror) in mirrors:
                raise Refusal(f"{self.file}: --mirror {url}: each run needs a URL of its own; start each by itself")
            mirrors |= {url} - {""}
            found.append(Setting(chosen, run_dir, options))
            if found[-1].finished:
                _refuse_changes(found[-1], fixed)
        return found

    def _places(self) -> Iterator[Command]:
        """The command without options of train.py, for each of the jobs that run at a time: each has its devices."""
        import torch  # takes seconds: not before the cheap refusals

        refuse_useless_gpus()
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        each = self.gpus or max(1, present // self.jobs)
        if present and each * self.jobs > present:
            raise Refusal(f"-j {self.jobs} -g {each}: this machine has {present} GPUs; run fewer at a time")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(present)))).split(",")
        for job in range(self.jobs):
            devices = {"CUDA_VISIBLE_DEVICES": ",".join(visible[job * each : (job + 1) * each])} if present else {}
            cores = max(1, count_cores() // self.jobs)
            command = torchrun(Topology(each), Link("127.0.0.1"), self.script, (), cores=cores)
            yield replace(command, env={**command.env, **devices})

    def _command(self, setting: Setting, place: Command) -> Command:
        return replace(place, argv=(*place.argv, *(word.replace("$", "$$") for word in setting.options)))

    def _run(self, todo: list[Setting], places: list[Command]) -> dict[Path, int]:
        """Run settings, one in each place at a time; the exit codes by run directory."""
        waiting, codes = list(todo), dict[Path, int]()
        running: dict[int, tuple[Setting, subprocess.Popen[bytes]]] = {}
        with _stop_signals() as stops:
            told = 0
            while running or (waiting and not stops):
                for number in [place for place in range(len(places)) if place not in running]:
                    if waiting and not stops:
                        setting = waiting.pop(0)
                        say(f"evenkeel: {len(todo) - len(waiting)} of {len(todo)}: {setting.run_dir}", to_stderr=True)
                        running[number] = setting, _started(self._command(setting, places[number]), setting.run_dir)
                for _, process in running.values():
                    for number in stops[told:]:
                        process.send_signal(number)
                told = len(stops)
                time.sleep(0.1)
                for number, (setting, process) in [*running.items()]:
                    if (code := process.poll()) is not None:
                        del running[number]
                        codes[setting.run_dir] = code if code in (0, STOPPED) else FAILED
                        if codes[setting.run_dir] == FAILED:
                            why = f"exit code {code}; its output is in {_output(setting.run_dir)}"
                            say(f"evenkeel: {setting.run_dir} failed: {why}", to_stderr=True)
        return codes | dict.fromkeys((it.run_dir for it in waiting), STOPPED)


def read(file: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The tables `fixed` and `grid` of a sweep's file.

    Raises:
        Refusal: it cannot be read, or has something else.
    """
    if not file.is_file():
        raise Refusal(f"{file}: no such file; name a TOML file with a table [grid]")
    found = read_config(file)
    fixed, grid = (_underscored(found.get(name, {})) for name in ("fixed", "grid"))
    if unknown := sorted(found.keys() - {"fixed", "grid"}):
        raise Refusal(f"{file}: {unknown[0]} is in no table; put options into [fixed], or as lists into [grid]")
    if not grid:
        raise Refusal(f"{file}: has no table [grid] with lists of values, such as lr = [0.1, 0.01]")
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise Refusal(f"{file}: {name} = {values!r} in [grid] must be a list of values; put one value into [fixed]")
    if both := sorted(fixed.keys() & grid.keys()):
        raise Refusal(f"{file}: {both[0]} is in [fixed] and in [grid]; leave it out of one")
    if own := sorted(OWN & (fixed.keys() | grid.keys())):
        raise Refusal(f"{file}: {own[0]}: sweep sets it for each run; leave it out")
    return fixed, grid


def _underscored(options: Any) -> dict[str, Any]:
    """A table with option names as config.toml has them; {} for what is no table."""
    return {name.replace("-", "_"): value for name, value in options.items()} if isinstance(options, dict) else {}


def name_of(chosen: Mapping[str, Any]) -> str:
    """The folder's name of a run, e.g. lr=0.1,seed=2."""
    parts = (f"{name}={'+'.join(map(str, it)) if isinstance(it, list) else it}" for name, it in chosen.items())
    return re.sub(r"[^\w=.,+-]", "_", ",".join(parts))[:200]


def table(settings: list[Setting], over: tuple[str, ...]) -> list[str]:
    """A line for each combination of the options that are not in `over`: mean ± deviation of its finished runs.

    The deviation is that of a sample (n - 1); a single run has none.
    """
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        rest = {name: value for name, value in setting.chosen.items() if name not in over}
        groups.setdefault(name_of(rest) or "all", []).append(setting)
    found = {name: [_metrics(it) for it in group if it.finished] for name, group in groups.items()}
    names = list(dict.fromkeys(name for runs in found.values() for metrics in runs for name in metrics))
    rows = [["setting", "runs", *names]]
    for group, runs in found.items():
        cells = [_spread([metrics[name] for metrics in runs if name in metrics]) for name in names]
        rows.append([group, f"{len(runs)}/{len(groups[group])}", *cells])
    return aligned(rows)


def _spread(values: list[float]) -> str:
    if not values:
        return "-"
    mean = statistics.fmean(values)
    spread = f" ± {statistics.stdev(values):.4g}" if len(values) > 1 and all(map(math.isfinite, values)) else ""
    return f"{mean:.4g}{spread}"


def _metrics(setting: Setting) -> dict[str, float]:
    found = read_facts(setting.run_dir / "summary.json")[0].get("metrics")
    return {k: v for k, v in found.items() if isinstance(v, (int, float))} if isinstance(found, dict) else {}


def _refuse_changes(setting: Setting, fixed: Mapping[str, Any]) -> None:
    """A finished run counts only if it had the file's fixed options; the others are in its name."""
    had = read_config(setting.run_dir / "config.toml")
    for name, value in fixed.items():
        if name in had and not _is(had[name], value):
            raise Refusal(
                f"{setting.run_dir} has finished with {flag(name)} {had[name]}, and the file has {value}; name another "
                "--run-dir, or move that run away"
            )


def _is(recorded: Any, typed: Any) -> bool:
    """Whether a run has this value of the file: it has settled "auto", normalised paths, and made lists of words."""
    same_path = isinstance(typed, str) and recorded == str(Path(typed))
    return typed == "auto" or recorded in (typed, [typed]) or same_path


def _started(command: Command, run_dir: Path) -> subprocess.Popen[bytes]:
    """A run, in a session of its own: a terminal's Ctrl-C reaches it through us, once."""
    output = _output(run_dir)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.touch(0o600)
    script = command.argv.index("--") + 1
    shown = (*command.argv[: script + 1], command.argv[-1])  # among the other options may be a task's secrets
    with output.open("ab") as file:
        file.write(f"$ {shlex.join(shown)}\n".encode(errors="surrogateescape"))
        file.flush()
        env = {**os.environ, **command.env}
        return start_in_session(command.argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=env)


def _output(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.out")


@contextmanager
def _stop_signals() -> Iterator[list[signal.Signals]]:
    """A list of the stop signals that come, Ctrl-C and SIGTERM, which do nothing else meanwhile."""
    came: list[signal.Signals] = []
    before = {
        it: signal.signal(it, lambda n, _: came.append(signal.Signals(n))) for it in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
