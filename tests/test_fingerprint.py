"""What bits depend on: which parts there are, and that a run which goes on elsewhere says so, or refuses."""

from __future__ import annotations

import importlib
import json
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import evenkeel
from evenkeel.arithmetic import EXACT_NCCL, fix_arithmetic
from evenkeel.classify import Classify
from evenkeel.fingerprint import NOT_COMPUTING, describe, differences, differences_among_ranks, fingerprint
from evenkeel.processes import REFUSAL
from evenkeel.tasks import load_task

from .processes import TRAIN, finish_all, fork_ranks, read, records, run, run_forked, torchrun
from .test_checkpoint import flip_a_bit
from .test_inspection import contents_of
from .test_train import job

CPU = torch.device("cpu")
OTHER = {"ATEN_CPU_CAPABILITY": "default"}
"""Kernels without vectors: the bits of another machine, on this one."""


def another_machine(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """A test of real runs that needs one."""
    vectors = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    skip = pytest.mark.skipif(not vectors, reason="this machine has no vectors to switch off")
    return pytest.mark.multiprocess(skip(test))


def own_task(folder: Path, factor: str) -> dict[str, str]:
    """The fingerprint of a task in a file of its own, which imports a module beside it."""
    folder.mkdir()
    (folder / "my_fingerprinted_task.py").write_text(
        "from evenkeel.classify import Classify\nimport my_helper\nclass Mine(Classify): ...\n"
    )
    (folder / "my_helper.py").write_text(f"FACTOR = {factor}\n")
    (folder / "never_imported.py").write_text(f"FACTOR = {factor}\n")
    try:
        return fingerprint(load_task(f"{folder / 'my_fingerprinted_task.py'}:Mine")(), CPU)
    finally:
        sys.path.remove(str(folder))
        for name in ("my_fingerprinted_task", "my_helper"):
            del sys.modules[name]
        importlib.invalidate_caches()


def test_with_exact_bits_on_gpus_nccl_has_one_order_of_adding_and_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*EXACT_NCCL, "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # or it would not be put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_PROTO", "LL")
    try:
        fix_arithmetic(exact=True)
        assert "env:NCCL_ALGO" not in fingerprint(Classify(), CPU), "the control: there is no GPU"
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        fix_arithmetic(exact=False)
        assert "env:NCCL_ALGO" not in fingerprint(Classify(), CPU)
        fix_arithmetic(exact=True)
    finally:
        torch.use_deterministic_algorithms(False)
    found = fingerprint(Classify(), CPU)
    assert {name: found[f"env:{name}"] for name in EXACT_NCCL} == EXACT_NCCL | {"NCCL_PROTO": "LL"}, "as the user says"


@pytest.mark.multiprocess
def test_libraries_count_that_the_task_uses_only_later() -> None:
    """Pillow decodes the first file, and torchvision mixes the first micro-batch, when the run has long begun."""
    look = "import torch; from evenkeel.fingerprint import fingerprint; from evenkeel.classify import Classify"
    names = "sorted({'pillow', 'torchvision'} & set(fingerprint(Classify(mixup=mixup), torch.device('cpu'))))"
    done = run([sys.executable, "-c", f"{look}; print(*({names} for mixup in (0.0, 0.2)))"])
    assert done.stdout == "[] ['pillow', 'torchvision']\n"


def test_it_is_flat_and_the_same_twice() -> None:
    found = fingerprint(Classify(), CPU)
    assert found == fingerprint(Classify(), CPU)
    assert json.loads(json.dumps(found)) == found
    assert all(type(value) is str and value for value in found.values())
    assert found["device"] == "cpu"
    assert "code:evenkeel/gradients.py" in found
    assert "cudnn" not in found, "it does not compute here"


def test_what_torch_is_told_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = fingerprint(Classify(), CPU), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    try:
        found = differences(before, fingerprint(Classify(), CPU))
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert found == {
        "threads": (str(threads), str(threads + 1)),
        "deterministic": ("False", "True"),
        "default_dtype": ("torch.float32", "torch.float64"),
        "env:MKL_CBWR": ("(none)", "COMPATIBLE"),
    }


def test_the_number_of_ranks_and_the_place_do_not_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = fingerprint(Classify(), CPU)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.chdir(tmp_path)
    assert fingerprint(Classify(), CPU) == before


