"""What tasks get wrong: each works or is explained in a line, by real runs."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import default_collate

from evenkeel.checked_metrics import check_metrics
from evenkeel.checked_optimizers import checked_optimizers
from evenkeel.errors import Ended, Refusal
from evenkeel.mistakes import Uncollated, checked_loss, explain, explain_samples, is_out_of_memory
from evenkeel.optimization import Rates

from .processes import (
    ROOT,
    TRAIN,
    finish,
    fork_ranks,
    free_port,
    kill_group,
    read,
    refused_ranks,
    run,
    run_forked,
    torchrun,
)

TASKS = ROOT / "tests" / "odd_tasks.py"


def job(task: str, run_dir: Path, *more: object) -> list[str]:
    """Options of a run of four steps, the last of one sample."""
    shape = ["--batch-size", 4, "--micro-batch", 2, "--epochs", 1, "--wandb", "disabled"]
    return [str(word) for word in ("--task", f"{TASKS}:{task}", "--run-dir", run_dir, *shape, *more)]


def the_line(err: str) -> str:
    """The only line of stderr."""
    (line,) = err.splitlines()
    assert line.startswith("evenkeel: ")
    return line.removeprefix("evenkeel: ")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("task", "code", "expected"),
    [
        (
            "Frozen",
            2,
            "model() returned a Linear without a parameter that needs a gradient (requires_grad is False for",
        ),
        ("NoModule", 2, "model() returned a Tensor: it must return an nn.Module"),
        (
            "Endless",
            2,
            "train_dataset() returned a Stream, which has no __len__: samples are dealt out by their numbers",
        ),
        ("NoTestLength", 2, "test_dataset() returned a SimpleNamespace, which has no __len__ and no __getitem__"),
        ("VectorLoss", 1, "loss() returned a tensor of shape [2]: it must return a scalar, the mean"),
        ("DictLoss", 1, "loss() returned a dict: it must return one scalar tensor; add up its values"),
        ("LossWithoutGradient", 1, "loss() returned a tensor without a gradient: it does not depend on"),
        (
            "MeanMetric",
            1,
            "metrics() returned a tensor of shape [] as 'loss' for a batch of 2 samples: it must have a row",
        ),
        ("FloatMetric", 1, "metrics() returned a float as 'accuracy' for a batch of 2 samples"),
        ("TwoOfThree", 1, "metrics() returned 'loss' with 3 numbers, [3], for each sample: return one for each"),
        ("RaggedMetric", 1, "metrics() returned rows of shape [2] as 'loss' for one batch and of [1] for another"),
        ("NoSummary", 1, "summarize() returned None: it must return a dict of numbers"),
        ("NumberedSummary", 1, "summarize() returned a dict with the key 1: names of metrics must be texts"),
        ("NumberedMetric", 1, "metrics() returned a dict with the key 0: names of metrics must be texts"),
        ("Maximum", 2, """the task's `best` is ('loss', 'maximum'): it must be a metric's name and "max" or "min","""),
        ("ComplexLoss", 1, "loss() returned a complex number: it must return a real one"),
        ("Lazy", 2, "model() returned a LazyLinear whose weight has no shape yet: call it in model() with a batch"),
        ("Meta", 2, "model() returned a Linear whose weight is on the meta device, without values"),
        ("OtherModel", 2, "optimizers()[0] has a parameter of shape [2, 3] that is none of the model's"),
        ("NoOptimizers", 2, "optimizers() returned an empty list: nothing would be trained"),
        ("TwiceTaken", 2, "bias is in optimizers()[0] and in optimizers()[1]: both would step it"),
        ("NoRates", 1, "rates() returned None: it must return one factor on the peak learning rates"),
        ("ExhaustedSamples", 1, "the data set's __getitem__ raised StopIteration at "),
        ("NegativeLength", 2, "test_dataset() returned a Negative, whose __len__ fails (ValueError: __len__() should"),
        ("NoMetrics", 1, "metrics() returned None: it must return a dict of tensors"),
        ("NoneInside", 1, "sample[1] is None: return a number or a tensor that stands for nothing"),
        ("Images", 1, "sample['image'] is an Image: make it a tensor in the data set's transform, by torchvision"),
        ("ManySizes", 1, "sample[0] has different sizes, [3, 4] and [3, 5]: resize, crop or pad them to one"),
        (
            "DataClasses",
            1,
            "a sample is a Sample: return a dict, by dataclasses.asdict(sample), a tuple or a named tuple",
        ),
        ("MissingKey", 1, "sample['y'] is not there in every sample; give all samples the same keys"),
        (
            "OneUnused",
            1,
            "2 of the model's 4 parameters got no gradient from loss(): spare.weight, spare.bias; use them",
        ),
    ],
)
def test_a_task_that_cannot_be_trained_is_told_in_a_line(tmp_path: Path, task: str, code: int, expected: str) -> None:
    done = run_forked(TRAIN, *job(task, tmp_path / "run"), expect=code)
    assert expected in the_line(done.stderr)
    if code == 2:
        assert not (tmp_path / "run").exists(), "nothing has been touched"
    else:
        assert expected in read(tmp_path / "run", "status.json")["reason"]


MISTAKEN = ["MeanMetric", "NoMetrics", "TwoOfThree", "NoSummary", "BrokenMetrics"]


@pytest.mark.multiprocess
@pytest.mark.parametrize("task", MISTAKEN)
def test_a_mistake_in_the_evaluation_shows_before_the_first_step(tmp_path: Path, task: str) -> None:
    done = run_forked(TRAIN, *job(task, tmp_path / "run"), expect=1)
    assert read(tmp_path / "run", "status.json")["step"] == 0
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
    if task == "BrokenMetrics":  # a mistake of the task's own keeps its place
        assert "in metrics" in done.stderr
        assert done.stderr.splitlines()[-1] == "StopIteration"


@pytest.mark.multiprocess
@pytest.mark.parametrize("task", ["UsualBest", "NoBest", "Scheduled"])
def test_what_is_likely_a_mistake_is_said_once(tmp_path: Path, task: str) -> None:
    done = run_forked(TRAIN, *job(task, tmp_path / "run", "--checkpoint-every", 1))
    expected = {
        "UsualBest": ["no best checkpoint will be kept: the evaluation has no metric 'accuracy', only loss; set the"],
        "NoBest": [],
        "Scheduled": [
            "no optimizer has bias: they will stay as they are",
            "something besides rates() has set a learning rate, a scheduler perhaps: that has no effect",
        ],
    }
    lines = done.stderr.splitlines()
    assert len(lines) == len(expected[task]), lines
    for line, text in zip(lines, expected[task], strict=True):
        assert line.startswith(f"evenkeel: WARNING: {text}")


@pytest.mark.multiprocess
def test_a_line_about_samples_comes_out_of_a_loading_process(tmp_path: Path) -> None:
    done = run_forked(TRAIN, *job("ManySizes", tmp_path / "run", "--num-workers", 1), expect=1)
    assert the_line(done.stderr).startswith(
        "the data set's samples cannot be made a batch: sample[0] has different sizes"
    )


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("task", "workers", "expected"),
    [("Exits", 0, "None"), ("Exits", 2, "None"), ("ExitsInLoss", 0, "0"), ("ExitsInModel", 0, "'no such\\nnetwork'")],
)
def test_sys_exit_in_a_task_is_a_failure(tmp_path: Path, task: str, workers: int, expected: str) -> None:
    done = run_forked(TRAIN, *job(task, tmp_path / "run", "--num-workers", workers), expect=1)
    assert re.fullmatch(
        rf"the task called sys.exit\({re.escape(expected)}\) at {TASKS}:\d+, and the run is not finished; .*",
        the_line(done.stderr),
    )
    if task != "ExitsInModel":
        assert read(tmp_path / "run", "status.json")["state"] == "failed"


@pytest.mark.multiprocess
def test_sys_exit_in_a_task_does_not_pass_for_the_end_of_a_job(tmp_path: Path) -> None:
    done = run(torchrun(2, TRAIN, *job("Exits", tmp_path / "run", "--num-workers", 1)), expect=1)
    assert "evenkeel: the task called sys.exit(None) at " in done.stderr


@pytest.mark.multiprocess
@pytest.mark.parametrize("task", ["Usual", "Everything", "OwnBatches", "OneUnusedAndSaidSo"])
def test_what_few_tasks_return_works(tmp_path: Path, task: str) -> None:
    run_forked(TRAIN, *job(task, tmp_path / "run"))
    assert read(tmp_path / "run")["state"] == "finished"


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it")
def test_ranks_with_other_data_are_told_so(tmp_path: Path) -> None:
    """Their steps would not be the same ones, and in the end one would wait for ever."""
    refused, _ = refused_ranks(2, TRAIN, *job("OtherDataOnRank1", tmp_path / "run"))
    assert the_line(refused.stderr) == (
        "the training data has 13 samples on rank 0 and 12 on rank 1; give all nodes the same data"
    )
    assert not (tmp_path / "run" / "status.json").exists()


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it")
def test_ranks_say_which_parameters_get_no_gradient_and_none_waits_for_ever(tmp_path: Path) -> None:
    """Three ranks, of which the last has no micro-batch and would wait in DDP for the gradients of the others."""
    ranks = fork_ranks(3, TRAIN, *job("OneUnused", tmp_path / "run"))
    try:
        ended = finish(ranks[0])
        assert ended.returncode == 1
        assert "spare.weight, spare.bias" in ended.stderr.splitlines()[-1]
        assert ended.stderr.count("spare.weight") == 1
        others = [finish(process) for process in ranks[1:]]  # no torchrun is here to end them
    finally:
        for process in ranks:
            kill_group(process)
    assert [process.returncode for process in others] == [1, 1]
    assert ["spare.weight" in process.stderr for process in others] == [True, False]


@pytest.mark.multiprocess
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, processes would share it")
@pytest.mark.parametrize("reduce", ["ring", "tree"])
def test_a_part_that_one_rank_leaves_out_in_a_later_step_commits_nothing(tmp_path: Path, reduce: str) -> None:
    """There DDP returns from an unfinished reduction in silence, with an old gradient of an earlier micro-batch."""
    options = ["--micro-batch", 1, "--reduce", reduce, "--checkpoint-every", 1]
    ranks = fork_ranks(2, TRAIN, *job("LeftOutLater", tmp_path / "run", *options))
    try:
        ended = [finish(process) for process in reversed(ranks)]
    finally:
        for process in ranks:
            kill_group(process)
    assert [process.returncode for process in ended] == [1, 1]
    assert "parameters got no gradient from loss()" in the_line(ended[0].stderr)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000001"]


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_ddp_says_of_parameters_without_a_gradient(group: None) -> None:
    """The control: not in the step itself but in the next one, a paragraph that names numbers."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(2, 2).requires_grad_(False)
            self.used, self.spare = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.used(self.frozen(x)).sum()

    model = Half()
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 2)).backward()
    with pytest.raises(RuntimeError) as stock:
        ddp(torch.ones(1, 2))
    assert "Expected to have finished reduction in the prior iteration" in str(stock.value)
    assert "spare" not in str(stock.value)
    with pytest.raises(
        Ended, match=r"^2 of the model's 4 parameters got no gradient.*: spare\.weight, spare\.bias; use"
    ):
        explain(stock.value, model)
    explain(RuntimeError("something else"), model)


