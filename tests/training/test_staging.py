"""Copies of the state in memory that is kept: right, in no one's way, and never overwritten while they are written."""

import contextlib
import io
import itertools
import multiprocessing
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from evenkeel.config import Config
from evenkeel.data.plan import Plan
from evenkeel.distributed.world import World
from evenkeel.run.attempt import Attempt
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance, load
from evenkeel.run.run import Run
from evenkeel.tasks.classify import Classify
from evenkeel.training.seqlock import Seqlock, Torn
from evenkeel.training.staging import ALIGNED, Staging, in_one_piece
from evenkeel.training.state import State
from tests.run.test_checkpoint import same
from tests.support.small_runs import locked

CPU = torch.device("cpu")
RANK_0 = World(0, 0, 1, 1, CPU, launched=False)


def tree() -> dict[str, Any]:
    """All that occurs in a state."""
    return {
        "step": 3,
        "model": {
            "weight": torch.randn(4, 6),
            "transposed": torch.randn(4, 6).t(),
            "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "expanded": torch.randn(3, 1).expand(3, 4),
            "half": torch.randn(5).bfloat16(),
            "nan": torch.tensor([float("nan"), -0.0, 1e-45]),
            "mask": torch.tensor([True, False]),
            "count": torch.tensor(7),
            "empty": torch.empty(0, 3),
            "learning": nn.Parameter(torch.randn(2)),
        },
        "optimizers": [{"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}],
    }


def copy(staging: Staging, live: Any) -> Any:
    placed, fill = staging.prepare(live)
    fill()
    return placed


def tensors(branch: Any) -> list[Tensor]:
    if isinstance(branch, Tensor):
        return [branch]
    parts = branch.values() if isinstance(branch, dict) else branch if isinstance(branch, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


def test_a_copy_is_bit_for_bit_what_was_there_and_shares_no_memory_with_it() -> None:
    staging, live = Staging(CPU), tree()
    copied = copy(staging, live)
    assert same(copied, live)
    assert not {t.data_ptr() for t in tensors(copied) if t.numel()} & {t.data_ptr() for t in tensors(live)}
    assert not any(t.requires_grad for t in tensors(copied))


def test_the_control_memory_that_nobody_keeps_is_overwritten_while_it_is_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2, provenance=Provenance(("test/accuracy", "max")))
    staging, writer = Staging(CPU), ThreadPoolExecutor()
    captured = copy(staging, {"step": 1, "model": {"w": torch.full((10,), 1.0)}, "optimizers": []})
    with locked(tmp_path):
        saved = writer.submit(checkpoints.save, captured, {})
        copy(staging, {"step": 2, "model": {"w": torch.full((10,), 2.0)}, "optimizers": []})
    assert (load(saved.result())["model"]["w"] == 2).all(), "a checkpoint of step 1 with the weights of step 2"


class Diverging(torch.optim.SGD):
    """Fails when it has stepped."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise FloatingPointError


def advance(state: State) -> None:
    for parameter in state.model.parameters():
        parameter.grad = torch.full_like(parameter, -1)
    state.commit(torch.tensor(1.0), {})


def test_a_held_state_stays_as_it_is_until_it_is_captured_and_only_the_commit_waits() -> None:
    model = nn.Linear(3, 3)
    state = State(model, [torch.optim.SGD(model.parameters(), lr=1.0)])
    advance(state)
    expected = state.capture()
    held = state.begin_capture()
    state.model(torch.randn(2, 3)).sum().backward()  # the next step's work goes on
    commit = threading.Thread(target=advance, args=(state,))
    commit.start()
    time.sleep(0.3)
    assert commit.is_alive()
    assert same(held(), expected)
    commit.join(timeout=120)
    assert state.capture()["step"] == 2


@pytest.mark.parametrize("final", [True, False])
def test_no_step_is_committed_after_the_final_capture(final: bool) -> None:
    """What a signal has saved is the last step there is. And the control: other captures hold nothing up."""
    model = nn.Linear(3, 3)
    state = State(model, [torch.optim.SGD(model.parameters(), lr=1.0)])
    advance(state)
    assert state.capture(final=final)["step"] == 1
    commit = threading.Thread(target=advance, args=(state,), daemon=True)
    commit.start()
    commit.join(timeout=1 if final else 120)
    assert commit.is_alive() == final
    assert state.step == (1 if final else 2)


def test_a_capture_while_the_loss_computes_with_other_weights_has_the_model_s_own() -> None:
    """A rescue may come in the middle of a teacher's pass, in a thread of its own. The control: `state_dict()`."""
    model = nn.Linear(3, 2)
    state, found = State(model, []), []
    model.register_forward_pre_hook(lambda *_: found.append((state.capture()["model"], model.state_dict()["weight"])))
    teacher = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    torch.func.functional_call(model, teacher, (torch.ones(1, 3),))
    ((captured, control),) = found
    assert all(torch.equal(captured[name], parameter) for name, parameter in model.named_parameters())
    assert not control.any()


def test_a_state_whose_optimizer_has_failed_half_way_is_torn() -> None:
    model = nn.Linear(3, 3)
    state = State(model, [Diverging(model.parameters(), lr=1.0)])
    whole = state.capture()
    with pytest.raises(FloatingPointError):
        advance(state)
    with pytest.raises(Torn, match="the optimizer step to 1 has not finished"):
        state.capture()
    state.restore(whole)
    assert same(state.capture(), whole)


def test_a_commit_that_hangs_is_waited_for_with_patience() -> None:
    state = State(nn.Linear(3, 3), [])
    with state._seqlock.change(1), pytest.raises(Torn, match="still in progress"):
        state.capture(time.monotonic() + 0.1)
    assert state.capture(time.monotonic() + 0.1)["step"] == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_the_devices_numbers_tell_whole_copies_from_torn_ones(devices: int) -> None:
    """A thread plays each GPU: it goes through its steps and asks nobody. And the control: without the numbers, most
    copies are mixtures."""
    pause = 0.002  # seconds after each second step; on a loaded machine a copy takes longer, and hardly any is whole
    seqlock, staging = Seqlock(*[CPU] * devices), Staging(CPU)
    weights = [[torch.zeros(500_000) for _ in range(4 // devices)] for _ in range(devices)]
    ended = threading.Event()
    together = threading.Barrier(devices)  # as an exchange of gradients makes them wait for each other

    def device(number: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            for step in itertools.count(1):
                together.wait()
                seqlock.begun[number].fill_(step)
                for weight in weights[number]:
                    weight.fill_(step)
                seqlock.done[number].fill_(step)
                time.sleep(pause * (step % 2))
                if ended.is_set():
                    together.abort()

    threads = [threading.Thread(target=device, args=(number,)) for number in range(devices)]
    for thread in threads:
        thread.start()
    try:
        told = {True: 0, False: 0}
        mixtures, deadline = 0, time.monotonic() + 240
        while min(told.values()) < 20 and time.monotonic() < deadline:
            live = {"done": seqlock.done, "weights": weights, "begun": seqlock.begun}
            copied, fill = staging.prepare(live, fences=devices)
            fill()
            seen = {int(bound) for part in copied["weights"] for weight in part for bound in torch.aminmax(weight)}
            numbers = {int(number) for number in [*copied["done"], *copied["begun"]]}
            if len(numbers) == 1:
                assert seen == numbers
            mixtures += len(seen) > 1
            told[len(numbers) == 1] += 1
            pause *= 1.1 if told[False] > told[True] else 1 / 1.1
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert min(told.values()) >= 20
    assert mixtures


def test_an_optimizer_computes_as_the_device_wants_it_wherever_its_state_comes_from() -> None:
    """A state from a GPU says fused=True, one from a CPU does not, and either may go on on the other."""
    model = nn.Linear(3, 3)
    fused = State(model, [torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)])
    advance(fused)
    saved = fused.capture()
    plain = State(model, [torch.optim.AdamW(model.parameters(), lr=0.1)])
    plain.restore(saved)
    [group] = plain.optimizers[0].param_groups
    assert group["fused"] is None
    assert group["lr"] == 0.5
    advance(plain)


class Training:
    """A run of its own in this process, whose weights all say the step."""

    def __init__(self, folder: Path, world: World, size: int = 10, grace: float = 25) -> None:
        task = Classify()
        config = Config(run_dir=folder, checkpoint_every=1, grace=grace, wandb="disabled").resolved()
        attempt = Attempt(config, task, Plan.of(config, 1437), world, {}, lambda _recorded: config)
        assert attempt.logs == attempt.path / "logs", "also of a run that does not begin, because it is finished"
        model = nn.Linear(size, size)
        self.state = State(model, [torch.optim.SGD(model.parameters(), lr=1.0)])
        if world.rank == 0:  # on others it waits to hear from rank 0
            attempt.begin(lambda: (1, ""))
        self.run = Run(attempt, task, self.state)
        if world.rank == 0:
            self.run._resume()
        for parameter in model.parameters():
            parameter.data.zero_()

    def step(self) -> None:
        advance(self.state)

    def saved(self, step: int) -> bool:
        """Whether the checkpoint of a step holds the weights of this step and no other."""
        found = load(self.run.path / "checkpoints" / f"step-{step:08d}")
        return all(bool((weight == found["step"]).all()) for weight in found["model"].values())


@pytest.mark.parametrize("grace", [25, 1], ids=["waits for the writer", "cannot wait and takes new memory in time"])
def test_a_rescue_while_a_checkpoint_is_written_leaves_two_whole(tmp_path: Path, grace: float) -> None:
    training = Training(tmp_path / "run", RANK_0, grace=grace)
    with locked(tmp_path / "run"):  # the writer waits, after it has copied the state
        training.step()
        training.run.checkpointer.after_step({})
        training.step()
        rescue = threading.Thread(target=training.run.ending.stopped, args=(lambda: "SIGTERM",))
        rescue.start()
        rescue.join(timeout=1)
        assert rescue.is_alive() == (grace > 1), "it is done within --grace, whatever it has to wait for"
    rescue.join(timeout=120)
    assert not rescue.is_alive()
    training.run.checkpointer.saver.result()
    assert training.saved(1)
    assert training.saved(2)


def test_a_checkpoint_needs_no_new_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "run", RANK_0)

    def full(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    training.step()
    training.run.checkpointer.after_step({})
    training.run.checkpointer.saver.result()
    assert training.saved(1)


@pytest.mark.parametrize("finished", [True, False])
def test_a_signal_after_the_end_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], finished: bool
) -> None:
    training = Training(tmp_path / "run", RANK_0)
    training.step()
    if finished:
        assert training.run.attempt.lead
        training.run.attempt.lead.directory.update_at_step("finished", 1)
    training.run.ending.stopped(lambda: "SIGTERM")
    assert ("the same command continues there" in capsys.readouterr().out) == (not finished)


def test_memory_whose_writer_has_failed_can_be_used_again(tmp_path: Path) -> None:
    training = Training(tmp_path / "run", RANK_0)
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    for _ in range(3):
        training.step()
        training.run.checkpointer.after_step({})  # reports what came of the one before
    with pytest.raises(FileExistsError):
        training.run.checkpointer.saver.result()
    (tmp_path / "run" / "checkpoints").unlink()
    training.step()
    training.run.checkpointer.after_step({})
    training.run.checkpointer.saver.result()
    assert training.saved(4)


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def test_memory_to_be_page_locked_is_as_large_as_the_state() -> None:
    """Blocks of torch's own, of a power of two each, would be up to twice that."""
    sources = [*tensors(tree()), torch.ones(1025, 1024)]
    memory, parts = in_one_piece(sources)
    assert sum(t.nbytes for t in sources) <= memory.nbytes < sum(t.nbytes for t in sources) + ALIGNED * len(sources)
    first = memory.data_ptr()
    for part, source in zip(parts, sources, strict=True):
        assert (part.shape, part.dtype) == (source.shape, source.dtype)
        assert part.stride() == torch.empty_like(source).stride()
        assert part.untyped_storage().nbytes() == part.nbytes, "a file would have all the memory for each tensor"
        assert not part.numel() or (first <= part.data_ptr() and part.data_ptr() + part.nbytes <= first + memory.nbytes)
        part.copy_(source)
    assert same(parts, sources), "no part overlaps another"
    torch.save(parts[-1], file := io.BytesIO())
    assert len(file.getvalue()) < 1.1 * parts[-1].nbytes


def growth_of_a_rank_that_never_writes(folder: Path) -> tuple[float, float]:
    """Megabytes that a checkpoint of 64 MB takes on such a rank, and that its rescue takes."""
    training = Training(folder, World(1, 0, 1, 1, CPU, launched=False), size=4000)
    for _ in range(2):
        training.step()
        training.run.checkpointer.after_step({})
    before = resident_megabytes()
    training.run.checkpointer.after_step({})
    checkpoint = resident_megabytes()
    training.run.ending.failed(RuntimeError("a peer has died"))
    assert training.saved(2)
    return checkpoint - before, resident_megabytes() - checkpoint


def test_a_rank_that_never_writes_needs_no_memory_for_it_nor_for_a_rescue(tmp_path: Path) -> None:
    # in a process of its own: after other tests malloc may have 64 MB at hand
    with multiprocessing.get_context("spawn").Pool(1) as process:
        checkpoint, rescue = process.apply(growth_of_a_rank_that_never_writes, (tmp_path / "run",))
    assert checkpoint < 10
    assert rescue < 10, "no step is committed any more, so what is written needs no copy"
