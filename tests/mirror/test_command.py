"""What commands find in place of a URL."""

from pathlib import Path

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.mirror.command import with_local_copies
from evenkeel.mirror.store import Store
from evenkeel.run.manifest import step_folders, step_of, verify
from evenkeel.run.state_files import STATE
from tests.mirror.test_store import cut, saved, state_of
from tests.support.s3 import port, store  # noqa: F401  (fixtures)


@pytest.fixture
def full(store: Store, tmp_path: Path) -> Store:
    """The second of three steps is the best, the third is damaged."""
    for step, accuracy in ((1, 0.1), (2, 0.9), (3, 0.3)):
        store.put(saved(tmp_path / "here", step, accuracy))
    name = state_of(store, 3)
    store.fs.pipe_file(name, cut(store.fs.cat_file(name)))
    store.write("config.toml", b"lr = 1.0\n")
    return store


@pytest.mark.parametrize(
    ("command", "states"),
    [
        ("checkpoint list URL", []),
        ("checkpoint verify URL", [1, 2, 3]),
        ("checkpoint inspect URL --step 1", [1]),
        ("predict URL --set test --checkpoint best", [2]),
        ("predict URL --set test --checkpoint=3", [3]),
        ("predict URL --set test", [2]),
        ("report URL", []),
    ],
)
def test_a_folder_with_what_the_command_reads(command: str, states: list[int], full: Store) -> None:
    words = command.replace("URL", full.url).split()
    place = words.index(full.url)
    copied = with_local_copies(words)
    folder = Path(copied[place])
    assert copied[:place] + copied[place + 1 : len(words)] == words[:place] + words[place + 1 :]
    assert copied[len(words) :] == ["--output=report.html"] * (words[0] == "report")
    assert (folder / "config.toml").read_text() == "lr = 1.0\n"
    found = step_folders(folder / "checkpoints")
    assert [step_of(path) for path in found if (path / STATE).exists()] == states
    if 3 not in states:
        for path in found:
            assert not (path / STATE).exists() or verify(path)


def test_other_words_stay_and_an_empty_place_is_refused(store: Store) -> None:
    assert with_local_copies(["predict", "runs/x"]) == ["predict", "runs/x"]
    assert with_local_copies(["status", store.url]) == ["status", store.url]
    with pytest.raises(Refusal, match=r"no whole checkpoint there$"):
        with_local_copies(["checkpoint", "list", store.url])
