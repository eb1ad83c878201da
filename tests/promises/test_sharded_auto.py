"""--micro-batch auto with --shard on: each rank tries alone, and no rank waits for one that has run out of memory."""

import json
import sys
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.processes import TRAIN, finish, finish_all, fork, rank_variables, read, start
from tests.support.small_runs import SUPPORT, job_of, the_line, weights_of

pytestmark = [needs.sharding, needs.no_gpu, needs.recovery]

SHAPE = "--epochs 1 --batch-size 16 --reduce tree --shard on --lr 0.02 --log-every 1"
job = job_of("hungry_blocks_task.py:HungryBlocks", SHAPE)

AMPLE = 40_000


def ranks_with(rooms: list[int], *arguments: object) -> list:
    every = zip(rank_variables(len(rooms)), rooms, strict=True)
    return [fork(*arguments, env={**variables, "ROOM": str(room)}) for variables, room in every]


@pytest.mark.parametrize(
    ("rooms", "number", "more"),
    [
        ([6000, 3900], 4, ["--ema", 0.9]),
        needs.slow([8000, 8000, 2100], 2, ["--hungry-in", "backward"]),
        needs.long([3900, 6000], 4, ["--precision", "bf16", "--checkpoint-activations"]),
    ],
)
def test_ranks_agree_and_the_run_is_as_if_typed(tmp_path: Path, rooms: list[int], number: int, more: list) -> None:
    auto, typed = tmp_path / "auto", tmp_path / "typed"
    first, *_ = finish_all(ranks_with(rooms, TRAIN, *job(auto, "--micro-batch", "auto", *more)))
    least = rooms.index(min(rooms))
    assert f"--micro-batch auto: {number} samples fit, on rank {least} no more" in first.stdout
    assert f"micro_batch = {number}\n" in (auto / "config.toml").read_text()
    finish_all(ranks_with([AMPLE] * len(rooms), TRAIN, *job(typed, "--micro-batch", number, *more)))
    assert weights_of(auto) == weights_of(typed)
    assert read(auto)["metrics"] == read(typed)["metrics"]


def workers(rooms: str, *arguments: object) -> list:
    """Start auto_worker.py on ranks with so many MiB of memory each."""
    variables = rank_variables(len(rooms.split()))
    return [fork(SUPPORT / "auto_worker.py", *arguments, env={**it, "ROOMS": rooms}) for it in variables]


def outcomes(tmp_path: Path, rooms: str, *arguments: object) -> list[dict]:
    finish_all(workers(rooms, tmp_path / "found.json", *arguments))
    return json.loads((tmp_path / "found.json").read_text())


@pytest.mark.parametrize(
    "arguments", [("forward", 0.9, "fp32", "all"), needs.slow(("backward", 0, "bf16", "recompute"))]
)
def test_trials_leave_no_trace(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    for rank in outcomes(tmp_path, "6000 3900", "ours", *arguments):
        assert rank["number"] == 4
        assert (rank["tensors"], rank["generators"], rank["gradients"], rank["learns"]) == (True, True, False, True)


def test_no_rank_waits_for_one_that_has_no_memory_for_a_single_sample(tmp_path: Path) -> None:
    poor, rich = outcomes(tmp_path, "500 6000", "ours", "backward", 0, "fp32", "all")
    assert poor["error"].startswith("out of memory on rank 0")
    assert rich["error"] == "--micro-batch auto: another rank does not have the memory for even one sample"
    ends = finish_all(ranks_with([6000, 500], TRAIN, *job(tmp_path / "run", "--micro-batch", "auto")), 1)
    lines = [the_line(it.stderr) for it in ends]
    assert lines[0] == rich["error"]
    assert lines[1].startswith("out of memory on rank 1 (the memory of host ")


@pytest.mark.slow
def test_with_real_collectives_in_a_trial_they_wait(tmp_path: Path) -> None:
    """The control of the above."""
    ends = [finish(it) for it in workers("6000 3900", tmp_path / "none", "control", "forward", 0, "fp32", "all")]
    assert all(it.returncode == 1 for it in ends)
    assert any("Timed out waiting 10000ms" in it.stderr for it in ends)


@pytest.mark.slow
# of 14 samples: 7 and 2 micro-batches, in 4 rounds and in 1
@pytest.mark.parametrize("micro_batch", [2, 7])
@pytest.mark.long
def test_a_trial_takes_the_memory_of_a_step(tmp_path: Path, micro_batch: int) -> None:
    """The control, without a reserve for sums, takes less, if there are several rounds."""
    peaks, exact = {}, {"MALLOC_MMAP_THRESHOLD_": "500000", "MALLOC_ARENA_MAX": "1"}
    for way in ("step", "trial", "control"):
        command = [sys.executable, SUPPORT / "memory_worker.py", tmp_path / way, "peak", way, micro_batch]
        finish_all([start(command, env={**it, **exact}) for it in rank_variables(2)])
        peaks[way] = json.loads((tmp_path / way).read_text())
    assert 0.98 * peaks["step"] < peaks["trial"] < 1.1 * peaks["step"], peaks
    assert (peaks["control"] < 0.9 * peaks["step"]) == (micro_batch == 2), peaks
