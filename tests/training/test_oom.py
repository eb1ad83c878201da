"""Memory that runs out: what is said, how a run goes on, and the micro-batch that fits."""

import errno
import os
import subprocess
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from evenkeel.common.errors import Refusal
from evenkeel.common.phases import CHECKPOINT, COMMIT, COMPUTING, activity
from evenkeel.config import Config
from evenkeel.data.dataset import InMemory
from evenkeel.distributed.world import World
from evenkeel.run.build import build_model, find_micro_batch
from evenkeel.training.batch_size_finder import Probe
from evenkeel.training.classification import Classification
from evenkeel.training.evaluation import Evaluation
from evenkeel.training.oom import OutOfMemory, _others, explained, explaining, next_smaller, note_batch, remedy
from evenkeel.training.optimization import build_optimizer
from evenkeel.training.state import State

CPU = torch.device("cpu")
ALONE = World(0, 0, 1, 1, CPU, launched=False)


@pytest.mark.parametrize(
    ("sizes", "batch"),
    [([64, 32, 16, 8, 4, 2, 1], 64), ([30, 15, 6, 3, 1], 30), ([13, 5, 2, 1], 100), ([101, 50, 25, 12, 6, 3, 1], 101)],
)
def test_the_next_smaller_micro_batch_divides_the_batch_where_it_can(sizes: list[int], batch: int) -> None:
    assert [next_smaller(size, batch) for size in sizes[:-1]] == sizes[1:]


def test_the_message_names_all_that_one_would_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    config = Config(batch_size=64, micro_batch=8)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    note_batch(caught.value, (torch.zeros(8, 3), torch.zeros(8)))
    text = explained(caught.value, CPU, config)
    assert "\n" not in text
    for part in (
        "out of memory on rank 3 (the memory of host ",
        "it was in ",
        f"1073741824.0 GiB more were requested at {__file__}:",
        "the batch was [8, 3] float32, [8] float32",
        "this process uses ",
        "the same command with --micro-batch 4 instead of 8 goes on",
    ):
        assert part in text
    with pytest.raises(RuntimeError) as built:
        build_model(config, cast(Any, SimpleNamespace(model=lambda: nn.Linear(1 << 30, 1 << 30))))
    assert f" at {__file__}:" in explained(built.value, CPU, config)
    assert "; make the network in model() smaller, or make room" in explained(built.value, CPU, config)
    assert "is 1 already" in remedy(Config(batch_size=64, micro_batch=1))
    note_batch(ValueError("something else"), None)
    note_batch(error := MemoryError(), {"image": torch.zeros(2, 3), "more": (torch.zeros(2).long(), ["a", "b"])})
    assert "the batch was [2, 3] float32, [2] int64;" in explained(error, CPU)
    note_batch(error, [torch.zeros(1)] * 8)
    assert "[1] float32 and 2 more;" in explained(error, CPU)


