"""--shard on: kills, stops, other numbers of ranks and damaged files end in the same bits, also with schedulers.

The controls of slots and files are in tests/run/test_sharded_checkpoint.py.
"""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from evenkeel.run.manifest import load
from tests.run.test_checkpoint import flip_a_bit, same
from tests.support import needs, processes
from tests.support import small_runs as runs
from tests.support.processes import ROOT, TRAIN, Process, fork_ranks, records, start, torchrun

pytestmark = [needs.sharding, pytest.mark.slow]

STEPS = 12
SHARD = ["--shard", "on", "--reduce", "tree", "--batch-size", 7, "--micro-batch", 1, "--max-steps", STEPS]
QUIET = ["--eval-every", STEPS, "--ema", 0.9, "--log-every", 1]
RARE = [*SHARD, *QUIET, "--checkpoint-every", 0]


def job(run_dir: Path, *more: object, task: str = "Struck") -> list[str]:
    return runs.options(f"{ROOT / 'tests' / 'support' / 'struck_task.py'}:{task}", run_dir, *(more or RARE))


@pytest.fixture(autouse=True)
def slowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PAUSE": "0.03", "STRUCK": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)


one_rank = runs.weights_undisturbed(1, job)


def three_ranks(run_dir: Path, *more: object, restarts: int = 0) -> Process:
    return start(torchrun(3, TRAIN, *job(run_dir, *(more or RARE)), restarts=restarts))


def log_of(run_dir: Path) -> str:
    return "\n".join(path.read_text() for path in sorted((run_dir / "logs").glob("*/rank-*.log")))


