"""What tasks and data sets get wrong: each works or is explained in a line, by real runs."""

import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.processes import ROOT, TRAIN, checked, finish, fork, read, records, run, run_forked, torchrun
from tests.support.small_runs import (
    ODD_TASKS,
    OWN,
    failed,
    job,
    odd_job,
    own_task,
    refusal,
    saved_step,
    the_line,
    trained,
)

WRONG = [
    ("Frozen", 2, "model() returned a Linear without a parameter that requires a gradient (requires_grad is False for"),
    ("Doubled", 2, "--validation: train_dataset() has 26 samples and unchanged_train_dataset() 13, so a part of"),
    ("Sparse", 2, "the model is an Embedding with sparse=True, and ranks add up dense gradients only: leave"),
    ("SparseLoss", 1, "a gradient is sparse, and ranks add up dense gradients only"),
    ("ItemLoss", 1, "loss() returned a float: it must return one scalar tensor; leave out .item() or float()"),
    ("NoFolder", 2, "train_dataset(): No such file or directory: no/such/folder/train.csv at "),
    ("NegativeLength", 2, "test_dataset() returned an OfLength whose __len__ fails: ValueError: __len__() should"),
    pytest.param("OnGpu", 2, "and there is none: return it on the CPU; Evenkeel moves it", marks=needs.no_gpu),
    ("NoModule", 2, f"model() returned a Tensor: it must return an nn.Module; see {ODD_TASKS}:"),
    ("NoTestLength", 2, "test_dataset() returned a SimpleNamespace, which has no __len__ and no __getitem__"),
    ("DictLoss", 1, "loss() returned a dict: it must return one scalar tensor; add up its values"),
    ("VectorPart", 1, "loss() returned a tensor of shape [2, 3] as its part 'kl': it must be one real number"),
    ("OtherParts", 1, "loss() returned the parts (a) for one batch and (a, b) for another"),
    ("FloatMetric", 1, "[2, ...], or a scalar one, their mean; leave out .item() or float(); see "),
    (
        "CallsBackward",
        1,
        f"loss() calls backward(): leave that out, because the training loop calls it; see {ODD_TASKS}",
    ),
    ("KeepsGraph", 1, f"in more than one step or micro-batch (self.last = loss.detach()); see {ODD_TASKS}:"),
    ("NoItems", 2, "train_dataset() returned a NoItems, which has no __getitem__: Evenkeel fetches samples by index"),
    ("TwoOfThree", 1, f"override summarize(means) to turn their means into numbers; see {ODD_TASKS}:"),
    (
        "NoBatchLoss",
        1,
        f"batch_loss() returned None: it must return one scalar tensor; is a `return` missing?; see {ODD_TASKS}:",
    ),
    ("OneEmbedding", 1, f"with a row for each sample, [2, ...]; see {ODD_TASKS}:"),
    ("RaggedMetric", 1, "metrics() returned rows of shape [2] as 'loss' for one batch and of [1] for another"),
    ("NoSummary", 1, "summarize() returned None: it must return a dict of numbers"),
    ("NumberedSummary", 1, "summarize() returned a dict with the key 1: names of metrics must be strings"),
    ("NumberedMetric", 1, "metrics() returned a dict with the key 0: names of metrics must be strings"),
    ("Maximum", 2, """the task's `best` is ('loss', 'maximum'): it must be a metric's name and "max" or "min","""),
    ("ComplexLoss", 1, "loss() returned a complex number: it must return a real one"),
    ("Lazy", 2, "model() returned a LazyLinear whose weight has no shape yet: call it once in model() with a batch"),
    ("Meta", 2, "model() returned a Linear whose weight is on the meta device, without values"),
    ("OtherModel", 2, f"build optimizers from the `model` that the method gets; see {ODD_TASKS}:"),
    (
        "Columns",
        2,
        "train_dataset() returned a tuple of 2 tensors with 13 rows each: return TensorDataset(x, y) of them",
    ),
    ("NoSamples", 1, "sample 0 is None: does __getitem__ return it?"),
    ("NoOptimizers", 2, "optimizers() returned an empty list: nothing would be trained"),
    ("NoRates", 1, "rates() returned None: it must return one factor on the peak learning rates"),
    ("ExhaustedSamples", 1, "the data set's __getitem__ raised StopIteration at "),
    ("NoMetrics", 1, "metrics() returned None: it must return a dict of tensors"),
    ("NoneInside", 1, "cannot be collated: part [1] of a sample: it is None; return tensors, arrays"),
    (
        "ManySizes",
        1,
        "cannot be collated: part [0] of a sample: its sizes differ: [",
    ),
    ("ManySizes", 1, f"collate(samples) in the task, as DataLoader's collate_fn; see {ODD_TASKS}:"),
]
"""Task of odd_tasks.py, exit code, what is said."""