def test_a_loss_that_is_a_vector_would_have_been_its_sum() -> None:
    """The control: weighted and with a gradient of ones, as a step does it, autograd has nothing against it."""
    weight = torch.ones(3, requires_grad=True)
    part = weight * 2 * 0.5
    part.backward(1 + 0 * part.detach())
    with pytest.raises(Ended, match=r"of shape \[3\]"):
        checked_loss(weight * 2)
    with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
        (weight * 2).backward()
    assert checked_loss((weight * 2).sum()).dim() == 0
    assert checked_loss((weight * 2)[:1]).shape == (1,), "as good as a scalar"


def test_metrics_are_the_same_for_all_batches() -> None:
    rows = torch.zeros(2)
    check_metrics({"a": rows, "b": torch.zeros(2, 5, 5)}, 2, {})
    check_metrics({}, 2, {})
    with pytest.raises(Ended, match=r"other names for one batch than for another \(b\)"):
        check_metrics({"a": rows, "b": rows}, 2, {"a": [rows[0]]})
    with pytest.raises(Ended, match=r"a tensor of shape \[3\] as 'a' for a batch of 2"):
        check_metrics({"a": torch.zeros(3)}, 2, {})


def model_and(make: Callable[[Any], Any]) -> tuple[nn.Module, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return model, make(model)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda m: None, "optimizers() returned None: it must return a list of torch.optim.Optimizer"),
        (lambda m: iter(()), "optimizers() returned a tuple_iterator: it must return a list"),
        (lambda m: [SGD(m.parameters())] * 2, "0.weight is in optimizers()[0] and in optimizers()[1]: both would"),
        (lambda m: ([SGD(m.parameters())], []), "optimizers()[0] is a list: it must be a torch.optim.Optimizer"),
        (lambda m: [LBFGS(m.parameters())], "optimizers()[0] is a LBFGS, whose step() needs a closure"),
        (
            lambda m: [AdamW(m.parameters(), lr=np.float64(0.1))],
            "optimizers()[0] has lr = np.float64(0.1), a number",
        ),
        (lambda m: [SGD(m[0].parameters()), SGD(m[1].parameters(), lr=torch.tensor(0.1))], None),
        (lambda m: SGD(m.parameters()), None),
    ],
)
def test_optimizers(make: Callable[[Any], Any], expected: str | None) -> None:
    model, returned = model_and(make)
    if expected is None:
        assert checked_optimizers(returned, model) == (returned if isinstance(returned, list) else [returned])
        return
    with pytest.raises(Refusal) as refused:
        checked_optimizers(returned, model)
    assert str(refused.value).startswith(expected)


