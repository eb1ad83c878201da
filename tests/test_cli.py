"""The command line: what it understands, and that a refusal is one line, exit code 2, and nothing touched."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import Field, asdict, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tomli_w
import torch

import train
from evenkeel.classify import Classify
from evenkeel.cli import parse
from evenkeel.config import Config, flag, saved_options
from evenkeel.devices import explain_devices
from evenkeel.errors import Refusal, exit_code

from .processes import TRAIN, run, torchrun

pytestmark = pytest.mark.filterwarnings("ignore:Unable to enable fault handler")  # torch asks for a real stderr

TASK = """
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Optional

from evenkeel.classify import Classify


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
    path = folder.parent / "options.toml"
    path.write_text(tomli_w.dumps(options))
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
        assert exit_code(train.main) == 2
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


def another_value(option: Field[Any], hint: Any, file: Path) -> Any:
    """Not the default."""
    if get_origin(hint) is Literal:
        return next(value for value in get_args(hint) if value != option.default)
    if Path in get_args(hint):
        return file
    if hint == tuple[str, ...]:
        return ("one.*", "two")
    if option.name == "loss_scale":  # a power of two
        return 2 * option.default
    (kind,) = [kind for kind in get_args(hint) or (hint,) if kind in (int, float)]  # or a word, as in int | "auto"
    return option.default + {int: 1, float: 0.5}[kind]


def test_every_option_by_its_flag(folder: Path) -> None:
    file = folder.parent / "model.pt"
    file.touch()
    hints = get_type_hints(Config)
    on = ("fresh", "strict_bits", "init_partial", "deterministic", "decay_norms", "sync_batchnorm", "channels_last")
    switches = dict.fromkeys(on, True)
    # --compile, --place and --model-parallel exclude each other, and so do the last two
    apart = ("task", "config", "eval_only", "strategy", "compile", "place", *on, "micro_batches")
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


def test_the_options_of_a_task(folder: Path) -> None:
    config, task = parse([*mine("Rich"), "--depth", "5", "--sizes", "7", "8", "9", "--mode", "y", "--lr", "1"])
    assert task.options() | {"depth": 5, "sizes": (7, 8, 9), "mode": "y", "rate": 0.5, "width": 32} == task.options()
    assert config.lr == 1.0
    assert config.run_dir == Path("runs/Rich")


def test_a_task_that_is_no_dataclass_of_its_own_has_its_parents_options(folder: Path) -> None:
    assert parse([*mine("Plain"), "--width", "5"])[1].options()["width"] == 5


