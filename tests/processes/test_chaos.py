"""Chaos as a user types it, on a small run: what happens to the job, to the disk, and to the processes."""

import os
import re
import signal
from itertools import groupby, islice
from pathlib import Path

import pytest

from evenkeel.cli.chaos.faults import schedule
from tests.support.chaos import (
    chaos,
    faults_in,
    free,
    launcher,
    reported,
    still_running,
    two_ranks,
    wait_for_fault,
    wait_until_nothing_runs,
)
from tests.support.processes import TRAIN, checked, finish, read, records, run, start, stop, torchrun, wait_until
from tests.support.small_runs import PLAN, SAMPLES, job, saved_step, told_step, trained, weights_of, weights_undisturbed

weights = weights_undisturbed(2, job)


def test_a_few_faults_of_all_kinds_change_no_bit_and_leave_no_process(tmp_path: Path, weights: str) -> None:
    run_dir, kinds, seed = tmp_path / "run", ["kill", "term", "truncate", "agent"], 1
    options = job(run_dir, "--pause", 0.15, "--checkpoint-every", 2, "--num-workers", 1)
    mix = f"--kill-every 1s --seed {seed} --count 5 --faults {','.join(kinds)}"
    done = run(chaos(mix, *two_ranks(*options)), limit=500)

    printed = faults_in(done.stdout)
    assert [kind for kind, _ in printed] == [fault.kind for fault in islice(schedule(kinds, 1, seed), 5)]
    assert {kind for kind, _ in printed} == set(kinds)
    assert all(re.search(r", at step \d+$", whom) for _, whom in printed), printed
    assert not any("missed" in whom for _, whom in printed)
    assert weights_of(run_dir) == weights
    assert still_running(run_dir) == []
    steps = [record["step"] for record in records(run_dir, "train")]
    for name, value in {
        "run": "finished",
        "steps done": f"{PLAN.total_steps} of {PLAN.total_steps}",
        "samples": f"{PLAN.epochs * SAMPLES} seen, {PLAN.epochs * SAMPLES} expected",
        "goodput": f"{read(run_dir)['goodput']:.1%}",
        "weights": f"sha256 {weights}",
        "lost, done again": str(len(steps) - len(set(steps))),
    }.items():
        assert reported(done.stdout, name) == value
    assert reported(done.stdout, "faults").startswith("5: ")
    assert "dead" in reported(done.stdout, "seconds")
    assert "starting it again" in done.stdout, "a killed agent ends the command"


def test_ctrl_c_stops_the_job_with_its_last_step_and_takes_a_frozen_rank_along(run_dir: Path) -> None:
    options = job(run_dir, "--pause", 0.1, "--checkpoint-every", 0)
    process = start(chaos("--kill-every 2s --count 1 --faults stop", *launcher("--", *options)))
    wait_for_fault(process, "stop")
    stop(process, signal.SIGINT, 130)
    assert still_running(run_dir) == []
    assert saved_step(run_dir) >= told_step(run_dir)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_the_end_of_chaos_ends_the_job_and_frees_the_disk(small_disk: Path, number: signal.Signals, code: int) -> None:
    run_dir = small_disk / "run"
    process = start(chaos("--kill-every 2s --faults fill", *two_ranks(*job(run_dir, "--pause", 0.1))))
    wait_for_fault(process, "fill")
    wait_until(lambda: not free(small_disk), "the disk is full")
    os.kill(process.pid, number)
    wait_until_nothing_runs(run_dir)
    checked(finish(process), code)
    assert free(small_disk) > 6 << 20
    assert read(run_dir, "status.json")["state"] == "stopped"


def test_a_full_disk_and_then_a_stop_on_request(small_disk: Path) -> None:
    """The job goes on while the disk is full; --then stop ends it as if it were preempted, which is no failure."""
    run_dir = small_disk / "run"
    options = job(run_dir, "--pause", 0.3, "--checkpoint-every", 2, "--keep", 1)
    done = run(chaos("--kill-every 1s --count 1 --faults fill --then stop", *two_ranks(*options)))
    assert "NO CHECKPOINT at step" in done.stderr, "it was full"
    assert len(records(run_dir, "start")) == 1, "nobody had to start again"
    assert read(run_dir, "status.json")["state"] == "stopped"
    assert reported(done.stdout, "run") == "stopped"
    assert free(small_disk) > 6 << 20


def test_a_command_that_never_does_a_step_is_given_up_and_a_refused_one_is_not_tried_again(tmp_path: Path) -> None:
    done = run(chaos("--kill-every 1s", "false", "--run-dir", tmp_path / "run"), expect=1)
    assert done.stdout.count("starting it again") == 2
    assert "the command ended 3 times in a row without a step, last with 1" in done.stdout
    assert reported(done.stdout, "run") == "never started"
    done = run(chaos("--kill-every 1s", *launcher("--", "--run-dir", tmp_path / "run", "--lr", -1)), expect=1)
    assert done.stderr.count("evenkeel: --lr") == 1
    assert "the command was refused" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bits_that_flip_are_found_and_the_right_rank_is_named(tmp_path: Path) -> None:
    """In gradients and weights, once and on every use. Those that end the run are gone with their process."""
    trained(2, job(tmp_path / "right", "--reduce", "tree"))
    words = job(tmp_path / "run", "--reduce", "tree", "--verify-every", 1, "--pause", 0.1)
    command = chaos("--kill-every 1s --seed 11 --count 6 --faults bitflip", *torchrun(3, TRAIN, *words, restarts=9))
    done = run(command, limit=500)
    struck = [whom for _, whom in faults_in(done.stdout) if not whom.startswith("missed")]  # while ranks start again
    assert len(struck) >= 4, done.stdout
    alarms = read(tmp_path / "run", "status.json")["alarms"]
    named = [re.findall("rank ([0-9])", alarm)[0] for alarm in alarms]
    assert [it for it, _ in groupby(named)] == [it for it, _ in groupby(whom[5] for whom in struck)], (alarms, struck)
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "right")
