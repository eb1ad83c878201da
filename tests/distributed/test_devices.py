"""GPUs by both their names, and what is said of those that are not there."""

from pathlib import Path

import pytest
import torch

from evenkeel.common.errors import Refusal
from evenkeel.distributed.devices import (
    choose,
    device_name,
    explain_devices,
    explain_uneven,
    explain_unused,
    refuse_missing,
)

CPU = torch.device("cpu")


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["cuda:0 (GPU 0)", "cuda:1 (GPU 1)"]),
        ("2,3", ["cuda:0 (GPU 2)", "cuda:1 (GPU 3)"]),
        (" 3 , 2 ", ["cuda:0 (GPU 3)", "cuda:1 (GPU 2)"]),
        ("GPU-8932f937,1", ["cuda:0 (GPU-8932f937)", "cuda:1 (GPU 1)"]),
        ("MIG-GPU-1/2/3", ["cuda:0 (MIG-GPU-1/2/3)"]),
    ],
)
def test_both_names(monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device_name(gpu(i)) for i in range(len(names))] == names
    assert device_name(torch.device("cuda")) == names[0]
    assert device_name(CPU) == "cpu"


def test_too_many_processes_see_the_mapping_and_the_entry_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,7,1")
    text = explain_devices(3, 2)
    assert "(CUDA_VISIBLE_DEVICES=2,3,7,1)" in text
    assert "local rank 0 -> cuda:0 (GPU 2), local rank 1 -> cuda:1 (GPU 3), local rank 2 -> none" in text
    assert "the entry 7 is not a GPU of this machine, so CUDA ignores it and all after it" in text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert "ignores" not in explain_devices(3, 2)


def test_uneven_gpus_are_told() -> None:
    big, small = "A100 with 80 GiB", "T4 with 15 GiB"
    assert explain_uneven([big, big]) == ""
    assert explain_uneven([big]) == ""
    text = explain_uneven([small, big, big])
    assert text.startswith(f"the devices of this job differ (rank 0: {small}; ranks 1-2: {big}): the small")


def test_missing_gpus_do_not_become_the_cpu_in_silence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(Refusal, match=r"^CUDA_VISIBLE_DEVICES=7: has no GPU that torch can use here.* CPU$"):
        refuse_missing(0, control=tmp_path)
    refuse_missing(0, control=tmp_path / "no driver")  # a habit on a machine without GPUs
    refuse_missing(1, control=tmp_path)
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        refuse_missing(0, control=tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    refuse_missing(0, control=tmp_path)


@pytest.mark.parametrize(("found", "line"), [("mps", "the mps device of "), ("cuda", ""), (None, "")])
def test_an_accelerator_not_in_use_is_named(monkeypatch: pytest.MonkeyPatch, found: str | None, line: str) -> None:
    device = torch.device(found) if found else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    choose([CPU])
    assert explain_unused().startswith(line)
    assert bool(explain_unused()) == bool(line)
