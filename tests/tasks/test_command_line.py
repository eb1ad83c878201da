"""The command line: what it understands, and that a refusal is one line, exit code 2, and nothing touched."""

import ast
import inspect
import io
import json
import re
import subprocess
import sys
from bdb import BdbQuit
from collections.abc import Callable
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tomli_w
import torch
import torch.nn.functional as F

import train
from evenkeel.__main__ import subcommands
from evenkeel.common import arguments
from evenkeel.common.arguments import flag
from evenkeel.common.errors import Ended, EndedByData, EndedHere, Refusal, Uncollated
from evenkeel.common.naming import listed
from evenkeel.common.processes import can_lose_a_node
from evenkeel.config import GROUPS, Config, saved_options
from evenkeel.distributed.attempt_files import forget_error
from evenkeel.distributed.causes import is_certain, is_mistake
from evenkeel.distributed.exits import exit_code
from evenkeel.launch.agent import first_error
from evenkeel.launch.launchers import MultiNode, option_words
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.command_line import BY_NAME, SYNONYMS, parse
from evenkeel.tasks.registry import built_in, load_task
from evenkeel.training.task import option_name
from tests.support.components import optional
from tests.support.processes import wait_until
from tests.support.raised import refusal_of

pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # torch asks for a real stderr

TASK = """
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Optional

from evenkeel.tasks.classify import Classify


@dataclass
class Rich(Classify):
    depth: int = 3
    \"\"\"Layers of my network.\"\"\"
    rate: float = 0.5
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[int, str] = (1, "a")
    names: list[str] = field(default_factory=lambda: ["a"])
    roots: list[Path] = field(default_factory=list)
    root: Path = Path("data")
    maybe: Optional[int] = None
    mode: Literal["x", "y", 3] = "x"
    loud: bool = False

    def __post_init__(self) -> None:
        if self.depth > 99:
            raise ValueError(f"depth {self.depth}: is too deep")


class Undecorated(Classify):
    depth: int = 3


class OtherDefault(Rich):
    depth = 4


@dataclass
class NotAnnotated(Rich):
    depth = 4


@dataclass
class Below(Undecorated):
    pass


class Constants(Rich):
    calls = 0
    deep: ClassVar[int] = 3
    best: Any = None
    net: object


@dataclass
class BothDecorated(Rich):
    depth: int = 4


@dataclass
class Hides(Rich):
    blocks: int = 2


class BestOfNothing(Classify):
    best = "accuracy"


class Returns(Classify):
    def test_dataset(self):
        held_out = [1, 2, 3]


class Idle(Classify):
    def test_dataset(self):
        pass


class Resolves(Classify):
    def resolved(self, recorded):
        pass


@dataclass
class Collides(Classify):
    batch_size: int = 3


@dataclass
class Demands(Classify):
    must: int = field(kw_only=True)


@dataclass
class Unsavable(Classify):
    table: dict[str, int] = field(default_factory=lambda: {"a": 1})


class Plain(Classify):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; the tasks above are in a file beside it."""
    (tmp_path / "tasks_of_mine.py").write_text(TASK)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "tasks_of_mine", raising=False)
    return tmp_path / "here"


def mine(name: str) -> list[str]:
    return ["--task", f"../tasks_of_mine.py:{name}"]


def toml(folder: Path, **options: Any) -> list[str]:
    """A configuration file beside the working directory, as options."""
    (folder.parent / "options.toml").write_text(tomli_w.dumps(options))
    return ["--config", "../options.toml"]


def contents(folder: Path) -> dict[Path, tuple[int, int]]:
    """All that is below a folder, by size and time of change."""
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


Refused = Callable[..., str]


