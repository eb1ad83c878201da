"""Twenty times a random rank dies or freezes in one run: no bit changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.promises.test_faults import disturb


@pytest.mark.timeout(1000)
def test_twenty_ranks_that_die_or_freeze_change_no_bit(tmp_path: Path) -> None:
    disturb(tmp_path, faults=20, epochs=11, seed=21)
