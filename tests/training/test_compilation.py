"""`--compile` and `--channels-last`: the same bits through kills and resumes, and a start that calls no compiler."""

import fcntl
import io
import os
import re
import struct
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from evenkeel.common.errors import Refusal
from evenkeel.distributed.placement import channels_last
from evenkeel.run import compiled_code
from evenkeel.run.compiled_code import CompiledCode
from evenkeel.training import compilation
from evenkeel.training.optimization import load_optimizer


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledCode:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setattr(compiled_code, "ASKED", "")  # which an earlier test's compiler may have set
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "run").mkdir()
    code = CompiledCode(tmp_path / "run", {"torch": "2"})
    code.unpack(starts_over=True)
    library = code.folder / "ab" / "cab.main.so"
    library.parent.mkdir()
    library.write_bytes(b"machine code")
    return code


def kept(code: CompiledCode) -> list[str]:
    return [name for name in zipfile.ZipFile(code.archive).namelist() if name.endswith(".so")]


def test_what_is_kept_comes_back_on_another_node(code: CompiledCode) -> None:
    os.utime(code.folder / "ab" / "cab.main.so", (0, 0))  # of a machine whose clock was not set
    code.pack()
    assert code.archive.stat().st_mode & 0o777 == 0o600
    code.clear()
    assert code.unpack(starts_over=False) == ""
    assert (code.folder / "ab" / "cab.main.so").read_bytes() == b"machine code"
    code.unpack(starts_over=True)
    assert not list(code.folder.iterdir()), "a run that begins takes nothing"


def test_an_archive_writes_nothing_outside_its_folder(code: CompiledCode, tmp_path: Path) -> None:
    code.pack()
    before = {*tmp_path.rglob("*")}
    code.archive.write_bytes(zipped(["../../evil.so", f"{tmp_path}/evil.so", "ab/../../../evil.so"]))
    code.unpack(starts_over=False)
    new = {path for path in {*tmp_path.rglob("*")} - before if not path.is_relative_to(code.folder)}
    assert not new


def test_code_that_is_not_ours_or_not_whole_is_not_run(code: CompiledCode) -> None:
    code.pack()
    archive = code.archive
    whole = archive.read_bytes()

    def refused(because: str) -> None:
        assert because in code.unpack(starts_over=False)
        assert not list(code.folder.iterdir())

    archive.chmod(0o644)
    refused("open to others")
    archive.chmod(0o600)
    archive.write_bytes(whole[:-1])
    refused("not a zip file")
    middle = whole.index(b"cab.main.so") + 15
    archive.write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
    refused("it is not used")
    archive.write_bytes(whole)
    assert code.unpack(starts_over=False) == "", "the control"
    elsewhere = archive.rename(archive.with_name("elsewhere"))
    archive.symlink_to(elsewhere)
    refused("symbolic link")
    archive.unlink()
    if os.geteuid() == 0:
        elsewhere.rename(archive)
        os.chown(archive, 12345, -1)
        refused("another user")


def zipped(names: Sequence[str] = ("a.so", "b.so"), **fields: int) -> bytes:
    """An archive with fields of its headers changed: flags, method, declared size."""
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, b"machine code")
    content = bytearray(file.getvalue())
    places = {"flags": (6, 8, "<H"), "method": (8, 10, "<H"), "size": (22, 24, "<I")}
    for field, value in fields.items():
        *offsets, form = places[field]
        for mark, offset in zip((b"PK\3\4", b"PK\1\2"), offsets, strict=True):
            for start in re.finditer(re.escape(mark), content):
                struct.pack_into(form, content, start.start() + int(offset), value)
    return bytes(content)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (zipped(flags=1), "File 'a.so' is encrypted, password required"),
        (zipped(method=99), "compression method is not supported"),
        (zipped(method=14), "it is not used"),
        (zipped(method=12), "it is not used"),
        (zipped(size=2**32 - 16), "its files have 8,589,934,560 bytes; at most"),
        (zipped(["a.so", "a.so/b.so"]), "it is not used"),
        (zipped()[:-30], "not a zip file"),
    ],
)
def test_an_archive_that_cannot_be_read_is_compiled_anew(code: CompiledCode, content: bytes, line: str) -> None:
    code.pack()
    code.archive.write_bytes(content)
    assert line in (told := code.unpack(starts_over=False))
    assert "\n" not in told
    assert not list(code.folder.iterdir()), "nor a part of it"


