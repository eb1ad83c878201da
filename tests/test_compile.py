"""`--compile` and `--channels-last`: the same bits through kills and resumes, and a start that calls no compiler."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from evenkeel import compilation
from evenkeel.checkpoint import Checkpoints
from evenkeel.compiled_code import CompiledCode
from evenkeel.config import Config, validate
from evenkeel.errors import Refusal
from evenkeel.optimization import load_optimizer
from evenkeel.placement import channels_last

from .processes import (
    TRAIN,
    checked,
    finish,
    finish_all,
    fork_ranks,
    read,
    records,
    run,
    run_forked,
    start,
    torchrun,
    wait_until,
)
from .test_mistakes import job as odd_job
from .test_train import job, kill_workers_and_agent, newest_checkpoint, wait_for_step

TAIL = 9
"""The step of the recording task's epoch with fewer samples."""


def compilers(folder: Path, pause: int = 0) -> dict[str, str]:
    """Variables with which each call of g++ leaves a line in folder/calls, and each that compiles takes longer."""
    wrapper, path = folder / "g++", os.environ["PATH"]
    slower = f'case "$*" in *"-o "*) sleep {pause};; esac'
    wrapper.write_text(f'#!/bin/sh\necho "$*" >> {folder}/calls\n{slower}\nPATH="{path}" exec g++ "$@"\n')
    wrapper.chmod(0o755)
    (folder / "tmp").mkdir()
    return {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder / "tmp")}


def compiled_files(folder: Path) -> int:
    """Calls that were for more than the compiler's version."""
    calls = folder / "calls"
    return sum("-o " in line for line in calls.read_text().splitlines()) if calls.exists() else 0


@pytest.mark.multiprocess
@pytest.mark.slow
def test_killed_before_the_tail_and_resumed_elsewhere_the_bits_are_the_same_and_nothing_is_compiled_twice(
    tmp_path: Path,
) -> None:
    """kill -9 just before the short step on 2 ranks, SIGTERM on 1, the rest on 2; a node of its own for each."""
    tree = ["--reduce", "tree", "--checkpoint-every", 2, "--ema", 0.9]
    finish_all(fork_ranks(1, TRAIN, *job(tmp_path / "undisturbed", *tree, "--compile")))
    finish_all(fork_ranks(1, TRAIN, *job(tmp_path / "eager", *tree)))

    run_dir, nodes = tmp_path / "run", [tmp_path / f"node-{i}" for i in range(3)]
    options = job(run_dir, *tree, "--compile", "--pause", 0.2)
    for node in nodes:
        node.mkdir()

    slow = ["--hang-timeout", "12"]  # the four compilations with which inductor begins take longer, and are no hang
    process = start(torchrun(2, TRAIN, *options, *slow), env=compilers(nodes[0], pause=4))
    wait_for_step(run_dir, TAIL - 1, process)
    wait_until(lambda: newest_checkpoint(run_dir) >= TAIL - 3, "a checkpoint")
    kill_workers_and_agent(process)
    assert compiled_files(nodes[0]) > 0, "the control: the first start calls the compiler"

    process = start([sys.executable, str(TRAIN), *options], env=compilers(nodes[1]))
    wait_for_step(run_dir, TAIL + 2, process)
    process.send_signal(signal.SIGTERM)
    checked(finish(process), 75)

    checked(finish(start(torchrun(2, TRAIN, *options), env=compilers(nodes[2]))), 0)
    assert compiled_files(nodes[2]) == 0
    last = records(run_dir, "compile")[-1]
    assert last["misses"] == 0
    assert last["hits"] > 0

    sha256 = {name: read(tmp_path / name)["weights_sha256"] for name in ("undisturbed", "eager", "run")}
    assert sha256["run"] == sha256["undisturbed"]
    assert sha256["eager"] != sha256["undisturbed"], "the control: compiled code is another one"
    exported = torch.load(run_dir / "model.pt", weights_only=True)
    assert list(exported) == list(torch.load(tmp_path / "eager" / "model.pt", weights_only=True))
    assert not list((nodes[2] / "tmp" / f"evenkeel-{os.geteuid()}").iterdir()), "a finished run leaves nothing there"


