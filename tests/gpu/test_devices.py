"""GPUs by both their names, and what is said of those that are not there."""

from __future__ import annotations

from evenkeel.distributed.devices import describe
from tests.distributed.test_devices import gpu


def test_a_real_gpu() -> None:
    line, kind = describe(gpu(0))
    print(line)
    assert line.startswith("cuda:0 (")
    assert kind.endswith(" GiB")