@pytest.mark.parametrize(
    "taken",
    [
        "if step.number != 1:\n            model.step(norm)",
        "model.step(norm)\n        model.step(norm)",
        "model.step(norm) if step.number != 1 else next(model.micro_batches(step)), model.step(norm)",
        pytest.param("model.step(norm)", id="the control"),
    ],
)
def test_a_loop_takes_each_step_once_after_all_of_its_micro_batches(tmp_path: Path, taken: str) -> None:
    """Or the next epoch or resume would repeat or miss samples."""
    loop, text, usual = tmp_path / "loop.py", TRAIN.read_text(), "        model.step(norm)  #"
    assert usual in text
    loop.write_text(text.replace(usual, f"        {taken}  #"))
    code = 0 if taken == "model.step(norm)" else 1
    done = run_forked(loop, *odd_job("Usual", tmp_path / "run"), expect=code)
    assert ("evenkeel: call model.step(norm) exactly once" in done.stderr) == bool(code)


@pytest.mark.parametrize(("task", "code", "expected"), WRONG)
def test_a_task_that_cannot_be_trained_is_told_in_a_line(tmp_path: Path, task: str, code: int, expected: str) -> None:
    workers = int(task == "ManySizes")  # its line comes out of a loader process
    more = ["--num-workers", workers, "--validation", 0.5 if task == "Doubled" else 0]
    assert expected in refusal(odd_job(task, tmp_path / "run", *more), code)
    if code == 2:
        assert not (tmp_path / "run" / "status.json").exists(), "nothing has been touched"
    else:
        status = read(tmp_path / "run", "status.json")
        assert expected in status["reason"]
        assert status["step"] == 0 or task not in ("NoMetrics", "TwoOfThree", "NoSummary"), "before the first step"


def test_a_mistake_in_the_evaluation_shows_before_the_first_step_and_keeps_its_place(tmp_path: Path) -> None:
    done = run_forked(TRAIN, *odd_job("BrokenMetrics", tmp_path / "run"), expect=1)
    assert read(tmp_path / "run", "status.json")["step"] == 0
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert "in metrics" in done.stderr
    # only the user's frames, and where the others are
    shown = re.findall(r'^  File "(.*?)"', done.stderr, re.MULTILINE)
    assert set(shown) == {str(TRAIN), str(ODD_TASKS)}
    log = re.search(r"^Traceback \(most recent call last\), your files only; all of it is in (.*):$", done.stderr, re.M)
    assert "evaluation.py" in Path(log[1]).read_text(), "a frame of the engine"
    assert re.fullmatch(rf"evenkeel: rank 0 failed: StopIteration at {ODD_TASKS}:\d+", done.stderr.splitlines()[-1])


