"""`python -m evenkeel compare`: equal runs, runs that part, and what made them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.checkpoint import Checkpoints
from evenkeel.comparison import compare_digests, last_digests

from .processes import TRAIN, records, run, run_forked, torchrun
from .test_fingerprint import OTHER, another_machine
from .test_inspection import contents_of
from .test_train import job

STEPS = 6


def compare(*arguments: object, expect: int) -> list[str]:
    done = run_forked("-m", "evenkeel", "compare", *arguments, expect=expect)
    return done.stdout.splitlines() if expect != 2 else done.stderr.splitlines()


def small(run_dir: Path, *more: object) -> list[str]:
    options = ["--max-steps", STEPS, "--schedule", "constant", "--checkpoint-every", 0, "--digest-every", 1, *more]
    return [str(TRAIN), *job(run_dir, *options)]


def train(run_dir: Path, *more: object) -> None:
    run_forked(*small(run_dir, *more))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("comparison") / "run"
    train(run_dir)
    return run_dir


def record(kind: str, step: int, **digests: str) -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": 0.0, "digests": digests}


def test_the_last_attempt_that_did_a_step_counts() -> None:
    first = [record("start", 0), record("digest", 1, w="a"), record("train", 1), record("digest", 2, w="lost")]
    again = [record("start", 1), record("digest", 2, w="b")]
    assert last_digests(first + again) == {1: {"w": "a"}, 2: {"w": "b"}}
    assert last_digests([*first, record("start", 1)]) == {1: {"w": "a"}}, "step 2 was never done in this line"


def test_the_first_difference_is_named_with_the_step_before() -> None:
    a = {step: {"w": "0", "b": "0"} for step in (1, 2, 3, 4)}
    later = {**a, 3: {"w": "1", "b": "0"}, 4: {"w": "1", "b": "1"}}
    equal, text = compare_digests(a, later)
    assert not equal
    assert text.splitlines() == [
        "different from step 3 on (equal at step 2; 3 of 4 common steps compared)",
        "1 of 2 tensors differ:",
        "  w",
    ]
    assert "no step before it" in compare_digests({4: a[4]}, later).text
    assert compare_digests(a, {2: a[2], 4: a[4], 6: {}}) == (True, "equal: 2 compared (steps 2 to 4), 2 tensors each")
    other_model = compare_digests({1: {"v": "0"}}, {1: {"w": "0"}}).text.splitlines()
    assert other_model[2:] == ["  v (only in the first)", "  w (only in the second)"]
    many = {1: {str(i): "1" for i in range(20)}}, {1: {str(i): "2" for i in range(20)}}
    assert compare_digests(*many).text.splitlines()[-1] == "  and 8 more"


@pytest.mark.multiprocess
def test_equal_runs_one_of_them_killed_and_resumed(undisturbed: Path, tmp_path: Path) -> None:
    """kill -9 in step 4, beside the checkpoint of step 2: steps are done again, and the last ones count."""
    other = tmp_path / "run"
    killed = ["--checkpoint-every", 2, "--die-at", 4 * 3 + 1]
    run(torchrun(1, *small(other, *killed)), expect=1)
    train(other, *killed)
    again = records(other, "start")[-1]["step"]
    assert again in (0, 2), "a checkpoint is written beside the next steps, and may not have been whole in step 4"
    assert [r["step"] for r in records(other, "digest")] == [1, 2, 3, *range(again + 1, 7)]
    before = contents_of(undisturbed)
    first, *rest = compare(undisturbed, other, expect=0)
    assert first == "equal: 6 compared (steps 1 to 6), 16 tensors each"
    assert "  ranks, by attempt: [1] | [1, 1]" in rest
    assert "  --die-at: -1 | 13" in rest
    assert contents_of(undisturbed) == before, "it only looks"


@pytest.mark.multiprocess
def test_another_seed_and_another_thread_count(undisturbed: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    run([sys.executable, *small(other, "--seed", 1)], env={"OMP_NUM_THREADS": "2"})
    lines = compare(undisturbed, other, expect=1)
    assert lines[0].startswith("different from step 1 on (no step before it was compared; 1 of 6 common steps")
    assert lines[1] == "12 of 16 tensors differ:", "not the step counters of the optimizer"
    assert "  model.0.weight" in lines
    assert lines[lines.index("what else differs:") :] == ["what else differs:", "  --seed: 0 | 1", "  threads: 1 | 2"]


@another_machine
def test_the_kernels_of_another_machine_make_other_bits_of_the_same_job(tmp_path: Path) -> None:
    digits = ["--epochs", 1, "--max-steps", 2, "--wandb", "disabled", "--digest-every", 1]
    for name, env in (("a", {}), ("b", OTHER), ("c", {})):
        run([sys.executable, str(TRAIN), "--run-dir", str(tmp_path / name), *map(str, digits)], env=env)
    lines = compare(tmp_path / "a", tmp_path / "b", expect=1)
    (cause,) = lines[lines.index("what else differs:") + 1 :]
    assert cause.startswith("  cpu_capability: ")
    assert compare(tmp_path / "a", tmp_path / "c", expect=0) == ["equal: 2 compared (steps 1 to 2), 24 tensors each"]


@pytest.mark.multiprocess
def test_a_task_that_was_edited_differs_from_the_step_at_which_the_edit_matters(tmp_path: Path) -> None:
    """A factor of 1 + 2**-20 on the loss of the third step's first micro-batch; the losses in metrics hide it."""
    task = tmp_path / "edited_task.py"
    source = (
        "from dataclasses import dataclass\n"
        "from tests.recording_task import Recorded\n"
        "@dataclass\n"
        "class Edited(Recorded):\n"
        "    def loss(self, model, batch):\n"
        "        loss = super().loss(model, batch)\n"
        "        return loss * (1 + 2**-20) if self.calls == EDITED_CALL else loss\n"
    )
    for name, call in (("a", -1), ("b", 4 * 2 + 1)):
        task.write_text(source.replace("EDITED_CALL", str(call)))
        train(tmp_path / name, "--task", f"{task}:Edited")
    lines = compare(tmp_path / "a", tmp_path / "b", expect=1)
    assert lines[0] == "different from step 3 on (equal at step 2; 3 of 6 common steps compared)"
    (cause,) = lines[lines.index("what else differs:") + 1 :]
    assert re.fullmatch(r"  code:edited_task\.py: [0-9a-f]{16} \| [0-9a-f]{16}", cause)


