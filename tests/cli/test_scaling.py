"""Tables and predictions of `scaling`, from numbers whose answer is known; and what is refused."""

import sys
from pathlib import Path
from typing import Any

import pytest

from evenkeel.cli.scaling.analysis import Sample, exposed, middle, predicted, serial_share, table
from evenkeel.cli.scaling.command import ScalingCommand
from evenkeel.cli.scaling.plot import draw
from evenkeel.common.errors import Refusal
from tests.support.raised import refusal_of


def amdahl(n: int, s: float) -> Sample:
    return Sample(1000 / (s + (1 - s) / n))


def gustafson(n: int, s: float) -> Sample:
    return Sample(1000 * (n - s * (n - 1)))


def test_a_law_is_found_again_in_what_follows_it() -> None:
    strong = table({n: (64, amdahl(n, 0.1)) for n in (1, 2, 4)}, weak=False)
    weak = table({n: (64 * n, gustafson(n, 0.2)) for n in (2, 4, 8)}, weak=True)
    assert serial_share(strong, weak=False) == pytest.approx(0.1)
    assert predicted(strong, weak=False)[:2] == (8, pytest.approx(1 / (0.1 + 0.9 / 8)))
    assert predicted(weak, weak=True)[0] == 16
    assert serial_share(strong, weak=True) != pytest.approx(0.1), "the control: the other law"
    faster = table({1: (64, Sample(100)), 2: (64, Sample(250))}, weak=False)
    assert predicted(faster, weak=False)[1:3] == (4, 0), "more than ideal: no less than nothing is serial"


def test_efficiency_and_losses_are_the_whole_step() -> None:
    # 0.064 s a step; on two ranks 0.040 instead of 0.032: 8 ms are lost, of them 2 in communication, 1 in data
    rows = table({1: (64, Sample(1000, 0.002)), 2: (64, Sample(1600, 0.002, 0.002, 0.001))}, weak=False)
    assert rows[0].efficiency == 1
    assert rows[1].speedup == pytest.approx(1.6)
    assert rows[1].efficiency == pytest.approx(0.8)
    assert rows[1].lost == pytest.approx({"data": 0.025, "communication": 0.05, "imbalance": 0.025, "other": 0.1})
    assert rows[1].efficiency + sum(rows[1].lost.values()) == pytest.approx(1)
    (_, more) = table({1: (64, Sample(1000)), 2: (64, Sample(1600, 0.02, 0.02))}, weak=False)
    assert more.lost == pytest.approx({"data": 0.1, "communication": 0.1, "imbalance": 0, "other": 0}, abs=1e-9)


def test_of_rounds_the_middle_counts() -> None:
    assert middle([Sample(1, 9), Sample(100, 0), Sample(2, 1)]) == Sample(2, 1)


def span(name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "tid": tid, "ts": begin * 1e6, "dur": (end - begin) * 1e6}


def test_communication_is_what_no_computation_hides() -> None:
    steps = [span("step 5", 0, 9, "user_annotation"), span("step 6", 10, 20, "user_annotation")]
    computing = [span("aten::mm", 10, 14), span("c10d::allreduce_", 14, 15), span("aten::mm", 2, 7, tid=9)]
    collectives = [span("gloo:all_reduce", *at, "user_annotation", 7) for at in ((1, 8), (12, 16), (30, 40))]
    assert exposed([*steps, *computing, *collectives]) == pytest.approx(2), "not the first step, nor what is outside"
    kernels = [span("ncclDevKernel_AllReduce", 11, 19, "kernel", 20), span("gemm", 10, 18, "kernel", 7)]
    assert exposed([*steps, *computing, *kernels]) == pytest.approx(1), "of a GPU its own time counts"


@pytest.mark.parametrize(
    ("options", "words", "line"),
    [
        ({"gpus": "2"}, [], "-g 2: give two or more numbers"),
        ({"gpus": "1,x"}, [], "-g 1,x: give two or more numbers"),
        ({"gpus": "2,3"}, [], "-g 2,3: 3 is not a multiple of 2"),
        ({"nodes": "1,2"}, [], "-n 1,2: give two or more numbers"),
        ({"gpus": "2", "nodes": "2"}, [], "-g 2: give two or more numbers"),
        ({"gpus": "2", "nodes": "1,2"}, [], "-nr is missing: with -n 1,2"),
        ({"gpus": "2", "nodes": "1,2", "node_rank": 0}, [], "--master is missing: -n 2 needs"),
        ({"gpus": "2", "nodes": "1,2", "node_rank": 2, "master": "a"}, [], "-nr 2: with -n 2"),
        ({"script": Path("absent.py")}, [], "--script absent.py: no such file"),
        ({"output": Path("plot.pdf")}, [], r"--output plot.pdf: name a file that ends in .svg or .png"),
        ({"output": Path("README.svg")}, ["--run-dir=x"], "-- --run-dir: scaling sets it"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: dict[str, Any], words: list[str], line: str) -> None:
    with pytest.raises(Refusal, match=line):
        ScalingCommand(**({"gpus": "1,2"} | options))(words)


def test_without_matplotlib_a_plot_is_refused_before_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    said = refusal_of(ScalingCommand("1,2", output=tmp_path / "plot.svg"), [])
    assert "plot.svg: matplotlib is not installed: pip install matplotlib" in said


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tables = {
        "fixed global batch": table({n: (64, amdahl(n, 0.1)) for n in (1, 2, 4)}, weak=False),
        "fixed batch a rank": table({n: (64 * n, gustafson(n, 0.2)) for n in (1, 2, 4)}, weak=True),
    }
    draw(tables, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
