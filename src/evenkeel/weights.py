"""Weights in files of all kinds: read into a model, whoever wrote them and from inside whatever wrapper, and written.

Wrappers put a part of their own into the names: `module.` (DataParallel, DDP), `_orig_mod.` (torch.compile). A model
may have a submodule of that name all the same, so what the model expects decides where such a part is left out. A file
that does not fit is refused with the names that differ: `load_state_dict(strict=False)` would say nothing, and the
training would start from random weights. No code in a file is ever run.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from .average import averaged
from .checkpoint import STATE, Damaged, dump, is_step_folder, load, step_folders
from .errors import Refusal

WRAPPERS = ("module", "_orig_mod")
"""What wrappers call the model in them."""

USUAL = frozenset(
    ["state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params"]
)
"""Where training scripts keep the weights in a larger dictionary. Others are looked into after these."""

SHOWN, SHOWN_RANDOM = 3, 20
"""Names in a message before the rest is a number: of a refusal, and of what stayed random."""

CONVERT = (
    "import sys, torch; f = lambda x: f(x.state_dict()) if hasattr(x, 'state_dict') else "
    "{k: f(v) for k, v in x.items()} if isinstance(x, dict) else x if torch.is_tensor(x) else None; "
    "torch.save(f(torch.load(sys.argv[1], map_location='cpu', weights_only=False)), sys.argv[2])"
)
"""Runs the code in a file, and keeps its tensors and the dictionaries they are in."""

CONVERT_SCRIPT = "import sys, torch; torch.save(torch.jit.load(sys.argv[1], 'cpu').state_dict(), sys.argv[2])"


def load_weights(model: nn.Module, path: Path, partial: bool = False) -> str:
    """Give a model on the CPU the weights of a file: of torch.save, of safetensors, or a run of ours.

    Args:
        model: keeps its own values where the file has none that fit. Buffers count as parameters do.
        path: a file, a run directory (its newest whole checkpoint), or one step-* folder.
        partial: take what fits, if anything does, instead of refusing a file that does not fit in all.

    Returns:
        A line that says where the weights are from and what has kept its first value.

    Raises:
        Refusal: there are no weights in it that can be read without running code, or they do not fit. The model may
            have some of them by then.
    """
    tree, read = _read_folder(path) if path.is_dir() or _in_step_folder(path) else (_read_file(path), str(path))
    found = _found(tree, list(model.state_dict()), read)
    fit = _load(model, found)
    if fit.clashes:
        raise Refusal(
            f"--init-from {found.where}: {_some(fit.clashes)}, which are one tensor in the model, differ in the file; "
            "untie them in the model, or leave all but one out of the file"
        )
    if fit.whole:
        needless = "; --init-partial was not needed" * partial
        return f"--init-from {found.where}: all {len(fit.loaded)} tensors of the model are from it{needless}"
    if partial and fit.loaded:
        return f"--init-from {found.where}: {fit.partly()}"
    remedy = "mend the model's options or the file; --init-partial loads what fits and leaves the rest random"
    if not fit.loaded:
        remedy = "nothing in it fits, so --init-partial would not help; name the file of such a model"
    raise Refusal(f"--init-from {found.where}: does not fit the model: {fit.differences()}; {remedy}")


def write(weights: Mapping[str, Any], form: str, file: IO[bytes]) -> None:
    """Write a bare state dict for others.

    Args:
        weights: on the CPU.
        form: "bare": as it is; "dp": names as DataParallel and DDP have them; "safetensors".
        file: is written to once, or in blocks.

    Raises:
        Refusal: safetensors cannot hold it.
        OSError: from the file.
    """
    if form != "safetensors":
        dump({f"module.{name}": value for name, value in weights.items()} if form == "dp" else dict(weights), file)
        return
    import safetensors.torch

    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise Refusal(f"--as safetensors: holds tensors only, and {_some(others)} is none; use --as bare")
    # the format knows no shared memory, so tied weights are written once for each name
    alone = {name: value.clone(memory_format=torch.contiguous_format) for name, value in weights.items()}
    try:
        content = safetensors.torch.save(alone, metadata={"format": "pt"})
    except (KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise Refusal(f"--as safetensors: cannot hold these weights: {error}; use --as bare") from None
    file.write(content)


@dataclass(frozen=True)
class _Found:
    """A state dict in a file."""

    where: str
    weights: Mapping[str, Any]
    pairs: dict[str, str]
    """Its names -> the model's, for those that fit."""
    others: dict[str, str]
    """Its other names -> the same without wrappers."""


