"""Checkpoints that are kept for ever, of a job that is stopped and goes on without the option."""

import re
from pathlib import Path

from evenkeel.run.manifest import load, read_manifest, step_folders, step_of, verify
from evenkeel.training.staging import named_tensors
from tests.support.processes import TRAIN, fork, run_forked
from tests.support.small_runs import job, stop_at


def test_each_nth_stays_through_a_stop_and_the_line_says_what_the_disk_will_hold(tmp_path: Path) -> None:
    command = [TRAIN, *job(tmp_path / "run", "--checkpoint-every", 4, "--keep", 1, "--pause", 0.03)]
    stopped = stop_at(tmp_path / "run", 12, fork(*command, "--keep-every", 5))
    (line,) = re.findall(r"evenkeel: at step 27 the disk holds up to .*", stopped.stdout)
    assert "(5 by --keep-every, 1 by --keep, 1 by --keep-best)" in line
    run_forked(*command)
    paths = step_folders(tmp_path / "run" / "checkpoints")
    kept = [step_of(path) for path in paths if read_manifest(path).kept_for_ever]
    assert kept[:2] == [5, 10]
    assert len(paths) - len(kept) <= 2, "the control: the others are the newest and the best"
    written = verify(paths[-1]).files["state.pt"].bytes
    said = re.search(r"of ([\d.]+) (bytes|kB) \(", line)
    size = float(said[1]) * {"bytes": 1, "kB": 1000}[said[2]]
    tensors = sum(tensor.nbytes for tensor in named_tensors(load(paths[-1])).values())
    assert abs(size - tensors) <= 0.06 * tensors + 64, "before the first step there is no optimizer state to measure"
    assert size <= written
