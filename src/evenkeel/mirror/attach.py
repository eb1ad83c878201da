"""The copying process around torchrun, for torchrun's agent (launch/agent.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from ..common.display import say
from ..common.errors import Refusal
from ..common.processes import AGENT_SIGNALS
from ..run.earlier_run import MIRRORED
from ..tasks.command_line import parse
from . import copying

TRIES = 5
"""How often a job starts the process again."""


@contextlib.contextmanager
def mirrored(train_args: Sequence[str], first: bool, alone: bool) -> Iterator[SimpleNamespace]:
    """Copy checkpoints within the block; `first`: on node 0; `alone`: there is no other node. At its end wait for the
    process, for a limited time.

    Yields `code`: 0, or the exit code with which this node ends before torchrun starts, and `fetching`: for how many
    seconds it has fetched; the block sets `finished` if the ranks have ended well. The process learns of signals as
    soon as Python does (`signal.set_wakeup_fd`), whatever torchrun's handlers do with them.
    """
    url, mirror = "", SimpleNamespace(code=0, fetching=0.0, finished=False)
    with contextlib.suppress(Refusal):  # the ranks raise it again, where their script has other options too
        config, task = parse(train_args)
        url = "" if config.eval_only else config.mirror
    if not url:
        yield mirror
        return
    folder, job = os.path.abspath(config.run_dir or ""), os.environ.get("EVENKEEL_LAUNCH") or uuid4().hex  # noqa: PTH100
    settings = {"url": url, "run_dir": folder, "first": first, "job": job, "harmless": sorted(task.harmless)}
    settings |= {name: getattr(config, name) for name in ("keep", "keep_best", "grace")}
    read, write = os.pipe()
    process, began = _started(settings, read), time.monotonic()
    assert process.stdout
    try:
        ready = process.stdout.readline()
    except BaseException:  # a signal in the middle of a long fetch
        process.kill()
        raise
    if not ready:
        mirror.code = process.wait()  # it has printed why
        yield mirror
        return
    mirror.fetching = time.monotonic() - began
    os.environ[MIRRORED] = folder
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    over = Event()
    (keeping := Thread(target=_keep, args=(process, settings, read, write, over), daemon=True)).start()
    try:
        yield mirror
    finally:
        for number in AGENT_SIGNALS:
            signal.signal(number, lambda *_: None)  # from here on they only go to the process
        settings["finished"] = mirror.finished and not alone
        over.set()
        _tell_the_end(write, settings)
        keeping.join()  # the process ends by itself, after `copying.LONGEST` at most
        signal.set_wakeup_fd(-1)


def _started(settings: dict[str, Any], read: int, again: bool = False) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", copying.__name__, json.dumps(settings | {"again": again})]
    return subprocess.Popen(command, stdin=read, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)


def _keep(process: subprocess.Popen[bytes], settings: dict[str, Any], read: int, write: int, over: Event) -> None:
    """In a thread: start the process again when it has been killed, with the same pipe, whose end is this agent's."""
    name, code = f"evenkeel: {settings['url']}: the process that copies", str(process.wait() or "")
    for _ in range(TRIES):
        if not code:
            return
        say(f"{name} has ended early ({code}); it is started again", to_stderr=True)
        time.sleep(copying.RETRY)
        try:
            process = _started(settings, read, again=True)
        except OSError as error:  # no memory
            code = str(error)
            continue
        if over.is_set():  # the one before may have read it
            _tell_the_end(write, settings)
        code = str(process.wait() or "")
    if code:
        lost = f"has ended early ({code}); the newest checkpoints may be in {settings['run_dir']} only"
        say(f"{name} {lost}", to_stderr=True)


def _tell_the_end(write: int, settings: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody reads
        os.write(write, copying.FINISHED if settings["finished"] else copying.DONE)
