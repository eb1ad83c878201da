"""`evenkeel scaling` over two nodes, typed once on each."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.nodes import Lab
from tests.support.processes import LIMIT, ROOT, environment


@pytest.mark.long
def test_one_node_and_two(tmp_path: Path) -> None:
    """The table is on node 0, although torchrun would give rank 0 to the other, whose address sorts first."""
    scaling = ["-m", "evenkeel", "scaling", "-n", "1,2", "-g", "1", "--steps", "24", "--rounds", "1", "--json"]
    env, batch = environment({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}), ["--batch-size", "16"]
    with Lab(2) as lab:
        jobs = []
        for rank, node in enumerate((1, 0)):
            command = [sys.executable, *scaling, "-nr", str(rank), "--master", lab.address(1), "--", *batch]
            with (tmp_path / f"{rank}.out").open("w") as out, (tmp_path / f"{rank}.err").open("w") as err:
                jobs.append(lab.popen(node, command, cwd=ROOT, env=env, stdout=out, stderr=err))
        codes = [job.wait(timeout=4 * LIMIT) for job in jobs]
    told = [(tmp_path / f"{rank}.err").read_text() for rank in (0, 1)]
    assert codes == [0, 0], told
    found = json.loads((tmp_path / "0.out").read_text())
    assert [row["ranks"] for row in found["fixed global batch"]["rows"]] == [1, 2]
    assert [row["batch"] for row in found["fixed batch a rank"]["rows"]] == [16, 32]
    assert found["fixed batch a rank"]["rows"][1]["speed"] > 0
    assert (tmp_path / "1.out").read_text() == ""
    assert "evenkeel: round 1 of 1: 1 rank" in told[0]
    assert "evenkeel: round 1 of 1: 1 rank" not in told[1], "it was not needed"
    assert told[1].endswith("evenkeel: the tables are on node 0\n")