def test_the_code_of_a_task_and_what_it_imports_from_its_folder_count(tmp_path: Path) -> None:
    one, same, other = (own_task(tmp_path / name, factor) for name, factor in [("a", "1"), ("b", "1"), ("c", "2")])
    assert one == same, "the folder's name does not count"
    assert "code:my_fingerprinted_task.py" in one
    assert "code:never_imported.py" not in one
    assert list(differences(one, other)) == ["code:my_helper.py"]


def test_no_installed_package_counts_as_code_of_a_task_that_lies_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository with its .venv in it."""
    module = types.ModuleType("job_beside_packages")
    module.__file__ = str(Path(sysconfig.get_path("purelib")).parents[2] / "job.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(Classify, "__module__", module.__name__)
    found = fingerprint(Classify(), CPU)
    assert not [name for name in found if "torch/" in name or "numpy/" in name]
    assert "code:evenkeel/tasks.py" in found


def test_a_module_of_evenkeel_computes_until_somebody_has_thought_about_it() -> None:
    modules = {path.stem for path in Path(evenkeel.__file__).parent.glob("*.py")}
    assert modules >= NOT_COMPUTING, "no name of the past"
    assert not NOT_COMPUTING & {"data", "gradients", "models", "optimization", "order", "plan", "randomness", "state"}


def test_differences_in_words() -> None:
    assert differences({"a": "1", "b": "2", "d": "4"}, {"c": "3", "a": "1", "b": "3"}) == {
        "c": ("(none)", "3"),
        "b": ("2", "3"),
        "d": ("4", "(none)"),
    }
    assert differences({}, {"a": "1"}) == {"fingerprint": ("(none)", "kept")}, "a checkpoint of an older release"
    ranks = [{"model": "A"}, {"model": "A"}, {"model": "B"}, {"model": "B"}, {"model": "C"}]
    among = differences_among_ranks(ranks)
    assert among == {"model of ranks 2-3": ("A", "B"), "model of rank 4": ("A", "C")}
    assert describe(among) == "model of ranks 2-3 A -> B, model of rank 4 A -> C"
    assert describe({str(i): ("x", "y") for i in range(10)}, most=1) == "0 x -> y and 9 more"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_and_its_libraries_show() -> None:
    found = fingerprint(Classify(), torch.device("cuda", 0))
    assert found["device_model"].startswith(torch.cuda.get_device_name(0))
    assert {"cuda", "cudnn", "nccl", "tf32_matmul", "tf32_cudnn", "cudnn_benchmark"} <= found.keys()
    torch.backends.cudnn.benchmark = True
    try:
        assert list(differences(found, fingerprint(Classify(), torch.device("cuda", 0)))) == ["cudnn_benchmark"]
    finally:
        torch.backends.cudnn.benchmark = False


def small(run_dir: Path, steps: int, *more: object) -> list[str]:
    """A command for a run that ends after so many steps and may be prolonged."""
    options = ["--reduce", "tree", "--max-steps", steps, "--schedule", "constant", "--checkpoint-every", 0, *more]
    return [str(TRAIN), *job(run_dir, *options)]


def here(run_dir: Path, steps: int, *more: object) -> CompletedProcess[str]:
    """A run of one process on this machine."""
    return run_forked(*small(run_dir, steps, *more))


def elsewhere(run_dir: Path, steps: int, *more: object, expect: int = 0) -> CompletedProcess[str]:
    """A run of one process on another machine."""
    return run([sys.executable, *small(run_dir, steps, *more)], env=OTHER, expect=expect)


@another_machine
def test_a_resume_elsewhere_warns_once_and_is_remembered_and_on_more_ranks_is_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finish_all(fork_ranks(2, *small(run_dir, 2)))
    same = here(run_dir, 4)
    assert "void" not in same.stderr, "the number of ranks is no part of it"
    assert read(run_dir)["bits_void_from"] is None
    there = elsewhere(run_dir, 6)
    warnings = [line for line in there.stderr.splitlines() if "void" in line]
    told = r"evenkeel: WARNING: from step 4 on bit-for-bit equality is void: cpu_capability "
    assert len(warnings) == 1
    assert warnings[0].startswith(told)
    assert warnings[0].endswith(" -> DEFAULT")
    (record,) = records(run_dir, "bits")
    assert record["step"] == 4
    assert record["differences"]["cpu_capability"][1] == "DEFAULT"
    assert list(record["differences"]) == ["cpu_capability"]
    assert read(run_dir)["bits_void_from"] == 4
    again = elsewhere(run_dir, 8)
    assert "void" not in again.stderr, "nothing has changed since"
    assert read(run_dir)["bits_void_from"] == 4
    back = here(run_dir, 10)
    assert "from step 8 on" in back.stderr
    assert [record["step"] for record in records(run_dir, "bits")] == [4, 8]
    assert read(run_dir)["bits_void_from"] == 4, "the first step counts"


@another_machine
def test_steps_that_are_done_again_in_the_old_place_are_good(tmp_path: Path) -> None:
    """The other machine dies by kill -9 before its first checkpoint: nothing that it did is left."""
    run_dir = tmp_path / "run"
    here(run_dir, 2, "--die-at", 9)
    run(torchrun(1, *small(run_dir, 6, "--die-at", 9)), env=OTHER, expect=1)
    assert [record["step"] for record in records(run_dir, "bits")] == [2]
    here(run_dir, 6, "--die-at", 9)
    assert [record["step"] for record in records(run_dir, "start")] == [0, 2, 2]
    assert read(run_dir)["bits_void_from"] is None


@another_machine
def test_strict_bits_refuses_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    finish_all(fork_ranks(2, *small(run_dir, 2, "--strict-bits")))
    before = contents_of(run_dir)
    done = run(torchrun(2, *small(run_dir, 4, "--strict-bits")), env=OTHER, expect=-REFUSAL)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("evenkeel: ")]
    assert line.startswith("evenkeel: --strict-bits: from step 2 on the bits might be others: cpu_capability ")
    assert line.endswith(" -> DEFAULT; continue with what it was before, or without --strict-bits")
    assert contents_of(run_dir) == before
    refused = elsewhere(run_dir, 4, "--strict-bits", expect=2)
    assert refused.stderr.splitlines() == [line]
    assert contents_of(run_dir) == before
    elsewhere(run_dir, 2, "--strict-bits")  # finished: nothing is computed
    here(run_dir, 4, "--strict-bits")
    assert records(run_dir, "start")[-1]["step"] == 2


@another_machine
def test_strict_bits_judges_by_the_checkpoint_that_is_whole(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    here(run_dir, 2)
    elsewhere(run_dir, 4)
    flip_a_bit(run_dir / "checkpoints" / "step-00000004" / "state.pt")
    refused = elsewhere(run_dir, 6, "--strict-bits", expect=2)
    assert "--strict-bits: from step 2 on" in refused.stderr
    here(run_dir, 6, "--strict-bits")
    assert read(run_dir)["bits_void_from"] is None


@another_machine
def test_ranks_that_differ_among_themselves_are_named(tmp_path: Path) -> None:
    run_dir, mixed = tmp_path / "run", tmp_path / "mixed.py"
    mixed.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['ATEN_CPU_CAPABILITY'] = 'default'\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    refused = run(torchrun(2, mixed, *small(run_dir, 2, "--strict-bits")), expect=-REFUSAL)
    assert "--strict-bits: from step 0 on the bits might be others: cpu_capability of rank 1 " in refused.stderr
    assert not (run_dir / "config.toml").exists()
    done = run(torchrun(2, mixed, *small(run_dir, 2)))
    assert "from step 0 on bit-for-bit equality is void: cpu_capability of rank 1 " in done.stderr
    assert list(records(run_dir, "bits")[0]["differences"]) == ["cpu_capability of rank 1"]
    assert read(run_dir)["bits_void_from"] == 0


@another_machine
def test_the_checkpoint_of_another_node_is_judged_and_nothing_written_on_this_one(tmp_path: Path) -> None:
    """Two nodes with a disk each, as far as their ranks can tell; only the second one has the run."""
    node, first, second = tmp_path / "node.py", tmp_path / "disk-0", tmp_path / "disk-1"
    node.write_text(
        "import os, sys\n"
        "os.environ |= {'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}\n"
        "arguments = [argument.replace('RANK', os.environ['RANK']) for argument in sys.argv[1:]]\n"
        "os.execv(sys.executable, [sys.executable, *arguments])\n"
    )
    here(second, 2)
    before = contents_of(second)
    both = torchrun(2, node, *small(tmp_path / "disk-RANK", 4))
    refused = run([*both, "--strict-bits"], env=OTHER, expect=-REFUSAL)
    assert "--strict-bits: from step 2 on" in refused.stderr
    assert contents_of(second) == before
    assert [path.name for path in first.iterdir()] == [".lock"]
    done = run(both, env=OTHER)
    assert "from step 2 on bit-for-bit equality is void" in done.stderr
    assert read(first)["bits_void_from"] == 2