@pytest.fixture
def refused(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run train.py's main program, which must refuse: one line on stderr, exit code 2, no group, nothing touched."""

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("it was not refused")

    monkeypatch.setattr(torch.distributed, "init_process_group", forbidden)
    monkeypatch.setattr(train, "train", forbidden)

    def call(*arguments: str) -> str:
        before = contents(folder.parent)
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        assert exit_code(lambda: train.main(list(arguments))) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("evenkeel: ")
        assert captured.err.endswith("\n")
        assert captured.err.count("\n") == 1
        after = contents(folder.parent)
        after = {path: facts for path, facts in after.items() if "__pycache__" not in path.parts}
        assert {p: f for p, f in before.items() if p in after} == before
        assert [p for p in after if p not in before] == []
        return captured.err.removeprefix("evenkeel: ").rstrip("\n")

    return call


def test_no_options_at_all_are_the_defaults(folder: Path) -> None:
    config, task = parse([])
    assert config == Config().resolved()
    assert task == Classify().resolved(None)


def test_the_options_of_a_task(folder: Path) -> None:
    config, task = parse([*mine("Rich"), "--depth", "5", "--sizes", "7", "8", "9", "--mode", "y", "--lr", "1"])
    assert task.options() | {"depth": 5, "sizes": (7, 8, 9), "mode": "y", "rate": 0.5, "width": 32} == task.options()
    assert (config.lr, config.run_dir) == (1.0, Path("runs/Rich"))


def another_value(option: Field[Any], hint: Any, file: Path) -> Any:
    """Not the default."""
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != option.default)
    if Path in get_args(hint):
        return file
    if hint == tuple[str, ...]:
        return ("one.*", "two")
    if hint == tuple[float, float]:
        return (0.25, 0.5)
    if option.name == "loss_scale":  # a power of two
        return 2 * option.default
    (kind,) = [kind for kind in get_args(hint) or (hint,) if kind in (int, float)]  # or a word, as in int | "auto"
    return (option.default or 0) + {int: 1, float: 0.5}[kind]


def test_every_option_by_its_flag(folder: Path) -> None:
    file = folder.parent / "model.pt"
    file.touch()
    hints = get_type_hints(Config)
    on = ("fresh", "other_data", "strict_bits", "init_partial", "deterministic", "decay_norms", "sync_batchnorm")
    on = (*on, "tensorboard", "csv", "save_predictions", "wandb_report", "share_gpu", "drop_last")
    switches = dict.fromkeys((*on, "channels_last", "checkpoint_activations"), True)
    # --compile, --place and --model-parallel exclude each other, and so do the last two
    apart = ("task", "config", "eval_only", "checkpoint", "strategy", "compile", "place", *switches, "micro_batches")
    apart = (*apart, "profile", "memory_snapshot", "shares", "reduce_dtype", "tracker", "verify_every", "mirror")
    apart = (*apart, "batch_tokens", "shard", "replicate")
    options = [option for option in fields(Config) if option.name not in apart]
    expected = {option.name: another_value(option, hints[option.name], file) for option in options}
    several = {name: value if isinstance(value, tuple) else (value,) for name, value in expected.items()}
    arguments = [text for name, values in several.items() for text in (flag(name), *map(str, values))]
    config, _ = parse([*arguments, *map(flag, switches)])
    assert asdict(config) == asdict(Config()) | expected | switches
    assert parse(["--eval-only"])[0].eval_only
    assert parse(["--compile"])[0].compile
    config, _ = parse(["--strategy", "dp", "--micro-batch", "auto"])  # the first does not go with --reduce tree
    assert (config.strategy, config.micro_batch) == ("dp", "auto")
    assert parse(["--place", "a=0,b=1"])[0].place == "a=0,b=1"
    assert parse(["--micro-batches", "4"])[0].micro_batches == 4
    assert parse(["--shares", "2:1"])[0].shares == "2:1"
    assert parse(["--tracker", "a.py:A", "--tracker", "b:B"])[0].tracker == ("a.py:A", "b:B")
    assert parse(option_words("tracker", ("a.py:A", "b:B")))[0].tracker == ("a.py:A", "b:B")
    assert parse(option_words("tracker", "a.py:A"))[0].tracker == ("a.py:A",)
    assert parse(["--mirror", "s3://bucket/run"])[0].mirror == "s3://bucket/run"
    assert parse(["--verify-every", "9", "--reduce", "tree"])[0].verify_every == 9
    assert parse(["--batch-tokens", "512", "--micro-batches", "4"])[0].batch_tokens == 512
    assert parse(["--shard", "on", "--reduce", "tree"])[0].shard == "on"
    assert parse(["--reduce-dtype", "bf16"])[0].reduce_dtype == "bf16"
    config, _ = parse(["--profile", "20:25", "--memory-snapshot"])
    assert (config.profile, config.memory_snapshot) == ("20:25", True)


