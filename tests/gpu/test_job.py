"""What one GPU can show of a job: it trains to the README's accuracy, is stopped, runs out of memory, is compiled."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.support import processes
from tests.support import small_runs as runs
from tests.support.gpu import REAL, Record, devices_of, shared, started
from tests.support.processes import ROOT, TRAIN, checked, finish, read, records, run, start, torchrun

DIGITS = ["--wandb", "disabled", "--log-every", 20]
"""The README's job, but for what it prints."""


def accuracy(run_dir: Path) -> float:
    return float(read(run_dir)["metrics"]["test/accuracy"])


@pytest.mark.parametrize("ranks", [1, 0, 2], ids=["torchrun", "plain python", "two ranks"])
def test_the_job_of_the_readme_reaches_its_accuracy(run_dir: Path, ranks: int, record_property: Record) -> None:
    runs.ended(started(ranks, *DIGITS, "--run-dir", run_dir))
    named = devices_of(run_dir)
    record_property("accuracy", f"{accuracy(run_dir):.4f}")
    record_property("seconds", f"{read(run_dir)['seconds']:.1f}")
    record_property("on", " and ".join(sorted({name.partition(" of ")[0] for name in named})))
    if torch.cuda.is_available():
        assert [name.startswith("cuda:") for name in named] == [True] * max(1, ranks)
        assert named[0].startswith("cuda:0 (")
    assert accuracy(run_dir) > 0.98
    loaded = runs.model_of(run_dir)
    assert {tensor.device.type for tensor in loaded.values()} == {"cpu"}


def test_ranks_that_verify_each_other_raise_no_alarm_and_change_no_bit(tmp_path: Path, record_property: Record) -> None:
    seconds = []
    for every in (1, 0):
        run_dir = tmp_path / f"every-{every}"
        words = ["--max-steps", 60, "--reduce", "tree", "--precision", "bf16", "--log-every", 1, "--wandb", "disabled"]
        runs.ended(started(2, *words, "--verify-every", every, "--run-dir", run_dir))
        seconds.append(median(b["time"] - a["time"] for a, b in pairwise(records(run_dir, "train")[10:])))
    status = read(tmp_path / "every-1", "status.json")
    assert (status["verified"], status.get("alarms", [])) == (60, [])
    assert runs.weights_of(tmp_path / "every-1") == runs.weights_of(tmp_path / "every-0")
    record_property("verified step", f"{seconds[0] / seconds[1]:.2f} of another")


@REAL
def test_more_ranks_than_gpus_are_refused_unless_they_share(tmp_path: Path) -> None:
    refused = run(torchrun(torch.cuda.device_count() + 1, TRAIN, *DIGITS, "--run-dir", tmp_path / "none"), expect=None)
    assert refused.returncode
    assert "with train.py's --share-gpu, which is slow" in refused.stderr
    assert not (tmp_path / "none").exists()


def test_killed_stopped_and_continued_on_other_numbers_of_ranks_the_tree_gives_the_same_bits(tmp_path: Path) -> None:
    tree = ["--reduce", "tree", "--checkpoint-every", 2, "--num-workers", 1]
    undisturbed = started(1, *runs.job(tmp_path / "undisturbed", *tree))
    run_dir = tmp_path / "run"
    options = runs.job(run_dir, *tree, "--pause", 0.1)
    process = started(2, *options)
    runs.wait_for_step(run_dir, 5, process)
    runs.kill_workers_and_agent(process)
    runs.ended(undisturbed)
    assert runs.saved_step(run_dir) >= 2
    process = started(0, *options)
    runs.stop_at(run_dir, 12, process, expect=75)
    runs.ended(started(1, *options))
    assert runs.weights_of(run_dir) == runs.weights_of(tmp_path / "undisturbed")


def test_a_network_of_the_readme_s_size_has_the_same_bits_on_one_rank_and_on_two(tmp_path: Path) -> None:
    tree = [*DIGITS, "--reduce", "tree", "--micro-batch", 16, "--epochs", 2, "--clip-norm", 1.0, "--ema", 0.9]
    both = [started(ranks, *tree, "--run-dir", tmp_path / str(ranks)) for ranks in (1, 2)]
    for process in both:
        runs.ended(process)
    assert runs.weights_of(tmp_path / "1") == runs.weights_of(tmp_path / "2")


