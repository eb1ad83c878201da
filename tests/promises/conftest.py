"""For all promises."""

from __future__ import annotations

import pytest

from tests.support.small_runs import job, trained, weights_of


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint of the weights of the recording task on two ranks that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    trained(2, job(run_dir, "--checkpoint-every", 0, "--eval-every", 1000))
    return weights_of(run_dir)
