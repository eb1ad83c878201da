"""`--compile` and `--channels-last`: the same bits through kills and resumes, and a start that calls no compiler."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance
from tests.support import needs
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, finish_all, fork_ranks, records, run, run_forked, start, torchrun, wait_until
from tests.support.small_runs import evaluation_of, job, kill_workers_and_agent, model_of, saved_step, weights_of


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


@needs.sharding
@pytest.mark.slow
def test_with_shards_blocks_are_compiled_and_the_bits_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    shape = "--epochs 2 --batch-size 18 --drop-last --micro-batch 3 --reduce tree --shard on --ema 0.9 --log-every 1"
    sharded = runs.job_of("sharded_task.py:Predicted", shape)
    for name, ranks, more in (("one", 1, ["--compile"]), ("two", 2, ["--compile"]), ("eager", 2, [])):
        runs.trained(ranks, sharded(tmp_path / name, *more))
    for name in ("one", "two"):
        (compiled,) = records(tmp_path / name, "compile")
        assert compiled["times"] == 2, "forward and backward of the one shape, for both blocks"
    one, two, eager = (weights_of(tmp_path / name) for name in ("one", "two", "eager"))
    assert one == two
    assert one != eager, "the control: compiled code is another one"


@pytest.mark.slow
def test_killed_and_resumed_elsewhere_the_bits_are_the_same_and_nothing_is_compiled_twice(tmp_path: Path) -> None:
    """kill -9 just before the short step 9 on 2 ranks, SIGTERM on 1, the rest on 2; a node of its own for each."""
    tree = ["--reduce", "tree", "--checkpoint-every", 2, "--ema", 0.9]
    for name, more in (("undisturbed", ["--compile"]), ("eager", [])):
        runs.trained(1, job(tmp_path / name, *tree, *more))

    run_dir, nodes = tmp_path / "run", [tmp_path / f"node-{i}" for i in range(3)]
    options = job(run_dir, *tree, "--compile", "--pause", 0.2)
    for node in nodes:
        node.mkdir()

    slow = ["--hang-timeout", "12"]  # the four compilations with which inductor begins take longer, and are no hang
    process = start(torchrun(2, TRAIN, *options, *slow), env=compilers(nodes[0], pause=4))
    runs.wait_for_step(run_dir, 8, process)
    wait_until(lambda: saved_step(run_dir) >= 6, "a checkpoint")
    kill_workers_and_agent(process)
    assert compiled_files(nodes[0]) > 0, "the control: the first start calls the compiler"

    process = start([sys.executable, TRAIN, *options], env=compilers(nodes[1]))
    runs.stop_at(run_dir, 11, process, expect=75)
    run(torchrun(2, TRAIN, *options), env=compilers(nodes[2]))
    assert compiled_files(nodes[2]) == 0
    last = records(run_dir, "compile")[-1]
    assert last["misses"] == 0 < last["hits"]

    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    assert weights_of(tmp_path / "eager") != weights_of(run_dir), "the control: compiled code is another one"
    names = [list(model_of(path)) for path in (run_dir, tmp_path / "eager")]
    assert names[0] == names[1]
    assert not list((nodes[2] / "tmp" / f"evenkeel-{os.geteuid()}").iterdir()), "a finished run leaves nothing there"


def test_without_a_compiler_it_is_refused_in_one_line(tmp_path: Path) -> None:
    options = [sys.executable, TRAIN, *job(tmp_path / "run"), "--compile"]
    done = run(options, env={"PATH": str(tmp_path), "CXX": "g++"}, expect=2)
    line = "--compile: needs a C++ compiler on a CPU and there is none on PATH; install g++"
    assert runs.the_line(done.stderr).startswith(line)
    assert not (tmp_path / "run").exists()


def test_channels_last_killed_and_resumed_on_other_numbers_of_ranks_the_bits_are_the_same(tmp_path: Path) -> None:
    data = ["--dataset", "fake", "--fake-samples", 100, "--image-size", 8, "--width", 8]
    cut = ["--batch-size", 16, "--micro-batch", 4, "--epochs", 4, "--reduce", "tree", "--ema", 0.9]
    command = [TRAIN, *data, *cut, "--log-every", 1, "--checkpoint-every", 3, "--wandb", "disabled", "--channels-last"]
    run_dir, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    finish_all(fork_ranks(1, *command, "--run-dir", undisturbed))
    for ranks, number in ((2, signal.SIGKILL), (0, signal.SIGTERM), (4, signal.SIGKILL)):
        before = saved_step(run_dir)
        started = fork_ranks(ranks, *command, "--run-dir", run_dir)
        wait_until(lambda before=before: saved_step(run_dir) > before, "a checkpoint")
        runs.signal_ranks(started, number)
    finish_all(fork_ranks(3, *command, "--run-dir", run_dir))
    assert weights_of(run_dir) == weights_of(undisturbed)
    assert all(value.is_contiguous() for value in model_of(run_dir).values())


def test_a_run_of_a_compiled_model_leaves_bare_names_and_goes_on_from_those_that_it_had(tmp_path: Path) -> None:
    def attempt(task: str, steps: int, run_dir: str = "run", *more: object) -> subprocess.CompletedProcess[str]:
        given = ["--ema", 0.9, "--schedule", "constant", "--max-steps", steps, *more]
        return run_forked(TRAIN, *runs.odd_job(task, tmp_path / run_dir, *given))

    attempt("CompiledByItself", 2)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    names = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(model_of(tmp_path / "run")) == names
    assert list(state["model"]) == list(state["ema"]) == names

    shutil.copytree(tmp_path / "run", tmp_path / "old")  # with the names that it had in earlier versions
    wrapped = dict(zip(names, ["0._orig_mod.weight", "0._orig_mod.bias", "1.weight", "1.bias"], strict=True))
    for part in ("model", "ema"):
        state[part] = {f"_orig_mod.{wrapped[name]}": value for name, value in state[part].items()}
    for folder in (tmp_path / "old" / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    Checkpoints(tmp_path / "old" / "checkpoints", 2, Provenance(("test/loss", "min"))).save(state, {})
    evaluated = [attempt("CompiledByItself", 2, name, "--eval-only") for name in ("run", "old")]
    first, second = (evaluation_of(told)["metrics"] for told in evaluated)
    assert first == second
    for name in ("run", "old"):
        attempt("CompiledByItself", 4, name)
    assert weights_of(tmp_path / "old") == weights_of(tmp_path / "run")