@pytest.mark.parametrize("arguments", [["--help"], [*mine("Rich"), "--help"], ["-h"]])
def test_help_lists_every_option_with_its_default(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert not ended.value.code
    text = capsys.readouterr().out
    for option in fields(Config):
        assert flag(option.name) in text
    assert "Samples of one optimizer step, over all processes" in text
    assert "--width" in text
    assert ("--depth" in text and "Layers of my network." in text) == ("--task" in arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--nonsense"], ["--nonsense"]),
        (["--batch-sise", "64"], ["--batch-sise", "perhaps --batch-size?"]),
        (["stray"], ["stray"]),
        (["--depth", "3"], ["--depth"]),
        (["--epochs"], ["--epochs"]),
        (["--task"], ["--task"]),
        (["--epochs", "many"], ["--epochs", "many"]),
        (["--epochs", "1.5"], ["--epochs", "1.5"]),
        (["--lr", "high"], ["--lr", "high"]),
        (["--optimizer", "lion"], ["--optimizer", "lion", "adamw"]),
        (["--wandb", "yes"], ["--wandb", "yes", "offline"]),
        (["--fresh", "yes"], ["yes"]),
        (["--task", "digitz"], ["--task digitz: unknown; built in: classify, regress, segment"]),
        (["--task", "none.py:Mine"], ["--task none.py:Mine: no file none.py"]),
        (["--batch-size", "0"], ["--batch-size 0: must be at least 1"]),
        (["--batch-size", "-8"], ["--batch-size -8: must be at least 1"]),
        (["--batch-size", "1438"], ["--batch-size 1438: the training data has only 1437 samples"]),
        (["--batch-size", "8", "--micro-batch", "9"], ["--micro-batch 9: is above --batch-size 8"]),
        (["--epochs", "0"], ["--epochs 0: must be at least 1"]),
        (["--width", "0"], ["--width 0"]),
        (["--init-from", "none.pt"], ["--init-from none.pt: no such file"]),
        (["--init-from", "../tasks_of_mine.py"], ["--init-from ../tasks_of_mine.py: is no file of torch.save"]),
        (["--init-from", ".."], ["--init-from ..: a folder without checkpoints"]),
        (["--init-partial"], ["--init-partial: there is no --init-from"]),
        (["--config", "none.toml"], ["--config none.toml: No such file"]),
        (["--config", "."], ["--config .: Is a directory"]),
        (["--config", "../tasks_of_mine.py"], ["--config ../tasks_of_mine.py: not TOML"]),
        (["--run-dir", "../tasks_of_mine.py"], ["--run-dir ../tasks_of_mine.py: is a file; name a folder"]),
        (["--run-dir", "../tasks_of_mine.py/run"], ["--run-dir ../tasks_of_mine.py/run: cannot be written: Not a dir"]),
        (["--run-dir", ".."], ["--run-dir ..: is not empty and not a run"]),
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
    expected = "Unrecognized options: --batch-sise, 4; perhaps --batch-size? (--help lists all options)"
    assert str(caught.value) == expected
    with pytest.raises(Refusal) as caught:
        parse(["--keep", "one"])
    assert str(caught.value).startswith("Error parsing --keep: ")
    assert str(caught.value).endswith(": 'one' (--help lists all options)")


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


def test_a_broken_config_in_the_run_directory(folder: Path, refused: Refused) -> None:
    (folder / "runs/classify").mkdir(parents=True)
    (folder / "runs/classify/config.toml").write_text("epochs = \n")
    (folder / "runs/classify/status.json").write_text('{"world_sizes": [1]}')
    assert refused().startswith("runs/classify/config.toml: not TOML")


def test_more_local_ranks_than_gpus(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3")
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    message = refused()
    assert message == explain_devices(3, 2)
    assert message.startswith("3 processes on this node but 2 visible GPUs (CUDA_VISIBLE_DEVICES=5,3)")
    assert "local rank 1 -> cuda:1 (GPU 3), local rank 2 -> none" in message


def test_half_an_environment_of_torchrun(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "incomplete torchrun environment: RANK=0 LOCAL_RANK=(unset) WORLD_SIZE=two" in refused()


def test_a_file_lies_under_the_command_line(folder: Path) -> None:
    config, _ = parse([*toml(folder, batch_size=32, seed=5, run_dir="there"), "--seed", "6"])
    assert (config.batch_size, config.seed, config.run_dir) == (32, 6, Path("there"))
    assert config.lr == Config().lr
    file = toml(folder, micro_batch=0, micro_batches=2)
    assert [(c.micro_batch, c.micro_batches) for c, _ in (parse(file), parse([*file, "--micro-batch=8"]))] == [
        (0, 2),
        (8, 0),
    ]


def test_a_file_can_name_the_task_and_its_options(folder: Path) -> None:
    options = toml(folder, task="../tasks_of_mine.py:Rich", depth=4, rate=2, sizes=[3], roots=["a"], loud=True)
    config, task = parse(options)
    assert config.task == "../tasks_of_mine.py:Rich"
    expected = {"depth": 4, "rate": 2, "sizes": (3,), "roots": [Path("a")], "loud": True, "pair": (1, "a")}
    assert task.options() | expected == task.options()
    assert parse([*options, "--depth", "5"])[1].options()["depth"] == 5
    assert parse([*toml(folder, task="nonsense"), "--task", "classify"])[1] == Classify().resolved(None)


def test_a_whole_number_is_a_float_too(folder: Path) -> None:
    assert parse(toml(folder, lr=1, clip_norm=2))[0].lr == 1.0


@pytest.mark.parametrize(
    ("task", "name", "value", "expected"),
    [
        ("classify", "batch_size", "64", "int"),
        ("classify", "batch_size", 64.0, "int"),
        ("classify", "batch_size", True, "int"),
        ("classify", "batch_size", [64], "int"),
        ("classify", "batch_size", {"of": 64}, "int"),
        ("classify", "lr", "0.1", "float"),
        ("classify", "lr", True, "float"),
        ("classify", "fresh", 1, "bool"),
        ("classify", "fresh", "true", "bool"),
        ("classify", "optimizer", "lion", "Literal['sgd', 'adam', 'adamw']"),
        ("classify", "schedule", 1, "Literal['constant', 'linear', 'cosine', 'step', 'poly']"),
        ("classify", "run_dir", 1, "Path | None"),
        ("classify", "width", 1.5, "int"),
        ("../tasks_of_mine.py:Rich", "sizes", 3, "tuple[int, ...]"),
        ("../tasks_of_mine.py:Rich", "sizes", [1, "b"], "tuple[int, ...]"),
        ("../tasks_of_mine.py:Rich", "pair", [1], "tuple[int, str]"),
        ("../tasks_of_mine.py:Rich", "pair", ["a", 1], "tuple[int, str]"),
        ("../tasks_of_mine.py:Rich", "names", [1], "list[str]"),
        ("../tasks_of_mine.py:Rich", "maybe", "x", "Optional[int]"),
        ("../tasks_of_mine.py:Rich", "mode", 4, "Literal['x', 'y', 3]"),
        ("../tasks_of_mine.py:Rich", "mode", 3.0, "Literal['x', 'y', 3]"),
    ],
    ids=str,
)
def test_a_wrong_type_in_a_file(
    folder: Path, refused: Refused, task: str, name: str, value: Any, expected: str
) -> None:
    message = refused(*toml(folder, **{"task": task, name: value}))
    start = f"--config ../options.toml: {name} = {value!r} has the wrong type; expected "
    assert message.startswith(start)
    assert message.removeprefix(start).replace("int | None", "Optional[int]") == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"batchsize": 3}, "--config ../options.toml: unknown key 'batchsize'; keys are option names"),
        ({"batch-size": 3}, "unknown key 'batch-size'; keys are option names, batch_size for example"),
        ({"depth": 3}, "unknown key 'depth'"),
        ({"training": {"epochs": 3}}, "unknown key 'training'"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"task": 3}, "--task 3: unknown"),
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


def test_a_refusal_is_one_line_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise Refusal("a\n  b\r\n\tc")

    assert exit_code(main) == 2
    assert capsys.readouterr().err == "evenkeel: a b c\n"


def test_exit_codes_of_a_main_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 75) == 75
    assert capsys.readouterr().err == ""
    assert exit_code(lambda: 1 // 0) == 1
    assert "in <lambda>\n    assert exit_code(lambda: 1 // 0) == 1" in (err := capsys.readouterr().err)
    assert err.rstrip().endswith("ZeroDivisionError: integer division or modulo by zero")


def test_only_local_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)

    def main() -> int:
        raise Refusal("no")

    monkeypatch.setenv("LOCAL_RANK", "1")
    assert exit_code(main) == 2
    assert capsys.readouterr().err == ""
    assert slept, "the first process to exit ends the others, and must not be a silent one"


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batch-size", "0"], "evenkeel: --batch-size 0: must be at least 1\n"),
        (["--run-dir", "../taken"], "evenkeel: --run-dir ../taken: is a file; name a folder\n"),
    ],
)
def test_a_real_refusal(tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "taken").write_text("taken")
    before = contents(tmp_path)
    done = run([sys.executable, str(TRAIN), *arguments], cwd=tmp_path / "here", expect=2)
    assert (done.stdout, done.stderr) == ("", expected)
    assert contents(tmp_path) == before


@pytest.mark.multiprocess
def test_a_real_refusal_under_torchrun(tmp_path: Path) -> None:
    """torchrun adds its own report, but each process of ours says nothing, or one line."""
    done = run(torchrun(2, TRAIN, "--task", "nonsense"), cwd=tmp_path, expect=1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("evenkeel:")]
    assert lines == [
        "evenkeel: --task nonsense: unknown; built in: classify, regress, segment; your own: FILE.py:CLASS or "
        "PACKAGE.MODULE:CLASS"
    ]
    assert "exitcode  : 2" in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.multiprocess
def test_real_help(tmp_path: Path) -> None:
    done = run([sys.executable, str(TRAIN), "--help"], cwd=tmp_path, expect=0)
    assert "--batch-size INT" in done.stdout
    assert done.stderr == ""
