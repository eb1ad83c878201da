"""Finding a user's class, and saying where their file broke."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from evenkeel.common.errors import Refusal
from evenkeel.common.user_code import load_name
from evenkeel.config import Config
from evenkeel.tasks import registry
from evenkeel.tasks.command_line import parse
from evenkeel.tasks.registry import built_in, default_task, load_task, refuse_other_parameters
from evenkeel.training.classification import Classification
from tests.support.raised import refusal_of

Write = Callable[[str, str], Path]


GOOD = """
from dataclasses import dataclass
from evenkeel.tasks import Classification

@dataclass
class Mine(Classification):
    depth: int = 3
    model_: str = "cnn"
    train_dataset = test_dataset = model = lambda self: None
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into the working directory; afterwards Python has forgotten it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def to(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield to
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refusal(task: str) -> str:
    """The message of the refusal that must come; it starts with the flag and its value."""
    message = refusal_of(load_task, task)
    assert message.startswith(f"--task {task}: ")
    return message.removeprefix(f"--task {task}: ")


def test_built_in_by_name() -> None:
    before = list(sys.path)
    for name in built_in():
        assert load_task(name).__name__.lower() == name
    assert sys.path == before, "a file of the working directory cannot take the place of a module of ours"


def test_the_old_name_of_the_default_task_says_what_it_is_now() -> None:
    assert refusal("digits").startswith("is now --task classify --dataset digits, the defaults; ")


def test_a_built_in_task_that_has_been_deleted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BUILT_IN, "gone", "Gone")
    told = f"has been deleted from this copy of Evenkeel; built in: {', '.join(built_in())}; "
    assert refusal("gone").startswith(told)


