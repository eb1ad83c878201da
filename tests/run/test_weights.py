"""Weights from files of all kinds: real wrappers write them, and no file is taken in part without a word."""

import argparse
import os
import random
import shlex
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.nn.utils import parametrizations

from evenkeel.common.errors import Refusal
from evenkeel.run.weights import SHOWN, WRAPPERS, read_weights, write
from evenkeel.training.state_dicts import sha256
from tests.support.processes import ROOT, run
from tests.support.raised import refusal_of

SIZES = (4, 6, 3)


class Net(nn.Module):
    """Parameters, buffers with a count of steps, tied weights, and a tensor at the root."""

    def __init__(self, sizes: tuple[int, int, int] = SIZES) -> None:
        super().__init__()
        before, between, after = sizes
        self.scale = nn.Parameter(torch.randn(between))
        self.body = nn.Sequential(nn.Linear(before, between), nn.BatchNorm1d(between), nn.Linear(between, between))
        self.again = nn.Linear(between, between)
        self.again.weight = self.body[2].weight
        self.head = nn.Linear(between, after)
        self.register_buffer("seen", torch.randint(1, 100, ()))
        self.body[1].num_batches_tracked.random_(1, 100)


class Taken(nn.Module):
    """A model that really has a submodule `module`, and beside it a tensor of the same name as one in there."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.randn(2, 2))


ddp, compiled = nn.parallel.DistributedDataParallel, torch.compile


WRAPPINGS: dict[str, list[Callable[[nn.Module], nn.Module]]] = {
    "bare": [],
    "DataParallel": [nn.DataParallel],
    "DDP": [ddp],
    "compiled": [compiled],
    "compiled DDP": [ddp, compiled],
    "DDP of compiled": [compiled, ddp],
    "all of them": [compiled, nn.DataParallel, ddp, compiled],
}


def wrapped(model: nn.Module, name: str) -> nn.Module:
    for wrapper in WRAPPINGS[name]:
        model = wrapper(model)
    return model


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A process group of one, which DDP asks for."""
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "old.pt"


def same(one: nn.Module, other: nn.Module) -> bool:
    return sha256(one.state_dict()) == sha256(other.state_dict())


def refusal(model: nn.Module, path: Path, partial: bool = False) -> str:
    message = refusal_of(read_weights, model, path, partial)
    assert message.startswith(f"--init-from {path}")
    assert message.isprintable()
    return message


def test_the_control_a_silent_load_of_a_file_of_ddp_leaves_the_model_random(file: Path) -> None:
    torch.save(ddp(Net()).state_dict(), file)
    model = Net()
    before = sha256(model.state_dict())
    model.load_state_dict(torch.load(file, weights_only=True), strict=False)
    assert sha256(model.state_dict()) == before, "no error, and nothing was loaded"
    read_weights(model, file)
    assert sha256(model.state_dict()) != before


KINDS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "taken": Taken,
    "only a submodule `module`": lambda: nn.Sequential(OrderedDict(module=nn.Sequential(nn.Linear(2, 2)))),
    "two networks, each perhaps wrapped by itself": lambda: nn.ModuleDict({"generator": Net(), "critic": Net()}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WRAPPINGS)
def test_any_nesting_of_wrappers(name: str, kind: str, file: Path) -> None:
    make = KINDS[kind]
    saved, model = make(), make()
    weights = wrapped(saved, name).state_dict()
    torch.save(weights, file)
    assert not same(saved, model), "the control"
    told = ": ".join(read_weights(model, file))
    assert same(saved, model)
    assert told == f"{file}: all {len(weights)} tensors of the model are from it"

    file.unlink()
    save_file({name: value.clone() for name, value in weights.items()}, file)
    model = make()
    read_weights(model, file)
    assert same(saved, model), "as safetensors, whatever the file is called"


def test_what_looks_like_a_wrapper_stays_where_the_model_has_it(file: Path) -> None:
    """To strip every `module.` would give `weight` twice, and one of the two to the wrong tensor."""
    saved, model = Taken(), Taken()
    names = list(ddp(saved).state_dict())
    assert [name.replace("module.", "") for name in names].count("weight") == 2
    torch.save(ddp(saved).state_dict(), file)
    read_weights(model, file)
    assert torch.equal(model.weight, saved.weight)
    assert torch.equal(model.module.weight, saved.module.weight)
    torch.save(saved.module.state_dict(), file)
    assert "2 missing: weight" in refusal(model, file), "it may be either, so it is neither"
    plain, weights = nn.Linear(2, 2), saved.module.state_dict()
    torch.save({f"module.{name}": torch.zeros_like(value) for name, value in weights.items()} | weights, file)
    assert "4 unexpected: module.weight (nearest in the model: weight), module.bias" in refusal(plain, file)


