"""Tasks: finding a user's class, saying where their file broke, and the digits."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from evenkeel.classify import Classify
from evenkeel.datasets import digits
from evenkeel.errors import Refusal
from evenkeel.tasks import BUILT_IN, Classification, Task, load_task

Write = Callable[[str, str], Path]

GOOD = """
from dataclasses import dataclass
from evenkeel.classify import Classify

@dataclass
class Mine(Classify):
    depth: int = 3
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
    with pytest.raises(Refusal) as caught:
        load_task(task)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"--task {task}: ")
    return message.removeprefix(f"--task {task}: ")


def test_built_in_by_name() -> None:
    assert load_task("classify") is Classify
    before = list(sys.path)
    assert issubclass(load_task("regress"), Task)
    assert sys.path == before, "a file of the working directory cannot take the place of a module of ours"
    assert list(BUILT_IN) == ["classify", "regress", "segment"]


def test_the_old_name_of_the_default_task_says_what_it_is_now() -> None:
    assert refusal("digits") == "is now --task classify --dataset digits, both of which are the defaults"


def test_a_class_in_a_file(write: Write) -> None:
    write("my_job.py", GOOD)
    found = load_task("my_job.py:Mine")
    assert issubclass(found, Classify)
    assert found().options() == Classify().options() | {"depth": 3}
    assert found().options()["model"] == "cnn", "the field of this option cannot have its name"
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


@pytest.mark.parametrize("name", ["digitz", "", ":", ":Mine", "my_job.py:", "my_job.py", "Classify"])
def test_an_unknown_name(name: str) -> None:
    assert (
        refusal(name)
        == "unknown; built in: classify, regress, segment; your own: FILE.py:CLASS or PACKAGE.MODULE:CLASS"
    )


def test_no_such_file_class_or_module(write: Write) -> None:
    write("there.py", GOOD)
    write("a_folder.py/x", "")
    assert refusal("not_there.py:Mine") == "no file not_there.py"
    assert refusal("a_folder.py:Mine") == "no file a_folder.py"
    assert refusal("there.py:Yours") == "Yours does not exist in there.py"
    assert refusal("there:Yours") == "Yours does not exist in there"
    assert refusal("not_there:Mine") == "does not import: ModuleNotFoundError: No module named 'not_there'"
    assert refusal("there.deeper:Mine").startswith("does not import: ModuleNotFoundError: No module named 'there.deep")


def test_a_class_that_is_no_task(write: Write) -> None:
    write("odd.py", "class Odd: ...\nnumber = 3\ndef function(): ...\n")
    for name in ("Odd", "number", "function"):
        assert refusal(f"odd.py:{name}") == f"{name} is not a subclass of evenkeel.tasks.Task in odd.py"


def test_a_class_that_lacks_methods(write: Write) -> None:
    write(
        "half.py",
        "from evenkeel.tasks import Classification\nclass Half(Classification):\n    def model(self): return None\n",
    )
    assert refusal("half.py:Half") == "Half lacks test_dataset, train_dataset; every task defines them"
    assert "Task lacks loss, metrics, model" in refusal("evenkeel.tasks:Task")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("x = 1\ndef f(:\n", 2, "SyntaxError: "),
        ("\n\nimport no_such_module_anywhere\n", 3, "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("from evenkeel.tasks import Nothing\n", 1, "ImportError: cannot import name 'Nothing' from 'evenkeel.tasks'"),
        ("def f():\n    raise ValueError('two\\nlines')\n\nf()\n", 2, "ValueError: two"),
        ("import json\n\njson.loads('{')\n", 3, "JSONDecodeError: Expecting property name"),
        ("import numpy\nnumpy.load('no-such-file.npz')\n", 2, "FileNotFoundError: [Errno 2]"),
        ("import sys\nsys.exit('my usage message')\n", 2, "SystemExit: my usage message"),
    ],
    ids=["syntax", "no module", "no name", "exception", "in the standard library", "in a library", "exit"],
)
def test_a_file_that_does_not_import_says_where_it_broke(write: Write, text: str, line: int, reason: str) -> None:
    """The line of the user, not the one in a library that it led to."""
    path = write("broken_job.py", text)
    message = refusal("broken_job.py:Mine")
    assert message.startswith(f"does not import: {reason}")
    assert message.endswith(f" at {path}:{line}")


