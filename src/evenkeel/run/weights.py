"""Weights in files of any origin: load them into a model, and write them for other programs (docs/weights.md).

Wrappers add to the names: `module.` (DataParallel, DDP), `_orig_mod.` (torch.compile). A file that does not fit is
refused with the names that differ; `load_state_dict(strict=False)` would silently leave the model random.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ..common.errors import Refusal
from ..common.naming import listed
from ..training.ema import averaged
from ..training.task_state import TaskState
from .chosen import chosen
from .manifest import is_step_folder, load, step_folders
from .state_files import Damaged, dump

WRAPPERS = ("module", "_orig_mod")

USUAL = {"state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params"}
"""Keys under which training scripts store weights in a larger dictionary. Other keys are tried after these."""

SAFETENSORS = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
    torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
"""Names of dtypes in that format."""

SHOWN, SHOWN_RANDOM = 3, 20
"""Maximum names in a refusal, and in the report of --init-partial; the others are only counted."""

CONVERT = (
    "import sys, torch; f = lambda x: f(x.state_dict()) if hasattr(x, 'state_dict') else "
    "{k: f(v) for k, v in x.items()} if isinstance(x, dict) else x if torch.is_tensor(x) else None; "
    "torch.save(f(torch.load(sys.argv[1], map_location='cpu', weights_only=False)), sys.argv[2])"
)
"""Runs the code in a file, and saves its tensors and the dictionaries around them."""

CONVERT_SCRIPT = "import sys, torch; torch.save(torch.jit.load(sys.argv[1], 'cpu').state_dict(), sys.argv[2])"


def read_chosen(model: nn.Module, run: Path, checkpoint: str, task_state: TaskState | None = None) -> tuple[str, str]:
    """As :func:`read_weights`, for the checkpoint that --checkpoint names (`records.chosen`)."""
    try:
        return read_weights(model, chosen(run, checkpoint), task_state=task_state)
    except Refusal as refusal:
        raise Refusal(str(refusal).replace("--init-from", f"--checkpoint {checkpoint}:", 1)) from None


def read_weights(
    model: nn.Module, path: Path, partial: bool = False, task_state: TaskState | None = None
) -> tuple[str, str]:
    """Load a file of torch.save or safetensors, or a checkpoint of ours; return where it is from, and how it fits.

    Args:
        model: on the CPU.
        path: a file, a run directory (its newest whole checkpoint), or one step-* folder.
        partial: load what fits, if anything does, instead of refusing a file that does not fit completely.
        task_state: what the task remembers, which is loaded from a checkpoint that has it.

    Raises:
        Refusal: the file has no weights that can be read without running code, or they do not fit. Some may already be
            in the model.
    """
    tree, read, remembered = _read(path)
    where, weights, pairs = _find(tree, read, model.state_dict())
    if task_state and task_state.now is not None and remembered is not None:
        task_state.load(remembered)
    own = list(model.state_dict())
    loaded, misfits, unused = _load(model, where, weights, pairs)
    missing = [name for name in own if name not in loaded and name not in misfits]
    if not (missing or unused or misfits):
        return where, f"all {len(own)} tensors of the model are from it" + partial * "; --init-partial was not needed"
    if partial and loaded:
        lines = [f"{len(loaded)} of the model's {len(own)} tensors are from it"]
        if random := [f"{_printable(n)} ({misfits.get(n, 'not in the file')})" for n in own if n not in loaded]:
            lines.append(f"{len(random)} stayed as initialised: {_some(random, SHOWN_RANDOM)}")
        if unused:
            lines.append(f"{len(unused)} in the file are not used: {_some(unused, SHOWN_RANDOM)}")
        return where, "; ".join(lines)
    remedy = "fix the model's options or the file; --init-partial loads what fits and leaves the rest random"
    if not loaded:
        remedy = "nothing in it fits, so --init-partial would not help; name a file of this model"
    lists = {
        "missing": _nearest(missing, unused or weights, "in the file"),
        "unexpected": _nearest(unused, missing or own, "in the model"),
        "of another shape": [f"{_printable(name)} is {how}" for name, how in misfits.items()],
    }
    differences = "; ".join(f"{len(found)} {what}: {_some(found)}" for what, found in lists.items() if found)
    raise Refusal(f"--init-from {where}: does not fit the model: {differences}; {remedy}")


def _load(
    model: nn.Module, where: str, weights: Mapping[str, Any], pairs: Mapping[str, str]
) -> tuple[set[str], dict[str, str], list[str]]:
    """Load what fits. Returns the model's names that are loaded; those that do not fit, and how they differ; and the
    file's names that are not used.

    Args:
        model: on the CPU.
        where: the weights are from, for a message.
        weights: of the file, by its names.
        pairs: the model's name -> the file's.
    """
    own = model.state_dict(keep_vars=True)
    misfits = {name: how for name, theirs in pairs.items() if (how := _misfit(weights[theirs], own[name]))}
    names = {name: theirs for name, theirs in pairs.items() if name not in misfits}
    for theirs in weights.keys() - pairs.values():
        if _bare(theirs) not in own:  # a hook of the model may accept it, such as the names of an old weight_norm
            names.setdefault(_bare(theirs), theirs)
    given = OrderedDict((name, weights[theirs]) for name, theirs in names.items())
    # versions of the modules: without them BatchNorm would assume an old file, and add num_batches_tracked
    given._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    try:
        absent, unexpected = model.load_state_dict(given, strict=False)  # both are reported below
    except RuntimeError as error:
        raise Refusal(f"--init-from {where}: cannot be loaded: {error}") from None

    tied: dict[int, list[str]] = {}
    for name, tensor in own.items():
        tied.setdefault(id(tensor), []).append(name)
    loaded: set[str] = set()
    for same in tied.values():
        first, *others = [given[name] for name in same if name in given] or [None]
        if not all(torch.equal(first, other.to(first.dtype)) for other in others):
            raise Refusal(
                f"--init-from {where}: {_some(same)}, which are one tensor in the model, differ in the file; "
                "untie them in the model, or leave all but one out of the file"
            )
        if not set(absent).issuperset(same):
            loaded |= set(same) - misfits.keys()
    used = {pairs[name] for name in misfits} | {theirs for name, theirs in names.items() if name not in unexpected}
    return loaded, misfits, [name for name in weights if name not in used]


def misfit(error: Exception, model: nn.Module, saved: Mapping[str, Any]) -> str:
    """Why a model's saved state cannot be loaded into it: names that only one has, a shape, else torch's error."""
    now = model.state_dict()
    new, gone = (listed([name for name in one if name not in other]) for one, other in ((now, saved), (saved, now)))
    others = f"only in the model: {new or 'nothing'}; only in the run: {gone or 'nothing'}"
    if new or gone:
        return others
    for name, value in now.items():
        if isinstance(value, Tensor) and (then := list(saved[name].shape)) != list(value.shape):
            return f"{name} is {then} in the run and {list(value.shape)} in the model"
    return " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])


def write(weights: Mapping[str, Any], form: str, file: IO[bytes]) -> None:
    """Write a state dict on the CPU in one of the forms of `checkpoint export`: bare, dp or safetensors.

    Raises:
        Refusal: safetensors cannot hold it.
        OSError: from the file.
    """
    if form != "safetensors":
        dump({f"module.{name}" if form == "dp" else name: value for name, value in weights.items()}, file)
        return
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise Refusal(f"--as safetensors: only for tensors, and {_some(others)} is not one; use --as bare")
    others = [f"{name} is {value.dtype}" for name, value in weights.items() if value.dtype not in SAFETENSORS]
    if others := others or [f"{name} is sparse" for name, it in weights.items() if it.layout != torch.strided]:
        raise Refusal(f"--as safetensors: cannot hold these weights: {_some(others)}; use --as bare")
    _write_safetensors(weights, file)


def _write_safetensors(weights: Mapping[str, Tensor], file: IO[bytes]) -> None:
    """Write one tensor after the other, by github.com/huggingface/safetensors, "Format"; tied ones once a name.

    Its library refuses those, and 0.5.3 copies 400 MB of weights in a file into memory (RssAnon + 382 MiB; 0.8.0: + 0).
    """
    names = sorted(weights, key=lambda name: (-weights[name].dtype.itemsize, name))  # so that all are aligned
    ends = list(accumulate(weights[name].nbytes for name in names))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, begin, end in zip(names, [0, *ends], ends, strict=False):
        kind, shape = SAFETENSORS[weights[name].dtype], list(weights[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        plain = weights[name].detach().resolve_conj().resolve_neg().contiguous()
        file.write(plain.flatten().view(torch.uint8).numpy().data)


def _read(path: Path) -> tuple[Any, str, Any]:
    """What a file or checkpoint holds, its name for a message, and what the task of a checkpoint remembers."""
    folder = path.resolve().parent if path.suffix == ".pt" else path.resolve()
    if is_step_folder(folder) and folder.is_dir():
        paths = [folder]
    elif path.is_dir():
        paths = step_folders(path / "checkpoints") or step_folders(path)
    else:
        return _read_file(path), str(path), None
    damages: list[str] = []
    for found in reversed(paths):
        try:
            state = load(found, "weights")
        except (Damaged, OSError) as damage:  # OSError: an active run has deleted it
            damages.append(str(damage))
            continue
        passed_over = f" ({len(damages)} newer damaged)" if damages else ""
        average = ", its averaged weights" if "ema" in state else ""  # the run evaluates and exports these
        name = f"{path}{f' at {found.name}' if found != folder else ''}{passed_over}{average}"
        return averaged(state), name, state.get("task")
    if damages:
        raise Refusal(f"--init-from {path}: no whole checkpoint: {damages[0]}; name another one")
    raise Refusal(f"--init-from {path}: a folder without checkpoints; name a file, a run directory or a step-* folder")


def _read_file(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise Refusal(f"--init-from {path}: cannot be read: {error.strerror or error}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a refusal is one line
            if start[8:9] == b"{":  # safetensors: after the header's length in bytes
                import safetensors.torch

                return safetensors.torch.load_file(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds: KeyError, EOFError, ...
        text = re.sub(r"(?s).*WeightsUnpickler error:\s*", "", str(error).strip()).split("\n")[0].split(". ")[0]
        what = _printable(type(error).__name__ + (f": {text}" if text else ""))
        damaged = f"is not a file of torch.save or safetensors, or is damaged ({what}); get it again or name another"
        raise Refusal(f"--init-from {path}: {_holds_code(path, str(error)) or damaged}") from None


def _holds_code(path: Path, error: str) -> str:
    """Why a file can be read only by running code, and how to convert it; empty if that is not the problem."""
    names: list[str] = []
    with contextlib.suppress(Exception):
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    names = names or re.findall(r"GLOBAL (.+?) was not an allowed global", error)
    script = "TorchScript" in error
    if not (names or script or ".tar format" in error):
        return ""
    code, needs = CONVERT_SCRIPT if script else CONVERT, ""
    mine = [name.removeprefix("__main__.") for name in names if name.startswith("__main__.")]
    if mine and all(name.isidentifier() for name in mine):  # they come from the file, and the user will type them
        code, needs = f"from SCRIPT import {', '.join(mine)}; {code}", ", SCRIPT being the program that saved it"
    why = f"its code ({_some(names)})" if names else "a TorchScript program" if script else "an old pickle"
    new = path.with_name(f"{path.stem}-weights.pt")
    return (
        f"has more than tensors: reading it would run {why}, so it is refused; if you trust its author, convert it "
        f"once, where that code is installed and best in a container without network{needs}: "
        f'python -c "{code}" {shlex.quote(str(path))} {shlex.quote(str(new))}'
    )


def _find(tree: Any, read: str, own: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, str]]:
    """The dictionary of a file that fits a model best, those at usual places first.

    Returns:
        Where it is, its weights, and the model's name -> its name for all that match.
    """
    ranked = []
    for place, weights in _dictionaries(tree):
        pairs = _match(weights, own)
        rank = (bool(pairs) and USUAL.issuperset(place), len(pairs), 0 if pairs else len(weights))
        ranked.append((rank, place, weights, pairs))
    if not ranked:
        keys = f" with {_some([str(key) for key in tree])}" if isinstance(tree, dict) and tree else ""
        raise Refusal(f"--init-from {read}: has no named tensors, only a {type(tree).__name__}{keys}")
    best = [entry for entry in ranked if entry[0] == max(rank for rank, *_ in ranked)]
    _, place, weights, pairs = best[0]
    if len(best) > 1 and pairs:
        places = " and in ".join(".".join(place) or "itself" for _, place, *_ in best)
        raise Refusal(f"--init-from {read}: weights that fit are in {places}; save the ones you want in their own file")
    return read + (f", its {_printable('.'.join(place))}" if place else ""), weights, pairs


def _dictionaries(tree: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """All dictionaries of named tensors in nested ones, with their places."""
    if isinstance(tree, Mapping):
        if any(isinstance(key, str) and isinstance(value, Tensor) for key, value in tree.items()):
            yield place, {str(key): value for key, value in tree.items()}
        for key, value in tree.items():
            if isinstance(key, str):
                yield from _dictionaries(value, (*place, key))


def _match(weights: Iterable[str], own: Iterable[str]) -> dict[str, str]:
    """The model's names -> the file's that mean the same without wrappers.

    Where the model has several such names (a real submodule `module`), the file must have as many, and those must be
    the same but for wrappers around the whole. A tensor is never loaded where another one might be meant.
    """
    pairs = {}
    theirs = _by_bare_name(weights)
    for bare, mine in _by_bare_name(own).items():
        found = theirs.get(bare, {})
        if len(mine) == len(found) == 1:
            pairs[next(iter(mine.values()))] = next(iter(found.values()))
        elif mine.keys() == found.keys():
            pairs |= {mine[name]: found[name] for name in mine}
    return pairs


def _by_bare_name(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Name without any wrapper -> name without those around all of them -> name."""
    short = {name: name for name in names}
    while short and any(all(name.startswith(f"{part}.") for name in short) for part in WRAPPERS):
        short = {name.partition(".")[2]: full for name, full in short.items()}
    found: dict[str, dict[str, str]] = {}
    for name, full in short.items():
        found.setdefault(_bare(name), {})[name] = full
    return found


def _bare(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _misfit(value: Any, own: Any) -> str:
    """How a value differs from the model's; empty if it can be copied there."""
    if not isinstance(own, Tensor):
        return ""  # the extra state of a module, which checks it itself
    if isinstance(value, Tensor) and value.shape == own.shape and torch.can_cast(value.dtype, own.dtype):
        return ""
    return f"{_kind(value)}, the model's {_kind(own)}"


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _nearest(names: list[str], others: Iterable[str], where: str) -> list[str]:
    """Names, the first ones each with the most similar of others."""
    known, first = {_bare(other): other for other in others}, []
    for name in names[:SHOWN]:
        near = get_close_matches(_bare(name), known, n=1, cutoff=0.5)
        first.append(_printable(name) + (f" (nearest {where}: {_printable(known[near[0]])})" if near else ""))
    return [*first, *names[SHOWN:]]


def _some(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first names and the number of the others."""
    return listed(list(map(_printable, names)), shown)


def _printable(name: str) -> str:
    """A name from a file, safe for a terminal."""
    return name if name.isprintable() else ascii(name)
