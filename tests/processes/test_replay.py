"""A step of a run that was killed and resized, run again on one process; also of streams, shards and images."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from evenkeel.data.sampler import ElasticSampler
from tests.support.processes import ROOT, TRAIN, bytes_of, records, run, run_forked, start, torchrun
from tests.support.shards import tars
from tests.support.small_runs import SUPPORT, options, recipe_job, stop_at

TASK = f"{ROOT / 'tests' / 'time_travel' / 'nan_task.py'}:FromFiles"
SAMPLES, BATCH, MICRO = 61, 6, 2
BAD = random.Random(29).randrange(8, 11)
"""The step, counted from 1, one of whose samples has NaN pixels."""


def bad_sample() -> int:
    sampler = ElasticSampler(range(SAMPLES), BATCH, MICRO, num_replicas=1, rank=0)
    sampler.set_epoch(0, BAD - 1)
    return next(iter(sampler))[1]


def job(folder: Path, *more: object) -> list[str]:
    """A run of two epochs; its samples are files in `folder`/data."""
    data = folder / "data"
    if not data.exists():
        data.mkdir(parents=True)
        generator = torch.Generator().manual_seed(0)
        for number in range(SAMPLES):
            torch.save(torch.randn(4, generator=generator), data / f"{number:03}.pt")
        torch.save(torch.full((4,), torch.nan), data / f"{bad_sample():03}.pt")
    shape = f"--epochs 2 --batch-size {BATCH} --micro-batch {MICRO} --log-every 1 --digest-every 1 --reduce tree"
    return options(TASK, folder / "run", "--data-dir", data, *shape.split(), "--keep-every", 5, *more)


def replay(run_dir: Path, step: object, *more: object, expect: int = 0) -> dict:
    done = run_forked("-m", "evenkeel", "replay", run_dir, "--step", step, "--json", *more, expect=expect)
    return json.loads(done.stdout)


@pytest.mark.promise
def test_a_sample_of_nan_is_named_on_one_process_after_a_kill_on_three_ranks_and_an_end_on_two(tmp_path: Path) -> None:
    """Digests agree in every bit at each step before, and nothing in the run changes."""
    stop_at(tmp_path / "run", 3, start(torchrun(3, TRAIN, *job(tmp_path, "--pause", 0.1))), signal.SIGKILL)
    assert len(records(tmp_path / "run", "digest")) < BAD
    done = run(torchrun(2, TRAIN, *job(tmp_path)), expect=1)
    command = f"replay {tmp_path / 'run'} --step {BAD}"
    assert command in done.stdout
    before = bytes_of(tmp_path)
    page = tmp_path.with_suffix(".html")
    found = replay(tmp_path / "run", BAD, "--html", page)
    assert bytes_of(tmp_path) == before
    assert found["agreement"] == "agrees: the run ended at that step too"
    (step,) = found["steps"]
    culprit = step["nonfinite"]
    file = str(tmp_path / "data" / f"{bad_sample():03}.pt")
    assert culprit["samples"] == [{"sample": bad_sample(), "source": file}]
    assert (culprit["operation"], culprit["value"], culprit["given"]) == ("aten.add", "nan", True)
    assert "model(features + 0.1 * noise)" in culprit["line"]
    assert {it["sample"] for it in step["samples"] if it["loss"] == "nan"} == {bad_sample()}
    shown = [f"{bad_sample():03}.pt", "aten.add", "model(features + 0.1 * noise)", "0.weight", found["agreement"]]
    assert [it for it in shown if it not in page.read_text()] == []
    assert found["started"] == BAD - 1
    earlier = replay(tmp_path / "run", f"1:{BAD - 1}")
    assert earlier["agreement"] == f"agrees in every bit (steps 1 to {BAD - 1} compared)"
    assert [it["step"] for it in earlier["steps"]] == [*range(1, BAD)]
    assert all(it["nonfinite"] is None for it in earlier["steps"])
    assert replay(tmp_path / "run", BAD - 1)["started"] == 5, "--keep-every 5"


@pytest.mark.slow
def test_a_step_after_one_that_the_run_has_left_out(tmp_path: Path) -> None:
    run_forked(TRAIN, *job(tmp_path, "--on-nonfinite", "skip", "--keep-every", 0))
    found = replay(tmp_path / "run", f"{BAD}:{BAD + 1}")
    assert found["agreement"] == f"agrees in every bit (steps 1 to {BAD + 1} compared)"
    assert [(it["step"], it["nonfinite"] is None) for it in found["steps"]] == [(BAD, False), (BAD + 1, True)]


def test_batchnorm_and_a_function_of_ones_own(tmp_path: Path) -> None:
    """Losses of samples use the running statistics, which stay as they are: the bits agree after the look."""
    run_forked(TRAIN, *recipe_job(tmp_path / "run", "--digest-every", 1, "--keep-every", 4, "--reduce", "tree"))
    (tmp_path / "see.py").write_text(
        "def see(_, batch, step):\n    print(step, len(batch[0]), file=open('seen', 'a'))\n"
    )
    words = ["-m", "evenkeel", "replay", tmp_path / "run", "--step", "6:8", "--python", f"{tmp_path / 'see.py'}:see"]
    done = run([sys.executable, *words, "--script", TRAIN, "--save-samples", tmp_path / "saved"], cwd=tmp_path)
    assert len([*(tmp_path / "saved").glob("step-7-sample-*-0.pt")]) == 12
    assert done.stdout.splitlines()[-1] == "evenkeel: agrees in every bit (steps 5 to 8 compared)"
    again = run_forked(*words, "--script", TRAIN, "--save-samples", tmp_path / "saved", expect=2)
    assert again.stderr == f"evenkeel: --save-samples {tmp_path / 'saved'}: is not empty; name a new folder\n"
    assert done.stdout.count("losses of samples use BatchNorm's running statistics") == 3
    assert (tmp_path / "seen").read_text().split("\n")[:4] == ["6 3"] * 4
    assert "sample" in done.stdout


def test_a_step_is_cut_as_it_was_before_the_run_changed_that(tmp_path: Path) -> None:
    """Its batches' statistics depend on it. The control replays with the present cut."""
    first = recipe_job(tmp_path / "run", "--log-every", 1)
    stop_at(tmp_path / "run", 3, start([sys.executable, str(TRAIN), *first]), signal.SIGTERM)
    run_forked(TRAIN, *recipe_job(tmp_path / "run", "--log-every", 1, "--micro-batch", 12))
    assert replay(tmp_path / "run", 2)["agreement"].startswith("agrees")
    control = replay(tmp_path / "run", 2, "--", "--micro-batch", 12, expect=1)
    assert control["agreement"].startswith("differs: step 1 has the ")