@needs.no_gpu
@pytest.mark.parametrize(
    ("task", "tracebacks", "line"),
    [
        ("BrokenMetrics", 1, "rank . failed: StopIteration at .*"),
        ("ItemLoss", 0, f"loss\\(\\) returned a float: .*; see {ODD_TASKS}:\\d+"),
    ],
)
def test_of_two_ranks_one_says_what_is_wrong(tmp_path: Path, task: str, tracebacks: int, line: str) -> None:
    """Besides torchrun's own traceback and its report, which has a line for each rank."""
    done = run(torchrun(2, TRAIN, *odd_job(task, tmp_path / "run")), expect=1)
    assert done.stderr.count("Traceback (most recent call last)") == tracebacks + 1
    assert len(re.findall(f"^evenkeel: {line}$", done.stderr, re.MULTILINE)) == 1
    assert len(re.findall("^  traceback : .*(StopIteration at|EndedHere: loss)", done.stderr, re.MULTILINE)) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "differs"),
    [
        ("nn.Linear(4 + int(os.environ['RANK']), 1)", "weight is [1, 5], not [1, 4]"),
        ("Network([nn.Linear(4, 1), nn.Linear(1, 1)])", "its layers come in another order"),
    ],
)
def test_a_model_that_differs_between_ranks_is_named(tmp_path: Path, made: str, differs: str) -> None:
    pytest.importorskip("evenkeel.tasks.regress")
    (tmp_path / "own.py").write_text(
        "import os\nfrom torch import nn\nfrom evenkeel.tasks.regress import Regress\n\n\nclass Own(Regress):\n"
        f"    def model(self):\n        return {made}\n\n\nclass Network(nn.Module):\n"
        "    def __init__(self, layers):\n        super().__init__()\n"
        "        for number in [[0, 1], [1, 0]][int(os.environ['RANK'])]:\n"
        "            self.add_module(str(number), layers[number])\n"
        "    def forward(self, x):\n        return self.get_submodule('1')(self.get_submodule('0')(x))\n"
    )
    words = ["--task", f"{tmp_path}/own.py:Own", "--run-dir", tmp_path / "run", "--wandb", "disabled"]
    done = run([sys.executable, ROOT / "launch" / "single_node.py", "-g", "2", "--", *words], expect=2)
    assert done.stderr == (
        f"evenkeel: model() of rank 1 differs from rank 0's: {differs}; it must not depend on the rank, nor on a "
        f"generator of its own; see {tmp_path}/own.py:7\n"
    )


NO_BEST = "no best checkpoint is stored: the evaluation has no metric 'error', only loss; in the task write best = ("
OUTSIDE = "something other than rates() sets a learning rate, perhaps a scheduler: it has no effect"


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("UnknownBest", [NO_BEST]),
        ("Evaluating", ["evaluation mode of 0: no dropout, and BatchNorm's statistics do not move, although"]),
        ("InAList", ["a plain list or dict of the model has layers (more), which are not trained, stored or"]),
        ("Sums", [f"{it}() returns the sum over the batch's samples (loss)" for it in ("metrics", "loss")]),
        ("Scheduled", ["no optimizer has bias: they will not change", OUTSIDE]),
        *((task, []) for task in ("NoBest", "Usual", "UsualBest", "Everything", "OwnBatches", "OneUnusedAndSaidSo")),
        ("BesidesTheLoss", []),
    ],
)
def test_a_likely_mistake_is_said_once_and_what_is_rare_works(tmp_path: Path, task: str, expected: list[str]) -> None:
    more = ["--checkpoint-every", 1, "--log-every", 1, "--micro-batch", 4]  # a micro-batch of two says little of a sum
    more += ["--validation", 0.4] * (task == "Sums")  # two sets, and the metrics are warned of once
    lines = run_forked(TRAIN, *odd_job(task, tmp_path / "run", *more)).stderr.splitlines()
    assert len(lines) == len(expected), lines
    for line, text in zip(lines, expected, strict=True):
        assert line.startswith(f"evenkeel: WARNING: {text}")
    assert read(tmp_path / "run")["state"] == "finished"
    if task in ("UsualBest", "BesidesTheLoss"):
        (*_, newest) = sorted((tmp_path / "run" / "checkpoints").glob("step-*/manifest.json"))
        assert read(newest.parent, newest.name)["best_by"] == ["test/loss", "min"]


@pytest.mark.parametrize("best", ["Task.best", "('error', 'min')"])
def test_what_decides_is_found_out_after_a_kill_too(tmp_path: Path, best: str) -> None:
    """By the first evaluation, if the rehearsal before the first step had too few samples."""
    body = f"""
        best = {best}
        def loss(self, model, batch):
            if activity.step == 2 and not os.path.exists({str(tmp_path / "killed")!r}):
                open({str(tmp_path / "killed")!r}, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().loss(model, batch)
        def summarize(self, means, samples):
            return {{"loss": float(means["loss"]) / (samples == 37)}}
    """
    task = own_task(tmp_path, body, "from evenkeel.common.phases import activity\nfrom evenkeel.tasks import Task")
    shape = ["--max-steps", 8, "--checkpoint-every", 1, "--eval-every", 4, "--keeper", "off", "--task", task]
    words = job(tmp_path / "run", *shape)
    checked(finish(fork(TRAIN, *words, env=OWN)), -signal.SIGKILL)
    assert saved_step(tmp_path / "run") in (1, 2)
    said = checked(finish(fork(TRAIN, *words, env=OWN)), 0).stderr
    decides = [
        read(folder, "manifest.json")["best_by"] for folder in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    ]
    if best == "Task.best":
        assert decides[-1] == ["test/loss", "min"]
        assert "no best checkpoint" not in said
    else:
        assert said.count(NO_BEST) == 1