class Named(nn.Module):
    """A random tree of modules, many of which are called as wrappers call theirs."""

    def __init__(self, dice: random.Random, depth: int = 3) -> None:
        super().__init__()
        for name in dice.sample(["weight", "bias", "w"], dice.randint(0 if depth else 1, 2)):
            self.register_parameter(name, nn.Parameter(torch.randn(2)))
        for name in dice.sample(["module", "_orig_mod", "a", "b"], dice.randint(0, 3) if depth else 0):
            self.add_module(name, Named(dice, depth - 1))


def names_if_wrapped_anywhere(model: nn.Module, dice: random.Random, often: float) -> dict[str, str]:
    """The model's names -> those in a file of it with wrappers around any of its modules."""
    many = dice.choice([1, 2]) if dice.random() < often else 0
    before = "".join(f"{dice.choice(WRAPPERS)}." for _ in range(many))
    names = {name: before + name for name, _ in model.named_parameters(recurse=False)}
    for part, child in model.named_children():
        inner = names_if_wrapped_anywhere(child, dice, often)
        names |= {f"{part}.{name}": f"{before}{part}.{its}" for name, its in inner.items()}
    return names


def test_random_models_with_wrappers_in_random_places(file: Path) -> None:
    """Where a name might mean two tensors the file is refused; never is one taken for the other."""
    stripped = 0
    for seed in range(300):
        saved, model = Named(random.Random(seed)), Named(random.Random(seed))
        weights = saved.state_dict()
        names = names_if_wrapped_anywhere(saved, random.Random(-seed), often=(0, 0.3, 1)[seed % 3])
        if weights:
            torch.save({names[name]: value for name, value in weights.items()}, file)
            try:
                read_weights(model, file)
            except Refusal:
                continue
            assert same(saved, model), (seed, names)
            stripped += any(name != its for name, its in names.items())
    assert stripped > 50


@pytest.mark.parametrize(
    "place", ["state_dict", "model", "net", "network", "model_state_dict", "weights", "my_own", "model.state_dict"]
)
def test_the_usual_dictionaries(place: str, file: Path) -> None:
    saved, model = Net(), Net()
    optimizer = torch.optim.Adam(saved.parameters())
    sum(p.sum() for p in saved.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    tree: Any = ddp(saved).state_dict()
    for part in reversed(place.split(".")):
        tree = {part: tree}
    torch.save(tree | {"epoch": 3, "best": torch.tensor(0.9), "optimizer": optimizer.state_dict()}, file)
    told = ": ".join(read_weights(model, file))
    assert same(saved, model)
    assert told.startswith(f"{file}, its {place}: all ")


def test_an_average_beside_the_model_is_not_taken_for_it(file: Path) -> None:
    saved, average, model = Net(), Net(), Net()
    torch.save({"model_ema": average.state_dict(), "model": saved.state_dict()}, file)
    read_weights(model, file)
    assert same(saved, model)
    torch.save({"net": average.state_dict(), "model": saved.state_dict()}, file)
    assert "weights that fit are in net and in model; save the ones you want" in refusal(model, file)
    torch.save({"average": average.state_dict()}, file)
    read_weights(model, file)
    assert same(average, model)


def test_a_file_from_a_gpu_loads_without_one(file: Path, tmp_path: Path) -> None:
    saved, model = Net(), Net()
    torch.save(saved.state_dict(), tmp_path / "cpu.pt")
    with zipfile.ZipFile(tmp_path / "cpu.pt") as source, zipfile.ZipFile(file, "w") as target:
        for name in source.namelist():  # what torch.save writes on the GPU 0
            content, cpu, gpu = source.read(name), b"X\x03\0\0\0cpu", b"X\x06\0\0\0cuda:0"
            target.writestr(name, content.replace(cpu, gpu) if name.endswith("data.pkl") else content)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="deserialize object on a CUDA device"):  # the control
            torch.load(file, weights_only=True)
    read_weights(model, file)
    assert same(saved, model)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


