"""`evenkeel new`: a small project of one's own."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ... import __version__
from ...common.display import say
from ...config import NAME
from .project import Answers, check, next_steps, write
from .source import own_source, source_of


@dataclass(frozen=True)
class NewCommand:
    """Write a small project of your own, with evenkeel as a dependency.

    Example: evenkeel new tide --task lm --with slurm docker

    Use --from evenkeel==VERSION only with an index of your own: on the public one this name is another package.
    """

    name: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="NAME")]
    """Name of the project, its folder and its Python package, e.g. tide."""
    task: Annotated[Literal["classify", "lm", "empty"], NAME] = "classify"
    """The task to begin with: classify (digits), lm (a text) or empty (random data, with TODOs)."""
    with_: Annotated[tuple[Literal["slurm", "docker", "k8s"], ...], tyro.conf.arg(name="with")] = ()
    """Launchers to add: slurm, docker, k8s."""
    from_: Annotated[str, tyro.conf.arg(name="from", metavar="SOURCE", help_behavior_hint="")] = ""
    """A wheel, a checkout, git+https://HOST/evenkeel@REVISION or evenkeel==VERSION. Default: that of this evenkeel."""

    def __call__(self) -> int:
        """Write it, and say where it is and what to type next."""
        folder, parts = Path(self.name), tuple(sorted(set(self.with_)))
        check(self.name, folder, parts)
        with tempfile.TemporaryDirectory() as scratch:
            source = source_of(self.from_ or own_source(), Path(scratch))
            answers = Answers(self.name, self.task, parts, source.requirement, source.kind)
            say(next_steps(folder, write(answers, __version__, folder, source.wheel)))
        return 0
