"""The copying process around torchrun, for torchrun's agent (launch/agent.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from uuid import uuid4

from ..common.display import say
from ..common.errors import Refusal
from ..common.processes import AGENT_SIGNALS
from ..run.records import MIRRORED
from ..tasks.command_line import parse
from . import copying


@contextlib.contextmanager
def mirrored(train_args: Sequence[str], first: bool) -> Iterator[int]:
    """Copy checkpoints within the block; `first`: on node 0. At its end wait for the process, for a limited time.

    Yields 0, or the exit code with which this node ends before torchrun starts. The process learns of signals as soon
    as Python does (`signal.set_wakeup_fd`), whatever torchrun's handlers do with them.
    """
    url = ""
    with contextlib.suppress(Refusal):  # the ranks raise it again, where their script has other options too
        config, task = parse(train_args)
        url = "" if config.eval_only else config.mirror
    if not url:
        yield 0
        return
    folder, job = os.path.abspath(config.run_dir or ""), os.environ.get("EVENKEEL_LAUNCH") or uuid4().hex  # noqa: PTH100
    settings = {"url": url, "run_dir": folder, "first": first, "job": job, "harmless": sorted(task.harmless)}
    settings |= {name: getattr(config, name) for name in ("keep", "keep_best", "grace")}
    command, pipe = [sys.executable, "-m", copying.__name__, json.dumps(settings)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True) as process:
        assert process.stdin
        assert process.stdout
        try:
            ready = process.stdout.readline()
        except BaseException:  # a signal in the middle of a long fetch
            process.kill()
            raise
        if not ready:
            yield process.wait()  # it has printed why
            return
        os.environ[MIRRORED] = folder
        os.set_blocking(process.stdin.fileno(), False)
        signal.set_wakeup_fd(process.stdin.fileno(), warn_on_full_buffer=False)
        try:
            yield 0
        finally:
            for number in AGENT_SIGNALS:
                signal.signal(number, lambda *_: None)  # from here on they only go to the process
            with contextlib.suppress(OSError):  # it was killed
                process.stdin.write(copying.DONE)
            if code := process.wait():  # it ends by itself, after `copying.LONGEST` at most
                lost = f"the process that copies ended early ({code}); the newest checkpoints may be in {folder} only"
                say(f"evenkeel: {url}: {lost}", to_stderr=True)
            signal.set_wakeup_fd(-1)
