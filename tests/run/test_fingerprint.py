"""What bits depend on: which parts there are, and that a run which goes on elsewhere says so, or refuses."""

import importlib
import shutil
import sys
import sysconfig
import types
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import torch.distributed as dist

import evenkeel
from evenkeel.run import fingerprint as fingerprint_module
from evenkeel.run.fingerprint import COMPUTING, UNSET, describe, differences, fingerprint, rank_differences
from evenkeel.run.manifest import read_manifest
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.registry import load_task
from evenkeel.training.determinism import EXACT_NCCL, fix_arithmetic
from tests.run.test_run_directory import OLD_RUNS
from tests.support.processes import TRAIN, run, run_forked
from tests.support.small_runs import job

CPU = torch.device("cpu")
OTHER = {"ATEN_CPU_CAPABILITY": "default"}
"""Kernels without vectors: the bits of another machine, on this one."""


def another_machine(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """A test of real runs that needs one."""
    vectors = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    skip = pytest.mark.skipif(not vectors, reason="this machine has no vectors to switch off")
    return skip(test)


def own_task(folder: Path, factor: str) -> dict[str, str]:
    """The fingerprint of a task in a file of its own, which imports a module beside it."""
    folder.mkdir()
    (folder / "my_fingerprinted_task.py").write_text(
        "from evenkeel.tasks.classify import Classify\nimport my_helper\nclass Mine(Classify): ...\n"
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


def test_it_is_flat_and_neither_ranks_nor_the_place_show(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = fingerprint(Classify(), CPU)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.chdir(tmp_path)
    assert found == fingerprint(Classify(), CPU)
    assert all(type(value) is str and value for value in found.values())
    assert found["device"] == "cpu"
    assert "code:evenkeel/training/distributed_loss.py" in found
    assert "cudnn" not in found, "it does not compute here"


def test_ranks_that_share_a_gpu_do_not_add_by_nccl() -> None:
    libraries = fingerprint_module._gpu_libraries
    if not dist.is_nccl_available():
        pytest.skip("torch without NCCL")
    before = libraries()["nccl"]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert libraries()["nccl"] == UNSET != before
    finally:
        dist.destroy_process_group()


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
    assert "code:evenkeel/training/task.py" in found


def test_a_change_of_any_file_of_a_room_that_computes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = shutil.copytree(Path(evenkeel.__file__).parent, tmp_path / "evenkeel")
    (package / "training" / "deeper").mkdir()
    (package / "training" / "deeper" / "more.py").touch()
    monkeypatch.setattr(fingerprint_module, "__file__", str(package / "run" / "fingerprint.py"))
    before, files = fingerprint(Classify(), CPU), list(package.rglob("*.py"))
    for file in files:
        file.write_text(f"{file.read_text()}# changed")
    changed = differences(before, fingerprint(Classify(), CPU))
    components = {name: [file for file in files if file.is_relative_to(package / name)] for name in COMPUTING}
    assert all(components.values())
    assert list(changed) == sorted(
        f"code:evenkeel/{file.relative_to(package)}" for component in components.values() for file in component
    )
    assert {"code:evenkeel/data/shuffle.py", "code:evenkeel/training/deeper/more.py"} <= changed.keys()


def test_a_checkpoint_of_another_version_is_one_difference() -> None:
    old = read_manifest(OLD_RUNS / "tree" / "checkpoints" / "step-00000022").fingerprint
    names = [name for name in old if name.startswith("code:evenkeel/")]
    here = {"code:evenkeel/data/shuffle.py": "1", "threads": old["threads"]}
    found = differences({name: old[name] for name in [*names, "threads"]}, here)
    assert describe(found) == f"Evenkeel is another version ({len(names) + 1} files of its code differ)"
    one = {"code:evenkeel/data/shuffle.py": ("1", "2")}
    assert describe(one) == "code:evenkeel/data/shuffle.py 1 -> 2", "the control: of one version the file is named"


def test_differences_in_words() -> None:
    assert differences({"a": "1", "b": "2", "d": "4"}, {"c": "3", "a": "1", "b": "3"}) == {
        "c": ("(none)", "3"),
        "b": ("2", "3"),
        "d": ("4", "(none)"),
    }
    assert differences({}, {"a": "1"}) == {"fingerprint": ("(none)", "kept")}, "a checkpoint of an older release"
    ranks = [{"model": "A"}, {"model": "A"}, {"model": "B"}, {"model": "B"}, {"model": "C"}]
    among = rank_differences(ranks)
    assert among == {"model of ranks 2-3": ("A", "B"), "model of rank 4": ("A", "C")}
    assert describe(among) == "model of ranks 2-3 A -> B, model of rank 4 A -> C"
    assert describe({str(i): ("x", "y") for i in range(10)}, most=1) == "0 x -> y and 9 more"


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
