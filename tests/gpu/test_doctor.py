"""The doctor on ranks that share a GPU. It compares the numbers of each collective with the right ones."""

import json
from pathlib import Path

import torch

from tests.support.gpu import REAL, Record
from tests.support.processes import run, torchrun

RANKS = max(2, torch.cuda.device_count() + 1)


def doctor(tmp_path: Path, *options: str) -> dict[str, tuple[str, str]]:
    """Name -> level and value of what it finds; the machine may have other troubles."""
    words = ["-m", "evenkeel", "doctor", "--json", "--", "--run-dir", tmp_path / "run", *options]
    done = run(torchrun(RANKS, *words), expect=None)
    findings = json.loads(done.stdout[done.stdout.index("{") :])["findings"]
    return {it["name"]: (it["level"], it["value"]) for it in findings}


@REAL
def test_more_ranks_than_gpus_are_a_failure_unless_they_share(tmp_path: Path) -> None:
    assert doctor(tmp_path)["ranks and devices"][0] == "FAIL"


def test_gloo_carries_cuda_tensors_rightly(tmp_path: Path, record_property: Record) -> None:
    found = doctor(tmp_path, "--share-gpu")
    if torch.cuda.is_available():
        assert found["devices of ranks"][0] == "WARN"
    assert found["process group"][1] == f"gloo, {RANKS} ranks"
    for name in ("all-reduce", "all-to-all", "broadcast"):
        assert found[name][0] == "OK", found[name]
        assert found[name][1].startswith("right, ")
        record_property(name, found[name][1].removeprefix("right, "))