def test_a_module_that_does_not_import_says_where_it_broke(write: Write) -> None:
    path = write("broken_package/__init__.py", "\n1 / 0\n")
    assert refusal("broken_package:Mine") == f"does not import: ZeroDivisionError: division by zero at {path}:2"


def test_a_neighbour_that_does_not_import_says_where_it_broke(write: Write) -> None:
    path = write("broken_neighbour.py", "\n\n1 / 0\n")
    write("whole_job.py", "import broken_neighbour\n" + GOOD)
    assert refusal("whole_job.py:Mine").endswith(f"ZeroDivisionError: division by zero at {path}:3")


def test_a_file_named_like_a_module_in_use(write: Write) -> None:
    write("json.py", GOOD)
    known = sys.modules["json"]
    assert refusal("json.py:Mine") == "the module name 'json' is taken or not allowed; rename the file"
    assert sys.modules["json"] is known


def test_ctrl_c_while_a_file_is_imported_is_not_an_error_in_it(write: Write) -> None:
    write("slow.py", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_task("slow.py:Mine")


def sha256(array: np.ndarray | Tensor) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def test_the_data_file_is_the_published_one() -> None:
    """As scikit-learn publishes it; so do accuracies compare with those in the literature."""
    with np.load(str(files("evenkeel") / "assets" / "digits.npz")) as data:
        images, labels = data["images"], data["labels"]
    assert (images.shape, images.dtype) == ((1797, 8, 8), np.uint8)
    assert (labels.shape, labels.dtype) == ((1797,), np.uint8)
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert digest == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def as_published(images: Tensor) -> Tensor:
    """White is 255 in all our data sets, and 16 in the file of the digits; as float [n, 1, 8, 8] in 0 .. 1."""
    return (images * (16 / 255)).round() / 16


def test_the_digits_are_split_once_and_for_all() -> None:
    """On every machine and with every torch: or test accuracies would not compare, and test images be trained on."""
    images, labels = digits(train=False).tensors
    assert sha256(as_published(images)) == "7c3401169cdbee1f060e6d04c94645f91fe420ad46b379a368e07af32a0f395f"
    assert sha256(labels) == "6b9fbcf51df8abdf833082d58b708cdc455621bb08f86347ee812afe01d767b8"
    images, labels = digits(train=True).tensors
    assert sha256(as_published(images)) == "4594848184f8fe7d57e83a0f77505e063f14d6033e85da1a8e7812b2bbfa9ee6"
    assert sha256(labels) == "fad0543dffebb29f7794c9a15d6ba5504eef0cc3cdcc81edf810d94a280ff66c"


def test_each_digit_is_in_one_part_and_looks_as_in_the_file() -> None:
    parts = [digits(train=True).tensors, digits(train=False).tensors]
    assert [len(labels) for _, labels in parts] == [1437, 360]
    assert all(images.shape[1:] == (1, 8, 8) and images.dtype == torch.uint8 for images, _ in parts)
    assert all(images.min() >= 0 and images.max() == 255 for images, _ in parts)
    with np.load(str(files("evenkeel") / "assets" / "digits.npz")) as data:
        published = Counter(
            (image.tobytes(), int(label)) for image, label in zip(data["images"], data["labels"], strict=True)
        )
    found: Counter[tuple[bytes, int]] = Counter()
    for images, labels in parts:
        pixels = (as_published(images) * 16).to(torch.uint8).numpy()
        found.update((image.tobytes(), int(label)) for image, label in zip(pixels, labels, strict=True))
    assert found == published
    assert len(published) == 1797, "no image is there twice, so the parts have none in common"


def test_each_class_is_in_both_parts() -> None:
    for part in (digits(train=True), digits(train=False)):
        counts = torch.bincount(part.tensors[1], minlength=10)
        assert counts.min() > 0.07 * len(part)


@pytest.mark.parametrize(("width", "dropout"), [(0, 0.1), (-1, 0.1), (8, 1.0), (8, -0.1), (8, float("nan"))])
def test_digits_refuse_a_network_that_cannot_be(width: int, dropout: float) -> None:
    with pytest.raises(Refusal, match=r"^--(width|dropout) \S+: must be "):
        Classify(width=width, dropout=dropout)


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


def test_a_task_needs_all_its_methods() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Task()  # type: ignore[abstract]