def test_names_and_shapes_that_differ_are_listed_with_the_nearest(file: Path) -> None:
    weights = ddp(Net()).state_dict()
    weights["module.classifier.head_weight"] = weights.pop("module.head.weight")
    weights["module.head.bias"] = torch.zeros(5)
    weights["module.seen"] = torch.tensor(0.5)
    torch.save({"state_dict": weights}, file)
    assert refusal(Net(), file) == (
        f"--init-from {file}, its state_dict: does not fit the model: "
        "1 missing: head.weight (nearest in the file: module.classifier.head_weight); "
        "1 unexpected: module.classifier.head_weight (nearest in the model: head.weight); "
        "2 of another shape: seen is float32 [], the model's int64 [], head.bias is float32 [5], the model's "
        "float32 [3]; fix the model's options or the file; --init-partial loads what fits and leaves the rest random"
    )


def test_partial_takes_what_fits_and_says_what_stayed_random(file: Path) -> None:
    saved, model = Net(), Net((4, 6, 9))
    weights = compiled(saved).state_dict()
    del weights["_orig_mod.body.1.num_batches_tracked"]
    weights["_orig_mod.extra"] = torch.zeros(1)
    torch.save(weights, file)
    assert "1 missing: body.1.num_batches_tracked" in refusal(model, file), "buffers count"
    model = Net((4, 6, 9))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert ": ".join(read_weights(model, file, partial=True)) == (
        f"{file}: 12 of the model's 15 tensors are from it; 3 stayed as initialised: "
        "body.1.num_batches_tracked (not in the file), head.weight (float32 [3, 6], the model's float32 [9, 6]), "
        "head.bias (float32 [3], the model's float32 [9]); 1 in the file are not used: _orig_mod.extra"
    )
    random = {"body.1.num_batches_tracked", "head.weight", "head.bias"}
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name in random else saved.state_dict()[name]), name


def test_long_lists_are_cut_and_names_do_not_reach_the_terminal_as_commands(file: Path) -> None:
    torch.save({"a\x1b[2Jb\nc": torch.zeros(1)} | {f"{i}": torch.zeros(1) for i in range(999)}, file)
    message = refusal(Net(), file)
    assert r"1000 unexpected: 'a\x1b[2Jb\nc', 0, 1 and 997 more;" in message
    assert f"and {15 - SHOWN} more;" in message
    assert len(message) < 1000


def test_a_file_of_which_nothing_fits_is_refused_with_partial_too(file: Path) -> None:
    model = Net()
    before = sha256(model.state_dict())
    for weights in ({"other": torch.zeros(1)}, {"head.bias": torch.zeros(99)}):
        torch.save(weights, file)
        for partial in (False, True):
            assert refusal(model, file, partial).endswith(
                "nothing in it fits, so --init-partial would not help; name a file of this model"
            )
    assert sha256(model.state_dict()) == before


def test_tied_weights(file: Path) -> None:
    saved, model = Net(), Net()
    save_model(saved, str(file))  # which writes a tensor under one of its names
    assert len(load_file(file)) == len(saved.state_dict()) - 1
    read_weights(model, file)
    assert same(saved, model)
    torch.save({name: value.clone() for name, value in saved.state_dict().items()}, file)
    read_weights(model := Net(), file)
    assert same(saved, model), "under both names, as copies"
    torch.save(saved.state_dict() | {"again.weight": torch.zeros(6, 6)}, file)
    for partial in (False, True):
        message = refusal(Net(), file, partial)
        assert "body.2.weight, again.weight, which are one tensor in the model, differ in the file" in message


def test_other_types_of_numbers_and_a_model_that_is_wrapped_itself(file: Path) -> None:
    saved, model = Net().bfloat16(), Net()
    torch.save(saved.state_dict(), file)
    told = read_weights(compiled(model), file, partial=True)
    assert told[1].endswith("are from it; --init-partial was not needed")
    assert model.scale.dtype == torch.float32
    assert torch.equal(model.scale, saved.scale.float())


def test_old_names_that_the_model_itself_understands(file: Path) -> None:
    """weight_norm of former years, which today's reads by a hook."""
    with pytest.warns(FutureWarning):
        saved = nn.Sequential(nn.utils.weight_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)), nn.BatchNorm1d(2))
    weights = ddp(saved).state_dict()
    assert "module.0.weight_g" in weights
    torch.save(weights, file)
    read_weights(model, file)
    images = torch.randn(5, 2)
    assert torch.equal(model.eval()(images), saved.eval()(images))

    del weights["module.1.num_batches_tracked"]
    torch.save(OrderedDict(weights), file)
    model.load_state_dict({name.removeprefix("module."): value for name, value in weights.items()})  # the control
    assert "missing: 1.num_batches_tracked" in refusal(model, file), "a file without versions is not an old one"


