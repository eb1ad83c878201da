"""Ranks that neither die nor work: noticed, named, saved, started again."""

import importlib.util
import os
import pickle
import re
import signal
import textwrap
import time
from pathlib import Path

import pytest

from tests.support import small_runs as runs
from tests.support.processes import (
    TRAIN,
    fork,
    read,
    records,
    run,
    running,
    start,
    torchrun,
    wait_until,
    wait_until_gone,
)
from tests.support.small_runs import (
    PLAN,
    SAMPLES,
    children,
    ended,
    job,
    no_step_is_done_twice,
    starts,
    wait_for_step,
    workers_of,
)

RECORDER = importlib.util.find_spec("torch.distributed.flight_recorder") is not None
"""Whether this release of torch has an analysis of its flight recorder."""

RARE = ["--checkpoint-every", 0, "--eval-every", 1000]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_a_frozen_rank_is_named_and_the_bits_are_the_same(run_dir: Path, undisturbed: str, victim: int) -> None:
    options = job(run_dir, *RARE, "--pause", 0.1, "--hang-timeout", 5)
    process = start(torchrun(2, TRAIN, *options, restarts=1))
    wait_for_step(run_dir, 3, process)
    frozen = workers_of(process)[victim]
    logs = run_dir / "logs" / "attempt-0001"
    os.mkfifo(collectives := logs / f"rank-{1 - victim}.collectives.json")  # whoever opens it waits for a reader
    os.kill(frozen, signal.SIGSTOP)
    wait_until_gone([frozen], 5 + 30)  # torchrun alone would take 30 s to be rid of it, once it wanted to
    time.sleep(3)  # by now the other rank's collective has failed, and is not pending any more
    assert "gloo:all_reduce" in collectives.read_text()
    done = ended(process)
    (line,) = [line for line in done.stderr.splitlines() if "no progress for 5 s" in line]
    assert f"rank {victim} does not answer any more" in line
    assert f"rank {1 - victim} waits in gradient reduction of step" in line
    assert "distributed_loss.py" in (logs / f"rank-{1 - victim}.stacks.txt").read_text()
    verdict = "".join(line for line in done.stderr.splitlines() if "flight recorder" in line)
    assert not RECORDER or f"rank {victim} left no record here; rank {1 - victim} in gloo:all_reduce" in verdict
    assert f"rank {victim} does not answer any more" in read(run_dir, "status.json")["last_failure"]
    assert [it.get("last_end") for it in records(run_dir, "start")] == [None, f"rank {victim} hung and was killed"]
    assert f"evenkeel: rank {victim} hung and was killed; all ranks restart in place" in done.stderr
    assert not read(run_dir, "status.json")["wrong_nodes"], "there is one node only"
    assert len(starts(run_dir)) == 2
    assert starts(run_dir)[1] >= 3
    assert no_step_is_done_twice(run_dir)
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    assert runs.weights_of(run_dir) == undisturbed
    if victim == 1:
        assert read(run_dir)["ledger"]["dead"] > 5, "a hang is not productive"


@pytest.mark.slow
def test_a_rank_that_is_frozen_before_its_first_beat_is_named(tmp_path: Path) -> None:
    """It stops when it starts the thread that beats, and only at the first start."""
    freezes = """
    start, mark = threading.Thread.start, __file__ + ".frozen"

    def freezing(thread):
        if thread.name == "beat" and os.environ["RANK"] == "1" and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        start(thread)

    threading.Thread.start = freezing
    """
    task = runs.own_task(tmp_path, before=textwrap.dedent(freezes))
    done = run(torchrun(2, TRAIN, *job(tmp_path / "run", "--task", task, "--hang-timeout", 3)), env=runs.OWN)
    (line,) = [line for line in done.stderr.splitlines() if "no progress for 3 s" in line]
    assert "rank 1 does not answer any more" in line
    assert "rank 1 hung and was killed; all ranks restart in place" in done.stderr


LARGE = """
def model(self):
    import torch
    made = super().model()
    made.large = torch.nn.Parameter(torch.zeros(15_000_000), requires_grad=False)
    return made
"""


@pytest.mark.slow
def test_each_checkpoint_may_take_longer_than_the_hang_timeout(tmp_path: Path) -> None:
    """As long as a slow disk takes for its size, also while another is due, and at the end."""
    task, rare = runs.slow_disk(tmp_path, 8, LARGE), ["--checkpoint-every", 6, "--max-steps", 13, *RARE[2:]]
    runs.trained(2, job(tmp_path / "run", *rare, "--hang-timeout", 5, "--task", task))
    assert len(starts(tmp_path / "run")) == 1


@pytest.mark.slow
def test_a_rank_that_is_stuck_in_its_data_says_so_itself(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = job(run_dir, "--checkpoint-every", 0, "--hang-timeout", 5, "--stick-at", 20)
    done = run(torchrun(2, TRAIN, *options, restarts=1))
    stuck = r"data loading of step 4 at \S+/recording_task\.py:\d+"
    assert re.search(f"rank 1 is in {stuck}; rank 0 waits in gradient reduction of step 4", done.stderr)
    logs = run_dir / "logs" / "attempt-0001"
    assert "recording_task.py" in (logs / "rank-1.stacks.txt").read_text()
    assert starts(run_dir) == [0, 3]
    assert re.fullmatch(f"rank 1 hung in {stuck}", records(run_dir, "start")[1]["last_end"])
    assert read(run_dir)["samples_seen"] == PLAN.epochs * SAMPLES
    fr_trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason="older releases have none")
    (verdict,) = [line for line in done.stderr.splitlines() if "flight recorder" in line]
    assert "flight recorder: rank 1 did not join gloo:all_reduce" in verdict
    traces = logs / "flight" / "gloo"
    fr_trace.main([str(traces)])  # the command `torchfrtrace`
    assert "Not all ranks joining collective" in caplog.text
    assert "missing ranks: {1}" in caplog.text
    for path in traces.iterdir():  # the control: as torch 2.15 writes gloo's, the group without its name
        trace = pickle.loads(path.read_bytes())
        path.write_bytes(pickle.dumps(trace | {"pg_config": {"": {"name": "", "desc": "", "ranks": "[0, 1]"}}}))
    with pytest.raises(KeyError):
        fr_trace.main([str(traces)])


@pytest.mark.slow
def test_the_control_without_a_watch_a_frozen_rank_holds_the_job(run_dir: Path) -> None:
    process = start(torchrun(2, TRAIN, *job(run_dir, "--pause", 0.1, "--hang-timeout", 0), restarts=1))
    wait_for_step(run_dir, 3, process)
    workers = workers_of(process)
    os.kill(workers[1], signal.SIGSTOP)
    time.sleep(12)
    assert all(map(running, workers.values()))
    assert process.poll() is None
    runs.kill_workers_and_agent(process)


@pytest.mark.slow
def test_a_job_that_was_suspended_does_not_hang(run_dir: Path) -> None:
    """Ctrl-Z and fg, long after: the clock went on, the job did not."""
    process = fork(TRAIN, *job(run_dir, "--pause", 0.1, "--hang-timeout", 4))
    wait_until(lambda: [*run_dir.rglob("*.stacks.txt")], "the first look of the watch")
    both = [process.pid, *children(process.pid)]  # the keeper and the trainer, as a terminal does
    for number, seconds in ((signal.SIGSTOP, 6), (signal.SIGCONT, 0)):
        for pid in both:
            os.kill(pid, number)
        time.sleep(seconds)
    ended(process)
    assert len(both) == 2
    assert len(starts(run_dir)) == 1