def test_what_cannot_be_meant_is_refused_in_a_line(tmp_path: Path) -> None:
    for words, line in {
        ("--step", "0"): "--step 0: give a step from 1 on",
        ("--step", "5:4"): "--step 5:4: give a step from 1 on",
        ("--step", "5", "--python", "no.py:f"): "--python no.py:f: there is no file no.py",
        ("--step", "5", "--pdb", "--ranks", "2"): "--pdb: works on one rank",
        ("--step", "5", "--ranks", "2"): f"{tmp_path}: is not a run directory",
        ("--step", "5"): f"{tmp_path}: is not a run directory",
    }.items():
        done = run_forked("-m", "evenkeel", "replay", tmp_path, *words, expect=2)
        assert line in done.stderr
        assert done.stdout == ""


@pytest.mark.promise
def test_the_control_a_replay_with_a_generator_that_goes_on_does_not_agree(tmp_path: Path) -> None:
    run_forked(TRAIN, *job(tmp_path, "--ordinary"), expect=1)
    found = replay(tmp_path / "run", 7, expect=1)
    assert found["started"] == 5
    assert found["agreement"].startswith("differs: from step 6 on, "), found["agreement"]


def test_a_ring_agrees_in_every_bit_on_its_own_number_of_ranks(tmp_path: Path) -> None:
    """And, the control, on one process but for rounding. All samples are seen, whichever rank has them."""
    ring = [*job(tmp_path, "--max-steps", 8), "--reduce", "ring", "--micro-batch", 1]
    run(torchrun(2, TRAIN, *ring))
    saved, page = tmp_path / "saved", tmp_path / "found.html"
    own = replay(tmp_path / "run", 7, "--ranks", 2, "--save-samples", saved, "--html", page)
    assert own["agreement"] == "agrees in every bit (steps 6 to 7 compared)"
    assert own["other"] == ""
    alone = replay(tmp_path / "run", 7)
    assert "the digests differ from step 6 on, as of a ring on other ranks" in alone["agreement"]
    (ours,), (theirs,) = own["steps"], alone["steps"]
    assert [it["sample"] for it in ours["samples"]] == [it["sample"] for it in theirs["samples"]]
    assert len({path.name.split("-")[3] for path in saved.iterdir()}) == len(ours["samples"]) == BATCH
    assert "agrees in every bit" in page.read_text()
    words = ["replay", tmp_path / "run", "--step", 7, "--ranks", 2, "--script", "no.py"]
    gone = run_forked("-m", "evenkeel", *words, expect=2)
    assert gone.stderr == "evenkeel: --script no.py: is not there, or has no train(run); name a file like train.py\n"


