"""Jobs of two ranks, with keepers, and of ranks with two GPUs each: by NCCL where there are enough, else they share."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support import small_runs
from tests.support.gpu import Record, shared, started
from tests.support.processes import read, run, torchrun, wait_until_gone
from tests.support.small_runs import (
    PLAN,
    SAMPLES,
    SUPPORT,
    ended,
    job,
    keepers_of,
    starts,
    stop_at,
    told_step,
    wait_for_step,
    weights_of,
    workers_of,
)


def test_a_frozen_rank_is_named_and_the_bits_are_the_same(tmp_path: Path, record_property: Record) -> None:
    rare = ["--checkpoint-every", 0, "--eval-every", 1000, "--deterministic"]
    undisturbed, run_dir = started(2, *job(tmp_path / "undisturbed", *rare)), tmp_path / "run"
    process = started(2, *job(run_dir, *rare, "--pause", 0.1, "--hang-timeout", 10))
    wait_for_step(run_dir, 3, process)
    frozen = small_runs.workers_of(process)[1]
    os.kill(frozen, signal.SIGSTOP)
    begun = time.monotonic()
    wait_until_gone([frozen])
    record_property("noticed, saved and killed", f"after {time.monotonic() - begun:.1f} s")
    done = ended(process)
    ended(undisturbed)
    (line,) = [line for line in done.stderr.splitlines() if "no progress for 10 s" in line]
    assert "rank 1 does not answer any more" in line
    recorded = (run_dir / "logs" / "attempt-0001" / "rank-0.collectives.json").read_text()
    assert "all_reduce" in recorded
    assert small_runs.no_step_is_done_twice(run_dir)
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")


def test_collectives_come_in_an_order_are_recorded_and_their_errors_reach_the_user(tmp_path: Path) -> None:
    """On NCCL two communicators: BatchNorm's beside DDP's; and the tree, where parameters may be unused."""
    run(torchrun(2, SUPPORT / "collectives_worker.py", tmp_path / "out.json", *shared(2)))
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["threads"], found["not waited for"]) == (1, 0)
    assert found["failure"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    backend = "gloo" if shared(2) or not torch.cuda.is_available() else "nccl"
    recorded = {name.partition(":")[2] for name in found["recorded"] if name.startswith(backend)}
    assert {"all_reduce", "all_to_all"} <= recorded, found["recorded"]


def test_batchnorm_over_the_whole_batch_with_ring_and_tree(tmp_path: Path) -> None:
    """Where ranks share a GPU the tree is allowed as well: gloo does not mind the order of two groups."""
    backend_is_gloo = bool(shared(2)) or not torch.cuda.is_available()
    shape = ["--dataset", "fake", "--fake-samples", 64, "--image-size", 32, "--model", "resnet18", "--batch-size", 16]
    shape += ["--micro-batch", 8, "--epochs", 1, "--sync-batchnorm", "--wandb", "disabled"]
    for reduce in ("ring", *["tree"] * backend_is_gloo):
        ended(started(2, *shape, "--reduce", reduce, "--run-dir", tmp_path / reduce))
        assert read(tmp_path / reduce)["state"] == "finished"


def test_with_exact_bits_a_ring_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, run_dir: Path) -> None:
    options = ["--deterministic", "--wandb", "disabled", "--log-every", 1, "--epochs", 3, "--checkpoint-every", 2]
    undisturbed = started(2, *options, "--run-dir", tmp_path / "undisturbed")
    process = started(2, *options, "--run-dir", run_dir)
    stop_at(run_dir, 1, process)
    ended(undisturbed)
    ended(started(2, *options, "--run-dir", run_dir))
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")


SEGMENT = ["--task", "segment", "--backbone", "small", "--canvas", 32, "--digit-size", 16, "--discriminator-width", 4]
SEGMENT += ["--samples", 45, "--test-samples", 13, "--batch-size", 11, "--micro-batch", 3, "--epochs", 4]
SEGMENT += ["--reduce", "tree", "--wandb", "disabled", "--log-every", 1, "--checkpoint-every", 2]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("evenkeel.tasks.segment")
    run_dir = tmp_path_factory.mktemp("one") / "run"
    ended(started(1, *SEGMENT, "--run-dir", run_dir))
    return run_dir


@pytest.mark.parametrize(
    ("ranks", "cut"), [(1, ["--model-parallel", 2]), (2, ["--place", "segmenter=0,discriminator=1"])], ids=str
)
def test_a_run_on_two_gpus_a_rank_is_that_of_one(tmp_path: Path, on_one: Path, ranks: int, cut: list[object]) -> None:
    run_dir = tmp_path / "two"
    options = [*SEGMENT, "--run-dir", run_dir, *cut]
    process = started(ranks, *options, each=2)
    stop_at(run_dir, 1, process)
    ended(started(ranks, *options, each=2))
    assert weights_of(run_dir) == weights_of(on_one)
    assert read(run_dir)["metrics"] == read(on_one)["metrics"]


def opens_a_gpu(pid: int) -> bool:
    """Whether a process has a device file of NVIDIA's driver for a GPU open."""
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has just been closed
            names.append(str(link.readlink()))
    return any(name.startswith("/dev/nvidia") and name[len("/dev/nvidia") :].isdigit() for name in names)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_gets_its_gpu_again_and_its_keeper_never_has_one(
    tmp_path: Path, ranks: int, record_property: Record
) -> None:
    rare = ["--deterministic", "--checkpoint-every", 1, "--eval-every", 1000]
    undisturbed, run_dir = started(ranks, *job(tmp_path / "undisturbed", *rare)), tmp_path / "run"
    process = started(ranks, *job(run_dir, *rare, "--pause", 0.1))
    wait_for_step(run_dir, 3, process)
    keepers, trainers = keepers_of(process), workers_of(process)
    assert not set(keepers.values()) & set(trainers.values()), "the ranks have gone without keepers"
    if torch.cuda.is_available():
        assert not any(map(opens_a_gpu, keepers.values()))
    control = any(map(opens_a_gpu, trainers.values()))
    done, begun = told_step(run_dir), time.monotonic()
    os.kill(trainers[max(trainers)], signal.SIGKILL)
    wait_for_step(run_dir, done + 3, process)
    record_property("from the kill to the third step after it", f"{time.monotonic() - begun:.1f} s")
    assert keepers_of(process) == keepers
    ended(process)
    ended(undisturbed)
    assert len(starts(run_dir)) == 2
    assert read(run_dir)["restarts"] == read(run_dir)["restarts_in_place"] == 1
    assert weights_of(run_dir) == weights_of(tmp_path / "undisturbed")
    assert control or not torch.cuda.is_available(), "no trainer has /dev/nvidiaN open: nothing is known of the keepers"