@pytest.mark.parametrize(
    ("task", "workers", "expected"),
    [("Exits", 0, "None"), ("Exits", 2, "None"), ("ExitsInLoss", 0, "0"), ("ExitsInModel", 0, "'no such\\nnetwork'")],
)
def test_sys_exit_in_a_task_is_a_failure(tmp_path: Path, task: str, workers: int, expected: str) -> None:
    line = refusal(odd_job(task, tmp_path / "run", "--num-workers", workers), code=1)
    called = rf"the task called sys.exit\({re.escape(expected)}\) at {ODD_TASKS}:\d+"
    assert re.fullmatch(rf"{called}, and the run is not finished; .*", line)
    if task != "ExitsInModel":
        assert read(tmp_path / "run", "status.json")["state"] == "failed"


def test_ranks_whose_losses_have_other_parts_are_told_before_the_first_step_counts(tmp_path: Path) -> None:
    done = run(torchrun(2, TRAIN, *odd_job("PartsByRank", tmp_path / "run")), expect=1)
    assert "evenkeel: loss() returned the parts (part_0) for one batch and (part_1) for another" in done.stderr
    assert read(tmp_path / "run", "status.json")["step"] == 0
    # and a sys.exit in a task does not pass for the end of a job
    done = run(torchrun(2, TRAIN, *odd_job("Exits", tmp_path / "exits", "--num-workers", 1)), expect=1)
    assert "evenkeel: the task called sys.exit(None) at " in done.stderr


@needs.no_gpu
@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("OtherDataOnRank1", "the training data has 13 samples on rank 0 and 12"),
        ("OtherSetsOnRank1", "the near data has 13 samples on rank 0 and 0"),
    ],
)
def test_ranks_with_other_data_are_told_so(tmp_path: Path, task: str, said: str) -> None:
    """Their steps would not be the same ones, and in the end one would wait for ever."""
    refused, _ = failed(2, odd_job(task, tmp_path / "run"), code=2)
    assert the_line(refused.stderr) == f"{said} on rank 1; give all nodes the same data"
    assert not (tmp_path / "run" / "status.json").exists()


def test_a_micro_batch_of_one_sample_and_batchnorm_are_refused_before_anything_is_touched(tmp_path: Path) -> None:
    options = ["--dataset", "fake", "--fake-samples", 101, "--image-size", 32, "--model", "shufflenet_v2_x0_5"]
    cut = ["--batch-size", 8, "--micro-batch", 4, "--run-dir", tmp_path / "run"]
    assert refusal([*options, *cut]).endswith("--micro-batch 3 leaves no single sample")
    assert not (tmp_path / "run").exists()


ONLY_THE_GENERATOR = """
import gan
from evenkeel import start

class Other(gan.Gan):
    def loss(self, model, batch):
        return model["critic"](batch[0].flatten(1) / 255).square().mean()

gan.Gan = Other
start(gan.main)
"""
LINE = (
    "evenkeel: --batch-size 64 --micro-batch 63: every step has 64 samples, of which a micro-batch gets only one, and "
    "the model's BatchNorm cannot train on one sample; --micro-batch 62 leaves no single sample"
)


@pytest.mark.parametrize("one", ["the task's loss", "the other network's loss"])
def test_networks_that_take_turns_are_refused_before_the_first_step(tmp_path: Path, one: str) -> None:
    script, run_dir = ROOT / "examples" / "gan.py", tmp_path / "run"
    if own := one != "the task's loss":
        (script := tmp_path / "own.py").write_text(ONLY_THE_GENERATOR)
    job = ["--run-dir", run_dir, "--wandb", "disabled", "--max-steps", 2]
    env = {"PYTHONPATH": f"{ROOT / 'examples'}:{ROOT / 'src'}"}
    done = checked(finish(fork(script, *job, "--batch-size", 64, "--micro-batch", 63, env=env)), 2)
    assert done.stderr.splitlines() == [LINE]
    assert run_dir.exists() == own
    checked(finish(fork(script, *job, "--batch-size", 64, "--micro-batch", 62, env=env)), 0)
    assert read(run_dir)["step"] == 2