@pytest.mark.multiprocess
def test_without_a_compiler_it_is_refused_in_one_line(tmp_path: Path) -> None:
    options = [sys.executable, str(TRAIN), *job(tmp_path / "run"), "--compile"]
    done = run(options, env={"PATH": str(tmp_path), "CXX": "g++"}, expect=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("evenkeel: --compile: needs a C++ compiler on a CPU and there is none on PATH; install g++")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "option", [{"strategy": "dp"}, {"model_parallel": 2}, {"place": "a=0"}, {"sync_batchnorm": True}]
)
def test_what_cannot_be_compiled_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(Refusal, match=r"^--compile --(strategy dp|model-parallel|place|sync-batchnorm): "):
        validate(Config(compile=True, **option).resolved())  # type: ignore[arg-type]


SHAPES = """
import sys, torch
from torch import nn
from evenkeel.compilation import compile_networks
from torch._dynamo.utils import counters
model = nn.Linear(4, 2)
if sys.argv[1] == "ours":
    compile_networks(model, torch.device("cpu"), exact=True, whole=True)
else:
    model.compile()
with torch.no_grad():
    for samples in (8, 6, 5, 7):
        model(torch.zeros(samples, 4))
print(counters["stats"]["unique_graphs"])
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("whose", "graphs"), [("ours", "4"), ("control: torch's default", "2")])
def test_each_shape_has_its_own_graph(whose: str, graphs: str) -> None:
    assert run([sys.executable, "-c", SHAPES, whose]).stdout.split() == [graphs]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CompiledCode:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "run").mkdir()
    code = CompiledCode(tmp_path / "run", {"torch": "2"})
    code.unpack(begins=True)
    library = code.folder / "ab" / "cab.main.so"
    library.parent.mkdir()
    library.write_bytes(b"machine code")
    return code


def kept(code: CompiledCode) -> list[Path]:
    return sorted(path for path in code._zip.parent.iterdir())


def test_what_is_kept_comes_back_on_another_node(code: CompiledCode) -> None:
    code.pack()
    assert [path.stat().st_mode & 0o777 for path in kept(code)] == [0o600, 0o600]
    code.clear()
    assert code.unpack(begins=False) == ""
    assert (code.folder / "ab" / "cab.main.so").read_bytes() == b"machine code"
    code.unpack(begins=True)
    assert not list(code.folder.iterdir()), "a run that begins takes nothing"


def test_code_that_is_not_ours_or_not_whole_is_not_run(code: CompiledCode) -> None:
    code.pack()
    archive = code._zip
    whole = archive.read_bytes()

    def refused(because: str) -> None:
        assert because in code.unpack(begins=False)
        assert not list(code.folder.iterdir())

    archive.chmod(0o644)
    refused("open to others")
    archive.chmod(0o600)
    archive.write_bytes(whole[:-1])
    refused("not what was written")
    archive.write_bytes(whole)
    assert code.unpack(begins=False) == "", "the control"
    elsewhere = archive.rename(archive.with_name("elsewhere"))
    archive.symlink_to(elsewhere)
    refused("symbolic link")
    archive.unlink()
    refused("No such file")
    if os.geteuid() == 0:
        elsewhere.rename(archive)
        os.chown(archive, 12345, -1)
        refused("another user")


def test_a_library_that_is_being_linked_is_left_for_the_next_time(code: CompiledCode) -> None:
    locks = code.folder / "locks"
    locks.mkdir()
    with (locks / "cab.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code.pack()
    assert json.loads(code._note.read_text())["files"] == 0
    code.pack()
    assert json.loads(code._note.read_text())["files"] == 1


def test_a_folder_where_others_may_write_is_refused(code: CompiledCode, tmp_path: Path) -> None:
    code.folder.parent.chmod(0o777)
    with pytest.raises(Refusal, match="others may write there"):
        CompiledCode(tmp_path / "run", {})


def test_dynamo_says_in_one_line_that_there_are_too_many_shapes(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    record = logging.LogRecord("x", 30, "x", 1, "torch._dynamo hit config.%s (%s)", ("recompile_limit", 64), None)
    assert not compilation._tell_of_too_many_shapes(record)
    assert "64 shapes" in caplog.text


@pytest.mark.multiprocess
def test_channels_last_killed_and_resumed_on_other_numbers_of_ranks_the_bits_are_the_same(tmp_path: Path) -> None:
    def options(run_dir: str, *more: object) -> list[object]:
        data = ["--dataset", "fake", "--fake-samples", 100, "--image-size", 8, "--width", 8]
        cut = ["--batch-size", 16, "--micro-batch", 4, "--epochs", 4, "--reduce", "tree", "--ema", 0.9]
        told = ["--log-every", 1, "--checkpoint-every", 3, "--wandb", "disabled"]
        return ["--run-dir", tmp_path / run_dir, *data, *cut, *told, *more]

    for run_dir, more in ("usual", []), ("undisturbed", ["--channels-last"]):
        finish_all(fork_ranks(1, TRAIN, *options(run_dir, *more)))
    disturbed = options("run", "--channels-last")
    for ranks, number in ((2, signal.SIGKILL), (0, signal.SIGTERM), (4, signal.SIGKILL)):
        before = newest_checkpoint(tmp_path / "run") if (tmp_path / "run").exists() else 0
        processes = fork_ranks(ranks, TRAIN, *disturbed)
        wait_until(lambda before=before: newest_checkpoint(tmp_path / "run") > before, "a checkpoint")  # type: ignore[misc]
        for process in processes:
            process.send_signal(number)
        for process in processes:
            finish(process)
    finish_all(fork_ranks(3, TRAIN, *disturbed))
    sha256 = {name: read(tmp_path / name)["weights_sha256"] for name in ("usual", "undisturbed", "run")}
    assert sha256["run"] == sha256["undisturbed"]
    assert all(value.is_contiguous() for value in torch.load(tmp_path / "run" / "model.pt", weights_only=True).values())


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
        load(its, saved, resumed)
        assert torch.equal(step(resumed, its), expected) is same


def test_what_a_task_has_compiled_stays_compiled_without_a_name_of_its_own() -> None:
    torch.manual_seed(0)
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(len(module.graph.nodes))
        return module.forward

    inner, called = nn.Linear(3, 4), []
    model = nn.Sequential(torch.compile(inner, backend=backend), nn.Linear(4, 2))  # type: ignore[arg-type]
    model[0].register_forward_hook(lambda *_: called.append(1))  # of the wrapper
    whole = torch.compile(model, backend=backend)
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


@pytest.mark.multiprocess
def test_a_run_of_a_compiled_model_leaves_bare_names_and_goes_on_from_those_that_it_had(tmp_path: Path) -> None:
    def attempt(task: str, steps: int, run_dir: str = "run", *more: object) -> str:
        options = odd_job(task, tmp_path / run_dir, "--ema", 0.9, "--schedule", "constant", "--max-steps", steps, *more)
        return run_forked(TRAIN, *options).stdout

    attempt("CompiledByItself", 2)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(torch.load(tmp_path / "run" / "model.pt", weights_only=True)) == names
    assert list(state["model"]) == list(state["ema"]) == names

    shutil.copytree(tmp_path / "run", tmp_path / "old")  # with the names that it had in earlier versions
    wrapped = dict(zip(names, ["0._orig_mod.weight", "0._orig_mod.bias", "1.weight", "1.bias"], strict=True))
    for part in ("model", "ema"):
        state[part] = {f"_orig_mod.{wrapped[name]}": value for name, value in state[part].items()}
    for folder in (tmp_path / "old" / "checkpoints").iterdir():
        shutil.rmtree(folder)
    Checkpoints(tmp_path / "old" / "checkpoints", 2, ("loss", "min")).save(state, {})
    evaluated = [attempt("CompiledByItself", 2, name, "--eval-only") for name in ("run", "old")]
    first, second = (json.loads(told.splitlines()[-1])["evaluation"]["metrics"] for told in evaluated)
    assert first == second
    for name in ("run", "old"):
        attempt("CompiledByItself", 4, name)
    assert read(tmp_path / "old")["weights_sha256"] == read(tmp_path / "run")["weights_sha256"]
