"""A lab of nodes with what tests do to them, and see of them."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from evenkeel.cli.chaos import nodes
from tests.support.processes import LIMIT


class Lab(nodes.Lab):
    """The lab of chaos."""

    def unplug(self, node: int) -> None:
        """Cut a node's cable at the switch, as in a power failure: no reset, packets just vanish."""
        nodes.ip("-n", f"{self.prefix}-switch", "link", "set", f"p{node}", "down")

    def run(self, node: int, argv: Sequence[str], **options: Any) -> str:
        """Run a command on a node to its end and return what it printed."""
        job = self.popen(node, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        output = job.communicate(timeout=LIMIT)[0]
        assert job.returncode == 0, output
        return str(output)

    def commands(self, node: int) -> list[str]:
        """The command lines of all processes on a node, but for the first."""
        lines = self.run(node, ["ps", "-eo", "pid=,stat=,args="]).splitlines()
        fields = [line.split(None, 2) for line in lines]
        return [args for pid, stat, args in fields if pid != "1" and "Z" not in stat and not args.startswith("ps ")]