def test_a_learning_rate_of_numpys_would_be_saved_and_never_read() -> None:
    """The control."""
    _, optimizer = model_and(lambda m: AdamW(m.parameters(), lr=np.float64(0.1)))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(saved, weights_only=True)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_rates_are_set_and_who_else_sets_them_is_told_once(
    kind: Callable[[float], Any], caplog: pytest.LogCaptureFixture
) -> None:
    _, optimizer = model_and(lambda m: AdamW(m.parameters(), lr=kind(0.5)))
    rates = Rates([optimizer])
    for factor in (1, 0.5, np.float64(0.25), torch.tensor(0.25), [np.float32(0.25)]):
        rates.set(factor)
    group = optimizer.param_groups[0]
    assert float(group["lr"]) == 0.125
    assert type(group["lr"]) in (float, torch.Tensor), "nothing of NumPy's"
    assert not caplog.records
    for _ in range(2):
        if kind is float:
            group["lr"] = 0.1
        else:
            group["lr"].fill_(0.1)  # as torch's schedulers do
        rates.set(1)
        assert float(group["lr"]) == 0.5
        assert [record.getMessage()[:52] for record in caplog.records] == [
            "something besides rates() has set a learning rate, a"
        ]
    for odd in (None, -1, float("nan"), float("inf"), "1", [1, 1], [], torch.ones(2), iter([1])):
        with pytest.raises(Ended, match=r"^rates\(\) returned .*: it must return one factor"):
            rates.set(odd)  # type: ignore[arg-type]