@pytest.mark.parametrize(
    ("torch_version", "ranks", "options", "hint"),
    [
        ("2.10.0", "2", {"reduce": "tree"}, "or --shard on"),
        ("2.9.1+cu128", "2", {"reduce": "tree", "micro_batch": 1}, "or --shard on"),
        ("2.10.0", "2", {}, "or in a new run --reduce tree --shard on"),
        ("2.8.0+cpu", "2", {"reduce": "tree"}, ""),
        ("2.10.0", "1", {"reduce": "tree"}, ""),
        ("2.10.0", "2", {"reduce": "tree", "shard": "on"}, ""),
        ("2.10.0", "2", {"reduce": "tree", "shard": 2}, ""),
        ("2.10.0", "4", {"reduce": "tree", "shard": 2}, "or --shard on"),
        ("2.10.0", "2", {"reduce": "tree", "precision": "fp16"}, ""),
    ],
)
def test_shard_on_is_named_where_it_helps_and_is_allowed(
    torch_version: str, ranks: str, options: dict[str, Any], hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", torch_version)
    monkeypatch.setenv("WORLD_SIZE", ranks)
    text = remedy(Config(**{"batch_size": 64, "micro_batch": 8, **options}))
    assert hint in text
    assert ("--shard" in text) == bool(hint)


class Greedy(Classification):
    """Has room for training only."""

    def train_dataset(self) -> InMemory:
        return InMemory(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Linear(6, 3)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": torch.empty(1 << 60, dtype=torch.uint8)}


def test_the_message_names_the_phase_in_which_it_was_and_not_the_one_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time that it is told, the evaluation is over."""
    monkeypatch.setattr(activity, "phase", COMMIT)
    monkeypatch.setattr(activity, "step", 7)
    task, config = Greedy(), Config(batch_size=4, micro_batch=2)
    with pytest.raises(RuntimeError) as caught:
        Evaluation(task, task.model(), task.test_dataset(), config, ALONE)()
    assert activity.phase == COMMIT
    assert "it was in evaluation after step 7;" in explained(caught.value, CPU, config)

    with pytest.raises(MemoryError) as held, activity.during(CHECKPOINT):
        raise MemoryError
    assert "it was in checkpoint after step 7;" in explained(held.value, CPU, config)

    activity.enter(COMPUTING)
    note_batch(error := MemoryError(), None)
    activity.enter(COMMIT)  # a rescue
    assert "it was in forward and backward of step 8;" in explained(error, CPU, config)


def test_other_processes_on_the_gpu_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    told = f"GPU-aa, 71, 2048 MiB, /usr/bin/python3\nGPU-aa, {os.getpid()}, 10 MiB, mine\nGPU-bb, 9, 1 MiB, x\n\nodd\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=told))
    for uuid, expected in (("aa", " (process 71 python3: 2048 MiB)"), ("GPU-cc", "")):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, uuid=uuid: SimpleNamespace(uuid=uuid))
        assert _others(torch.device("cuda", 0)) == expected


def test_memory_that_runs_out_before_the_training_is_told_as_well() -> None:
    @explaining
    def main() -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.raises(OutOfMemory, match=r"^out of memory on rank 0 .*use a smaller --micro-batch$"):
        main()

    @explaining
    def broken() -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        broken()


class Needy(Classification):
    """Draws random numbers, moves buffers, and fails above so many samples; as much memory nobody has."""

    def __init__(self, fit: int) -> None:
        self.fit = fit
        self.seen: list[int] = []

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(3)
        return InMemory(torch.randn(50, 6, generator=generator), torch.randint(3, (50,), generator=generator))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 3))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        self.seen.append(len(batch[0]))
        loss = super().loss(model, batch)
        if len(batch[0]) > self.fit:
            torch.empty(1 << 60, dtype=torch.uint8)
        return loss


@pytest.mark.parametrize("fit", [64, 7, 0])
def test_the_probe_finds_what_fits_and_leaves_no_trace(fit: int) -> None:
    task, config = Needy(fit), Config(batch_size=40, micro_batch="auto")
    model = task.model()
    state = State(model, [build_optimizer(model.parameters(), config)])
    before = {name: value.clone() for name, value in state.tensors().items()}
    optimizer = str(state.optimizers[0].state_dict())
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    probe = Probe(config, task, ALONE, task.train_dataset(), state)
    if fit:
        found, said = probe()
        assert found == {64: 40, 7: 5}[fit]
        assert said.startswith(f"--micro-batch auto: {found} samples fit")
        assert task.seen == {64: [40, 40], 7: [40, 20, 10, 5, 5]}[fit], "two passes where the first one fits"
    else:
        with pytest.raises(OutOfMemory, match=r"the batch was \[2, 6\] float32, \[2\] int64"):
            probe()
    assert torch.equal(torch.rand(3), expected), "generators"
    after = state.tensors()
    assert after.keys() == before.keys(), "no state of the optimizer"
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert str(state.optimizers[0].state_dict()) == optimizer
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_micro_batch_that_is_found_and_leaves_batchnorm_a_single_sample_is_refused_before_the_run() -> None:
    """As one that is typed; it failed in the last step of the first epoch."""

    class Normed(Needy):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    task, config = Normed(4), Config(batch_size=9, micro_batch="auto")
    model = task.model()
    found, _ = find_micro_batch(config, task, ALONE, task.train_dataset(), State(model, []))
    assert found == 3, "the control: 9 samples, and in the last step 5, in parts of 3"
    task, config = Normed(4), Config(batch_size=8, micro_batch="auto")
    short = InMemory(*(tensor[:13] for tensor in task.train_dataset().tensors))
    with pytest.raises(Refusal, match="--batch-size 8 --micro-batch 4: the last step of an epoch has 5"):
        find_micro_batch(config, task, ALONE, short, State(model, []))