@REAL
def test_memory_that_runs_out_is_explained_and_smaller_pieces_go_on(tmp_path: Path, record_property: Record) -> None:
    task = f"{ROOT / 'tests/support/small_gpu_task.py'}:Limited"

    def options(run_dir: str, micro_batch: object) -> list[object]:
        shape = ["--batch-size", 64, "--micro-batch", micro_batch, "--epochs", 2, "--log-every", 1]
        return ["--task", task, "--run-dir", tmp_path / run_dir, "--wandb", "disabled", *shape]

    failed = checked(finish(started(0, *options("run", 64))), 1)
    (line,) = [line for line in failed.stderr.splitlines() if line.startswith("evenkeel: ")]
    assert line.startswith("evenkeel: out of memory on rank 0 (cuda:0 (")
    assert "the same command with --micro-batch 32 instead of 64 goes on" in line
    runs.ended(started(0, *options("run", 2)))
    done = runs.ended(started(1, *options("auto", "auto")))
    found = re.search(r"--micro-batch auto: (\d+) samples fit, not \d+", done.stdout)
    assert found, done.stdout
    assert 1 <= int(found[1]) < 64
    record_property("auto", found[0])


def test_low_precision_trains_as_well(tmp_path: Path, record_property: Record) -> None:
    """With loader processes, so that batches come by pinned memory; fp16 begins with a scale that overflows."""
    more = {"tf32": [], "bf16": ["--channels-last"], "fp16": ["--loss-scale", 2.0**40]}
    if not torch.cuda.is_available():
        del more["tf32"]
    jobs = {
        precision: started(
            *(0, *DIGITS, "--epochs", 6, "--num-workers", 1, "--run-dir", tmp_path / precision),
            *("--precision", precision, *options),
        )
        for precision, options in more.items()
    }
    for precision, process in jobs.items():
        runs.ended(process)
        record_property(precision, f"{accuracy(tmp_path / precision):.4f}")
        assert accuracy(tmp_path / precision) > 0.9


@pytest.mark.timeout(150)
def test_a_compiled_run_resumes_alike(tmp_path: Path, record_property: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMIT", max(processes.LIMIT, 120.0))  # compilers take long
    cache = {"TMPDIR": str(tmp_path)}
    options = [*DIGITS, "--epochs", 4, "--checkpoint-every", 20, "--compile"]
    eager = started(0, *DIGITS, "--epochs", 4, "--run-dir", tmp_path / "eager")
    begun = started(0, *options, "--run-dir", tmp_path / "run", **cache)
    stopped = runs.stop_at(tmp_path / "run", 40, begun)
    runs.ended(eager)
    runs.ended(started(1, *options, "--run-dir", tmp_path / "run", **cache))
    compiled = records(tmp_path / "run", "compile")
    record_property("compiled", [{name: it[name] for name in ("hits", "misses")} for it in compiled])
    record_property("accuracy", f"{accuracy(tmp_path / 'run'):.4f}, eager {accuracy(tmp_path / 'eager'):.4f}")
    assert accuracy(tmp_path / "run") == pytest.approx(accuracy(tmp_path / "eager"), abs=0.04)
    if stopped.returncode == 75:
        assert compiled[-1]["misses"] == 0


def test_a_trace_has_the_gpu_s_kernels_and_its_memory(tmp_path: Path) -> None:
    memory = ["--memory-snapshot"] if torch.cuda.is_available() else []
    options = runs.job(tmp_path / "run", "--profile", "4:7", *memory)
    runs.ended(started(1, *options))
    folder = tmp_path / "run" / "profile"
    trace = json.loads((folder / "rank-0.json").read_text())
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    assert "cpu_op" in kinds
    if torch.cuda.is_available():
        assert "kernel" in kinds
        assert (folder / "rank-0.memory.pickle").stat().st_size > 0


def test_the_launchers_start_ranks_that_share(run_dir: Path) -> None:
    launcher = [sys.executable, "launch/single_node.py", "-g", "2", "--"]
    runs.ended(start([*launcher, *runs.job(run_dir, "--share-gpu")]))
    assert read(run_dir)["world_sizes"] == [2]
    if shared(2) and torch.cuda.is_available():
        assert {name.partition(" ")[0] for name in devices_of(run_dir)} == {"cuda:0"}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_two_runs_of_one_command_give_the_same_bits_on_a_gpu(tmp_path: Path, precision: str) -> None:
    recipe = ["--deterministic", "--precision", precision, "--ema", 0.9, "--epochs", 2]
    for process in [started(0, *runs.recipe_job(tmp_path / name, *recipe)) for name in ("one", "again")]:
        runs.ended(process)
    assert runs.weights_of(tmp_path / "one") == runs.weights_of(tmp_path / "again")
