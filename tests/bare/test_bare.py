"""The README's two commands on a bare machine, by an ordinary user; the second without a network."""

import json
import re
import time
from collections.abc import Iterator

import pytest

from tests.bare.machine import HOME, Machine, bare_machine, why_not

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(2400),  # packages of 6 GB are installed
]
BITS = """augmentation checkpoint_activations gradients hsdp lm meta_device order parts
patterns recipes refresh replay_shard replicate schedulers shard sharded_auto sharded_commands
sharded_state shards shares streams sync_batchnorm task_state tree turns two_networks untested verify_every
whole_batch"""
"""Promises of what is computed, which needs no tool: CI has just shown them beside this machine."""
ABSENT = "git ip ps gcc cc g++ srun sbatch docker chromium sudo wget curl"


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with bare_machine() as machine:
        yield machine


def test_nothing_else_is_there(machine: Machine) -> None:
    """Without this the other tests would show nothing."""
    absent = f"for tool in {ABSENT}; do ! command -v $tool || exit 1; done"
    assert machine.run("sh", "-c", f"{absent}; [ $(id -u) != 0 ] && ! python3 -c 'import torch'", network=True) == 0
    no_route = "[ $(wc -l </proc/net/route) = 1 ]"  # its header
    assert machine.run("sh", "-c", no_route, network=False) == 0
    assert machine.run("sh", "-c", no_route, network=True) == 1, "the control"


def test_make_train(machine: Machine) -> None:
    """The first command of all: it installs the packages as well."""
    assert machine.run("make", "train", "ARGS=--epochs 3", network=True) == 0
    summary = json.loads((machine.checkout / "runs" / "classify" / "summary.json").read_text())
    assert summary["state"] == "finished"
    assert summary["metrics"]["test/accuracy"] > 0.85


def test_make_test(machine: Machine) -> None:
    """What the machine lacks is skipped with the reason; nothing fails."""
    begun = time.monotonic()
    log = machine.root / HOME / "log"
    left_out = " ".join(f"--ignore=tests/promises/test_{name}.py" for name in BITS.split())
    code = machine.run("sh", "-c", f"make test 'ARGS={left_out}' >/{HOME}/log 2>&1", network=False)
    text = log.read_text()
    print(text[-6000:], f"\nmake test took {time.monotonic() - begun:.0f} s on a bare machine")
    assert code == 0, text[-20000:]
    passed = re.search(r"(\d+) passed, (\d+) skipped", text)
    assert int(passed[1]) > 2000
    assert int(passed[2]) < 100
    assert "not installed: git" in text


def test_a_thin_project(machine: Machine) -> None:
    """Its two commands, with a wheel of this checkout; the second without a network. Two environments need 12 GB."""
    new = "make setup && python3 tools/make_it_yours.py tide --thin --with slurm docker && rm -r .venv && cd ../tide"
    assert machine.run("sh", "-c", f"{new} && make train 'ARGS=--epochs 3'", network=True) == 0
    project = machine.root / HOME / "tide"
    assert [*(project / "wheels").glob("*.whl")]
    summary = json.loads((project / "runs" / "Digits" / "summary.json").read_text())
    assert summary["state"] == "finished"
    assert summary["metrics"]["test/accuracy"] > 0.85
    assert machine.run("sh", "-c", "cd ../tide && make test", network=False) == 0