def test_batchnorm_over_the_whole_batch_needs_its_ranks_and_one_may_idle(tmp_path: Path) -> None:
    words = ["--sync-batchnorm", "--micro-batch", 6, "--max-steps", 4, "--digest-every", 1, "--keep-every", 2]
    run(torchrun(3, TRAIN, *recipe_job(tmp_path / "run", *words, "--reduce", "tree")))
    found = replay(tmp_path / "run", "3:4", "--ranks", 3)
    assert found["agreement"] == "agrees in every bit (steps 3 to 4 compared)"
    assert [len(step["samples"]) for step in found["steps"]] == [12, 12]
    refused = run_forked("-m", "evenkeel", "replay", tmp_path / "run", "--step", 3, expect=2)
    assert "--sync-batchnorm: a step has 2 micro-batches of 6 samples" in refused.stderr


def test_the_debugger_stops_before_each_micro_batch(tmp_path: Path) -> None:
    run_forked(TRAIN, *recipe_job(tmp_path / "run", "--digest-every", 1, "--reduce", "tree"))
    words = ["-m", "evenkeel", "replay", tmp_path / "run", "--step", 3, "--pdb", "--script", TRAIN]
    typed = "p step, len(batch[0]), type(model).__name__\nc\n" * 4
    done = subprocess.run([sys.executable, *map(str, words)], input=typed, capture_output=True, text=True, check=True)
    assert done.stdout.count("(Pdb) (3, 3, '") == 4
    assert done.stdout.splitlines()[-1] == "evenkeel: agrees in every bit (steps 1 to 3 compared)"


SHAPE = "--batch-size 12 --micro-batch 3 --max-steps 10 --reduce tree --digest-every 1 --keep-every 4"


def images(folder: Path) -> Path:
    """Sixteen pictures of two classes, and as many for the test."""
    for part in ("train", "val"):
        for number in range(16):
            path = folder / part / f"class-{number % 2}" / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (24, 24), (16 * number, 255 - 16 * number, 90)).save(path)
    return folder


def shards(folder: Path) -> Path:
    """54 samples in four shards, with their index."""
    tars(folder, [9, 14, 11, 20])
    run_forked("-m", "evenkeel", "data", "index", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "refresh", "shards", "images"])
def test_steps_are_run_again_in_every_bit_and_samples_have_names(tmp_path: Path, kind: str) -> None:
    """On one process, from a checkpoint of any step. The control: with pictures that were changed it does not agree."""
    words = {
        "stream": lambda: (f"{SUPPORT / 'streams_task.py'}:Streamed",),
        "refresh": lambda: (f"{SUPPORT / 'refreshed_task.py'}:Refreshed",),
        "shards": lambda: (f"{SUPPORT / 'shards_task.py'}:Sharded", "--folder", shards(tmp_path / "data")),
        "images": lambda: ("classify", "--dataset", "imagefolder", "--data-dir", images(tmp_path / "data")),
    }
    task, *more = words[kind]()
    run = tmp_path / "run"
    run_forked(TRAIN, *options(task, run, *SHAPE.split(), "--log-every", 1, *more))
    found = run_forked("-m", "evenkeel", "replay", run, "--step", "6").stdout
    assert found.splitlines()[0] == "evenkeel: replayed from the checkpoint of step 4"
    assert found.splitlines()[-1] == "evenkeel: agrees in every bit (steps 5 to 6 compared)"
    if kind in ("shards", "images"):
        assert f"({tmp_path / 'data'}" in found, "the file of a sample, or its shard"
    audited = run_forked("-m", "evenkeel", "audit", run, "--segments", 9).stdout
    assert "WRONG" not in audited
    assert "shown by running them again: 1-10\n" in audited
    assert ("which a stream has not" in audited) == (kind == "stream")
    if kind == "images":
        for path in (tmp_path / "data" / "train").rglob("*.png"):
            Image.new("RGB", (24, 24), (90, 16, 255)).save(path)
        again = ("-m", "evenkeel", "replay", run, "--step", "6")
        assert "the training data has changed" in run_forked(*again, expect=2).stderr
        found = run_forked(*again, "--", "--other-data", expect=1).stdout
        assert found.splitlines()[-1].startswith("evenkeel: differs: from step 5 on"), found