@needs.no_gpu
def test_ranks_that_split_on_import_are_told_so_and_those_with_own_dice_go_on(tmp_path: Path) -> None:
    for task in ("Drawn", "DrawnAtEachRead"):
        first, _ = trained(2, odd_job(task, tmp_path / task, "--max-steps", 1))
        assert ("the training and test data differs each time" in first.stderr) == (task == "DrawnAtEachRead")
        first, _ = trained(2, odd_job(task, tmp_path / task, "--max-steps", 1))  # it is finished
        assert "--fresh starts over" in first.stdout
        assert len(read(tmp_path / task, "status.json")["digests"]) == (0 if task == "DrawnAtEachRead" else 2)
    refused, _ = failed(2, odd_job("DrawnOnImport", tmp_path / "run"), code=2)
    assert "the training data of rank 1 differs from rank 0's, although it has as many" in the_line(refused.stderr)
    assert not (tmp_path / "run" / "status.json").exists()


def test_what_is_another_at_each_read_is_known_at_each_start_beside_a_set_that_is_not(tmp_path: Path) -> None:
    for steps in (1, 2):
        options = ["--max-steps", steps, "--schedule", "constant"]
        done = run_forked(TRAIN, *odd_job("TrainingDrawnAtEachRead", tmp_path / "run", *options))
        assert "the training data differs each time" in done.stderr
        assert [*read(tmp_path / "run", "status.json")["digests"]] == ["test"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_goes_on_with_its_data_or_with_other_data_that_is_meant(tmp_path: Path, workers: int) -> None:
    def attempt(task: str, steps: int, *more: object, expect: int = 0) -> str:
        options = ["--max-steps", steps, "--schedule", "constant", "--num-workers", workers, *more]
        return run_forked(TRAIN, *odd_job(task, tmp_path / "run", *options), expect=expect).stderr

    attempt("DrawnOnImport", 1)
    known = read(tmp_path / "run", "status.json")
    refused = the_line(attempt("DrawnOnImport", 2, expect=2))
    assert refused.startswith(f"--run-dir {tmp_path / 'run'}: the training data has changed, although it has")
    assert refused.endswith("add --other-data")
    assert read(tmp_path / "run", "status.json") == known, "nothing has been touched"
    assert "WARNING: --other-data: the training data has changed" in attempt("DrawnOnImport", 2, "--other-data")
    assert read(tmp_path / "run", "status.json")["digests"] != known["digests"]
    attempt("DrawnOnImport", 3, "--fresh")
    # of an earlier version
    status = tmp_path / "run" / "status.json"
    status.write_text(status.read_text().replace('"digests"', '"unknown"'))
    attempt("DrawnOnImport", 4)
    assert read(tmp_path / "run", "status.json")["digests"]


CHANGED = "samples of the training data are not what they were when the job began"


@needs.no_gpu
@pytest.mark.parametrize(("ranks", "workers"), [(0, 0), (0, 1), (2, 1)])
def test_data_that_the_loss_changes_ends_the_run(tmp_path: Path, ranks: int, workers: int) -> None:
    job = odd_job("Fills", tmp_path / "run", "--num-workers", workers)
    first, *others = failed(ranks, job)
    assert the_line(first.stderr).startswith(CHANGED)
    assert not any(done.stderr for done in others)
    assert read(tmp_path / "run", "status.json")["step"] == 1


def test_the_control_such_a_result_depends_on_the_loader_processes(tmp_path: Path) -> None:
    """Which is accepted with --other-data, with one warning."""
    losses = set()
    for workers in (0, 1):
        options = ["--num-workers", workers, "--other-data", "--log-every", 1]
        done = run_forked(TRAIN, *odd_job("Fills", tmp_path / str(workers), *options))
        assert [line for line in done.stderr.splitlines() if CHANGED in line] == [
            f"evenkeel: WARNING: --other-data: {CHANGED}"
        ]
        losses.add(records(tmp_path / str(workers), "train")[-1]["train/loss"])
    assert len(losses) == 2
