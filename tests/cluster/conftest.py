"""For all tests on a Slurm cluster. They run one after the other, in one process: see ByFile in tests/conftest.py."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, why_not

REASON = why_not()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder without a cluster. The time of a test begins after its fixtures, which may wait for one."""
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.skipif(REASON is not None, reason=str(REASON)))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(600, func_only=True))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four nodes of two CPUs and two pretend GPUs."""
    cluster = Cluster(nodes=4, cpus=2)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that uses the cluster: no job, idle nodes, no process that outlived its job."""
    yield
    if "cluster" in request.fixturenames:
        left = request.getfixturevalue("cluster").settle()
        assert not left, f"processes without a job: {left}"
