"""The engine, and the image in it: made once for all tests of a session."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docker.engine import Engine, engine_for_the_tests, why_not
from tests.support.pip import certificates, pip_configuration
from tests.support.processes import ROOT

IMAGE = "evenkeel-test"
SECRETS = ("a-password-4711.invalid", "a-certificate-of-ones-own-4711")
"""One stands in the pip configuration that the build is given, the other in its CA file."""


@dataclass(frozen=True)
class Built:
    """The image, and how it came about."""

    engine: Engine
    seconds: float
    revision: str


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A daemon in the machine's network, where an image can be built."""
    if reason := why_not():
        pytest.skip(reason)
    with engine_for_the_tests() as running:
        try:
            running.start(own_network=False)
        except RuntimeError as error:
            pytest.skip(f"no container engine here: {error}")
        yield running


@pytest.fixture(scope="session")
def built(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The image from a clean cache. Afterwards the daemon is in a network of its own."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "pip.conf").write_text(f"{pip_configuration()}trusted-host = {SECRETS[0]}\n")
    secrets = ["--secret", f"id=pip_conf,src={folder / 'pip.conf'}"]
    if ca := certificates():
        (folder / "ca.crt").write_text(f"{ca.read_text()}\n# {SECRETS[1]}\n")
        secrets += ["--secret", f"id=ca,src={folder / 'ca.crt'}"]
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    engine.import_base()
    seconds = engine.build(IMAGE, ROOT, *secrets, "--build-arg", f"REVISION={revision}")
    engine.stop()
    engine.start(own_network=True)
    print(f"built in {seconds:.0f} s")
    return Built(engine, seconds, revision)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder for runs that belongs to no known user."""
    folder = tmp_path / "runs"
    folder.mkdir()
    os.chown(folder, 4242, 4242)
    return folder
