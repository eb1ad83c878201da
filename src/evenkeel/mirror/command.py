"""A local copy of a run in a store, for commands that read a run's folder."""

from __future__ import annotations

import atexit
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp

from ..common import keeper_link
from ..common.arguments import is_typed, some_options
from ..common.errors import Refusal
from ..run.chosen import chosen
from ..run.manifest import step_folders, step_of
from .store import Store


def with_local_copies(words: Sequence[str]) -> list[str]:
    """A command line with temporary folders in place of URLs, such as `checkpoint list s3://bucket/run`.

    `list` and `report` need manifests only, `verify` every checkpoint, the others that of --step or --checkpoint, else
    the newest whole one. `report` writes to the working directory. Refused if the store cannot be read, or has no run.
    """
    if words[0] not in ("checkpoint", "report", "predict"):
        return list(words)
    copied = [str(_copy(word, words)) if re.match(r"\w+://", word) else word for word in words]
    return copied + ["--output=report.html"] * (words[0] == "report" and not is_typed("output", words))


def _copy(url: str, words: Sequence[str]) -> Path:
    folder = Path(mkdtemp(prefix="evenkeel-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    keeper_link.before_exit(lambda: shutil.rmtree(folder, ignore_errors=True))  # a rank leaves without the former
    store = Store(url, checkpoints := folder / "checkpoints")
    typed, _ = some_options(words, ("--step",), ("--checkpoint",))
    try:
        store.fetch_files(folder)
        if not store.manifests():
            raise Refusal(f"{url}: no whole checkpoint there")
        found, name = step_folders(checkpoints), typed.step or typed.checkpoint or "last"
        if words[0] == "report" or words[1] == "list":
            return folder
        wanted = found if words[1] == "verify" else [] if name == "last" else [chosen(folder, name)]
        if not wanted:
            store.copies = folder / "manifests"
            shutil.rmtree(checkpoints)
            checkpoints.mkdir()
            store.fetch_newest(checkpoints)
        for path in wanted:
            shutil.rmtree(path)
            store.fetch(step_of(path), checkpoints, check=False)  # the command checks it, and says what is wrong
    except (OSError, ValueError) as error:
        raise Refusal(f"{url}: cannot be read: {type(error).__name__}: {error}") from None
    return folder
