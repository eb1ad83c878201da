"""`audit` of a run: an honest one passes, and each forgery is named."""

import json
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evenkeel.run.chain import chained
from tests.support import processes
from tests.support.components import has
from tests.support.processes import ROOT, TRAIN, bytes_of, finish_all, fork_ranks, records, run_forked, wait_until
from tests.support.small_runs import options, saved_step, signal_ranks, signal_ranks_at, starts, trained, wait_for_start

TASK = f"{ROOT / 'tests' / 'time_travel' / 'part_task.py'}:Parting"
SHAPE = "--batch-size", 10, "--micro-batch", 4, "--epochs", 2, "--reduce", "tree", "--log-every", 1, "--keep-every", 8
STEPS = 40


def job(run: Path, *more: object) -> list[str]:
    return options(TASK, run, *SHAPE, "--digest-every", 1, *more)


def audit(run: Path, *more: object, expect: int = 0) -> str:
    return run_forked("-m", "evenkeel", "audit", run, *more, expect=expect).stdout


def wrong(text: str) -> list[str]:
    """The lines below the checks that found something."""
    return [line.strip() for line in text.splitlines() if line.startswith("       ")]


def rewrite(run: Path, change: Callable[[list[dict]], object], rechain: bool = False) -> None:
    """Change the lines of metrics.jsonl; with `rechain` as a forger does who computes the chain again."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    change(lines)
    chain = ""
    for it in lines if rechain else []:
        if it["kind"] == "digest":
            it["chain"] = chain = chained(chain, it)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def of_step(lines: list[dict], step: int) -> dict:
    return next(it for it in lines if it["kind"] == "digest" and it["step"] == step)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed on three ranks, between two checkpoints, and ended on two."""
    run = tmp_path_factory.mktemp("runs") / "a"
    ranks = fork_ranks(3, TRAIN, *job(run, "--keeper", "off"))
    signal_ranks_at(12, run, ranks, signal.SIGKILL)
    finish_all(fork_ranks(2, TRAIN, *job(run)))
    return run


@pytest.fixture
def run(usual: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(usual, tmp_path / "a", ignore=shutil.ignore_patterns("audit.json")))


@pytest.mark.promise
def test_an_honest_run_on_three_ranks_with_kills_passes_on_one(usual: Path) -> None:
    steps = [it["step"] for it in records(usual, "digest")]
    assert len(steps) > len(set(steps)) == STEPS, "the control: some steps were done twice, and both are in the chain"
    before = bytes_of(usual)
    text = audit(usual, "--segments", 9)
    assert before == {path: it for path, it in bytes_of(usual).items() if path.name != "audit.json"}
    assert "WRONG" not in text
    assert "the run had 3, 2 ranks; run again on 1, with --seed " in text
    assert f": {STEPS} of {STEPS} steps\nshown by running them again: 1-40\nshown by the chain only: none\n" in text
    assert "not shown: what is in the data\n" in text
    few = audit(usual, "--segments", 1, "--seed", 1)
    assert ": 8 of 40 steps\n" in few
    assert few == audit(usual, "--segments", 1, "--seed", 1), "the seed repeats the choice"


def slowed(folder: Path) -> list[str]:
    """Options of a task without an evaluation, in one process that is slow while there is a file `slow`."""
    slow = folder / "slow"
    lines = "import time", "from pathlib import Path", "from tests.time_travel.part_task import Parting", "", ""
    lines += "class Own(Parting):", "    test_dataset = lambda self: None", "", "    def loss(self, model, batch):"
    lines += (
        f"        time.sleep(0.1 * Path({str(slow)!r}).exists())",
        "        return super().loss(model, batch)",
    )
    (folder / "own.py").write_text("\n".join(lines) + "\n")
    slow.touch()
    return job(folder / "a", "--keeper", "off", "--task", f"{folder / 'own.py'}:Own")


@pytest.mark.long
def test_a_run_that_goes_on_from_the_end_of_an_epoch_passes(tmp_path: Path) -> None:
    """An attempt would evaluate at its first step, if there were data, and has recorded that step before."""
    run, words = tmp_path / "a", [*slowed(tmp_path), "--checkpoint-every", 20]
    signal_ranks_at(22, run, fork_ranks(0, TRAIN, *words), signal.SIGKILL)
    assert saved_step(run) == 20, "the control: the end of an epoch"
    (tmp_path / "slow").unlink()
    trained(0, words)
    assert [it["step"] for it in records(run, "digest")].count(20) == 1
    assert "WRONG" not in audit(run, "--segments", 9)