def test_the_run_directory_holds_the_values_of_options(folder: Path) -> None:
    def run_dir(template: str, *more: str) -> str:
        return str(parse(["--run-dir", template, *more])[0].run_dir)

    assert run_dir("runs/{task}-{lr}") == "runs/classify-0.002"
    assert run_dir("runs/{dataset}/{model}-{batch_size}", "--batch-size", "32") == "runs/digits/cnn-32"
    assert run_dir("runs/{data_dir}", "--data-dir", "../up/x") == "runs/..-up-x", "no folder by the way"
    assert str(parse([*mine("Rich"), "--run-dir", "{task}-{depth}"])[0].run_dir) == "Rich-3"
    for template, said in (
        ("runs/{lrr}", "there is no option lrr; there are task, epochs"),
        ("runs/{}", "there is no option {}; "),
        ("runs/{task.__class__}", "there is no option task.__class__; "),
        ("runs/{lr", "unmatched brace"),
        ("runs/lr}", "unmatched brace"),
    ):
        assert refusal_of(run_dir, template).startswith(f"--run-dir {template}: {said}")


@pytest.mark.parametrize("name", ["Undecorated", "OtherDefault", "NotAnnotated", "Below"])
def test_what_looks_like_an_option_and_is_none_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(Refusal, match=r"^task \w+: its depth has no effect as an option; decorate the class with"):
        parse(mine(name))
    assert parse([*mine("Plain"), "--width", "5"])[1].options()["width"] == 5, "an option of its parent"
    assert parse(mine("Constants"))[1].options() == parse(mine("Rich"))[1].options()
    assert parse(mine("BothDecorated"))[1].options()["depth"] == 4
    with pytest.raises(Refusal, match=r"^task Hides: its option --blocks hides the method blocks\(\) of Task; rename"):
        parse(mine("Hides"))
    with pytest.raises(Refusal, match=r"did you mean to annotate it in Constants \(calls: int = 0\)\?"):
        parse([*mine("Constants"), "--calls", "3"])


