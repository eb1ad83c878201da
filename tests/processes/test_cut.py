"""The default cut of a step: as few micro-batches as keep all ranks at work, decided once and recorded."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.processes import TRAIN, checked, finish, fork, fork_ranks, kill_group, rank_variables, read
from tests.support.small_runs import TASK, job, told_step, trained


def untyped(run_dir: Path, *more: object) -> list[str]:
    """The options of `job`, without its --micro-batch."""
    options = job(run_dir, *more)
    at = options.index("--micro-batch")
    return options[:at] + options[at + 2 :]


def test_a_run_keeps_its_cut_on_fewer_ranks_and_is_cut_anew_on_more(tmp_path: Path) -> None:
    run_dir, pause = tmp_path / "run", ("--pause", 0.05)

    def stopped_after(ranks: int, steps: int, *more: object) -> str:
        before = told_step(run_dir)
        started = fork_ranks(ranks, TRAIN, *untyped(run_dir, *pause, *more))
        processes.wait_until(lambda: told_step(run_dir) >= before + steps, "steps")
        for process in started:
            process.send_signal(signal.SIGTERM)
        return "".join(finish(process).stderr for process in started)

    def recorded() -> tuple[int, int, str]:
        config, status = (run_dir / "config.toml").read_text(), read(run_dir, "status.json")
        newest = max(run_dir.glob("checkpoints/step-*/manifest.json"))
        typed = int(re.findall(r"^micro_batches = (\d+)", config, re.M)[0])
        assert typed == status["micro_batches"]
        return typed, status["micro_batch"], json.loads(newest.read_text())["fingerprint"]["micro_batch"]

    for ranks, steps in ((2, 3), (1, 2)):
        assert "micro-batches" not in stopped_after(ranks, steps)
        assert recorded() == (2, 6, "1/2 of a step")

    strict = stopped_after(3, 2, "--strict-bits")
    assert "1 of 3 ranks has nothing to do" in strict
    assert "void" not in strict
    assert recorded() == (2, 6, "1/2 of a step")

    step = read(run_dir, "status.json")["step"]
    (first, *_) = trained(3, untyped(run_dir, *pause))
    said = f"from step {step} on a step is cut into 3 micro-batches, before into 2 micro-batches: each batch has"
    assert said in first.stderr
    assert "BatchNorm's groups and the last bits change; if that matters, add --micro-batches 2," in first.stderr
    assert "nothing to do" not in first.stderr
    assert recorded() == (3, 4, "1/3 of a step")
    summary = read(run_dir)
    assert (summary["samples_seen"], summary["bits_void_from"]) == (3 * 101, step)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("seed", (0, 1)),
        ("micro-batches", (2, 3)),
        ("log-every", (1, 2)),
        ("epochs", (2, 3)),
        ("keep-every", (0, 5)),
        ("profile", ("2:4", "3:4")),
        ("strict-bits", ("no", "yes")),
    ],
)
def test_ranks_with_other_options_are_refused(tmp_path: Path, name: str, values: tuple[object, object]) -> None:
    """Without the comparison ranks with another cut leave samples out, and those with other collectives hang."""
    words = [[f"--{name}", value] for value in values]
    if name == "strict-bits":
        words, values = [[], ["--strict-bits"]], (False, True)
    variables, job_of = rank_variables(2), untyped(tmp_path / "run", "--schedule", "constant")
    started = [fork(TRAIN, *job_of, *words[rank], env=variables[rank]) for rank in range(2)]
    refused = checked(finish(started[0]), 2)
    kill_group(started[1])  # which leaves the speaking to the first
    assert f"--{name} is {values[0]} on rank 0 and {values[1]} on rank 1; type the same on all nodes" in refused.stderr


def test_plan_prints_the_cut_and_why(tmp_path: Path) -> None:
    pytest.importorskip("evenkeel.cli.plan")
    recorded = '{"micro_batch": 16, "micro_batches": 4}'
    for options, status, line in (
        ([], "", "micro-batch 32 (each step in 2 parts, so that every rank has work): "),
        (
            ["--reduce", "tree"],
            "",
            "micro-batch 8 (an eighth of the batch, with --reduce tree on any number of ranks): ",
        ),
        (["--micro-batch", 20], "", "micro-batch 20: "),
        ([], recorded, f"micro-batch 16 (as the run in {tmp_path} has recorded it): "),
    ):
        if status:
            (tmp_path / "status.json").write_text(status)
        task = ["--task", TASK, "--batch-size", 64, "--run-dir", tmp_path]
        said = processes.run_forked("-m", "evenkeel", "plan", "-w", 2, "--", *task, *options).stdout
        assert line in said.splitlines()[0]
