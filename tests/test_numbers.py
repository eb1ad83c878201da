"""Every number has bounds that mean something: whatever is typed is taken or refused in a line, never a traceback."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import pytest

from evenkeel.__main__ import main, subcommands
from evenkeel.common.arguments import LARGEST_WORLD, flag
from evenkeel.common.errors import Refusal
from evenkeel.config import BOUNDS, Config, check_numbers, validate
from evenkeel.distributed.world import World
from evenkeel.launch import launchers
from evenkeel.launch.launchers import MultiNode, parse_arguments
from evenkeel.tasks import command_line as cli
from evenkeel.tasks.registry import built_in, load_task
from evenkeel.training.cut import decide_cut
from evenkeel.training.determinism import threads_of_a_rank
from tests.support.components import has, optional
from tests.support.processes import ROOT, TRAIN

EXTREMES = ("inf", "nan", "-1", "0", "1e400", str(10**30), "9" * 5000, "", "\u00b2", "1_0")
NUMBERS: tuple[Any, ...] = (float("inf"), float("-inf"), float("nan"), -1, 0, 1e300, 10**30)

DOCKER, SLURM = optional("launch.docker.docker_run.ContainerNode"), optional("launch.slurm.submission.Submit")
K8S = optional("launch.k8s.options.Submit")
ACTIONS = [it for command in subcommands().values() for it in get_args(get_type_hints(command).get("action"))]
COMMANDS = [Config, *map(load_task, built_in()), MultiNode, *DOCKER, *SLURM, *K8S, *subcommands().values(), *ACTIONS]


def numbers_of(options: Any) -> list[str]:
    """Names of the options that may be a number."""
    hints = get_type_hints(options)
    return [f.name for f in fields(options) if {int, float} & {hints[f.name], *get_args(hints[f.name])}]


def refusal_of(call: Callable[[], object]) -> str:
    """What a call refuses, in a line; nothing if it does not. Any other error is a traceback."""
    try:
        call()
    except Refusal as refusal:
        text = str(refusal)
    else:
        text = ""
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("chaos --minutes inf", "--minutes inf: must be at most 527040"),
        ("plan -w 0", "--world-size 0: must be at least 1"),
        ("checkpoint inspect . --step=-1", "--step -1: must be at least 0"),
    ],
)
def test_the_commands_say_which_number(typed: str, said: str) -> None:
    assert not has(typed.split()[0]) or refusal_of(lambda: evenkeel(*typed.split())) == said


def test_the_commands_are_all_there() -> None:
    assert not has("checkpoint") or {"InspectCheckpoint", "ExportModel"} <= {action.__name__ for action in ACTIONS}
    assert not has("plan") or "world_size" in numbers_of(subcommands()["plan"])
    assert {"gpus", "join_timeout", "max_restarts", "node_rank"} == set(numbers_of(MultiNode))


@pytest.mark.parametrize("options", COMMANDS, ids=lambda options: options.__name__)
def test_every_number_has_bounds(options: Any) -> None:
    """A new one fails here until somebody has thought about them."""
    without = {"loss_scale"}  # its bounds are part of a check of its own
    assert set(numbers_of(options)) - without <= {it.name for it in fields(options) if "bounds" in it.metadata}


@pytest.mark.parametrize("name", numbers_of(Config))
def test_extremes_of_the_options_of_a_job(name: str) -> None:
    texts = [refusal_of(lambda value=value: validate(Config(**{name: value}).resolved())) for value in NUMBERS]
    assert all(text.startswith(flag(name)) for text in texts if text)
    assert sum(map(bool, texts)) >= 3, "infinity, NaN and what is below nothing at least"


@pytest.mark.parametrize(
    ("task", "name"), [(load_task(task), name) for task in built_in() for name in numbers_of(load_task(task))]
)
def test_extremes_of_the_options_of_a_task(task: Any, name: str) -> None:
    for value in NUMBERS:
        text = refusal_of(lambda value=value: check_numbers(task(**{name: value})))
        assert text or value in (0, 1e300, 10**30), value


@dataclass
class Own:
    """The options of somebody's own task."""

    limit: float = float("inf")
    size: int = 1
    flag: bool = True
    names: tuple[str, ...] = ()
    more: ClassVar[int] = 10**30


def test_numbers_of_an_own_task_fit_into_64_bits() -> None:
    check_numbers(Own())
    with pytest.raises(Refusal, match=r"^--size 10{29}.*: must be at most 9223372036854775807"):
        check_numbers(Own(size=10**30))
    with pytest.raises(Refusal, match=r"^--limit nan: must be a number$"):
        check_numbers(Own(limit=float("nan")))