@pytest.mark.parametrize("where", ["working folder", "script", "launcher", "copy of a job"])
def test_the_task_of_a_project(where: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found from any folder, and so is what it imports."""
    monkeypatch.delenv("EVENKEEL_CODE", raising=False)
    write("tide/task.py", GOOD)
    write("pyproject.toml", '[tool.evenkeel]\ntask = "tide.task:Mine"\n')
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "argv", ["/nowhere/near/x.py"])
    assert default_task()[0] == Config.task, "the control: no project is here"
    if where == "working folder":
        monkeypatch.chdir(tmp_path)
    elif where == "copy of a job":
        monkeypatch.setenv("EVENKEEL_CODE", str(tmp_path))
    else:
        monkeypatch.setattr(sys, "argv", [str(tmp_path / ("train.py" if where == "script" else "launch/x.py"))])
    assert default_task()[0] == "tide.task:Mine"
    assert load_task(*default_task()).__module__ == "tide.task"


def test_a_project_without_a_task(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    for without in ("[tool.evenkeel]", "[tool]", ""):
        monkeypatch.chdir(write("pyproject.toml", without).parent)
        assert default_task()[0] == "classify"


@pytest.mark.parametrize("text", ["tool = ", "[tool.evenkeel]\ntask = 3"])
def test_a_projects_task_that_cannot_be_read(text: str, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write("pyproject.toml", text).parent)
    with pytest.raises(Refusal, match=r"pyproject.toml: (not TOML|task of \[tool.evenkeel\] is 3; give)"):
        default_task()


def test_a_missing_task_of_a_project_is_refused_by_its_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("reef/task.py", GOOD)
    path = write("pyproject.toml", '[tool.evenkeel]\ntask = "reef.task:Gone"\n')
    monkeypatch.chdir(path.parent)
    line = "Gone does not exist in reef.task, which has Mine; name one of them"
    assert refusal_of(parse, []) == f"{path}: task = 'reef.task:Gone': {line}"
    assert refusal_of(parse, ["--task", "reef.task:Gone"]) == f"--task reef.task:Gone: {line}"


@pytest.mark.parametrize(
    ("task", "line"),
    [
        ("Mine", "unknown; did you mean reef.task:Mine? Built in: "),
        ("mine", "unknown; did you mean reef.task:Mine? Built in: "),
        (
            "reef.tsk:Mine",
            "does not import: ModuleNotFoundError: No module named 'reef.tsk'; did you mean reef.task:Mine?",
        ),
        ("ref.task:Mine", "does not import: ModuleNotFoundError: No module named 'ref'; did you mean reef.task:Mine?"),
        ("reef.task:Mime", "Mime does not exist in reef.task, which has Mine; did you mean Mine?"),
        ("classfy", "unknown; did you mean classify? Built in: "),
    ],
)
def test_a_mistyped_task_of_a_project(write: Write, monkeypatch: pytest.MonkeyPatch, task: str, line: str) -> None:
    write("reef/task.py", GOOD)
    monkeypatch.chdir(write("pyproject.toml", '[tool.evenkeel]\ntask = "reef.task:Mine"\n').parent)
    assert refusal_of(parse, ["--task", task]).startswith(f"--task {task}: {line}")


def test_a_class_in_a_file(write: Write) -> None:
    write("my_job.py", GOOD)
    found = load_task("my_job.py:Mine")
    assert issubclass(found, Classification)
    assert found().options() == {"depth": 3, "model": "cnn"}, "the field of this option cannot have its name"
    assert sys.modules["my_job"].Mine is found, "a loader process finds the class by the name of its module"


def test_a_class_in_a_file_elsewhere_that_imports_its_neighbour(write: Write) -> None:
    write("far/away/neighbour_of_mine.py", "DEPTH = 7\n")
    write("far/away/my_far_job.py", "from neighbour_of_mine import DEPTH\n" + GOOD.replace("= 3", "= DEPTH"))
    assert load_task("far/away/my_far_job.py:Mine")().options()["depth"] == 7


def test_a_class_in_a_package(write: Write) -> None:
    write("my_package/__init__.py", "")
    write("my_package/depths.py", "DEPTH = 9\n")
    write("my_package/job.py", "from .depths import DEPTH\n" + GOOD.replace("= 3", "= DEPTH"))
    assert load_task("my_package.job:Mine")().options()["depth"] == 9


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((name, "unknown; built") for name in ("digitz", "", ":", ":Mine")),
        *((name, "unknown; did you mean classify? Built") for name in ("Classify", "clasify")),
        *((name, "no such file; built") for name in ("not_there.py:", "not_there.py")),
        ("there.py", "the class is missing; did you mean there.py:Mine? Built"),
        ("bare.py", "the class is missing; built"),
    ],
)
def test_an_unknown_name(write: Write, name: str, why: str) -> None:
    write("there.py", "from torch import nn\nclass Net(nn.Module): ...\n" + GOOD)
    write("bare.py", "number = 3\n")
    known = ", ".join(built_in())
    assert refusal(name) == f"{why} in: {known}; your own: FILE.py:CLASS or PACKAGE.MODULE:CLASS"


def test_no_such_file_class_or_module(write: Write) -> None:
    write("there.py", GOOD)
    write("a_folder.py/x", "")
    assert refusal("not_there.py:Mine") == "no file not_there.py; did you mean there.py:Mine?"
    assert refusal("xyz.py:Mine") == "no file xyz.py"
    assert refusal("a_folder.py:Mine") == "no file a_folder.py"
    write("bare.py", "from evenkeel.tasks import Classification")
    assert refusal("there.py:Yours") == "Yours does not exist in there.py, which has Mine; name one of them"
    assert refusal("there.py:mine") == "mine does not exist in there.py, which has Mine; did you mean Mine?"
    assert refusal("there:Yours") == "Yours does not exist in there, which has Mine; name one of them"
    assert refusal("bare.py:Yours") == "Yours does not exist in bare.py, which has no task", "it only imports one"
    assert refusal("not_there:Mine") == "does not import: ModuleNotFoundError: No module named 'not_there'"
    assert refusal("there.deeper:Mine").startswith("does not import: ModuleNotFoundError: No module named 'there.deep")


def test_a_class_that_is_no_task(write: Write) -> None:
    write("odd.py", "class Odd: ...\nnumber = 3\ndef function(): ...\n")
    for name, place in (("Odd", r"; see .*odd\.py:1"), ("number", ""), ("function", r"; see .*odd\.py:3")):
        said = f"{name} is not a subclass of evenkeel.tasks.Task in odd.py"
        assert re.fullmatch(f"{said}{place}", refusal(f"odd.py:{name}"))


def test_a_class_that_lacks_methods(write: Write) -> None:
    write(
        "half.py",
        "from evenkeel.tasks import Classification\nclass Half(Classification):\n    def model(self): return None\n",
    )
    said = refusal("half.py:Half")
    assert re.fullmatch(r"Half must define test_dataset\(\), train_dataset\(\); see .*half\.py:2", said)
    assert "Task must define loss(), model()" in refusal("evenkeel.tasks:Task")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("loss(self, batch)", "Odd.loss(self, batch) must be loss(self, model, batch), at {}:3"),
        ("metrics(self, model)", "Odd.metrics(self, model) must be metrics(self, model, batch), at {}:3"),
        ("loss(self, outputs, targets)", "Odd.loss(self, outputs, targets) must be loss(self, model, batch), at {}:3"),
        ("metrics(self, batch, model)", "Odd.metrics(self, batch, model) must be metrics(self, model, batch), at {}:3"),
        ("model()", "Odd.model() must be model(self), at {}:3"),
        *((f"loss(self, {more})", "") for more in ("net, batch, step", "net, batch, scale=1", "*of_any")),
    ],
)
def test_a_method_with_other_parameters(write: Write, method: str, expected: str) -> None:
    path = write("odd.py", f"from evenkeel.tasks import Task\nclass Odd(Task):\n    def {method}: ...\n")
    with pytest.raises(Refusal, match=re.escape(expected.format(path))) if expected else nullcontext():
        refuse_other_parameters(load_name("odd.py:Odd", ""))


@pytest.mark.parametrize(("value", "kind"), [("None", "NoneType"), ("torch.nn.Linear(3, 2)", "Linear")])
def test_a_value_in_place_of_a_method(write: Write, value: str, kind: str) -> None:
    text = f"import torch\nfrom evenkeel.tasks import Task\nclass Odd(Task):\n    model = {value}\n"
    path = write("odd.py", text)
    said = rf"Odd.model must be a method, and is a value of type {kind}; write def model\(.*; see {path}:3"
    with pytest.raises(Refusal, match=said):
        refuse_other_parameters(load_name("odd.py:Odd", ""))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optimizer", "optimizers"),
        ("metric", "metrics"),
        ("collate_fn", "collate"),
        ("test_data", "test_dataset"),
        ("train_data", "train_dataset"),
        ("val_dataset", "validation_dataset"),
        ("configure_optimizers", "optimizers"),
        ("points", ""),
        ("_optimizer", ""),
    ],
)
def test_a_method_of_a_misspelt_name_that_nothing_calls(write: Write, name: str, meant: str) -> None:
    text = GOOD + f"    def {name}(self): return None\n"
    path = write("own.py", text)
    told = rf"is never called: did you mean {meant}\(\)\? Rename it; a method of your own "
    line = rf"^Mine.{name}\(\) at {path}:10 {told}"
    with pytest.raises(Refusal, match=line) if meant else nullcontext():
        parse(["--task", "own.py:Mine"])
    write("called.py", text + f"    def tokens(self, batch): return self.{name}()\n")
    parse(["--task", "called.py:Mine"])


@pytest.mark.parametrize("decorator", ["@dataclass", ""])
def test_an_init_with_arguments(write: Write, decorator: str) -> None:
    more = "    def __init__(self, depth): ...\n"
    text = GOOD.replace("@dataclass", decorator).replace('    depth: int = 3\n    model_: str = "cnn"\n', more)
    path = write("init.py", text)
    with pytest.raises(Refusal, match=rf"Mine.__init__\(self, depth\) at {path}:\d: a task gets no arguments; make "):
        parse(["--task", "init.py:Mine"])
    write("good_init.py", path.read_text().replace(", depth", "").replace(decorator, ""))
    parse(["--task", "good_init.py:Mine"])


@pytest.mark.parametrize(
    ("name", "text", "line", "reason"),
    [
        ("job.py", "x = 1\ndef f(:\n", 2, "SyntaxError: "),
        ("job.py", "\n\nimport no_such_module\n", 3, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("job.py", "from evenkeel.tasks import Nothing\n", 1, "ImportError: cannot import name 'Nothing' from 'even"),
        ("job.py", "def f():\n    raise ValueError('two\\nlines')\n\nf()\n", 2, "ValueError: two"),
        ("job.py", "import json\n\njson.loads('{')\n", 3, "JSONDecodeError: Expecting property name"),
        ("job.py", "import numpy\nnumpy.load('no-such-file.npz')\n", 2, "FileNotFoundError: [Errno 2]"),
        ("job.py", "import sys\nsys.exit('my usage message')\n", 2, "SystemExit: my usage message"),
        ("neighbour.py", "\n\n1 / 0\n", 3, "ZeroDivisionError: division by zero"),
        ("package/__init__.py", "\n1 / 0\n", 2, "ZeroDivisionError: division by zero"),
    ],
    ids="syntax module name exception stdlib library exit neighbour package".split(),  # noqa: SIM905
)
def test_a_file_that_does_not_import_says_where(write: Write, name: str, text: str, line: int, reason: str) -> None:
    """The line of the user, not the one in a library that it led to."""
    path, task = write(name, text), "package:Mine" if "package" in name else "job.py:Mine"
    if name == "neighbour.py":
        write("job.py", "import neighbour\n" + GOOD)
    message = refusal(task)
    assert message.startswith(f"does not import: {reason}")
    assert message.endswith(f" at {path}:{line}")
    assert refusal(task) == message, "asked again, as a rank does after its keeper"


def test_a_file_named_like_a_module_in_use(write: Write) -> None:
    write("json.py", GOOD)
    known = sys.modules["json"]
    assert refusal("json.py:Mine") == "the module name 'json' is taken or not allowed; rename the file"
    assert sys.modules["json"] is known


def test_ctrl_c_while_a_file_is_imported_is_not_an_error_in_it(write: Write) -> None:
    write("slow.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_task("slow.py:Mine")


def test_loss_and_metrics_of_a_classification() -> None:
    class Fixed(Classification):
        train_dataset = test_dataset = model = None  # type: ignore[assignment]

    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 2.0]])
    labels = torch.tensor([0, 1, 0])
    each = torch.log1p(torch.exp(torch.tensor([-2.0, -2.0, 2.0])))
    task, model = Fixed(), torch.nn.Identity()
    torch.testing.assert_close(task.loss(model, (logits, labels)), each.mean())
    metrics = task.metrics(model, (logits, labels))
    torch.testing.assert_close(metrics["loss"], each)
    assert metrics["accuracy"].tolist() == [True, True, False]
    assert task.best == ("accuracy", "max")
    assert task.options() == {}
