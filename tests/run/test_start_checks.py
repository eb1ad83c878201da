"""What a start refuses: --mirror where no process copies or this copy has no mirror, --shard on with an old torch."""

import sys
from pathlib import Path

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.config import Config
from evenkeel.run.build import refuse_old_torch
from evenkeel.run.earlier_run import MIRRORED
from evenkeel.run.start_checks import refuse_unmirrored


def test_a_mirror_without_a_process_that_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(run_dir=tmp_path, mirror="s3://bucket/runs")
    with pytest.raises(Refusal, match=r"^--mirror: (no process copies the checkpoints|has been deleted)"):
        refuse_unmirrored(config)
    monkeypatch.setitem(sys.modules, "evenkeel.mirror", None)
    with pytest.raises(Refusal, match=r"^--mirror: has been deleted from this copy of Evenkeel; leave it out$"):
        refuse_unmirrored(config)
    refuse_unmirrored(Config(run_dir=tmp_path))
    monkeypatch.setenv(MIRRORED, str(tmp_path))
    refuse_unmirrored(config)


def test_sharding_with_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.8.0+cpu")
    with pytest.raises(Refusal, match=r"^--shard on: needs torch 2.9 or later, and this is 2.8.0\+cpu$"):
        refuse_old_torch(Config(shard="on"))
    monkeypatch.setattr("torch.__version__", "2.10.0")
    refuse_old_torch(Config(shard="on"))