def test_a_scheduler_is_seen_when_it_is_made(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer = model_and(lambda m: AdamW(m.parameters()))
    LambdaLR(optimizer, lambda step: 0.1)
    Rates([optimizer], begun=True)
    assert not caplog.records, "in a run that goes on, the peak is kept there"
    Rates([optimizer])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([(1, [2, 3]), (1, [2])], "sample[1] has 1 parts in one sample and 2 in another"),
        (
            [{"a": {"b": torch.zeros(2)}}, {"a": {"b": torch.zeros(3)}}],
            "sample['a']['b'] has different sizes, [2] and [3]",
        ),
        ([object(), object()], "a sample is an object: return tensors, arrays, numbers, texts"),
        ([1, "one"], "a sample is of different types: int, str"),
        ([np.array([object()])] * 2, "a sample is a ndarray: return tensors"),
    ],
)
def test_samples_that_make_no_batch(samples: list[Any], expected: str) -> None:
    with pytest.raises((TypeError, RuntimeError)) as stock:
        default_collate(samples)
    assert explain_samples(samples, stock.value).startswith(
        f"the data set's samples cannot be made a batch: {expected}"
    )


def test_the_traceback_of_a_loading_process_is_taken_off() -> None:
    text = "Caught Uncollated in DataLoader worker process 0.\nOriginal:\n  ...\nevenkeel.mistakes.Uncollated: why\n"
    assert str(Uncollated(text)) == "why"
    assert str(Uncollated("why")) == "why"


def beyond_all_memory() -> object:
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (beyond_all_memory, True),
        (lambda: bytearray(1 << 60), True),
        (lambda: np.empty(1 << 60, dtype=np.uint8), True),
        (lambda: torch.zeros(2) @ torch.zeros(3), False),
        (lambda: [][1], False),
    ],
)
def test_which_errors_are_for_want_of_memory(fails: Callable[[], object], expected: bool) -> None:
    with pytest.raises((RuntimeError, MemoryError, IndexError)) as caught:
        fails()
    assert is_out_of_memory(caught.value) == expected
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


@pytest.mark.multiprocess
def test_torchrun_ends_with_the_line(tmp_path: Path) -> None:
    done = run(torchrun(2, TRAIN, *job("VectorLoss", tmp_path / "run")), expect=1)
    lines = [line for line in done.stderr.splitlines() if line.startswith("evenkeel: loss() returned")]
    assert lines  # of each rank that has come so far
