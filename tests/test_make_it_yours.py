"""What tools/make_it_yours.py computes before it writes: valid names, what goes with a component, what names it."""

from typing import Any

import pytest

from tests.support.copies import components, dangling, how_many, needs_all_components, some_components, taken_out, tool

pytestmark = needs_all_components


@pytest.fixture(scope="module")
def made() -> Any:
    return tool()


@pytest.fixture(scope="module")
def files(made: Any) -> dict[str, str]:
    texts: dict[str, str] = made.texts()
    return texts


NAMES = {
    "my-trainer class True 9lives __init__ _mine mine_ MyTrainer Torch größe": "cannot be a Python package's name",
    "match case type print len list": "is a word of Python",
    "torch torchvision pil yaml test tests src train json launch slurm docker k8s docs examples tools submit "
    "interpreter nanogpt run": "choose another name",
    "world rank model name": "which would hide the package",
}


@pytest.mark.parametrize(("name", "why"), [(name, why) for names, why in NAMES.items() for name in names.split()])
def test_a_bad_name(name: str, why: str, made: Any, files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        made.check_name(name, files)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"make_it_yours: {name}: ")
    assert why in line


@pytest.mark.parametrize("name", ["mytrainer", "speech2text", "acme_vision"])
def test_a_name_that_a_package_can_have(name: str, made: Any, files: dict[str, str]) -> None:
    made.check_name(name, files)


@pytest.mark.parametrize("without", some_components(3), ids=how_many)
def test_nothing_that_is_left_imports_or_names_what_goes(without: list[str], made: Any, files: dict[str, str]) -> None:
    gone, left = taken_out(made, files, without)
    assert dangling(left, made.tracked() - gone, gone) == []
    control = dangling({name: files[name] for name in left}, made.tracked() - gone, gone)
    assert control, "as it was"


def test_each_component_can_be_the_only_one_that_goes(made: Any, files: dict[str, str]) -> None:
    """Several at once may hide that one of them needs another."""
    for name in components():
        gone, left = taken_out(made, files, [name])
        assert dangling(left, made.tracked() - gone, gone) == [], name


def test_the_index_of_the_documentation_lists_what_is_left(made: Any, files: dict[str, str]) -> None:
    left = taken_out(made, files, ["slurm", "chaos"])[1]["docs/index.md"].splitlines()
    missing = [line for line in files["docs/index.md"].splitlines() if line not in left]
    assert [line.partition("]")[0] for line in missing] == ["- [Slurm", "- [Chaos"]


def test_the_order_of_components_does_not_matter(made: Any, files: dict[str, str]) -> None:
    names = some_components(1)[-1]
    assert taken_out(made, files, names) == taken_out(made, files, names[::-1])


def test_a_package_goes_with_the_last_file_that_imports_it(made: Any, files: dict[str, str]) -> None:
    def listed(*without: str) -> str:
        return taken_out(made, files, without)[1]["pyproject.toml"]

    assert "matplotlib" in listed("report")
    without = listed("report", "scaling")
    assert "matplotlib" not in without
    assert '"evenkeel[tensorboard,parquet,text,onnx,mirror,examples,docs]"' in without
    assert "submitit>=" not in listed("slurm")
    bare = listed(*components())
    assert '"evenkeel[tensorboard,parquet,docs]"' in bare
    assert "bench = [" not in bare
    assert 'files = ["src", "tools", "train.py", "launch"]' in bare


def test_a_users_file_that_imports_a_room(made: Any, files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    mine = files | {"src/evenkeel/tasks/mine.py": "from .lm import LM\n"}
    with pytest.raises(SystemExit, match="2"):
        made.goes({"lm": components()["lm"]}, mine)
    why = "imports evenkeel.tasks.lm, which would be deleted; change it, or keep that component"
    said = f"src/evenkeel/tasks/mine.py {why}"
    assert capsys.readouterr().err == f"make_it_yours: {said}\n"
    maybe = mine | {"src/evenkeel/tasks/mine.py": "try:\n    from .lm import LM\nexcept ImportError:\n    pass\n"}
    made.goes({"lm": components()["lm"]}, maybe)