def test_a_run_that_went_back_behind_its_whole_ledger_has_nothing_to_show(tmp_path: Path) -> None:
    run, words = tmp_path / "a", [*slowed(tmp_path), "--checkpoint-every", 3, "--digest-every", 4]
    signal_ranks_at(5, run, fork_ranks(0, TRAIN, *words), signal.SIGKILL)
    ranks = fork_ranks(0, TRAIN, *words)
    wait_for_start(run, 2)
    signal_ranks(ranks, signal.SIGKILL)
    assert records(run, "start")[-1]["step"] < records(run, "digest")[-1]["step"] == 4, "the control"
    text = audit(run)
    assert "WRONG" not in text
    assert ": 0 of 0 steps\nshown by running them again: none\nshown by the chain only: none\n" in text


@pytest.mark.promise
def test_a_run_that_was_stopped_in_an_evaluation_passes_before_and_after_it_goes_on(tmp_path: Path) -> None:
    own, hold, held = tmp_path / "own.py", tmp_path / "hold", tmp_path / "held"
    lines = "import time", "from pathlib import Path", "from evenkeel.common.phases import activity"
    lines += "from tests.time_travel.part_task import Parting", "", "", "class Own(Parting):"
    lines += "    def metrics(self, model, batch):", f"        while activity.step and Path({str(hold)!r}).exists():"
    lines += f"            Path({str(held)!r}).touch()", "            time.sleep(0.01)"
    own.write_text("\n".join([*lines, "        return super().metrics(model, batch)", ""]))
    run, words = tmp_path / "a", ["--task", f"{own}:Own", "--eval-every", 6, "--keeper", "off"]
    hold.touch()
    ranks = fork_ranks(0, TRAIN, *job(run, *words))
    wait_until(held.exists, "the evaluation of step 6")
    signal_ranks(ranks, signal.SIGTERM)
    assert (saved_step(run), records(run, "digest")[-1]["step"]) == (6, 5), "the control"
    assert "WRONG" not in audit(run, "--segments", 9)
    hold.unlink()
    trained(0, job(run, *words))
    assert [it["step"] for it in records(run, "digest")] == [*range(1, STEPS + 1)]
    assert "WRONG" not in audit(run, "--segments", 9)
    rewrite(run, lambda lines: lines.remove(of_step(lines, STEPS)))
    assert f"records after step {STEPS - 1} were removed: the run was at step {STEPS}" in audit(run, expect=1)


@pytest.mark.skipif(not has("report"), reason="taken out")
def test_the_report_shows_the_last_audit_and_nothing_without_one(run: Path) -> None:
    def shown() -> str:
        run_forked("-m", "evenkeel", "report", run)
        return (run / "report.html").read_text()

    assert "<h2>Audit</h2>" not in shown(), "the control"
    audit(run, "--segments", 1, "--seed", 1)
    page = shown()
    assert "<h2>Audit</h2>" in page
    assert re.search(r'<th scope="row">nothing is wrong</th><td>on \d{4}-\d\d-\d\d \d\d:\d\d, up to step 40</td>', page)
    assert re.search(r'<th scope="row">shown by running them again</th><td>\d+-\d+</td>', page)
    rewrite(run, lambda lines: of_step(lines, 30)["digests"].update({"model.0.weight": "0" * 16}))
    audit(run, "--segments", 0, expect=1)
    assert re.search(r'<th scope="row">WRONG</th>.*<td>the record of step 30 was edited, or ', shown())
    for damaged in ("{", '{"time": 1}', (run / "audit.json").read_text().replace('"none"', "7")):
        (run / "audit.json").write_text(damaged)
        assert "<h2>Audit</h2>" not in shown()


def test_an_edited_line(run: Path) -> None:
    rewrite(run, lambda lines: of_step(lines, 30)["digests"].update({"model.0.weight": "0" * 16}))
    found = wrong(audit(run, "--segments", 0, expect=1))
    assert found[0].startswith("the record of step 30 was edited, or ")


def test_an_edited_loss(run: Path) -> None:
    def flatter(lines: list[dict]) -> None:
        next(it for it in reversed(lines) if it["kind"] == "train" and it["step"] == 35)["train/loss"] = 0.1

    rewrite(run, flatter)
    assert wrong(audit(run, "--segments", 0, expect=1))[0].startswith("step 35 has the logged loss 0.1, the ledger ")


