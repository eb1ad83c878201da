"""Python programs without two seconds of imports: forked from a process that has imported torch.

For tests in which a job has many ranks or many starts, and neither torchrun nor the start is what is tested. A program
is a process and a process group of its own, and runs as `python ARGUMENTS` would; only what torch reads from the
environment when it is imported is not read again. `python forked.py DESCRIPTOR` is the process it comes from.
"""

import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = """torch torch._dynamo torch.distributed.run torch.utils.data torch.utils.serialization.config rich.progress
tyro tyro._backends._tyro_backend tyro.constructors._struct_spec_attrs typeguard numpy"""
"""What takes time to import, and nothing of ours: it must find itself in a new process."""
OURS = "evenkeel.launch.start evenkeel.run.run evenkeel.run.eval_only evenkeel.tasks.command_line"
"""But where neither a start nor imports are tested."""


class Forked:
    """A program at work; as much of `subprocess.Popen` as the tests need. `arguments`: a Python file, or "-m" and a
    module, and what belongs to it; `env` has all its environment variables. `warm`: what train.py imports of ours is
    imported too."""

    def __init__(self, arguments: list[str], env: Mapping[str, str], cwd: Path, warm: bool = False) -> None:
        self.args = [sys.executable, *arguments]
        self.returncode: int | None = None
        self._outputs = [tempfile.TemporaryFile("w+") for _ in ("stdout", "stderr")]  # noqa: SIM115
        self._told, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"argv": arguments, "env": dict(env), "cwd": str(cwd), "warm": warm}).encode()
        with its:
            files = [its.fileno(), *(file.fileno() for file in self._outputs)]
            socket.send_fds(_parent(), [order], files)
        self.pid = int(self._told.recv(100))

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = int(self._told.recv(100))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code."""
        if self.poll() is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.poll()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has printed, when it has ended."""
        self.wait(timeout)
        for file in self._outputs:
            file.seek(0)
        out, err = (file.read() for file in self._outputs)
        return out, err

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, and all that it has started in its group, such as what a keeper has forked."""
        os.killpg(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@functools.cache
def _parent() -> socket.socket:
    """The process that forks, for all tests of this one; it ends with this one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # threads are not forked
    # here rank 0 holds the store, as nowhere else: c10d warns where it ends before another rank that asks the store
    one["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    with its:
        command = [sys.executable, __file__, str(its.fileno())]
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")} | one
        subprocess.Popen(command, env=env, pass_fds=[its.fileno()], start_new_session=True)
    return ours


def serve(orders: socket.socket, names: str) -> None:
    """Import these modules, and start a program for each order, until nobody is left to give one."""
    for name in names.split():
        __import__(name)
    gc.freeze()  # or each program would look through all of torch for garbage, and copy the pages of what it looks at
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would be missing in the programs"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    warm: socket.socket | None = None
    while True:
        order, files, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not order:
            return
        if json.loads(order)["warm"] and names == PRELOADED:
            warm = warm or _with_ours(orders, *files)
            socket.send_fds(warm, [order], files)
        elif os.fork() == 0:
            for its in filter(None, (orders, warm)):
                its.close()
            _stand_by(json.loads(order), *files)
        for file in files:
            os.close(file)


def _with_ours(orders: socket.socket, *files: int) -> socket.socket:
    """To a fork that serves with OURS imported too. It does not need the arguments."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for file in (orders.detach(), ours.detach(), *files):
            os.close(file)
        serve(its, OURS)
        os._exit(0)
    its.close()
    return ours


def _stand_by(order: Any, teller: int, out: int, err: int) -> NoReturn:
    """Start the program, wait for it, and tell of its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    program = os.fork()
    if program == 0:
        os.close(teller)
        _become(order, out, err)
    os.write(teller, str(program).encode())
    _, status = os.waitpid(program, 0)
    os.write(teller, str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(order: Any, out: int, err: int) -> NoReturn:
    """Run a program to its end."""
    code: Any = 1
    try:
        os.setpgid(0, 0)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(source, target)
            os.close(source)
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["env"])
        del sys.modules["__mp_main__"]  # multiprocessing's second name for this file
        sys.path[1:1] = order["env"].get("PYTHONPATH", "").split(os.pathsep)
        first, *rest = order["argv"]
        if first == "-m":
            sys.argv, sys.path[0] = rest, order["cwd"]
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [first, *rest], str(Path(first).parent)
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), PRELOADED)
