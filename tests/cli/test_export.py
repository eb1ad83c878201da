"""`checkpoint export --onnx` and `--as transformers`: the same outputs elsewhere, and what cannot be exported."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evenkeel import fit
from evenkeel.cli import export
from evenkeel.common.errors import Ended
from evenkeel.run.weights import read_weights
from evenkeel.tasks.command_line import parse_as_recorded
from tests.support.exported_task import Saves, points
from tests.support.processes import ROOT, checked
from tests.support.small_runs import SUPPORT, model_of, the_line, weights_of
from tests.support.typed import typed

TASKS = SUPPORT / "exported_task.py"
needs_onnx = pytest.mark.skipif(not find_spec("onnxscript"), reason="needs onnx, onnxscript and onnxruntime")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def run_of(runs: Path, task: str) -> Path:
    """A finished run of two steps, made when it is first asked for."""
    run_dir = runs / task.rpartition(":")[2]
    if not run_dir.exists():
        fit(task, run_dir=run_dir, max_steps=2, batch_size=8, limit_batches=2, wandb="disabled")
    return run_dir


def own(runs: Path, task: str) -> Path:
    return run_of(runs, f"{TASKS}:{task}")


def exported(*arguments: object, expect: int = 0) -> subprocess.CompletedProcess[str]:
    return checked(subprocess.CompletedProcess(arguments, *typed("checkpoint export", *arguments)), expect)


def refusal(*arguments: object, code: int = 2) -> str:
    return the_line(exported(*arguments, expect=code).stderr)


def test_a_model_with_save_pretrained_is_a_folder(runs: Path, tmp_path: Path) -> None:
    run_dir, folder = own(runs, "Line"), tmp_path / "folder"
    for spelled in ("--as", "--format"):
        done = exported(run_dir, spelled, "transformers", "-o", folder.with_name(spelled))
        (line,) = done.stdout.splitlines()
        assert line.endswith(f" -> {tmp_path / spelled}, sha256 of the weights {weights_of(run_dir)}")
        assert done.stderr == ""
        found = torch.load(tmp_path / spelled / "weights.pt", weights_only=True)
        torch.testing.assert_close(found, model_of(run_dir), rtol=0, atol=0)
    folder.mkdir()
    assert "exists already; name another file" in refusal(run_dir, "--as", "transformers", "-o", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["--as", "--format", "folder"]


def test_without_save_pretrained_or_space_nothing_is_left(runs: Path, tmp_path: Path) -> None:
    line = refusal(own(runs, "Keywords"), "--as", "transformers", "-o", tmp_path / "folder")
    assert line.startswith("--as transformers: the task's model, Words, has no save_pretrained(folder); use another")
    line = refusal(own(runs, "FullDisk"), "--as", "transformers", "-o", tmp_path / "folder", code=1)
    assert line == f"{tmp_path / 'folder'}: cannot be written: No space left on device"
    assert not list(tmp_path.iterdir())


def test_networks_that_are_called_apart_are_refused(runs: Path) -> None:
    run_dir = own(runs, "Parts")
    config, task, model = export.built(run_dir, model_of(run_dir), [])
    with pytest.raises(Exception, match=r"metrics\(\) of the task calls parts of the model \(a, b\) and not the model"):
        export.example_call(config, task, model, 2)


@pytest.mark.slow
def test_a_model_of_transformers_is_loaded_by_transformers(runs: Path, tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    example = ROOT / "examples" / "bert_of_transformers.py"
    if not example.exists():
        pytest.skip("the examples have been left out")
    run_dir = run_of(runs, f"{example}:Bert")
    exported(run_dir, "--as", "transformers", "-o", tmp_path / "bert")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert").eval()
    _, task = parse_as_recorded(run_dir, [])
    ours = task.model().eval()
    read_weights(ours, run_dir / "model.pt")
    words = task.test_dataset().tensors[0][:3]
    with torch.no_grad():
        assert torch.equal(theirs(words).logits, ours(words).logits)


@pytest.mark.parametrize("task", ["Line", "Keywords", "classify"])
def test_the_call_of_the_task_is_exported_for_any_number_of_samples(runs: Path, task: str) -> None:
    """As torch.onnx takes it, which needs more packages; this is torch.export alone."""
    run_dir = run_of(runs, task) if task == "classify" else own(runs, task)
    config, made, model = export.built(run_dir, model_of(run_dir), [])
    call = export.example_call(config, made, model, 2)
    assert len(call.tensors[0]) == 2
    shapes = export._shapes(model, call)
    program = torch.export.export(model, call.arguments, call.keywords, dynamic_shapes=shapes).module()
    more = export.example_call(config, made, model, 5)
    with torch.no_grad():
        expected, found = (it(*more.arguments, **more.keywords) for it in (model, program))
    torch.testing.assert_close(found, expected)
    assert len(more.tensors[0]) == 5


def test_what_cannot_be_meant_is_refused(runs: Path, tmp_path: Path) -> None:
    run_dir, file = own(runs, "Line"), tmp_path / "model.onnx"
    assert "--onnx FILE" in refusal(run_dir)
    assert "leave --output and --as out" in refusal(run_dir, "--onnx", file, "-o", tmp_path / "x")
    assert "only --onnx and --as transformers take options" in refusal(run_dir, "-o", file, "--", "--batch-size", 4)
    assert "there is no folder" in refusal(run_dir, "--onnx", tmp_path / "no" / "model.onnx")
    _, _, err = typed("checkpoint list", run_dir, "-- --epochs 2")
    assert "only `checkpoint export` takes options of train.py" in the_line(err)
    alone = tmp_path / "alone"
    (run_dir / "checkpoints").rename(alone)
    try:
        line = refusal(alone, "--as", "transformers", "-o", tmp_path / "x")
        assert "has no config.toml, and the model is made by the run's options; name a run directory" in line
    finally:
        alone.rename(run_dir / "checkpoints")
    file.write_text("mine")
    assert refusal(run_dir, "--onnx", file) == f"--onnx {file}: exists already; name another file"
    assert file.read_text() == "mine"
    if not find_spec("onnxscript"):
        line = refusal(run_dir, "--onnx", tmp_path / "other.onnx")
        assert line.endswith("needs the package onnx; pip install onnx onnxscript onnxruntime")


@needs_onnx
@pytest.mark.parametrize("task", ["Line", "Keywords"])
def test_onnx_computes_the_same(runs: Path, tmp_path: Path, task: str) -> None:
    run_dir, file = own(runs, task), tmp_path / "model.onnx"
    done = exported(run_dir, "--onnx", file)
    assert "; onnxruntime's outputs are torch's within " in done.stdout
    assert done.stdout.endswith(", for any number of samples\n")
    assert done.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"], "the weights are in it"
    runtime: Any = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    inputs, targets = points(19).tensors
    _, made = parse_as_recorded(run_dir, [])
    model = made.model()
    read_weights(model, run_dir / "model.pt")
    feed = {it.name: it_is.numpy() for it, it_is in zip(session.get_inputs(), (inputs, targets), strict=False)}
    with torch.no_grad():
        expected = model(inputs) if task == "Line" else model(inputs, scale=2.0, mask=targets)["found"]
    torch.testing.assert_close(torch.as_tensor(session.run(None, feed)[0]), expected)


@needs_onnx
def test_what_torch_cannot_export_is_a_line(runs: Path, tmp_path: Path) -> None:
    line = refusal(own(runs, "Branching"), "--onnx", tmp_path / "model.onnx", code=1)
    assert line.startswith(f"--onnx {tmp_path / 'model.onnx'}: torch cannot export this model: GuardOnDataDependent")
    assert not list(tmp_path.iterdir())


@needs_onnx
def test_the_control_other_outputs_end_the_export(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, file = own(runs, "Line"), tmp_path / "model.onnx"
    config, task, model = export.built(run_dir, model_of(run_dir), [])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        assert export.write_onnx(config, task, model, file).startswith("checked by onnx; pip install onnxruntime")
    call = export.example_call(config, task, model, 2)
    assert "for any number" in export._compared(file, file, model, [call])
    other = Saves(4, 1)
    nn.init.constant_(other.weight, 3.0)
    with pytest.raises(Ended, match="onnxruntime's outputs differ from torch's by"):
        export._compared(file, file, other, [call])
