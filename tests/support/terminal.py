"""A command on a terminal of its own, with a real Ctrl-C."""

import fcntl
import os
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence

from tests.support.processes import LIMIT, ROOT, environment, kill_group

CONTROL = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")


class Terminal:
    """A running command whose input and output are a terminal of some width. Use it as a context."""

    def __init__(self, command: Sequence[str], columns: int = 100, env: Mapping[str, str] | None = None) -> None:
        self._ours, its = os.openpty()
        self.resize(columns)
        plain = environment({"TERM": "xterm", **(env or {})})
        plain.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=plain,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(its)
        self.output = ""

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        kill_group(self.process)
        self.process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """What was printed, without colours, movements of the cursor and carriage returns."""
        return CONTROL.sub("", self.output).replace("\r", "")

    def read_until(self, pattern: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not re.search(pattern, self.text):
            assert self._read(deadline), f"ended without {pattern}\n{self.text}"

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def end(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + LIMIT
        while self._read(deadline):
            pass
        return self.process.wait(timeout=max(1.0, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        readable, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"nothing more came in time\n{self.text}"
        try:
            part = os.read(self._ours, 65536)
        except OSError:  # EIO: nobody has the terminal open any more
            return False
        self.output += part.decode(errors="replace")
        return bool(part)
