"""Models on several GPUs of one rank, or on one GPU twice; `test_placement` does without any, by fake devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from evenkeel.config import Config
from evenkeel.distributed.placement import place
from evenkeel.distributed.world import World
from evenkeel.training.optimization import build_optimizer, clip_grad_norm
from evenkeel.training.staging import Staging
from evenkeel.training.state import State
from evenkeel.training.state_dicts import sha256
from tests.gpu.test_state import HANG, advance, captured_in_a_thread

TWO = torch.cuda.device_count() > 1


def devices() -> list[torch.device]:
    """Two GPUs, or one twice, as with --share-gpu."""
    return [torch.device("cuda", 0), torch.device("cuda", int(TWO))]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Linear(500, 500), nn.BatchNorm1d(500), nn.Dropout(0.4)]
    return nn.Sequential(*blocks, nn.Linear(500, 500), nn.Dropout(0.4), nn.Linear(500, 10), nn.Dropout(0.1))


@pytest.mark.parametrize("cut", ["--model-parallel", "--place"])
def test_a_cut_network_computes_on_two_gpus_what_it_computes_on_one(cut: str) -> None:
    """Bit for bit, dropout included, if both are of one model: each goes on with the other's random numbers."""
    if len({torch.cuda.get_device_name(device) for device in devices()}) > 1:
        pytest.skip("two models of GPUs")
    spread = Config(model_parallel=2) if cut == "--model-parallel" else Config(place="0=0,1=0,2=0,3=1,4=1,5=1,6=1")
    found = []
    for config, on in ((Config(), devices()[:1]), (spread, devices())):
        net = layers()
        place(net, config, on)
        assert {p.device for p in net.parameters()} == set(on)
        images = torch.randn(32, 500, generator=torch.Generator().manual_seed(1)).to(on[0])
        for _ in range(3):
            torch.manual_seed(5)
            out = net(images)
            F.cross_entropy(out, torch.arange(32, device=on[0]) % 10).backward()
        after = torch.rand(3, device=on[0])
        every = (out, after, *(p.grad for p in net.parameters()), *net.buffers())
        found.append([t.cpu() for t in every if t is not None])
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


@pytest.mark.parametrize("hanging", [0, 1] if TWO else [0])
def test_if_one_of_two_gpus_hangs_the_last_whole_step_is_saved(hanging: int) -> None:
    state, staging = on_two(), Staging(*devices())
    state.pin(staging)
    expected = sha256(state.capture()["model"])
    with torch.cuda.device(hanging):
        torch.cuda._sleep(HANG)
    advance(state)
    advance(state)
    found = captured_in_a_thread(state, staging)
    assert not torch.cuda.current_stream(devices()[hanging]).query(), "it still hangs"
    assert found["step"] == 2
    assert sha256(found["model"]) == expected
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


@pytest.mark.skipif(not TWO, reason="needs two GPUs")
def test_a_bare_cuda_is_the_rank_s_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    with torch.cuda.device(0):  # puts it back
        assert World.from_environment().device == torch.zeros(1).cuda().device == torch.device("cuda", 1)