def test_ten_kills_cost_no_step_that_all_have(run_dir: Path, one_rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    strikes = ["loss:1:1", "optimizer:2:2", "copy:0:4", "loss:all:5", "copy:1:6", "optimizer:0:7", "loss:2:8"]
    strikes += ["copy:2:9", "loss:0:10", "optimizer:1:11"]
    monkeypatch.setenv("STRIKES", " ".join(strikes))
    runs.ended(three_ranks(run_dir))
    # killed in the optimizer's third step or in the copy of the fourth, a rank has only the step before
    expected = [0, 1, 2, 3, 5, 5, 7, 8, 8, 10, 11]
    assert sorted(set(runs.starts(run_dir))) == sorted(set(expected))
    assert runs.starts(run_dir) == sorted(runs.starts(run_dir)), "none goes further back than the attempt before"
    # of loss:all a rank may be left over, and is killed in the attempt after it
    assert len(expected) <= len(runs.starts(run_dir)) <= len(expected) + 2
    assert "which was in memory; the ranks had [[2, 3], [2, 3], [1, 2]]" in log_of(run_dir)
    assert runs.weights_of(run_dir) == one_rank


@pytest.mark.parametrize("lost", [False, True], ids=["recorded", "not recorded"])
@pytest.mark.parametrize(("shard", "victims"), [("on", "all"), pytest.param("off", "0", marks=pytest.mark.long)])
def test_an_evaluation_right_before_a_kill_is_done_once(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard: str, victims: str, lost: bool
) -> None:
    """A slot is written before the evaluation of its step, and a rescue does not have its metrics. The control: a kill
    before the record of the evaluation, which is done again."""
    often = [*RARE, "--eval-every", 3]
    often[1] = shard
    runs.trained(1, job(tmp_path / "undisturbed", *often))
    monkeypatch.setenv("STRIKES", "evaluated:0:3" if lost else f"loss:{victims}:3")
    monkeypatch.setenv("EVALUATED", str(tmp_path / "evaluated"))
    runs.ended(three_ranks(run_dir, *often))
    assert runs.starts(run_dir)[1] == 3, "after the evaluation of step 3, in the pass or before the record"

    def evaluated(folder: Path) -> list:
        return [(it["step"], it["test/loss"]) for it in processes.records(folder, "eval")]

    assert evaluated(run_dir) == evaluated(tmp_path / "undisturbed")
    done = (tmp_path / "evaluated").read_text().split()
    assert done == ["3"] * (1 + lost) + ["6", "9", "12"]


def test_ranks_may_be_three_then_two_then_four_then_one(run_dir: Path, one_rank: str) -> None:
    begins = []
    for ranks, step in ((3, 2), (2, 5), (4, 8)):
        began = runs.told_step(run_dir)
        started = fork_ranks(ranks, TRAIN, *job(run_dir))
        codes = runs.signal_ranks_at(max(step, began + 1), run_dir, started, signal.SIGTERM)
        assert 0 not in codes
        begins.append(runs.told_step(run_dir))
    runs.trained(1, job(run_dir))
    assert runs.starts(run_dir) == [0, *begins], "all steps that were finished were saved, and none was done twice"
    assert runs.weights_of(run_dir) == one_rank
    files = sorted(path.name for path in (run_dir / "checkpoints" / f"step-{STEPS:08d}").iterdir())
    assert files == ["manifest.json", "state-0-of-1.pt"]


def test_a_rank_that_is_stopped_a_step_behind_commits_it(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LATE", "1:4")
    runs.signal_ranks_at(5, run_dir, fork_ranks(2, TRAIN, *job(run_dir, task="Late")), signal.SIGTERM)
    assert runs.told_step(run_dir) == 5
    assert runs.saved_step(run_dir) == 5


def test_a_damaged_file_is_set_aside_on_all_ranks_and_the_one_before_is_taken(run_dir: Path, one_rank: str) -> None:
    often = [*SHARD, *QUIET, "--checkpoint-every", 3, "--keep", 3]
    process = three_ranks(run_dir, *often)
    runs.wait_for_step(run_dir, 9, process)
    for keeper in runs.keepers_of(process).values():
        os.killpg(keeper, signal.SIGKILL)
    process.wait()
    for hidden in (run_dir / "checkpoints").glob(".step-*"):  # else the start would complete a whole one
        shutil.rmtree(hidden)
    steps = sorted((run_dir / "checkpoints").glob("step-*"))
    assert len(steps) >= 2
    flip_a_bit(steps[-1] / "state-1-of-3.pt")
    runs.trained(2, job(run_dir, *often))
    assert runs.starts(run_dir)[1] == int(steps[-2].name[5:])
    assert re.search(rf"{steps[-1].name}/state-1-of-3.pt: sha256 is .* set aside", log_of(run_dir))
    assert runs.weights_of(run_dir) == one_rank


BLIND = """
import os

from evenkeel.run import manifest
from tests.support.struck_task import Struck


class Blind(Struck):
    pass


def fail(*_, **__):
    raise OSError(5, os.strerror(5))


if os.environ.get("RANK") == os.environ.get("BLIND"):
    manifest.sha256_of = fail
"""


@pytest.mark.parametrize("rank", [1, needs.long(0)])
def test_a_checkpoint_that_one_rank_cannot_read_is_not_set_aside(
    run_dir: Path, tmp_path: Path, one_rank: str, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    (tmp_path / "blind.py").write_text(BLIND)
    words = runs.options(f"{tmp_path / 'blind.py'}:Blind", run_dir, *SHARD, *QUIET, "--checkpoint-every", 3)
    runs.signal_ranks_at(5, run_dir, fork_ranks(2, TRAIN, *words), signal.SIGTERM)
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    monkeypatch.setenv("BLIND", str(rank))
    done = runs.failed(2, words)
    assert f"rank {rank} on " in done[0].stderr.splitlines()[-1]
    assert f"cannot read what rank {1 - rank} can: " in done[0].stderr.splitlines()[-1]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before
    monkeypatch.delenv("BLIND")
    runs.trained(2, words)
    assert runs.weights_of(run_dir) == one_rank


FULL = """
import errno, os
from tests.support.struck_task import Struck

class Full(Struck):
    pass

fsync = os.fsync

def fail(file):
    path = os.readlink(f"/proc/self/fd/{file}")
    if "step-00000003" in path and path.endswith("state-1-of-2.pt"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    fsync(file)

os.fsync = fail
"""


def test_a_disk_that_is_full_for_one_rank_costs_a_checkpoint(tmp_path: Path, run_dir: Path, one_rank: str) -> None:
    (tmp_path / "full.py").write_text(FULL)
    often = [*SHARD, *QUIET, "--checkpoint-every", 3]
    begun = time.monotonic()
    runs.trained(2, runs.options(f"{tmp_path / 'full.py'}:Full", run_dir, *often))
    assert time.monotonic() - begun < 60, "rank 0 waits for the others for ten minutes"
    (failure,) = records(run_dir, "checkpoint_failed")
    assert (failure["step"], "a rank could not write its rows" in failure["reason"]) == (3, True)
    assert "NO CHECKPOINT at step 3: [Errno 28] No space left on device" in log_of(run_dir)
    assert len(runs.starts(run_dir)) == 1
    assert runs.weights_of(run_dir) == one_rank


def test_a_keeper_that_is_killed_costs_no_step(run_dir: Path, one_rank: str) -> None:
    process = three_ranks(run_dir, restarts=1)
    runs.wait_for_step(run_dir, 4, process)
    os.kill(runs.keepers_of(process)[1], signal.SIGKILL)
    runs.wait_for_start(run_dir, 2)
    assert runs.starts(run_dir)[1] >= 4
    runs.ended(process)
    assert runs.weights_of(run_dir) == one_rank


def test_a_stop_while_a_rank_is_frozen_saves_its_rows_before_torchrun_kills(run_dir: Path, one_rank: str) -> None:
    process = three_ranks(run_dir)
    runs.wait_for_step(run_dir, 4, process)
    os.kill(runs.workers_of(process)[1], signal.SIGSTOP)
    begun = time.monotonic()
    processes.stop(process)
    assert time.monotonic() - begun < 20, "torchrun kills after 30 s"
    assert runs.saved_step(run_dir) == runs.told_step(run_dir)
    runs.trained(2, job(run_dir))
    assert runs.no_step_is_done_twice(run_dir)
    assert runs.weights_of(run_dir) == one_rank


@pytest.mark.long
def test_a_source_that_one_keeper_must_import_again_costs_no_step(
    run_dir: Path, tmp_path: Path, one_rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That keeper has written its slots and forgotten them; the others still have theirs in memory."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path)]))
    (tmp_path / "extra.py").touch()
    lines = ["import os", "from tests.support.struck_task import Struck", "class Own(Struck): pass"]
    (tmp_path / "own.py").write_text("\n".join([*lines, "if os.environ.get('RANK') == '1': import extra"]))
    process = start(torchrun(3, TRAIN, *runs.options(f"{tmp_path / 'own.py'}:Own", run_dir, *RARE)))
    runs.wait_for_step(run_dir, 4, process)
    (tmp_path / "extra.py").write_text("changed = True")
    os.kill(runs.workers_of(process)[2], signal.SIGKILL)
    runs.ended(process)
    assert len(runs.starts(run_dir)) == 2
    assert runs.no_step_is_done_twice(run_dir)
    assert runs.weights_of(run_dir) == one_rank


def test_a_rank_that_does_not_see_the_folder_ends_the_job_in_one_line(tmp_path: Path) -> None:
    ranks = []
    for number, variables in enumerate(processes.rank_variables(2)):
        (tmp_path / str(number)).mkdir()
        ranks.append(processes.fork(TRAIN, *job(Path("run")), env=variables, cwd=tmp_path / str(number)))
    lines = "".join(done.stderr for done in processes.finish_all(ranks, 1))
    assert "--shard needs a shared folder for checkpoints: rank 1 does not see" in lines


def test_a_model_with_other_rows_ends_the_run(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import os\nfrom evenkeel.tasks.transformer import Decoder\nfrom tests.support import struck_task\n"
        "class Own(struck_task.Struck):\n    def model(self):\n"
        "        return Decoder(int(os.environ['ROWS']), 34, heads=1, layers=2, dropout=0.1, end=None)\n"
    )
    monkeypatch.setenv("ROWS", "65")
    unsharded = [word if word != "on" else "off" for word in RARE]
    words = runs.options(f"{file}:Own", run_dir, *unsharded)
    runs.signal_ranks_at(4, run_dir, fork_ranks(1, TRAIN, *words), signal.SIGTERM)
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    monkeypatch.setenv("ROWS", "66")
    done = processes.run(torchrun(1, TRAIN, *runs.options(f"{file}:Own", run_dir, *RARE)), expect=-signal.SIGALRM)
    assert "only in" in done.stderr or "fit" in done.stderr, done.stderr
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before


@pytest.mark.long
def test_a_run_without_shards_goes_on_from_a_sharded_checkpoint_and_back(run_dir: Path) -> None:
    """And a flipped bit is found; what else the commands say is in test_sharded_commands.py."""
    runs.signal_ranks_at(4, run_dir, fork_ranks(3, TRAIN, *job(run_dir)), signal.SIGTERM)
    path = max((run_dir / "checkpoints").glob("step-*"))
    copy = Path(shutil.copytree(run_dir, run_dir.with_name("copy")))
    flip_a_bit(path / "state-2-of-3.pt")
    assert "state-2-of-3.pt" in processes.evenkeel("checkpoint", "verify", run_dir, expect=1).stdout
    exported = copy / "model.pt"
    processes.evenkeel("checkpoint", "export", copy, "-o", exported, "--raw")
    assert same(torch.load(exported), dict(load(copy / "checkpoints" / path.name)["model"]))
    unsharded = [word if word != "on" else "off" for word in RARE]
    runs.signal_ranks_at(runs.told_step(copy) + 1, copy, fork_ranks(1, TRAIN, *job(copy, *unsharded)), signal.SIGTERM)
    assert "state.pt" in {file.name for file in max((copy / "checkpoints").glob("step-*")).iterdir()}
    runs.trained(2, job(copy))
    assert runs.starts(copy)[1] == int(path.name[5:])
    assert runs.starts(copy) == sorted(set(runs.starts(copy)))


EVALUATED = [*SHARD, "--eval-every", 2, "--checkpoint-every", 0, "--log-every", 1]


def rates(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["train/lr"] for record in records(run_dir, "train")}


@pytest.mark.long
def test_schedulers_survive_kills_and_resizes(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(folder: Path) -> list[str]:
        return job(folder, *EVALUATED, task="Scheduled")

    runs.trained(1, mine(tmp_path / "undisturbed"))
    expected = rates(tmp_path / "undisturbed")
    assert len(set(expected.values())) == len(expected) == STEPS
    assert expected[STEPS] < 1e-4, "evaluations have halved it"
    monkeypatch.setenv("STRIKES", "loss:1:2 optimizer:2:4 copy:0:6")
    job_on_three = start(torchrun(3, TRAIN, *mine(run_dir)))
    runs.signal_ranks_at(8, run_dir, [job_on_three], signal.SIGTERM)
    stopped = runs.told_step(run_dir)
    runs.signal_ranks_at(stopped + 1, run_dir, fork_ranks(2, TRAIN, *mine(run_dir)), signal.SIGTERM)
    runs.trained(1, mine(run_dir))
    assert runs.starts(run_dir) == sorted(runs.starts(run_dir))
    assert len(runs.starts(run_dir)) >= 5, "three kills and two stops"
    assert rates(run_dir) == expected
    assert runs.weights_of(run_dir) == runs.weights_of(tmp_path / "undisturbed")
    both = (run_dir, tmp_path / "undisturbed")
    last = [load(folder / "checkpoints" / f"step-{STEPS:08d}")["schedulers"] for folder in both]
    assert last[0] == last[1]
