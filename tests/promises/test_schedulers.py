"""Built-in optimizers and torch's schedulers are part of the committed state: through kills and on other ranks."""

import random
import signal
from pathlib import Path

import pytest

from evenkeel.run.manifest import load
from tests.support import needs
from tests.support import small_runs as runs
from tests.support.processes import TRAIN, bytes_of, fork_ranks, read, records, wait_until
from tests.support.recipe_task import STEPS, bare_rates
from tests.support.small_runs import interrupt, recipe_job, refusal, saved_step, signal_ranks, trained, weights_of
from tests.training.test_optimizers import WITH_MUON


def job(run_dir: Path, kind: str, *more: object, task: str = "Scheduled") -> list[str]:
    """27 steps, with an evaluation after every third."""
    shape = ["--kind", kind, "--lr", 0.002, "--reduce", "tree", "--checkpoint-every", 2, "--eval-every", 3]
    return recipe_job(run_dir, *shape, *more, task=task)


def rates(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["train/lr"] for record in records(run_dir, "train")}


def kill(ranks: int, run_dir: Path, slow: Path, words: list[str], victims: int = 1) -> None:
    """kill -9 of some ranks, a few steps after the start."""
    interrupt(ranks, run_dir, words, runs.told_step(run_dir) + random.randrange(2, 6), victims=victims, slow=slow)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [needs.long("onecycle"), "plateau", needs.long("sequential")])
def test_killed_and_finished_on_other_ranks_rates_and_bits_are_as_undisturbed(tmp_path: Path, kind: str) -> None:
    slow, run_dir, plain = tmp_path / "slow", tmp_path / "run", tmp_path / "undisturbed"
    words = job(run_dir, kind, "--slow", slow)
    kill(2, run_dir, slow, words)
    kill(2, run_dir, slow, words, victims=2)
    kill(3, run_dir, slow, words)
    trained(0, words)
    trained(1, job(plain, kind))
    assert read(run_dir)["world_sizes"] == [2, 2, 3, 1]
    expected = dict(enumerate(bare_rates(kind), start=1))
    assert rates(plain) == expected, "those of a plain loop"
    assert rates(run_dir).items() <= expected.items(), "also of steps that were done twice"
    assert len(rates(run_dir)) > STEPS - 5, "a step may be saved before it is told"
    assert len(set(expected.values())) > 3
    assert weights_of(run_dir) == weights_of(plain)
    last = [load(folder / "checkpoints" / f"step-{STEPS:08d}")["schedulers"] for folder in (plain, run_dir)]
    assert last[0] == last[1]


def test_the_control_a_scheduler_outside_of_the_state_gives_other_rates(tmp_path: Path) -> None:
    slow, run_dir = tmp_path / "slow", tmp_path / "run"
    words = job(run_dir, "onecycle", "--slow", slow, task="Outside")
    kill(2, run_dir, slow, words)
    began = saved_step(run_dir)
    trained(0, words)
    expected = bare_rates("onecycle")
    told = rates(run_dir)
    assert told[1] == pytest.approx(expected[0])
    assert told[began + 1] == pytest.approx(expected[0]), "it has begun again"
    assert told[STEPS] != pytest.approx(expected[-1])


@pytest.mark.slow
def test_a_run_killed_between_a_step_and_its_evaluation_steps_the_scheduler_once(tmp_path: Path) -> None:
    hold, run_dir = tmp_path / "hold", tmp_path / "run"
    words = job(run_dir, "plateau", "--hold", hold)
    hold.touch()
    started = fork_ranks(2, TRAIN, *words)
    wait_until(Path(f"{hold}.waiting").exists, "the evaluation after step 3")
    signal_ranks(started, signal.SIGTERM)
    assert load(run_dir / "checkpoints" / "step-00000003")["schedulers"]["evaluated"] == 0
    hold.unlink()
    trained(0, words)
    assert rates(run_dir).items() <= dict(enumerate(bare_rates("plateau"), start=1)).items()
    assert rates(run_dir)[STEPS] == bare_rates("plateau")[-1]


def test_what_would_set_other_rates_is_refused(run_dir: Path) -> None:
    for typed in (["--warmup-steps", 3], ["--schedule", "poly"]):
        said = f"{' '.join(map(str, typed))}: the task's schedulers() set the learning rates; leave it out"
        assert refusal(job(run_dir, "onecycle", *typed)) == said
    assert not run_dir.exists()
    trained(0, job(run_dir, "plateau", "--max-steps", 6, "--schedule", "constant"))
    longer = [*job(run_dir, "plateau", "--max-steps", 9, "--schedule", "constant")]
    another = f"--run-dir {run_dir}: has another run: "
    before = bytes_of(run_dir)
    assert refusal([*longer, "--eval-every", "2"]).startswith(f"{another}--eval-every was 3 and is now 2; ")
    assert bytes_of(run_dir) == before
    trained(0, longer)
    assert rates(run_dir)[9] == bare_rates("plateau")[8], "one that is stepped by evaluations may be made longer"


def test_a_finished_run_whose_rates_depend_on_its_length_stays_as_it_is(run_dir: Path) -> None:
    def words(steps: int) -> list[str]:
        return job(run_dir, "onecycle", "--schedule", "constant", "--max-steps", steps)

    trained(0, words(6))
    before = bytes_of(run_dir)
    line = refusal(words(9))
    assert line.startswith(
        f"--run-dir {run_dir}: has another run: --max-steps was 6 and is now 9; continue it with the"
    )
    assert bytes_of(run_dir) == before
    said = trained(0, [*words(6), "--eval-every", 2])[0].stdout
    assert said == f"evenkeel: {run_dir}: finished at step 6; --fresh starts over\n", "the control: this may change"


KINDS = {
    "muon": ["--optimizer", "muon", "--momentum", 0.9, "--betas", 0.9, 0.95],
    "adamw": ["--betas", 0.8, 0.95],
    "sgd": ["--optimizer", "sgd", "--momentum", 0.5],
}


@pytest.mark.parametrize("kind", [pytest.param("muon", marks=WITH_MUON), needs.long("adamw"), needs.long("sgd")])
def test_killed_on_two_ranks_and_finished_on_one_the_bits_are_the_same(tmp_path: Path, kind: str) -> None:
    run_dir, slow, options = tmp_path / "run", tmp_path / "slow", ["--reduce", "tree", *KINDS[kind]]
    words = recipe_job(run_dir, *options, "--checkpoint-every", 2, "--slow", slow)
    interrupt(2, run_dir, words, step=5, slow=slow)
    trained(1, words)
    trained(2, recipe_job(tmp_path / "plain", *options))
    assert read(run_dir)["world_sizes"] == [2, 1]
    assert weights_of(run_dir) == weights_of(tmp_path / "plain")
    other = [*options[:-1], 0.3]
    line = refusal(recipe_job(run_dir, *other))
    assert "has another run: --momentum was" in line or "has another run: --betas was" in line
    trained(0, recipe_job(tmp_path / "other", *other))
    assert weights_of(tmp_path / "other") != weights_of(run_dir), "the control: the option has an effect"
