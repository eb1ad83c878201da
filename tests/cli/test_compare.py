"""`python -m evenkeel compare`: equal runs, runs that part, and what made them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evenkeel.cli.compare import compare_digests, last_digests
from evenkeel.run.checkpoint import Checkpoints
from evenkeel.run.manifest import Provenance
from tests.run.test_fingerprint import OTHER, another_machine
from tests.support.processes import TRAIN, run, run_forked
from tests.support.small_runs import job
from tests.support.typed import typed

STEPS = 6


def compare(*arguments: object, expect: int) -> list[str]:
    code, out, err = typed("compare", *arguments)
    assert code == expect, err
    return (err if code == 2 else out).splitlines()


def small(run_dir: Path, *more: object) -> list[object]:
    options = ["--max-steps", STEPS, "--schedule", "constant", "--checkpoint-every", 0, "--digest-every", 1, *more]
    return [TRAIN, *job(run_dir, *options)]


def train(run_dir: Path, *more: object) -> None:
    run_forked(*small(run_dir, *more))


def record(kind: str, step: int, **digests: str) -> dict[str, Any]:
    return {"kind": kind, "step": step, "time": 0.0, "digests": digests}


def test_the_first_difference_is_named_with_the_step_before() -> None:
    a = {step: {"w": "0", "b": "0"} for step in (1, 2, 3, 4)}
    later = {**a, 3: {"w": "1", "b": "0"}, 4: {"w": "1", "b": "1"}}
    equal, text = compare_digests(a, later)
    assert not equal
    first = "different from step 3 on (equal at step 2; 3 of 4 common steps compared)"
    assert text.splitlines() == [first, "1 of 2 tensors differ:", "  w"]
    assert "no step before it" in compare_digests({4: a[4]}, later)[1]
    assert compare_digests(a, {2: a[2], 4: a[4], 6: {}}) == (True, "equal: 2 compared (steps 2 to 4), 2 tensors each")
    other_model = compare_digests({1: {"v": "0"}}, {1: {"w": "0"}})[1].splitlines()
    assert other_model[2:] == ["  v (only in the first)", "  w (only in the second)"]
    many = {1: {str(i): "1" for i in range(20)}}, {1: {str(i): "2" for i in range(20)}}
    assert compare_digests(*many)[1].splitlines()[-1] == "  and 8 more"


def test_the_last_attempt_that_did_a_step_counts() -> None:
    first = [record("start", 0), record("digest", 1, w="a"), record("train", 1), record("digest", 2, w="lost")]
    again = [record("start", 1), record("digest", 2, w="b")]
    assert last_digests(first + again) == {1: {"w": "a"}, 2: {"w": "b"}}
    assert last_digests([*first, record("start", 1)]) == {1: {"w": "a"}}, "step 2 was never done in this line"


@pytest.mark.slow
@another_machine
def test_the_kernels_of_another_machine_make_other_bits_of_the_same_job(tmp_path: Path) -> None:
    digits = ["--epochs", 1, "--max-steps", 2, "--wandb", "disabled", "--digest-every", 1]
    for name, env in (("a", {}), ("b", OTHER), ("c", {})):
        run([sys.executable, TRAIN, "--run-dir", tmp_path / name, *digits], env=env)
    lines = compare(tmp_path / "a", tmp_path / "b", expect=1)
    (cause,) = lines[lines.index("what else differs:") + 1 :]
    assert cause.startswith("  cpu_capability: ")
    assert compare(tmp_path / "a", tmp_path / "c", expect=0) == ["equal: 2 compared (steps 1 to 2), 24 tensors each"]


def made_up(folder: Path, step: int, value: float) -> Path:
    """A run that has left a checkpoint and no more."""
    Checkpoints(folder / "checkpoints", 2, Provenance(("test/accuracy", "max"), {"threads": str(value)})).save(
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
    (line,) = compare(a, b, expect=2)
    assert "nothing to compare" in line
    assert line.endswith(f"or compare their metrics: python -m evenkeel compare --metrics {a} {b}")


def test_refusals(tmp_path: Path) -> None:
    a, missing = made_up(tmp_path / "a", 4, 1.0), tmp_path / "missing"
    said = [f"evenkeel: {missing}: no run there (no config.toml); name two run directories"]
    assert compare(a, missing, expect=2) == compare(missing, a, expect=2) == said
    assert compare(a, expect=2) == [f"evenkeel: compare needs two runs, as in: python -m evenkeel compare {a} runs/a"]
    b = made_up(tmp_path / "b", 4, 1.0)
    assert compare(a, expect=2)[0].endswith(f"compare {a} {b}")
    assert "train.py" in compare(a, a, "--", "--lr", "1", expect=2)[0]
