"""`--strategy dp`: uneven shares of a micro-batch in one process have the result of DDP."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.common.errors import Refusal
from evenkeel.data.dataset import InMemory
from evenkeel.distributed.data_parallel import Share, chunks, divide, refuse_company, replicas, samples_in
from evenkeel.training.classification import Classification
from evenkeel.training.loss import ModelWithLoss


class Forty(Classification):
    """The documents' example: 40 samples, which are a batch of 30 and one of 10."""

    def train_dataset(self) -> InMemory:
        generator = torch.Generator().manual_seed(2)
        return InMemory(torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator))

    test_dataset = train_dataset

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def test_plan_prints_shares_of_the_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    PlanCommand = pytest.importorskip("evenkeel.cli.plan").PlanCommand  # noqa: N806
    monkeypatch.setattr(sys, "path", list(sys.path))
    task = ["--task", f"{__name__}:Forty"]
    PlanCommand(world_size=4)([*task, "--strategy", "dp", "--batch-size", "30"])
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "40 samples, global batch 30, micro-batch 30 (the whole batch): 2 steps an epoch, 40 in all; "
        "each micro-batch is divided among the GPUs",
        "every full step, 30 samples:",
        *[f"  GPU {gpu}: {size} samples" for gpu, size in enumerate([8, 8, 8, 6])],
        "an epoch's last step, 10 samples:",
        *[f"  GPU {gpu}: {text}" for gpu, text in enumerate(["3 samples", "3 samples", "3 samples", "1 sample"])],
    ]
    PlanCommand(world_size=2)([*task, "--strategy", "dp", "--batch-size", "30", "--micro-batch", "15"])
    assert "  GPU 0: 16 samples as 8 + 8\n  GPU 1: 14 samples as 7 + 7\n" in capsys.readouterr().out
    PlanCommand(world_size=3)([*task, "--batch-size", "30", "--micro-batch", "auto"])
    out = capsys.readouterr().out
    assert "micro-batch 10 (auto, if that fits): " in out
    assert "  rank 2: 10 samples\n" in out
    # one process, whose probe begins with the whole batch
    PlanCommand(world_size=3)([*task, "--batch-size", "30", "--micro-batch", "auto", "--strategy", "dp"])
    out = capsys.readouterr().out
    assert "micro-batch 30 (auto, if that fits): " in out
    assert "  GPU 2: 10 samples\n" in out


def by_hand(model: nn.Module, task: Classification, batch: Any, devices: int) -> Tensor:
    """What `Parallel` does, with copies of the module on the CPU instead of on GPUs."""
    parts = divide(batch, chunks(samples_in(batch), devices))
    return torch.cat([Share(ModelWithLoss(model, task.loss))(part)[0] for part in parts]).sum() / samples_in(batch)


@pytest.mark.parametrize("samples", [30, 10, 5, 1])
def test_uneven_shares_count_by_their_samples(samples: int) -> None:
    task = Forty()
    model = task.model()
    batch = task.train_dataset().__getitems__(list(range(samples)))
    whole = ModelWithLoss(model, task.loss)(batch)
    expected = torch.autograd.grad(whole, list(model.parameters()))
    divided = by_hand(model, task, batch, 4)
    torch.testing.assert_close(divided, whole)
    found = torch.autograd.grad(divided, list(model.parameters()))
    torch.testing.assert_close(found, expected)
    # the control: DataParallel's users take the mean of the GPUs' means, which is another thing where shares are uneven
    parts = divide(batch, chunks(samples, 4))
    naive = torch.stack([ModelWithLoss(model, task.loss)(part) for part in parts]).mean()
    even = len(set(chunks(samples, 4))) == 1
    assert torch.allclose(naive, whole, rtol=1e-4) == even


def test_batches_of_all_kinds_are_divided() -> None:
    batch = {"x": torch.arange(5), "more": (torch.arange(10).view(5, 2), ["a", "b", "c", "d", "e"]), "scale": 3}
    first, second = divide(batch, [3, 2])
    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1, 2], [3, 4])
    assert (first["more"][1], second["more"][1]) == (["a", "b", "c"], ["d", "e"])
    assert (second["more"][0].tolist(), second["scale"]) == ([[6, 7], [8, 9]], 3)
    assert samples_in(batch) == 5
    pair = [torch.arange(2), torch.arange(2)]
    assert [part[1].tolist() for part in divide(pair, [1, 1])] == [[0], [1]], "a list of tensors is not one of samples"


def test_the_shares_are_those_of_torch() -> None:
    for samples in range(1, 41):
        for devices in range(1, 10):
            expected = [len(part) for part in torch.arange(samples).chunk(devices)]
            assert chunks(samples, devices) == expected, (samples, devices)
    assert (chunks(30, 4), chunks(10, 4)) == ([8, 8, 8, 6], [3, 3, 3, 1])


def test_dp_with_several_processes_sees_the_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    refuse_company(1, 2)
    with pytest.raises(
        Refusal, match=r"here: cuda:0 \(GPU 2\), cuda:1 \(GPU 3\)\), and this job has 4 processes; start one"
    ):
        refuse_company(4, 2)
    with pytest.raises(Refusal, match=r"here: none\)"):
        refuse_company(2, 0)


def test_what_one_process_divides_among(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert replicas("ddp", torch.device("cuda", 1)) == [torch.device("cuda", 1)]
    assert [device.index for device in replicas("dp", torch.device("cuda", 0))] == [0, 1, 2]
    assert replicas("dp", torch.device("cpu")) == [torch.device("cpu")]