@dataclass
class _Fit:
    """How a state dict fits a model. Names of the file as they are there."""

    named: list[str]
    """All in the file."""
    expected: list[str]
    """All in the model."""
    missing: list[str] = field(default_factory=list)
    """Names of the model's."""
    unexpected: list[str] = field(default_factory=list)
    """Names of the file's."""
    misshapen: dict[str, str] = field(default_factory=dict)
    """Name of the model's -> what the file has and what the model."""
    clashes: list[str] = field(default_factory=list)
    """Names of one tensor of the model for which the file has different values."""

    @property
    def whole(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    @property
    def loaded(self) -> list[str]:
        absent = self.misshapen.keys() | self.missing
        return [name for name in self.expected if name not in absent]

    def differences(self) -> str:
        """What does not fit, with the nearest names."""
        lists = []
        if self.missing:
            names = _nearest(self.missing, self.unexpected or self.named, "in the file")
            lists.append(f"{len(self.missing)} missing: {names}")
        if self.unexpected:
            names = _nearest(self.unexpected, self.missing or self.expected, "in the model")
            lists.append(f"{len(self.unexpected)} unexpected: {names}")
        if self.misshapen:
            names = _some([f"{_printable(name)} is {how}" for name, how in self.misshapen.items()])
            lists.append(f"{len(self.misshapen)} of another shape: {names}")
        return "; ".join(lists)

    def partly(self) -> str:
        """What was taken, what stayed random, and what was left over."""
        random = dict.fromkeys(self.missing, "not in the file") | self.misshapen
        told = [f"{len(self.loaded)} of the model's {len(self.expected)} tensors are from it"]
        if random:
            names = [f"{_printable(name)} ({random[name]})" for name in self.expected if name in random]
            told.append(f"{len(names)} stayed as initialised: {_some(names, SHOWN_RANDOM)}")
        if self.unexpected:
            told.append(f"{len(self.unexpected)} in the file are not used: {_some(self.unexpected, SHOWN_RANDOM)}")
        return "; ".join(told)


def _in_step_folder(path: Path) -> bool:
    return path.name == STATE and is_step_folder(path.resolve().parent)


def _read_folder(path: Path) -> tuple[Any, str]:
    """The weights of one of our checkpoints, checked against its manifest, and what to call them."""
    resolved = path.resolve()
    if _in_step_folder(path) or is_step_folder(resolved):
        paths = [resolved if resolved.is_dir() else resolved.parent]
    else:
        paths = step_folders(path / "checkpoints") or step_folders(path)
    damages: list[str] = []
    for candidate in reversed(paths):
        try:
            state = load(candidate)
        except (Damaged, OSError) as damage:  # the latter: a run that goes on has deleted it
            damages.append(str(damage))
            continue
        passed_over = f" ({len(damages)} newer damaged)" if damages else ""
        average = ", its averaged weights" * ("ema" in state)  # those that the run evaluates and exports
        return averaged(state), f"{path}{f' at {candidate.name}' * (candidate != resolved)}{passed_over}{average}"
    if damages:
        raise Refusal(f"--init-from {path}: no whole checkpoint: {damages[0]}; name another one")
    raise Refusal(f"--init-from {path}: a folder without checkpoints; name a file, a run directory or a step-* folder")


def _read_file(path: Path) -> Any:
    """What a file holds: tensors, plain data and nothing that would have to be run."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise Refusal(f"--init-from {path}: cannot be read: {error.strerror or error}") from None
    if start.startswith(b"version https://git-lfs"):
        raise Refusal(f"--init-from {path}: only a pointer to a file in Git LFS; get the file with `git lfs pull`")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a refusal is one line
            if start[8:9] == b"{":  # after the header's length in bytes
                import safetensors.torch

                return safetensors.torch.load_file(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what it stumbles over: KeyError, EOFError, ...
        raise Refusal(f"--init-from {path}: {_unreadable(path, str(error)) or _damaged(error)}") from None


def _unreadable(path: Path, error: str) -> str:
    """Why a file would need its code to be run, and the way to convert it; empty if that is not what is wrong."""
    names: list[str] = []
    with contextlib.suppress(Exception):
        names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    names = names or re.findall(r"GLOBAL (.+?) was not an allowed global", error)
    archive, tar = "TorchScript" in error, ".tar format" in error
    if not (names or archive or tar):
        return ""
    code, script = CONVERT_SCRIPT if archive else CONVERT, ""
    mine = [name.removeprefix("__main__.") for name in names if name.startswith("__main__.")]
    if mine and all(name.isidentifier() for name in mine):  # they come from the file, and are going to be typed
        code = f"from SCRIPT import {', '.join(mine)}; {code}"
        script = ", SCRIPT being the program that saved it"
    why = f"its code ({_some(names)})" if names else "a TorchScript program" if archive else "an old pickle"
    new = path.with_name(f"{path.stem}-weights.pt")
    return (
        f"holds more than tensors: to read it is to run {why}, so it is refused; if you trust who made it, convert it "
        f"once, where that code is installed and best in a container without network{script}: "
        f'python -c "{code}" {shlex.quote(str(path))} {shlex.quote(str(new))}'
    )


def _damaged(error: Exception) -> str:
    told = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
    line = (told[1] if told else str(error).strip()).split("\n")[0].split(". ")[0]
    what = type(error).__name__ + f": {line}" * bool(line)
    return f"is no file of torch.save or safetensors, or damaged ({_printable(what)}); get it again or name another"


def _found(tree: Any, expected: list[str], read: str) -> _Found:
    """The dictionary of a file that fits the model best, those at the usual places before others."""
    model = _tree_of(expected)
    all_found = [(place, weights, *_match(weights, model)) for place, weights in _dictionaries(tree)]
    if not all_found:
        keys = f" with {_some([str(key) for key in tree])}" if isinstance(tree, dict) and tree else ""
        raise Refusal(f"--init-from {read}: holds no tensors by name, only a {type(tree).__name__}{keys}")

    def rank(place: Sequence[str], weights: Mapping[str, Any], pairs: dict[str, str]) -> tuple[bool, int, bool, int]:
        usual = USUAL.issuperset(place)
        fits = usual and bool(pairs)
        return (fits, len(pairs), *((False, 0) if pairs else (usual, len(weights))))

    ranks = [rank(place, weights, pairs) for place, weights, pairs, _ in all_found]
    best = [entry for entry, its in zip(all_found, ranks, strict=True) if its == max(ranks)]
    if len(best) > 1 and best[0][2]:
        places = " and in ".join(".".join(place) or "itself" for place, *_ in best)
        raise Refusal(f"--init-from {read}: weights that fit are in {places}; save those that are meant by themselves")
    place, weights, pairs, others = best[0]
    its = f", its {_printable('.'.join(place))}" * bool(place)
    return _Found(f"{read}{its}", weights, pairs, others)


def _dictionaries(tree: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """All dictionaries of named tensors in nested ones, and where they are."""
    if not isinstance(tree, Mapping):
        return
    if any(isinstance(key, str) and isinstance(value, Tensor) for key, value in tree.items()):
        yield place, tree
    for key, value in tree.items():
        if isinstance(key, str):
            yield from _dictionaries(value, (*place, key))


def _load(model: nn.Module, found: _Found) -> _Fit:
    """Load what fits, and tell what does not."""
    own = model.state_dict(keep_vars=True)
    fit = _Fit([str(name) for name in found.weights], list(own))
    given = {target: name for name, target in found.pairs.items()}
    for name in own:
        if name in given and (how := _misfit(found.weights[given[name]], own[name])):
            fit.misshapen[name] = how
    # names that only a hook of the model's understands: an old weight_norm's, say
    more = {target: name for name, target in found.others.items() if target not in given}
    handed = {target: name for target, name in (given | more).items() if target not in fit.misshapen}
    weights = OrderedDict((target, found.weights[name]) for target, name in handed.items())
    # a file without versions is a new one: BatchNorm would fill in a missing num_batches_tracked for an old one
    versions = dict(getattr(model.state_dict(), "_metadata", {}))
    theirs = getattr(found.weights, "_metadata", {})
    for target, name in handed.items():
        if known := theirs.get(name.rpartition(".")[0]):
            versions[target.rpartition(".")[0]] = known
    weights._metadata = versions  # type: ignore[attr-defined]  # where torch keeps them
    try:
        missing, unexpected = model.load_state_dict(weights, strict=False)  # what it returns is told
    except RuntimeError as error:
        raise Refusal(f"--init-from {found.where}: cannot be loaded: {error}") from None
    loaded = set(own) - set(missing) - set(fit.misshapen)
    tied = _tied(own)
    fit.missing = [
        name for name in own if name in missing and name not in given and loaded.isdisjoint(tied.get(name, ()))
    ]
    unused = {handed.get(target, target) for target in unexpected}
    unused |= {name for name, target in found.others.items() if handed.get(target) != name}
    unused |= {str(name) for name in found.weights if not isinstance(name, str)}
    fit.unexpected = [name for name in fit.named if name in unused]
    for names in tied.values():
        values = [weights[name] for name in names if name in weights]
        same = all(torch.equal(values[0], value.to(values[0].dtype)) for value in values[1:])
        if not same and names[0] not in fit.clashes:
            fit.clashes += names
    return fit


def _misfit(value: Any, own: Any) -> str:
    """How a value differs from what the model has by that name; empty if it can be copied there."""
    if not isinstance(own, Tensor):
        return ""  # the extra state of a module, which knows it
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}, the model's {_kind(own)}"
    # torch takes a [1] of its first years for a scalar
    same = value.shape == own.shape or (own.dim() == 0 and value.dim() == 1 and value.numel() == 1)
    return "" if same and torch.can_cast(value.dtype, own.dtype) else f"{_kind(value)}, the model's {_kind(own)}"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _tied(own: Mapping[str, Any]) -> dict[str, list[str]]:
    """Name -> all names of the same tensor, where there are several."""
    names: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    return {name: same for same in names.values() if len(same) > 1 for name in same}


@dataclass
class _Node:
    """A module in dotted names, or a tensor."""

    path: str = ""
    name: str | None = None
    """Of the tensor that it is."""
    children: dict[str, _Node] = field(default_factory=dict)

    def leaves(self) -> Iterator[str]:
        """Names of all tensors in it."""
        if self.name is not None:
            yield self.name
        for child in self.children.values():
            yield from child.leaves()


def _tree_of(names: Iterable[str]) -> _Node:
    root = _Node()
    for name in names:
        node = root
        for part in name.split("."):
            path = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, _Node(path))
        node.name = name
    return root


def _match(weights: Mapping[str, Any], model: _Node) -> tuple[dict[str, str], dict[str, str]]:
    file = _tree_of(name for name in weights if isinstance(name, str))
    return _pairs(file, model)


def _pairs(file: _Node, model: _Node) -> tuple[dict[str, str], dict[str, str]]:
    """Which tensor of a file is which of the model, with the fewest wrappers left out that let the most fit.

    In any place the file may have a wrapper more than the model, or the model one more than the file.

    Returns:
        The file's names -> the model's, and the file's other names -> the same without wrappers.
    """
    pairs, others = {}, {}
    if file.name is not None and model.name is not None:
        pairs[file.name] = model.name
    elif file.name is not None:
        others[file.name] = model.path
    for part, child in file.children.items():
        if part in model.children:
            its_pairs, its_others = _pairs(child, model.children[part])
            pairs |= its_pairs
            others |= its_others
        else:
            others |= _left_over(child, file.path, model.path)
    choices = [(pairs, others)]
    for part in WRAPPERS:
        if part in file.children:
            its_pairs, its_others = _pairs(file.children[part], model)
            siblings = [child for name, child in file.children.items() if name != part]
            for child in siblings:
                its_others = its_others | _left_over(child, file.path, model.path)
            choices.append((its_pairs, its_others))
        if list(model.children) == [part]:  # nothing but a wrapper
            choices.append(_pairs(file, model.children[part]))
    return max(choices, key=lambda choice: len(choice[0]))  # the first of equals: nothing left out


def _left_over(node: _Node, file_path: str, model_path: str) -> dict[str, str]:
    rest = {name: name[len(file_path) :].lstrip(".") for name in node.leaves()}
    return {name: f"{model_path}.{end}" if model_path else end for name, end in rest.items()}


def _nearest(names: list[str], others: list[str], where: str) -> str:
    """The first names, each with the most similar of others."""
    shown, known = [], {_unwrapped(other): other for other in others}
    for name in names[:SHOWN]:
        near = get_close_matches(_unwrapped(name), known, n=1, cutoff=0.5)
        shown.append(_printable(name) + (f" (nearest {where}: {_printable(known[near[0]])})" if near else ""))
    return _some([*shown, *names[SHOWN:]])


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _some(names: Sequence[str], shown: int = SHOWN) -> str:
    """The first names and the number of the others."""
    more = f" and {len(names) - shown} more" * (len(names) > shown)
    return ", ".join(map(_printable, names[:shown])) + more


def _printable(name: str) -> str:
    """A name out of a file, without what would command a terminal."""
    return name if name.isprintable() else ascii(name)
