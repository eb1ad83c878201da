"""A lab of nodes with what tests do to them, and see of them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenkeel.cli.chaos import nodes
from tests.support.processes import LIMIT, ROOT, environment
from tests.support.small_runs import children


class Lab(nodes.Lab):
    def unplug(self, node: int) -> None:
        """Cut a node's cable at the switch, as in a power failure: no reset, packets just vanish."""
        nodes.ip("-n", f"{self.prefix}-switch", "link", "set", f"p{node}", "down")

    def write_hosts(self, node: int, text: str) -> None:
        """Replace what a node knows of names."""
        (init,) = children(self._inits[node].pid)
        with Path(f"/proc/{init}/root/dev/shm/hosts").open("r+") as file:  # never empty for a reader
            file.write(text)
            file.truncate()

    def run(self, node: int, argv: Sequence[str], **options: Any) -> str:
        """Run a command on a node to its end and return what it printed."""
        job = self.popen(node, argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
        output = job.communicate(timeout=LIMIT)[0]
        assert job.returncode == 0, output
        return str(output)

    def start(self, node: int, command: Sequence[object], log: Path) -> subprocess.Popen[Any]:
        env = environment({"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
        with log.open("a") as out:
            words = [str(word) for word in command]
            return self.popen(node, words, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT)

    def launch(self, node: int, nodes: str, log: Path, *words: object) -> subprocess.Popen[Any]:
        """Start our launcher on a node; `nodes`: N or MIN:MAX of one rank each. `words` has its options, -- and those
        of train.py."""
        head = [sys.executable, "launch/multi_node.py", "-n", nodes, "-g", "1", "-nr", node]
        return self.start(node, [*head, "--master", self.address(0), *words], log)

    def commands(self, node: int) -> list[str]:
        """The command lines of all processes on a node, but for the first."""
        lines = self.run(node, ["ps", "-eo", "pid=,stat=,args="]).splitlines()
        fields = [line.split(None, 2) for line in lines]
        return [args for pid, stat, args in fields if pid != "1" and "Z" not in stat and not args.startswith("ps ")]
