"""How a node's exit code follows from those of its ranks, and what failed first."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from evenkeel.launch import agent

VERDICTS = {(75, 75): 75, (1, 2): 2, (75, 2): 2, (1, -9): 137, (75, -9): 137, (1, 1): 1, (-11, 1): 139, (3, 75): 3}
VERDICTS |= {(1, 75): 1, (1, -15): 1}  # torchrun stops the others after a failure


@pytest.mark.parametrize(("codes", "code"), VERDICTS.items())
def test_the_verdict_over_a_nodes_ranks(codes: tuple[int, ...], code: int) -> None:
    assert agent.verdict([*codes]) == code


def test_the_last_line_is_what_the_first_rank_to_fail_has_said(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (file := tmp_path / "0" / "error.json").write_text("{}")
    lost, killed = SimpleNamespace(error_file=str(file), exitcode=1), SimpleNamespace(error_file="<N/A>", exitcode=-9)
    killed.message = "Signal 9"
    assert agent.causes([lost]) == []
    assert agent.causes([lost, killed]) == ["evenkeel: the job has failed: Signal 9"]
    (tmp_path / "failed").write_text("ValueError: two at job.py:3\n")
    assert agent.causes([killed, lost])[0] == "evenkeel: the job has failed: ValueError: two at job.py:3"


def test_first_error_leaves_out_what_is_half_written(tmp_path: Path) -> None:
    for name, text in (("0", '{"mess'), ("1", json.dumps({"message": "plain words"}))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "error.json").write_text(text)
    assert agent.first_error([tmp_path]) == "plain words"
    assert agent.first_error([tmp_path / "0"]) == ""


@pytest.mark.parametrize(("workers", "times"), [(0, 1), (1, 0)])
def test_a_wait_for_other_nodes_is_told_beside_the_process_of_a_mirror(workers: int, times: int) -> None:
    code = (
        "import subprocess, threading, time\n"
        "from evenkeel.launch.agent import _report_waiting\n"
        "children = [subprocess.Popen(['sleep', '60'])]\n"
        "threading.Thread(target=_report_waiting, args=('waiting for node 1',), daemon=True).start()\n"
        "time.sleep(1)\n"
        f"children += [subprocess.Popen(['sleep', '60']) for _ in range({workers})]\n"
        "time.sleep(5)\n"
        "[child.kill() for child in children]\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=90)
    assert (told.stdout + told.stderr).count("waiting for node 1") == times
