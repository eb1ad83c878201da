"""`python -m evenkeel compare`: equal runs, runs that part, and what made them."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.test_compare import compare, small, train
from tests.support.processes import contents_of, records, run, torchrun


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("comparison") / "run"
    train(run_dir)
    return run_dir


def test_equal_runs_one_of_them_killed_and_resumed(undisturbed: Path, tmp_path: Path) -> None:
    """kill -9 in step 4, beside the checkpoint of step 2: steps are done again, and the last ones count."""
    other = tmp_path / "run"
    killed = ["--checkpoint-every", 2, "--die-at", 4 * 3 + 1]
    run(torchrun(1, *small(other, *killed, "--keeper", "off")), expect=1)
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


def test_another_seed_and_another_thread_count(undisturbed: Path, tmp_path: Path) -> None:
    other = tmp_path / "run"
    run([sys.executable, *small(other, "--seed", 1)], env={"OMP_NUM_THREADS": "2"})
    lines = compare(undisturbed, other, expect=1)
    assert lines[0].startswith("different from step 1 on (no step before it was compared; 1 of 6 common steps")
    assert lines[1] == "12 of 16 tensors differ:", "not the step counters of the optimizer"
    assert "  model.0.weight" in lines
    assert lines[lines.index("what else differs:") :] == ["what else differs:", "  --seed: 0 | 1", "  threads: 1 | 2"]


def test_a_task_that_was_edited_differs_from_the_step_at_which_the_edit_matters(tmp_path: Path) -> None:
    """A factor of 1 + 2**-20 on the loss of the third step's first micro-batch; the losses in metrics hide it."""
    task = tmp_path / "edited_task.py"
    source = (
        "from dataclasses import dataclass\n"
        "from tests.support.recording_task import Recorded\n"
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


def test_without_digests_the_end_and_the_checkpoints_are_compared(undisturbed: Path, tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "other"
    train(same, "--digest-every", 0)
    first, *rest = compare(undisturbed, same, expect=0)
    told = "no digests of a common step (--digest-every), so only one step is compared: "
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
    assert "; run both with --digest-every 1, or compare their metrics: " in refusal