@pytest.mark.parametrize("arguments", [["--help"], [*mine("Rich"), "--help"], ["-h"]])
def test_help_lists_every_option(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert not ended.value.code
    text = capsys.readouterr().out
    for option in fields(Config):
        assert flag(option.name) in text
    assert "Samples of one optimizer step, over all processes" in text
    assert "--width" in text
    assert ("--depth" in text and "Layers of my network." in text) == ("--task" in arguments)


def test_help_names_options_that_torchrun_takes_for_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from torch.distributed.run import get_args_parser

    with (folder.parent / "tasks_of_mine.py").open("a") as file:
        file.write("\n\n@dataclass\nclass Short(Rich):\n    n: int = 3\n    no_: int = 4\n    node_size: int = 5\n")
    with pytest.raises(SystemExit):
        parse([*mine("Short"), "--help"])
    assert "For --n, --no type torchrun ... -- train.py, else torchrun refuses it." in capsys.readouterr().out
    for option in ("--n", "--no"):
        with pytest.raises(SystemExit):
            get_args_parser().parse_args(["train.py", option, "1"])
        assert get_args_parser().parse_args(["--", "train.py", option, "1"]).training_script == "train.py"
    assert get_args_parser().parse_args(["train.py", "--node-size", "1"]).training_script_args == ["--node-size", "1"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nonsense"], ["--nonsense"]),
        (["--batch-sise", "64"], ["--batch-sise", "did you mean --batch-size?"]),
        (["--workers", "1"], ["Unrecognized options: --workers; did you mean --num-workers?"]),
        (["--learnign_rate=0.1"], ["--learnign_rate=0.1; did you mean --lr?"]),
        (["--amp"], ["--amp: here it is --precision bf16 or --precision fp16"]),
        (["--resume", "auto"], ["--resume: not needed: the same command continues where it stopped"]),
        (["-b", "64"], ["-b: here it is --batch-size, of all processes together"]),
        (
            ["--task", "tests.support.recording_task:Recorded", "--model", "x"],
            ["--model: a part of the task: its class makes the network"],
        ),
        (["stray"], ["stray"]),
        (["--epochs"], ["--epochs"]),
        (["--epochs", "many"], ["--epochs", "many"]),
        (["--optimizer", "lion"], ["--optimizer", "lion", "adamw"]),
        (["--fresh", "yes"], ["yes"]),
        (["--task", "none.py:Mine"], ["--task none.py:Mine: no file none.py"]),
        (["--batch-size", "-8"], ["--batch-size -8: must be at least 1"]),
        (["--batch-size", "1438"], ["--batch-size 1438: the training data has only 1437 samples"]),
        (["--batch-size", "8", "--micro-batch", "9"], ["--micro-batch 9: is above --batch-size 8"]),
        (["--init-from", "none.pt"], ["--init-from none.pt: no such file"]),
        (["--init-from", "../tasks_of_mine.py"], ["--init-from ../tasks_of_mine.py: is not a file of torch.save"]),
        (["--init-from", ".."], ["--init-from ..: a folder without checkpoints"]),
        (["--task", ""], ["--task is empty (an unset shell variable?): give a value or leave it out"]),
        (["--run_dir="], ["--run_dir is empty"]),
        ([""], ["an argument is empty"]),
        ([*mine("BestOfNothing")], ["the task's `best` is 'accuracy': it must be a metric's name and", "None"]),
        ([*mine("Constants"), "--patience", "2"], ["--patience 2: the task's `best` is None; name the metric"]),
        ([*mine("Returns")], ["test_dataset() has no return: return the data, or None for a run", "_mine.py:"]),
        ([*mine("Idle"), "--eval-only"], ["--eval-only: there is nothing to evaluate on, because test_dataset()"]),
        ([*mine("Resolves")], ["resolved() returned None: it must return a task"]),
        (["--init-partial"], ["--init-partial: there is no --init-from"]),
        (["--config", "none.toml"], ["--config none.toml: No such file"]),
        (["--config", "../tasks_of_mine.py"], ["--config ../tasks_of_mine.py: not TOML"]),
        (["--run-dir", "../tasks_of_mine.py/run"], ["tasks_of_mine.py/run: cannot be written: Not a dir"]),
        (["--run-dir", ".."], ["is not empty and not a run: it has"]),
        (["--run-dir", "/proc/run"], ["--run-dir /proc/run: cannot be written"]),
        (mine("Collides"), ["task Collides: its option --batch-size exists already", "rename the field"]),
        (mine("Demands"), ["task Demands: its option --must has no default; give it one"]),
        (mine("Unsavable"), ["--table: config.toml cannot hold its value of type dict"]),
        ([*mine("Rich"), "--depth", "100"], ["depth 100: is too deep"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input(refused: Refused, arguments: list[str], expected: list[str]) -> None:
    message = refused(*arguments)
    assert [text for text in expected if text not in message] == [], message


def test_what_a_synonym_names_exists_and_the_synonym_does_not() -> None:
    ours = {flag(option_name(option.name)) for cls in (Config, Classify) for option in fields(cls)}
    assert [name for here in SYNONYMS.values() for name in re.findall(r"--[a-z-]+", here) if name not in ours] == []
    assert ours & BY_NAME.keys() == {"--model", "--dataset", "--data-dir"}, "which other tasks have not"
    asked = "--learning-rate --gradient-accumulation-steps --resume --amp --fp16 --bf16 --bs --batch --wd --output-dir "
    asked += "--logdir --ckpt --local-rank --arch --data --data-path --print-freq --distributed --use-env"
    assert set(asked.split()) <= BY_NAME.keys()
    assert len(BY_NAME) == sum(len(names.split()) for names in SYNONYMS), "each once"


def test_a_task_may_have_an_option_of_that_name(folder: Path) -> None:
    (folder.parent / "tasks_of_mine.py").write_text(TASK.replace("depth: int", "arch: int = 1\n    depth: int"))
    assert parse([*mine("Rich"), "--arch", "7"])[1].options()["arch"] == 7


OF_COMPONENTS = (
    "cli.checkpoint.ExportModel",
    "launch.docker.docker_run.ContainerNode",
    "launch.slurm.node.NodeCommand",
    "launch.slurm.submission.Submit",
)


COMMANDS = (MultiNode, *(it for name in OF_COMPONENTS for it in optional(name)), *subcommands().values())


@pytest.mark.parametrize("options", [*GROUPS, *map(load_task, built_in()), *COMMANDS])
def test_no_help_text_is_broken_in_the_midst_of_a_sentence(options: type) -> None:
    """tyro keeps the line breaks of a docstring below a field."""
    (cls,) = ast.parse(inspect.getsource(options)).body
    assert isinstance(cls, ast.ClassDef)
    texts = [ast.literal_eval(it.value) for it in cls.body[1:] if isinstance(it, ast.Expr)]
    assert [text for text in texts if "\n" in text] == []


class Terminal(io.TextIOWrapper):
    """A stdout that shows colours."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.TextIOWrapper, Terminal])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_one_line_is_left_of_the_framed_message_on_any_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: type[io.TextIOWrapper], encoding: str
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", kind(io.BytesIO(), encoding=encoding))
    with pytest.raises(Refusal) as caught:
        parse(["--batch-sise", "4"])
    expected = "Unrecognized options: --batch-sise; did you mean --batch-size? (--help lists all options)"
    assert str(caught.value) == expected
    assert refusal_of(parse, ["--keep", "one"]) == "--keep one: must be a whole number (--help lists all options)"


def test_another_runs_directory_is_refused_by_name_with_both_values(folder: Path, refused: Refused) -> None:
    config, task = parse([])
    (folder / "runs/classify").mkdir(parents=True)
    (folder / "runs/classify/config.toml").write_text(tomli_w.dumps(saved_options(config, task.options())))
    (folder / "runs/classify/status.json").touch()
    message = refused("--batch-size", "32", "--micro-batch", "8", "--seed", "1", "--width", "16")
    for change in ("--batch-size was 64 and is now 32", "--seed was 0 and is now 1", "--width was 32 and is now 16"):
        assert change in message
    assert "--micro-batch" not in message
    assert "--fresh" in message
    assert "--task was classify and is now" in refused(*mine("Plain"), "--run-dir", "runs/classify")


def test_more_local_ranks_than_gpus(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    message = refused()
    assert message.startswith("3 processes on this node but 2 visible GPUs (CUDA_VISIBLE_DEVICES=5,3)")
    assert "local rank 1 -> cuda:1 (GPU 3), local rank 2 -> none" in message


def test_a_file_lies_under_the_command_line(folder: Path) -> None:
    config, _ = parse([*toml(folder, batch_size=32, seed=5, run_dir="there"), "--seed", "6"])
    assert (config.batch_size, config.seed, config.run_dir) == (32, 6, Path("there"))
    assert config.lr == Config().lr
    assert parse(toml(folder, lr=1))[0].lr == 1.0, "a whole number is a float too"
    file = toml(folder, micro_batch=0, micro_batches=2)
    cuts = [(c.micro_batch, c.micro_batches) for c, _ in (parse(file), parse([*file, "--micro-batch=8"]))]
    assert cuts == [(0, 2), (8, 0)]


def test_a_file_can_name_the_task_and_its_options(folder: Path) -> None:
    options = toml(folder, task="../tasks_of_mine.py:Rich", depth=4, rate=2, sizes=[3], roots=["a"], loud=True)
    config, task = parse(options)
    assert config.task == "../tasks_of_mine.py:Rich"
    expected = {"depth": 4, "rate": 2, "sizes": (3,), "roots": [Path("a")], "loud": True, "pair": (1, "a")}
    assert task.options() | expected == task.options()
    assert parse([*options, "--depth", "5"])[1].options()["depth"] == 5
    assert parse([*toml(folder, task="nonsense"), "--task", "classify"])[1] == Classify().resolved(None)


@pytest.mark.parametrize(
    ("task", "name", "value", "expected"),
    [
        ("classify", "batch_size", "64", "int"),
        ("classify", "batch_size", True, "int"),
        ("classify", "lr", "0.1", "float"),
        ("classify", "fresh", 1, "bool"),
        ("classify", "optimizer", "lion", "Literal['sgd', 'adam', 'adamw', 'muon']"),
        ("classify", "run_dir", 1, "Path | None"),
        ("../tasks_of_mine.py:Rich", "sizes", [1, "b"], "tuple[int, ...]"),
        ("../tasks_of_mine.py:Rich", "pair", ["a", 1], "tuple[int, str]"),
        ("../tasks_of_mine.py:Rich", "maybe", "x", "Optional[int]"),
        ("../tasks_of_mine.py:Rich", "mode", 3.0, "Literal['x', 'y', 3]"),
    ],
    ids=str,
)
def test_wrong_types_in_a_file(folder: Path, refused: Refused, task: str, name: str, value: Any, expected: str) -> None:
    message = refused(*toml(folder, **{"task": task, name: value}))
    start = f"--config ../options.toml: {name} = {value!r} has the wrong type; expected "
    assert message.startswith(start)
    assert message.removeprefix(start).replace("int | None", "Optional[int]") == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batchsize": 3}, "--config ../options.toml: unknown key 'batchsize'; keys are option names"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"task": 3}, "--task 3: unknown"),
        ({"run_dir": ""}, '--config ../options.toml: run_dir = "" is empty; give a value, or leave it out'),
        ({"task": "../tasks_of_mine.py:Rich", "depth": 100}, "--config ../options.toml: depth 100: is too deep"),
    ],
    ids=str,
)
def test_a_bad_file(folder: Path, refused: Refused, options: dict[str, Any], expected: str) -> None:
    assert expected in refused(*toml(folder, **options))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--batch-size", "48", "--lr", "0.1", "--optimizer", "sgd", "--keep", "3", "--wandb", "offline"],
        [*mine("Rich"), "--sizes", "4", "5", "6", "--root", "a b/c", "--maybe", "3", "--loud", "--rate", "1e-30"],
        [*mine("Rich"), "--names", 'quo"te', "ümlaut\n", "--pair", "3", "", "--mode", "3"],
    ],
    ids=["defaults", "options", "task", "text"],
)
def test_what_a_run_saves_starts_the_same_run(folder: Path, arguments: list[str]) -> None:
    config, task = parse(arguments)
    saved = saved_options(config, task.options())
    again, task_again = parse(toml(folder, **saved))
    assert task_again.options() == task.options()
    assert replace(again, config=None) == config
    assert saved_options(again, task_again.options()) == saved


def said_of_nonsense(option: Field[Any], hint: Any) -> str:
    """What is said of a value that is neither a number nor a choice."""
    values = ["x!"] * (len(get_args(hint)) if get_origin(hint) is tuple else 1)
    return refusal_of(parse, [f"{flag(option.name)}=x!"] if hint is bool else [flag(option.name), *values])


NOT_TEXT = [it for it in fields(Config) if get_type_hints(Config)[it.name] not in (str, Path | None, tuple[str, ...])]
OURS = r"--[\w-]+( x!)+: (must be|the types must be) [^<>\[\]()']+ \(--help lists all options\)|--[\w-]+=x!: .*"


@pytest.mark.parametrize("option", NOT_TEXT, ids=lambda option: option.name)
def test_a_value_of_the_wrong_type_is_named_with_its_option_and_the_remedy(option: Field[Any]) -> None:
    said = said_of_nonsense(option, get_type_hints(Config)[option.name])
    assert said.startswith(flag(option.name))
    assert re.fullmatch(OURS, said), said


def test_the_control_without_the_translation_it_is_tyros_message(monkeypatch: pytest.MonkeyPatch) -> None:
    option = next(it for it in NOT_TEXT if it.name == "micro_batch")
    monkeypatch.setattr(arguments, "PLAIN", {})
    assert not re.fullmatch(OURS, said_of_nonsense(option, int))


def test_torchruns_report_of_a_known_end_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> int:
        raise Ended("the\nend")

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert exit_code(main) == 1
    assert first_error([tmp_path]) == "evenkeel.common.errors.Ended: the end"


def test_of_several_ranks_with_a_bug_the_first_prints_its_traceback_and_all_report_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def main() -> int:
        return int("x")

    first_line = main.__wrapped__.__code__.co_firstlineno
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    line = f"ValueError: invalid literal for int() with base 10: 'x' at {__file__}:{first_line + 2}"

    def fail(rank: str, attempt: int = 0) -> str:
        file = tmp_path / f"attempt_{attempt}" / rank / "error.json"
        file.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setenv("RANK", rank)
        assert exit_code(main) == 1
        report = json.loads(file.read_text())["message"]["extraInfo"]
        assert report["py_callstack"] == line
        assert "in main" in first_error([file.parent])
        return capsys.readouterr().err

    first = fail("1").splitlines()
    assert first[0] == "Traceback (most recent call last), your files only:", "there is no log"
    assert first[-1] == f"evenkeel: rank 1 failed: {line}"
    assert fail("0") == ""
    assert fail("0", attempt=1) == f"evenkeel: rank 0 failed: {line}\n"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    (tmp_path / "attempt_1" / "failed").unlink()
    forget_error()  # as before a restart in place
    assert fail("2").count("Traceback") == 1
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "3" / "error.json"))
    forget_error()  # of a rank that was killed, and has no such file
    assert fail("4").count("Traceback") == 1


def test_the_line_of_an_error_says_that_it_is_tried_again_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def last_line(error: Exception, count: int) -> str:
        def main() -> int:
            raise error

        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
        assert exit_code(main) == 1
        return capsys.readouterr().err.splitlines()[-1]

    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for error in (OSError(5, "Input/output error"), Ended("no room")):
        assert last_line(error, 2).endswith(
            "; torchrun tries again, in case the machine is to blame, unless another rank reports a mistake"
            " (restart 3 of 3)"
        )
        assert "tries" not in last_line(error, 3)


def from_another(error: Exception, cause: Exception) -> Exception:
    """The error as `raise error from cause` leaves it."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "comes_again"),
    [
        (ValueError("a"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True),
        (RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu"), True),
        (EndedHere("loss() returned a float"), True),
        (KeyError("Caught KeyError in DataLoader worker process 0."), True),
        (RuntimeError("Caught UnicodeDecodeError in DataLoader worker process 0."), False),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), False),
        (TypeError("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) differ"), True),
        (RuntimeError("CUDA error: unspecified launch failure"), False),
        (RuntimeError("Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"), False),
        (RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"), True),
        (RuntimeError("can't start new thread"), False),
        (RuntimeError("Timed out after 901 seconds"), False),
        (RuntimeError("PytorchStreamReader failed reading zip archive"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (torch.distributed.DistBackendError("NCCL"), False),
        (ConnectionResetError("by peer"), False),
        (MemoryError(), False),
        (EndedByData("an image does not decode"), False),
        (from_another(Uncollated("sample[0]"), RuntimeError("stack expects each tensor to be equal size")), True),
        (Uncollated("sample[0]: RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory"), False),
        (from_another(ValueError("no index"), FileNotFoundError(2, "gone")), False),
        (from_another(ValueError("no index"), KeyError("index")), True),
    ],
    ids=str,
)
def test_only_mistakes_in_code_are_not_tried_again(error: Exception, comes_again: bool) -> None:
    assert is_mistake(error) == comes_again


@pytest.mark.parametrize(
    ("error", "certain"),
    [
        (NameError("name 'softmx' is not defined"), True),
        (IndexError("Target 12 is out of bounds."), True),
        (BdbQuit(), True),  # without a terminal
        (KeyError("labels"), True),
        (AssertionError("no labels"), True),
        (KeyError("Unable to open object (file read failed: errno = 5)"), False),  # h5py's
        (TypeError("'NoneType' object is not subscriptable"), False),  # perhaps an image that was not read
        (RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"), False),
        (ValueError("a"), False),
    ],
    ids=str,
)
def test_only_mistakes_in_the_code_itself_are_not_tried_twice(error: Exception, certain: bool) -> None:
    assert is_certain(error) == certain


@pytest.mark.parametrize(
    ("fail", "expected"),
    [
        (lambda: torch.nn.Liner(2, 3), "has no attribute 'Liner' (did you mean Linear?) at "),  # type: ignore[attr-defined]
        (lambda: tourch.nn, "name 'tourch' is not defined (did you mean torch?) at "),  # type: ignore[name-defined] # noqa: F821
        (lambda: [].nothing_like_it, "'list' object has no attribute 'nothing_like_it' (not a tensor, but several"),  # type: ignore[attr-defined]
        (lambda: F.cross_entropy(torch.zeros(1, 3), ("cat",)), "(are the labels text? Then number them in "),
        (lambda: F.cross_entropy(torch.zeros(1, 3), torch.tensor([3])), "3 is out of bounds (the model has 3 outputs"),
        (
            lambda: F.linear(torch.zeros(1, 3), torch.zeros(2, 4)),
            "(the second number is what the layer gets, the third ",
        ),
        (
            lambda: F.conv2d(torch.zeros(1, 1, 3, 3).double(), torch.zeros(1, 1, 1, 1), torch.zeros(1)),
            "(call .float() in the da",
        ),
        (
            lambda: setattr(torch.nn.Module.__new__(torch.nn.Module), "x", torch.nn.Module()),
            "(begin __init__ with super().__init__()",
        ),
        (lambda: int("x"), "with base 10: 'x' at "),
    ],
)
def test_an_error_says_what_to_do(fail: Callable[[], int], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(fail) == 1
    *trace, line = capsys.readouterr().err.splitlines()
    assert expected in line
    assert not [it for it in trace if "/src/evenkeel/" in it]


def fails(error: Exception) -> int:
    raise error


def test_what_led_to_an_error_is_shown_with_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    assert exit_code(lambda: fails(from_another(ValueError("a"), KeyError("b")))) == 1
    assert "KeyError: 'b'" in capsys.readouterr().err


def test_a_refusal_is_one_line_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: fails(Refusal("a\n  b\r\n\tc"))) == 2
    assert capsys.readouterr().err == "evenkeel: a b c\n"


def test_exit_codes_of_a_main_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch has one of its own once there was a group
    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 75) == 75
    assert capsys.readouterr().err == ""
    assert exit_code(lambda: int("x")) == 1
    *trace, last, line = capsys.readouterr().err.splitlines()
    assert 'in <lambda>\n    assert exit_code(lambda: int("x")) == 1' in "\n".join(trace)
    assert last == (error := "ValueError: invalid literal for int() with base 10: 'x'")
    assert line.startswith(f"evenkeel: rank 0 failed: {error} at {__file__}:")
    assert exit_code(lambda: listed(3)) == 1  # type: ignore[arg-type]
    assert re.search(r"/naming\.py:\d+, in Evenkeel's own code: unless your .* report it", capsys.readouterr().err)


BROKE = "the connection to another rank broke: it has died or is out of reach (gloo: "
LATE = "no answer from another rank: it is late, stuck or out of reach (gloo: "


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Connection closed by peer [127.0.0.1]:1. This is typically", f"{BROKE}Connection closed by peer)"),
        ("Read error [127.0.0.1]:1: Connection reset by peer", f"{BROKE}Connection reset by peer)"),
        ("Timed out waiting 2000ms for recv operation to complete",
         f"{LATE}Timed out waiting 2000ms for recv operation to complete)"),
        ("op.preamble.length <= op.nbytes. 8 vs 4",
         "RuntimeError: [/x/gloo/tcp/pair.cc:1] op.preamble.length <= op.nbytes. 8 vs 4"),
    ],
)  # fmt: skip
def test_what_gloo_says_is_a_plain_line(
    text: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exit_code(lambda: fails(RuntimeError(f"[/x/gloo/tcp/pair.cc:1] {text}"))) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"evenkeel: rank 0 failed: {why} at {__file__}:")


def once(out: Path) -> list[int]:
    """The pids of all that were started; no rank was started twice."""
    ranks, pids = zip(*(path.name.split("-") for path in out.iterdir()), strict=True)
    assert len(set(ranks)) == len(ranks)
    return [int(pid) for pid in pids]


@pytest.mark.parametrize(
    ("typed", "elastic"), [(["--nnodes=2"], False), (["--nnodes", "2:2", "a"], False), (["--nnodes", "1:12"], True)]
)
def test_a_node_that_joins_an_elastic_job_does_not_end_it(typed: list[str], elastic: bool) -> None:
    agent = subprocess.Popen([sys.executable, "-c", "input()", *typed], stdin=subprocess.PIPE)
    wait_until(lambda: Path(f"/proc/{agent.pid}/cmdline").read_bytes(), "a command line, which comes last in an exec")
    try:
        assert can_lose_a_node(agent.pid) == elastic
    finally:
        agent.communicate(b"\n")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((5, None, "two", None), "incomplete torchrun environment: RANK=5 LOCAL_RANK=(unset) WORLD_SIZE=two"),
        ((5, 0, 2, 1), "RANK=5: must be a whole number from 0 to 1;"),
        ((0, 1, 2, 2), "LOCAL_RANK=1: must be a whole number from 0 to 0;"),
        ((0, 0, 2, 3), "LOCAL_WORLD_SIZE=3: must be a whole number from 1 to 2;"),
        ((0, 0, 2, 2), "MASTER_ADDR is not set"),
    ],
)
def test_a_rank_that_cannot_be(refused: Refused, monkeypatch: pytest.MonkeyPatch, values: Any, expected: str) -> None:
    for name, value in zip(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), values, strict=True):
        if value is not None:
            monkeypatch.setenv(name, str(value))
    assert expected in refused()