def test_a_library_that_is_being_linked_is_left_for_the_next_time(code: CompiledCode) -> None:
    locks = code.folder / "locks"
    locks.mkdir()
    with (locks / "cab.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code.pack()
    assert kept(code) == []
    code.pack()
    assert kept(code) == ["ab/cab.main.so"]


def test_a_folder_where_others_may_write_is_refused(code: CompiledCode, tmp_path: Path) -> None:
    code.folder.parent.chmod(0o777)
    with pytest.raises(Refusal, match="others may write there"):
        CompiledCode(tmp_path / "run", {})


def test_an_optimizer_takes_up_a_state_whose_memory_has_another_order() -> None:
    def network() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 5, 3)
        channels_last(model)
        return model, torch.optim.AdamW(model.parameters(), 0.1, fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        model(torch.linspace(0, 1, 2 * 3 * 6 * 6).view(2, 3, 6, 6)).square().mean().backward()
        optimizer.step()
        return next(model.parameters()).detach().clone()

    model, optimizer = network()
    step(model, optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    saved["state"] = {  # as a broadcast leaves it
        number: {name: value.clone().contiguous() for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    optimizer.zero_grad()
    expected = step(model, optimizer)
    for load, same in ((load_optimizer, True), (lambda o, s, _: o.load_state_dict(s), False)):
        resumed, its = network()
        resumed.load_state_dict(weights)
        load(its, saved, resumed.parameters())
        assert torch.equal(step(resumed, its), expected) is same


@pytest.fixture
def graphs() -> list[int]:
    """What `counted` has compiled since the test began."""
    torch._dynamo.reset()
    counted.graphs = []  # type: ignore[attr-defined]
    return counted.graphs  # type: ignore[attr-defined,no-any-return]


def counted(module: torch.fx.GraphModule, _inputs: object) -> object:
    """A backend of torch.compile that only counts."""
    counted.graphs.append(len(module.graph.nodes))  # type: ignore[attr-defined]
    return module.forward


def test_what_a_task_has_compiled_stays_compiled_without_a_name_of_its_own(graphs: list[int]) -> None:
    inner, called = nn.Linear(3, 4), []
    model = nn.Sequential(torch.compile(inner, backend=counted), nn.Linear(4, 2))  # type: ignore[arg-type]
    model[0].register_forward_hook(lambda *_: called.append(1))  # of the wrapper
    whole = torch.compile(model, backend=counted)
    assert any("_orig_mod" in name for name in whole.state_dict()), "the control"
    expected = whole(torch.ones(2, 3))
    torch._dynamo.reset()
    graphs.clear(), called.clear()

    found = compilation.in_place(whole)  # type: ignore[arg-type]
    assert list(found.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert found is model
    assert found[0] is inner  # type: ignore[index]
    assert torch.equal(found(torch.ones(2, 3)), expected)
    assert graphs
    assert called
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert compilation.in_place(plain) is plain
    graphs.clear()
    plain(torch.ones(2, 3))
    assert not graphs


def test_networks_of_torchs_own_classes_are_compiled_like_others_each_for_itself(graphs: list[int]) -> None:
    """torch 2.8 to 2.11 leave out what `nn.Sequential(...).compile()` is called on."""

    class Own(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).relu()

    layers, values = [nn.Linear(3, 4), nn.Linear(4, 2)], torch.ones(2, 3)
    networks = [nn.Linear(3, 4), nn.Sequential(*layers), nn.Sequential(nn.Linear(3, 4), nn.Tanh()), Own(*layers)]
    for number, network in enumerate(networks, 1):
        expected = network(values)
        network._compiled_call_impl = torch.compile(compilation._call(network), backend=counted)  # type: ignore[arg-type]
        for _ in range(2):
            assert torch.equal(network(values), expected)
        assert len(graphs) == number
