"""One checkpoint: the name of its folder, the manifest that describes its files, and how both are verified.

checkpoints/step-00000042/state.pt        tensors and plain data, nothing else (sharded: see state_files.py)
                          manifest.json   see :class:`Manifest`
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from ..common.files import sha256_of
from ..common.naming import TEST, Kind, full_name, named
from .state_files import READ_AGAIN, Damaged, Want, WrittenFile, entries, patiently, read_state, state_files

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. Older ones lack some fields, which are then empty or None."""

    step: int
    time: float
    """The time of writing, in seconds since 1970."""
    kind: Kind
    host: str
    metrics: dict[str, float]
    """The evaluation at this step, empty if there was none."""
    best_by: tuple[str, str] | None
    """The run's (metric, "max" or "min")."""
    fingerprint: dict[str, str]
    """The facts that its bits depend on (fingerprint.py), by part."""
    bits_void_from: int | None
    """The step after which its bits may differ from those of an undisturbed run; None: they do not."""
    files: dict[str, WrittenFile]
    """Its files by name; those with the state (state_files.py) are among them."""
    keep_every: int = 0
    """The run's --keep-every when it was written."""

    @property
    def kept_for_ever(self) -> bool:
        """True for a checkpoint of --keep-every, whatever that option is by now."""
        return bool(self.keep_every) and self.step % self.keep_every == 0


@dataclass
class Provenance:
    """What all checkpoints of a run say of it (see `Manifest`). `Attempt` makes it; `resume` and `Evaluator` set some.

    Nothing of it changes after the first evaluation.
    """

    best_by: tuple[str, str] | None = None
    """(full name of a metric, "max" or "min") that decides which is best; None: none. Set by `resume`;
    again by `Evaluator`: without the assumed metric in the first evaluation the loss decides."""
    fingerprint: dict[str, str] = field(default_factory=dict)
    """`Attempt` completes it when the cut is decided; `resume` sets rank 0's on all ranks."""
    bits_void_from: int | None = None
    """Set by `resume`."""
    run_id: str = ""
    """The run's, in status.json; set by `Attempt` once the start is recorded. A process that finds another id there
    is a leftover of the previous run, and writes nothing. Empty: no check."""


def step_folders(folder: Path) -> list[Path]:
    """Everything in a folder that has a checkpoint's name, complete or not, by step."""
    return sorted(filter(is_step_folder, entries(folder, "step-*")), key=step_of)


def is_step_folder(path: Path) -> bool:
    """Whether a path has a checkpoint's name."""
    return re.fullmatch(r"step-\d+", path.name) is not None


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def load(path: Path, want: Want = "all") -> dict[str, Any]:
    """Verify and read a checkpoint on the CPU: the result of `State.capture`, or what is wanted of it.

    Raises:
        Damaged: as :func:`verify`; or it does not load without running code, or is not the state of this step.
    """
    verify(path)
    return read_state(path, step_of(path), want)


def verify(path: Path, advance: Callable[[int], object] = lambda _: None, rank: int = 0, ranks: int = 1) -> Manifest:
    """Read every file of a checkpoint and compare its size and sha256 with the manifest; each of several ranks a part.
    ``advance`` gets the number of bytes of each block that is read.

    Raises:
        Damaged: a file is missing, not readable or different.
    """
    manifest = read_manifest(path)
    for name, written in list(manifest.files.items())[rank::ranks]:
        file = path / name
        if (size := patiently(Path.stat, file).st_size) != written.bytes:
            raise Damaged(f"{file}: has {size} bytes, should have {written.bytes} bytes")
        digest = patiently(partial(sha256_of, advance=advance), file)
        if digest != written.sha256:
            raise Damaged(f"{file}: sha256 is {digest}, the manifest says {written.sha256}")
    return manifest


def read_manifest(path: Path, pauses: Sequence[float] = READ_AGAIN) -> Manifest:
    """The manifest of a checkpoint, not checked against its files.

    Raises:
        Damaged: there is no manifest, it is not readable, or it is not this folder's.
    """
    file = path / MANIFEST
    try:
        manifest = manifest_of(content := json.loads(patiently(Path.read_text, file, pauses)))
        if content["step"] != step_of(path):
            raise ValueError(f"{manifest.kind} of step {content['step']}")
        # those of the state first, in the order of ranks; if one is missing, the manifest is damaged
        states = {name: manifest.files[name] for name in state_files(manifest.files)}
        return replace(manifest, files=states | manifest.files)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Damaged(f"{file}: is not this checkpoint's manifest ({type(error).__name__}: {error})") from None


def manifest_of(content: dict[str, Any]) -> Manifest:
    """A manifest from its JSON; raises a ValueError, TypeError, LookupError and the like if it is none."""
    kind, best_by, void_from = content.get("kind", "checkpoint"), content.get("best_by"), content.get("bits_void_from")
    if kind not in get_args(Kind):
        raise ValueError(f"{kind} of step {content['step']}")
    return Manifest(
        step=int(content["step"]),
        time=float(content["time"]),
        kind=kind,
        host=str(content.get("host", "")),
        metrics={name: float(value) for name, value in named(TEST, content["metrics"]).items()},
        best_by=(full_name(TEST, best_by[0]), str(best_by[1])) if best_by else None,
        fingerprint={str(name): str(value) for name, value in content.get("fingerprint", {}).items()},
        bits_void_from=None if void_from is None else int(void_from),
        files={str(name): WrittenFile(int(f["bytes"]), str(f["sha256"])) for name, f in content["files"].items()},
        keep_every=int(content.get("keep_every", 0)),
    )
