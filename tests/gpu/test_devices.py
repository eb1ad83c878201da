"""GPUs by both their names, and what is said of those that are not there."""

from __future__ import annotations

from evenkeel.distributed.devices import describe
from tests.distributed.test_devices import gpu


def test_a_real_gpu() -> None:
    found = describe(gpu(0))
    print(found)
    assert found.line.startswith("cuda:0 (")
    assert found.kind.endswith(" GiB")