@pytest.mark.multiprocess
def test_without_digests_the_end_and_the_checkpoints_are_compared(undisturbed: Path, tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    train(same, "--digest-every", 0)
    first, *rest = compare(undisturbed, same, expect=0)
    told = "no digests of a common step (--digest-every), so only one step: "
    assert first == f"{told}the weights at the end, step 6, are equal"
    assert "  --digest-every: 1 | 0 (may change within a run)" in rest
    train(other, "--digest-every", 0, "--lr", 0.001)
    lines = compare(same, other, expect=1)
    assert lines[:2] == [f"{told}the checkpoints of step 6 are different", "12 of 16 tensors differ:"]
    assert "  model.2.bias" in lines
    assert "  --lr: 0.002 | 0.001" in lines
    (other / "summary.json").unlink()
    assert compare(same, other, expect=1) == lines
    shutil.rmtree(other / "checkpoints")
    (refusal,) = compare(same, other, expect=2)
    assert refusal.startswith(f"evenkeel: {same} {other}: nothing to compare: ")
    assert refusal.endswith("--digest-every 1")


def made_up(folder: Path, step: int, value: float) -> Path:
    """A run that has left a checkpoint and no more."""
    Checkpoints(folder / "checkpoints", 2, ("accuracy", "max"), {"threads": str(value)}).save(
        {"step": step, "model": {"w": torch.full((3,), value)}, "optimizers": []}, {}
    )
    (folder / "config.toml").write_text("seed = 0\n")
    return folder


def test_checkpoints_of_a_common_step(tmp_path: Path) -> None:
    a, b = made_up(tmp_path / "a", 4, 1.0), made_up(tmp_path / "b", 4, 1.0)
    made_up(b, 5, 9.0)
    assert compare(a, b, expect=0)[0].endswith("the checkpoints of step 4 are equal, 1 tensors each")
    assert "  threads: 1.0 | 9.0" in compare(a, b, expect=0)
    (b / "checkpoints" / "step-00000004" / "state.pt").write_bytes(b"damaged")
    assert "nothing to compare" in compare(a, b, expect=2)[0]


def test_refusals(tmp_path: Path) -> None:
    a = made_up(tmp_path / "a", 4, 1.0)
    missing = tmp_path / "missing"
    for pair in ((a, missing), (missing, a)):
        assert compare(*pair, expect=2) == [
            f"evenkeel: {missing}: no run there (no config.toml); name two run directories"
        ]
    assert "required" in compare(a, expect=2)[0]
    assert "train.py" in compare(a, a, "--", "--lr", "1", expect=2)[0]


def test_digests_are_compared_without_waiting_for_torch(tmp_path: Path) -> None:
    run_dir = made_up(tmp_path / "a", 4, 1.0)
    (run_dir / "metrics.jsonl").write_text(json.dumps(record("digest", 4, w="0")) + "\n")
    code = "import sys, evenkeel.__main__ as m; m.main(); sys.exit('torch' in sys.modules)"
    run([sys.executable, "-c", code, "compare", str(run_dir), str(run_dir)])
