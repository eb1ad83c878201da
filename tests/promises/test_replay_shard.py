"""--digest-every with --shard on: of whole tensors, the same on any number of ranks; replay and audit agree."""

import json
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from evenkeel.run.manifest import MANIFEST
from evenkeel.run.state_files import dump
from tests.promises.test_sharded_state import QUIET, SHARD, job
from tests.support import needs
from tests.support.components import has
from tests.support.processes import TRAIN, records, run_forked, start, torchrun
from tests.support.small_runs import signal_ranks_at, starts, trained

pytestmark = [needs.sharding, pytest.mark.slow]

WORDS = [*SHARD, *QUIET, "--clip-norm", 0.5, "--digest-every", 1, "--checkpoint-every", 4, "--keep", 9]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks, of which one was killed, then a replica of two."""
    folder = tmp_path_factory.mktemp("killed")
    variables = {"PAUSE": "0.03", "STRUCK": str(folder), "STRIKES": "optimizer:1:2"}
    three = start(torchrun(3, TRAIN, *job(folder / "run", *WORDS)), env=variables)
    signal_ranks_at(6, folder / "run", [three], signal.SIGTERM)
    trained(2, job(folder / "run", *WORDS, "--shard", 2))
    assert len(starts(folder / "run")) == 3
    return folder / "run"


def said(*words: object, expect: int = 0) -> str:
    return run_forked("-m", "evenkeel", *words, expect=expect).stdout


def test_they_are_those_of_one_process_whatever_its_parts(killed: Path, tmp_path: Path) -> None:
    trained(0, job(tmp_path / "alone", *WORDS))
    both = (killed, tmp_path / "alone")
    found, alone = ({it["step"]: it["digests"] for it in records(run, "digest")} for run in both)
    assert list(alone) == [*range(1, 13)]
    assert found.items() <= alone.items()
    assert len(found) >= 10, "two attempts may have ended between a step and its record"
    if has("compare"):
        assert "equal: " in said("compare", killed, tmp_path / "alone")


def test_an_audit_and_a_replay_agree(killed: Path) -> None:
    assert "run again on 1" in (audit := said("audit", killed, "--segments", 2, "--seed", 1))
    assert "WRONG" not in audit
    replayed = said("replay", killed, "--step", 10)
    assert "agrees in every bit" in replayed
    assert "embed.weight" in replayed
    refused = run_forked("-m", "evenkeel", "replay", killed, "--step", 10, "--ranks", 2, expect=2).stderr
    assert "--ranks 2: one process replays a run with --shard 2" in refused


def test_the_control_one_number_in_the_rows_of_one_rank_is_found(killed: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(killed, tmp_path / "copy")
    folder = max((copy / "checkpoints").glob("step-*"))
    state = torch.load(file := folder / "state-1-of-2.pt", weights_only=True)
    state["model"]["embed.weight"][3, 5] += 1e-6
    with file.open("wb") as written:
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"][file.name] = asdict(dump(state, written))
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert "step 12 is not the state that the ledger has" in said("audit", copy, "--segments", 0, expect=1)