class Pickled(nn.Linear):
    """A module whose file names this one."""


RAN = "EVENKEEL_TEST_CODE_WAS_RUN"


class Hostile:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return exec, (f"import os; os.environ[{RAN!r}] = 'yes'",)


def convert(message: str, cwd: Path | None = None) -> None:
    """Do what a refusal says: type its command in a folder, or run its program here."""
    command = message[message.index("python -c") :]
    if cwd:
        path = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        run(["bash", "-c", command.replace("python", shlex.quote(sys.executable), 1)], cwd, path)
    else:
        _, option, program, *words = shlex.split(command)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [option, *words])
            exec(program, {})


@pytest.mark.parametrize(("what", "zipped"), [("module", True), ("namespace", False)])
def test_files_that_hold_code_are_refused_with_the_way_to_convert_them(what: str, zipped: bool, file: Path) -> None:
    saved, model = Pickled(2, 2), nn.Linear(2, 2)
    dictionary = {"model": saved.state_dict(), "args": argparse.Namespace(lr=1.0), "epoch": 3}
    torch.save(saved if what == "module" else dictionary, file, _use_new_zipfile_serialization=zipped)
    message = refusal(model, file)
    assert "has more than tensors: reading it would run its code (" in message
    assert (f"{__name__}.Pickled" if what == "module" else "argparse.Namespace") in message
    assert "if you trust its author, convert it once" in message
    convert(message, ROOT if zipped else None)
    read_weights(model, file.with_name("old-weights.pt"))
    assert same(saved, model)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_is_run(zipped: bool, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAN, "no")
    torch.save({"model": Net().state_dict(), "x": Hostile()}, file, _use_new_zipfile_serialization=zipped)
    assert "would run its code (" in refusal(Net(), file)
    assert os.environ[RAN] == "no"
    torch.load(file, weights_only=False)
    assert os.environ[RAN] == "yes", "the control"


def test_a_torchscript_program_is_refused_with_the_way_to_convert_it(file: Path) -> None:
    saved, model = Net(), Net()
    with pytest.warns():  # torch would have programs exported instead
        torch.jit.save(torch.jit.trace(saved.body, torch.randn(2, 4)), str(file))
    message = refusal(saved.body, file)
    assert "a TorchScript program" in message
    convert(message)
    read_weights(model.body, file.with_name("old-weights.pt"))
    assert same(saved.body, model.body)


def truncated(file: Path) -> bytes:
    return file.read_bytes()[:-60]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a file of torch.save or safetensors, or is damaged (EOFError)"),
        (b"hello\n" * 9, "or is damaged ("),
        (b"\x80\x02}q\x00.", "or is damaged ("),
        (b"\x10\0\0\0\0\0\0\0{}", "or is damaged (SafetensorError: "),
        (truncated, "or is damaged ("),
    ],
    ids=["empty", "text", "pickle", "safetensors", "cut"],
)
def test_files_that_are_something_else(content: Any, expected: str, file: Path) -> None:
    torch.save(Net().state_dict(), file)
    file.write_bytes(content(file) if callable(content) else content)
    assert expected in refusal(Net(), file)


@pytest.mark.parametrize("form", ["bare", "dp", "safetensors"])
def test_what_is_written_loads_where_it_is_meant_to(form: str, file: Path) -> None:
    saved, model = Net(), Net()
    with file.open("wb") as opened:
        write(saved.state_dict(), form, opened)
    if form == "safetensors":
        model.load_state_dict(load_file(file))
    else:
        target = nn.DataParallel(model) if form == "dp" else model
        target.load_state_dict(torch.load(file, weights_only=True))
    assert same(saved, model)
    read_weights(model := Net(), file)
    assert same(saved, model)


def test_safetensors_holds_nothing_but_tensors(file: Path) -> None:
    weights: dict[str, Any] = {"a": torch.zeros(1), "b._extra_state": {"n": 1}}
    with file.open("wb") as opened, pytest.raises(Refusal, match=r"^--as safetensors: .*b\._extra_state is not one"):
        write(weights, "safetensors", opened)


def test_files_without_named_tensors(file: Path, tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], file)
    assert refusal(Net(), file).endswith("has no named tensors, only a list")
    torch.save({"epoch": 3, "loss": 0.5}, file)
    assert refusal(Net(), file).endswith("has no named tensors, only a dict with epoch, loss")
    assert "a folder without checkpoints; name a file, a run directory or a step-* folder" in refusal(Net(), tmp_path)
