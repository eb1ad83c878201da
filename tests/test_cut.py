"""The default cut of a step: as few micro-batches as keep all ranks at work, decided once and recorded."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from evenkeel.config import Config
from evenkeel.cut import fact_of_the_job, has_batchnorm, settle
from evenkeel.launch import LARGEST_WORLD, Topology
from evenkeel.records import recorded_options

from .processes import (
    TRAIN,
    checked,
    finish,
    finish_all,
    fork,
    fork_ranks,
    free_port,
    kill_group,
    read,
    records,
    run_forked,
    wait_until,
)
from .test_train import job


def settled(world_size: int, recorded: dict[str, Any] | None = None, batchnorm: bool = False, **options: Any) -> Config:
    return settle(Config(batch_size=64, **options), world_size, lambda: batchnorm, recorded or {})


def cut(*arguments: Any, **options: Any) -> tuple[object, int]:
    """(--micro-batch, --micro-batches) of what is settled."""
    config = settled(*arguments, **options)
    return config.micro_batch, config.micro_batches


def test_a_new_run_has_a_micro_batch_for_each_rank() -> None:
    assert [cut(ranks) for ranks in (1, 2, 3, 8)] == [(0, 1), (0, 2), (0, 3), (0, 8)]
    assert cut(100) == (0, 64), "there are no more samples"
    assert cut(64, batchnorm=True) == (0, 32), "which has no statistics of one sample"
    assert cut(32, batchnorm=True) == (0, 32)
    assert cut(8, strategy="dp") == (0, 1), "DataParallel divides it"


def test_what_is_typed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGEST_WORLD, "8")
    known = {"micro_batch": 16, "micro_batches": 4}
    assert cut(2, known, micro_batch=5) == (5, 0)
    assert cut(2, known, micro_batches=5) == (0, 5)
    assert cut(2, known, micro_batch="auto") == ("auto", 0)


def test_the_largest_world_of_an_elastic_job_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGEST_WORLD, "8")
    assert [cut(ranks) for ranks in (2, 3, 4, 8, 16)] == [(0, 8), (0, 9), (0, 8), (0, 8), (0, 16)]
    assert cut(2, sync_batchnorm=True) == (0, 2), "its micro-batches need a rank each"


def test_launchers_tell_the_largest_world(monkeypatch: pytest.MonkeyPatch) -> None:
    from evenkeel.launchers import command_for

    monkeypatch.delenv(LARGEST_WORLD, raising=False)
    for nodes, expected in (((1, 1), None), ((2, 2), None), ((1, 3), "6")):
        topology = Topology(2, *nodes, master_host="127.0.0.1" if nodes[1] > 1 else "")
        assert command_for(topology, TRAIN, []).env.get(LARGEST_WORLD) == expected


def test_the_tree_has_a_cut_that_is_a_fact_of_the_job() -> None:
    assert [cut(ranks, reduce="tree") for ranks in (1, 2, 3, 8, 64)] == [(8, 0)] * 5
    assert fact_of_the_job(Config(batch_size=5)).micro_batch == 1
    assert fact_of_the_job(Config(batch_size=64, micro_batch=5)).micro_batch == 5
    assert cut(3, {"micro_batch": 16, "micro_batches": 4}, reduce="tree") == (0, 4), "as it is recorded"


@pytest.mark.parametrize(
    ("ranks", "options", "expected"),
    [
        (1, {}, (0, 4)),
        (3, {}, (0, 4)),
        (4, {}, (0, 4)),
        (5, {}, (0, 5)),
        (5, {"strict_bits": True}, (0, 4)),
        (5, {"sync_batchnorm": True}, (0, 4)),
        (5, {"reduce": "tree"}, (0, 4)),
    ],
)
def test_a_recorded_cut_stays_unless_ranks_would_be_idle(
    ranks: int, options: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert cut(ranks, {"micro_batch": 16, "micro_batches": 4}, **options) == expected


def test_more_ranks_than_pairs_of_samples_change_nothing() -> None:
    assert cut(64, {"micro_batch": 2, "micro_batches": 32}, batchnorm=True) == (0, 32)


def test_a_recorded_size_stays_on_any_number_of_ranks() -> None:
    """It was typed, or is that of an older version, which wrote the size that it took by default."""
    for ranks in (1, 8, 64):
        assert cut(ranks, {"micro_batch": 8, "micro_batches": 0}) == (8, 0)
        assert cut(ranks, {"micro_batch": 8}) == (8, 0)


def test_where_it_is_recorded(tmp_path: Path) -> None:
    assert recorded_options(tmp_path) == {} == recorded_options(None)
    (tmp_path / "config.toml").write_text("micro_batch = 12\nepochs = 3\n")
    assert recorded_options(tmp_path) == {"micro_batch": 12}, "of an older version, or without its status"
    status = {"micro_batch": 32, "micro_batches": 2, "threads": 4, "step": 5}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert recorded_options(tmp_path) == {"micro_batch": 32, "micro_batches": 2, "threads": 4}


def test_which_models_have_batchnorm() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert has_batchnorm(model)
    assert not has_batchnorm(model[0])
    assert not has_batchnorm(model.eval()), "frozen"


def untyped(run_dir: Path, *more: object) -> list[str]:
    """The options of `job`, without its --micro-batch."""
    options = job(run_dir, *more)
    at = options.index("--micro-batch")
    return options[:at] + options[at + 2 :]


@pytest.mark.multiprocess
def test_a_run_keeps_its_cut_on_fewer_ranks_and_is_cut_anew_on_more(tmp_path: Path) -> None:
    run_dir, pause = tmp_path / "run", ("--pause", 0.05)

    def lines() -> int:
        return len(records(run_dir, "train")) if (run_dir / "metrics.jsonl").exists() else 0

    def stopped_after(ranks: int, steps: int, *more: object) -> str:
        began = lines()
        started = fork_ranks(ranks, TRAIN, *untyped(run_dir, *pause, *more))
        wait_until(lambda: lines() >= began + steps, "steps")
        for process in started:
            process.send_signal(signal.SIGTERM)
        return "".join(finish(process).stderr for process in started)

    def recorded() -> tuple[int, int, str]:
        config, status = (run_dir / "config.toml").read_text(), read(run_dir, "status.json")
        newest = max(run_dir.glob("checkpoints/step-*/manifest.json"))
        typed = int(re.findall(r"^micro_batches = (\d+)", config, re.M)[0])
        assert typed == status["micro_batches"]
        return typed, status["micro_batch"], json.loads(newest.read_text())["fingerprint"]["micro_batch"]

    assert "micro-batches" not in stopped_after(2, 3)
    assert recorded() == (2, 6, "1/2 of a step")
    assert "micro-batches" not in stopped_after(1, 2)
    assert recorded() == (2, 6, "1/2 of a step")

    strict = stopped_after(3, 2, "--strict-bits")
    assert "1 of 3 ranks have nothing to do" in strict
    assert "void" not in strict
    assert recorded() == (2, 6, "1/2 of a step")

    step = read(run_dir, "status.json")["step"]
    (first, *_) = finish_all(fork_ranks(3, TRAIN, *untyped(run_dir, *pause)))
    assert (
        f"from step {step} on micro-batches are of 1/3 of a step instead of 1/2 of a step: the global" in first.stderr
    )
    assert "BatchNorm's groups" in first.stderr
    assert "nothing to do" not in first.stderr
    assert recorded() == (3, 4, "1/3 of a step")
    summary = read(run_dir)
    assert summary["samples_seen"] == 3 * 101
    assert summary["bits_void_from"] == step


@pytest.mark.multiprocess
def test_ranks_with_other_options_are_refused(tmp_path: Path) -> None:
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    started = [
        fork(
            TRAIN, *job(tmp_path / "run", "--seed", rank), env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(2)
    ]
    refused = checked(finish(started[0]), 2)
    kill_group(started[1])  # which leaves the speaking to the first
    assert "--seed is 0 on rank 0 and 1 on rank 1; type it, and the same on all nodes" in refused.stderr


@pytest.mark.multiprocess
def test_the_tree_says_what_its_cut_costs(tmp_path: Path) -> None:
    alone = run_forked(TRAIN, *untyped(tmp_path / "alone", "--reduce", "tree", "--max-steps", 1))
    assert (
        "--reduce tree cuts a step the same way on any number of ranks: 12 passes on this one process; in a new run "
        "--micro-batch 12 is one, and faster"
    ) in " ".join(alone.stdout.split())
    typed = run_forked(TRAIN, *job(tmp_path / "typed", "--reduce", "tree", "--max-steps", 1))
    assert "passes" not in typed.stdout


@pytest.mark.multiprocess
def test_plan_prints_the_cut_and_why(tmp_path: Path) -> None:
    def plan(*options: object) -> str:
        task = job(tmp_path / "none")[:2]
        command = ("-m", "evenkeel", "plan", "-w", 2, "--", *task, "--batch-size", 64, "--run-dir", tmp_path, *options)
        return run_forked(*command).stdout.splitlines()[0]

    assert "micro-batch 32 (1/2 of a step, so that no rank is idle): " in plan()
    assert "micro-batch 8 (an eighth of the batch, with --reduce tree on any number of ranks): " in plan(
        "--reduce", "tree"
    )
    assert "micro-batch 20: " in plan("--micro-batch", 20)
    (tmp_path / "status.json").write_text('{"micro_batch": 16, "micro_batches": 4}')
    assert f"micro-batch 16 (as the run in {tmp_path} has recorded it): " in plan()