def test_lines_removed_and_added(run: Path) -> None:
    rewrite(run, lambda lines: lines.remove(of_step(lines, 30)))
    found = wrong(audit(run, "--segments", 0, expect=1))
    assert found == ["records between step 29 and step 31 were removed"]
    rewrite(run, lambda lines: lines.insert(lines.index(of_step(lines, 20)) + 1, of_step(lines, 20) | {"samples": ""}))
    assert "the record of step 20 was added" in wrong(audit(run, "--segments", 0, expect=1))
    rewrite(run, lambda lines: [lines.remove(it) for it in lines[::-1] if it["step"] > 33])
    assert "records after step 33 were removed: the run was at step 40" in wrong(audit(run, "--segments", 0, expect=1))


def test_a_swapped_checkpoint(run: Path, tmp_path: Path) -> None:
    """With that of another run, and with that of another step."""
    run_forked(TRAIN, *job(tmp_path / "b", "--seed", 1, "--max-steps", 17))
    there = run / "checkpoints" / "step-00000016"
    for other in (tmp_path / "b" / "checkpoints" / "step-00000016", run / "checkpoints" / "step-00000024"):
        shutil.rmtree(there)
        shutil.copytree(other, there)
        found = wrong(audit(run, "--segments", 0, expect=1))
        assert len(found) == 1
        if other.name == there.name:
            assert found == ["the checkpoint of step 16 is not the state that the ledger has at step 16"]
        else:
            assert found[0].startswith(f"{there}/manifest.json: is not this checkpoint's manifest")


@pytest.mark.promise
def test_a_repeated_sample_of_a_forger_who_computes_the_chain_again(run: Path) -> None:
    rewrite(run, lambda lines: of_step(lines, 30).update(samples=of_step(lines, 29)["samples"]), rechain=True)
    text = audit(run, "--segments", 0, expect=1)
    assert text.startswith("ok     chain of "), "the control: the chain alone does not show it"
    assert wrong(text) == ["step 30 used other samples than its place in the order has: repeated or left out"]


def test_another_learning_rate(run: Path, tmp_path: Path) -> None:
    """The options of a run with another rate are put in place of its own, at last with a ledger to match."""
    run_forked(TRAIN, *job(tmp_path / "b", "--lr", 0.05, "--max-steps", 1))
    shutil.copy(tmp_path / "b" / "config.toml", run / "config.toml")
    text = (run / "config.toml").read_text().replace("max_steps = 1\n", "max_steps = 0\n")
    (run / "config.toml").write_text(text)
    found = wrong(audit(run, "--segments", 0, expect=1))
    assert found[0].startswith("step 1 was trained with other options than config.toml has")
    theirs = records(tmp_path / "b", "digest")[0]["options"]

    def claim(lines: list[dict]) -> None:
        for it in lines:
            if it["kind"] == "digest":
                it["options"] = theirs

    rewrite(run, claim, rechain=True)
    found = wrong(audit(run, "--segments", 9, expect=1))
    assert any(line.startswith("step 1, run again from step 0, has another ") for line in found)


def test_a_run_without_a_ledger_is_refused_in_a_line(tmp_path: Path) -> None:
    run_forked(TRAIN, *options(TASK, tmp_path / "a", *SHAPE, "--max-steps", 2))
    done = run_forked("-m", "evenkeel", "audit", tmp_path / "a", expect=2)
    assert f"{tmp_path / 'a'}: has no ledger to audit; train with --digest-every N and --reduce tree" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_a_step_whose_rank_0_died_before_its_record_is_recorded_when_the_run_goes_on(tmp_path: Path) -> None:
    """The other rank has committed the step, and saves it."""
    after = "        run.after_step(model, norm)"
    dies = (
        "        import os, pathlib, signal, time\n"
        "        mark = pathlib.Path(__file__).with_name('died')\n"
        "        if step.number == 4 and os.environ['RANK'] == '0' and not mark.exists():\n"
        "            mark.touch()\n"
        "            time.sleep(1)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (own := tmp_path / "own.py").write_text(TRAIN.read_text().replace(after, dies + after))
    processes.run([sys.executable, own, "-g", "2", *job(tmp_path / "a", "--keeper", "on", "--max-steps", 8)])
    assert starts(tmp_path / "a") == [0, 5]
    assert [it["step"] for it in records(tmp_path / "a", "digest")] == [*range(1, 9)]
