"""--mirror where no process copies the checkpoints, or where this copy has no mirror."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from evenkeel.common.errors import Refusal
from evenkeel.config import Config
from evenkeel.run.run_directory import MIRRORED
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