def train(*arguments: str) -> None:
    cli.parse(arguments)


def launch(*arguments: str) -> None:
    launchers.prepare([*arguments, "--dry-run"], TRAIN)


def docker(*arguments: str) -> None:
    from evenkeel.launch.docker.docker_run import ContainerNode, Host, command

    typed, job = parse_arguments(ContainerNode, arguments)
    command(typed, job, Host(1, 1, root=False, gpus=False, infiniband=False, lockable=False, shm=1 << 30), {})


def submit(*arguments: str) -> None:
    from evenkeel.launch.slurm import submission

    submission.main([*arguments, "--dry-run"], ROOT)


def k8s(*arguments: str) -> None:
    from evenkeel.launch.k8s import submission

    submission.main([*arguments, "--image", "tide", "--dry-run"])


def evenkeel(*arguments: str) -> None:
    with pytest.MonkeyPatch.context() as it:
        it.setattr(sys, "argv", ["evenkeel", *arguments])
        main()


OPTIONS: dict[Any, str] = {
    train: "--epochs, --grace, --place",
    launch: "-n, -g, --max-restarts, -n 2 -nr 0 --master",
    docker: "-n 2 -nr 0 --master" if DOCKER else "",
    submit: "-n, --time, --mem, --array-seeds" if SLURM else "",
    k8s: "-n, --time, --mem, --cpus-per-gpu" if K8S else "",
    evenkeel: "plan -w, chaos --minutes, chaos --kill-every, chaos --nodes, checkpoint inspect . --step",
}
LINES = [(run, words) for run, lines in OPTIONS.items() for words in map(str.split, lines.split(",")) if words]


@pytest.mark.parametrize(
    ("run", "words"),
    [it for it in LINES if it[0] is not evenkeel or has(it[1][0])],
    ids=lambda part: " ".join(part) if isinstance(part, list) else part.__name__,
)
def test_extremes_of_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, words: list[str]) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # no Slurm, no git, nothing
    more = ["0:inf", "5:0", "0:" + "9" * 30, "h:0", "h:70000"] if words[-1] in ("--array-seeds", "--master") else []
    *before, option = words
    for value in (*EXTREMES, *more):
        typed = [f"{option}={value}"] if option.startswith("--") else [option, value]
        text = refusal_of(lambda typed=typed: run(*before, *typed))
        assert text or option == "--master" or value in ("0", "1_0", ""), value
        assert "no Slurm" not in text
    assert not list(tmp_path.glob("runs")), "nothing is written"


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("RANK", ("-1", "2", "abc", "", "9" * 5000)),
        ("LOCAL_RANK", ("-1", "2", "1.0")),
        ("WORLD_SIZE", ("0", "-3", "nan", "1_0")),
        ("LOCAL_WORLD_SIZE", ("0", "3", "inf")),
        ("MASTER_PORT", ("0", "70000", "http")),
    ],
)
def test_environments_of_no_torchrun(monkeypatch: pytest.MonkeyPatch, variable: str, values: tuple[str, ...]) -> None:
    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert World.from_environment().rank == 1
    for value in values:
        monkeypatch.setenv(variable, value)
        with pytest.raises(Refusal, match=f"^{variable}={value[:40]}: must be a whole number from") as caught:
            World.from_environment()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["abc", "-1", "", "9" * 30])
def test_other_variables(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(LARGEST_WORLD, value)
    with pytest.raises(Refusal, match=f"^{LARGEST_WORLD}="):
        decide_cut(Config(), 2, lambda: False, {})
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert 1 <= threads_of_a_rank(False, 1) <= BOUNDS["threads"][1]


def test_a_file_that_is_none(tmp_path: Path) -> None:
    """To read a pipe waits for whoever writes it, and a device has no end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        for option in ("--config", "--init-from"):
            text = refusal_of(lambda option=option, path=path: train(option, str(path)))
            assert text.startswith(f"{option} {path}: is ")
            assert "a pipe or a device" in text
    assert refusal_of(lambda: train("--config", str(tmp_path))) == f"--config {tmp_path}: Is a directory"
    assert refusal_of(lambda: launch("--script", str(tmp_path))) == f"--script {tmp_path}: no such file"


@pytest.mark.parametrize("text", ["epochs = " + "9" * 5000, "epochs = " + "[" * 3000, "lr = nan", "grace = inf"])
def test_numbers_in_a_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert refusal_of(lambda: train("--config", str(file)))
