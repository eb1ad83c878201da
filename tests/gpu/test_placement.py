"""Models on several GPUs of one rank; `test_placement` does without any, by fake devices."""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenkeel.config import Config
from evenkeel.distributed.placement import place
from evenkeel.distributed.world import World
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.staging import Staging
from evenkeel.training.state import State, sha256
from tests.support.processes import ROOT, TRAIN, finish, finish_all, fork_ranks, read, records, wait_until

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

HANG = 60_000_000_000
"""Cycles that a stream spins for: half a minute."""


def devices() -> list[torch.device]:
    return [torch.device("cuda", 0), torch.device("cuda", 1)]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Linear(500, 500), nn.BatchNorm1d(500), nn.Dropout(0.4)]
    return nn.Sequential(*blocks, nn.Linear(500, 500), nn.Dropout(0.4), nn.Linear(500, 10), nn.Dropout(0.1))


@pytest.mark.parametrize("cut", ["--model-parallel", "--place"])
def test_a_cut_network_computes_on_two_gpus_what_it_computes_on_one(cut: str) -> None:
    """Bit for bit, dropout included, if both are of one model: each goes on with the other's random numbers."""
    if torch.cuda.get_device_name(0) != torch.cuda.get_device_name(1):
        pytest.skip("two models of GPUs")
    spread = Config(model_parallel=2) if cut == "--model-parallel" else Config(place="0=0,1=0,2=0,3=1,4=1,5=1,6=1")
    found = []
    for config, on in ((Config(), devices()[:1]), (spread, devices())):
        net = layers()
        place(net, config, on)
        assert len({p.device for p in net.parameters()}) == len(on)
        images = torch.randn(32, 500, generator=torch.Generator().manual_seed(1)).to(on[0])
        for _ in range(3):
            torch.manual_seed(5)
            out = net(images)
            F.cross_entropy(out, torch.arange(32, device=on[0]) % 10).backward()
        after = torch.rand(3, device=on[0])
        found.append(
            [t.cpu() for t in (out, after, *(p.grad for p in net.parameters()), *net.buffers()) if t is not None]
        )
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def on_two() -> State:
    """Two steps done, whose weights say the step, on two GPUs."""
    model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1000), nn.BatchNorm1d(1000))
    place(model, Config(model_parallel=2), devices())
    state = State(model, [build_optimizer(model.parameters(), Config(lr=1.0, weight_decay=0.0))])
    for _ in range(2):
        advance(state)
    for device in devices():
        torch.cuda.synchronize(device)
    return state


def advance(state: State) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.commit(clip_grad_norm(state.parameters, 1.0), [group.committed + 1 for group in state.buffers.groups])


@pytest.mark.parametrize("hanging", [0, 1])
def test_if_one_of_two_gpus_hangs_the_last_whole_step_is_saved(hanging: int) -> None:
    state, staging = on_two(), Staging(*devices())
    state.pin(staging)
    expected = sha256(state.capture()["model"])
    with torch.cuda.device(hanging):
        torch.cuda._sleep(HANG)
    advance(state)
    advance(state)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(state.capture(time.monotonic() + 10, staging=staging)))
    thread.start()
    thread.join(timeout=20)
    assert found, "the capture waits for the stream that hangs"
    assert not torch.cuda.current_stream(devices()[hanging]).query(), "it still hangs"
    assert found[0]["step"] == 2
    assert sha256(found[0]["model"]) == expected
    for device in devices():
        torch.cuda.synchronize(device)


def test_a_step_that_is_not_finite_is_left_out_on_both() -> None:
    state = on_two()
    state.skip_nonfinite = True
    before = sha256(state.model.state_dict())
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    state.commit(clip_grad_norm(state.parameters, 0.0), [group.committed for group in state.buffers.groups])
    state.settle()
    assert state.skipped == 1
    assert sha256(state.model.state_dict()) == before


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cut", [["--model-parallel", 2], ["--place", "segmenter=0,discriminator=1"]], ids=str)
def test_a_run_on_two_gpus_a_rank_is_that_of_one(tmp_path: Path, ranks: int, cut: list[object]) -> None:
    """Stopped and continued; the same bits with the tree. Networks without dropout on other kernels: same GPU model."""
    if torch.cuda.device_count() < 2 * ranks:
        pytest.skip(f"needs {2 * ranks} GPUs")
    pytest.importorskip("evenkeel.tasks.segment")
    shape = ["--task", "segment", "--backbone", "small", "--canvas", 32, "--digit-size", 16, "--discriminator-width", 4]
    shape += ["--samples", 45, "--test-samples", 13, "--batch-size", 11, "--micro-batch", 3, "--epochs", 4]
    shape += ["--reduce", "tree", "--wandb", "disabled", "--log-every", 1, "--checkpoint-every", 2]
    finish_all(fork_ranks(1, TRAIN, *shape, "--run-dir", tmp_path / "one"))
    run_dir = tmp_path / "two"
    job = [TRAIN, *shape, "--run-dir", run_dir, *cut]
    started = fork_ranks(ranks, *job)
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and records(run_dir, "train"), "a step")
    for rank in started:
        rank.send_signal(signal.SIGTERM)
    for rank in started:
        finish(rank)
    finish_all(fork_ranks(ranks, *job))
    assert read(run_dir)["weights_sha256"] == read(tmp_path / "one")["weights_sha256"]
    assert read(run_dir)["metrics"] == read(tmp_path / "one")["metrics"]


def test_a_bare_cuda_is_the_rank_s_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with torch.cuda.device(0):  # puts it back
        assert World.from_environment().device == torch.zeros(1).cuda().device == torch.device("cuda", 1)


def test_collectives_on_nccl_come_in_an_order_are_recorded_and_their_errors_reach_the_user(tmp_path: Path) -> None:
    """Two NCCL communicators: BatchNorm's beside DDP's; and the tree, where parameters may be unused."""
    worker = ROOT / "tests/support/collectives_worker.py"
    finish_all(fork_ranks(2, worker, tmp_path / "out.json"))
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["threads"], found["not waited for"]) == (1, 0)
    assert found["failure"] == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert {"all_reduce", "all_to_all"} <= {
        name.partition(":")[2] for name in found["recorded"] if name.startswith("nccl")
    }, found["recorded"]


def test_with_exact_bits_a_ring_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path) -> None:
    options = ["--deterministic", "--wandb", "disabled", "--log-every", 1, "--epochs", 3, "--checkpoint-every", 2]
    finish_all(fork_ranks(2, TRAIN, *options, "--run-dir", tmp_path / "undisturbed"))
    run_dir = tmp_path / "run"
    started = fork_ranks(2, TRAIN, *options, "--run-dir", run_dir)
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and records(run_dir, "train"), "a step")
    for rank in started:
        rank.send_signal(signal.SIGTERM)
    for rank in started:
        finish(rank)
    finish_all(fork_ranks(2, TRAIN, *options, "--run-dir", run_dir))
    assert read(run_dir)["weights_sha256"] == read(tmp_path / "undisturbed")["weights_sha256"]
