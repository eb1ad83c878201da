"""The process of a node that fetches before torchrun starts, and copies whole checkpoints while the job runs.

It prints a line to stdout when torchrun may start, and reads bytes from stdin: the number of each signal that the agent
gets, and `DONE` when the ranks have ended, or `FINISHED` when they have ended well and there are other nodes. Without
one of these the agent was killed, and the ranks' rescues still come.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from ..common.display import say
from ..common.errors import REFUSED, Refusal
from ..common.files import LOCK, folder_locked, read_json, temporary_name, try_lock
from ..common.processes import AGENT_SIGNALS
from ..config import changed_options
from ..resilience import heartbeat
from ..resilience.interruption import STOPPED
from ..run.checkpoint import Checkpoints
from ..run.manifest import MANIFEST, Manifest, Provenance, read_manifest, step_of
from ..run.records import read_config, read_facts
from ..run.state_files import WRONG as SET_ASIDE
from ..run.state_files import Damaged, folder_of
from . import lease
from .store import FILES, Store

DONE, FINISHED = b"\0", b"\xff"

POLL, RETRY, LONGEST = 0.5, 5.0, 600.0
"""Seconds between two looks at the folder; two attempts if the store is away; to finish when the ranks have ended by
themselves. After a stop signal, or if the store is away then, it is --grace."""

PRUNED = 60.0
"""Seconds between two looks for checkpoints of other nodes that --keep no longer keeps."""

WRONG = ("PermissionError", "FileNotFoundError", "NoCredentialsError")  # wrong credentials, no such bucket


class Copier:
    """Copies what a run's folder has and the store lacks.

    Args:
        settings: url, run_dir, keep, keep_best, grace, job (its id), harmless (options), first: whether this is
            node 0, which has the lease, and deletes, and again: whether one has died while the ranks were running.
        copies: a folder for manifests.
    """

    def __init__(self, settings: SimpleNamespace, copies: Path) -> None:
        self.settings, self.store = settings, Store(settings.url, copies)
        self.run_dir = Path(settings.run_dir)
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", settings.keep)
        self.lease, self.over = lease.Lease(self.store, settings.job), threading.Event()
        self._done = dict[Path, int]()  # looked after: checkpoint -> its manifest's time in ns
        self._sent = dict[str, int]()
        self._trouble, self._away, self._copied, self._orphaned = "", False, False, False
        self._finished, self._pruned = False, 0.0
        self._links: Path | None = None  # the folder of the last upload
        self._latest = math.inf  # on the monotonic clock: when the time to finish is over

    def begin(self) -> int:
        """Fetch the newest whole checkpoint if it is newer than the folder's. Returns 75 if it must be tried later."""
        begun = threading.Event()
        threading.Thread(target=self._live, args=(begun,), daemon=True).start()
        try:
            self._claim()
            if self._is_behind():
                (folder := self.checkpoints.folder).mkdir(parents=True, exist_ok=True)
                with folder_locked(folder, time.monotonic() + RETRY):  # on a shared disk one node fetches
                    self._fetch()
        except Exception as error:  # of any type: each kind of store has its own
            if isinstance(error, Refusal):
                raise
            if type(error).__name__ in WRONG:
                raise Refusal(f"--mirror {self.settings.url}: {_shown(error)}") from None
            if not self.checkpoints.newest_step():  # a start from step 0 would lose what is there
                self._say(f"is away, and {self.run_dir} is empty; start again: {_shown(error)}")
                return STOPPED
            self._say(f"is away: {_shown(error)}; the job starts, and copying is tried again")
        finally:
            begun.set()
        return 0

    def _live(self, begun: threading.Event) -> None:
        """Until the fetch is over: tell a container's health check that files grow, also if another node fetches them
        into the same folder."""
        before = dict[Path, int]()
        while not begun.wait(POLL):
            with contextlib.suppress(OSError):  # it is whole, and has another name
                now = {path: path.stat().st_mtime_ns for path in self.checkpoints.folder.glob(".*/*/*")}
                if now != before:
                    heartbeat.renew()
                before = now

    def _is_behind(self) -> bool:
        return max(self._there(), default=0) > self.checkpoints.newest_step()

    def _there(self) -> dict[int, Manifest]:
        """The manifests in the store, without those of checkpoints that --verify-every has set aside here: they are
        deleted there, or the next start would fetch them."""
        found = self.store.manifests()
        for path in self.checkpoints.folder.glob(f"{SET_ASIDE}*"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                step, written = (read_json(path / MANIFEST)[name] for name in ("step", "time"))
                if step in found and found[step].time == written:
                    self.store.remove(f"checkpoints/{folder_of(step)}/{MANIFEST}")
                    del found[step]
        return found

    def _fetch(self) -> None:
        newest = self.checkpoints.newest_step()
        if self._is_behind():
            self.store.fetch_files(self.run_dir)
            step = self.store.fetch_newest(self.checkpoints.folder, newest, self.settings.first)
            self._say(f"fetched step {step}" if step else "nothing newer is whole")
        else:
            self._say(f"another node has fetched step {newest}")

    def watch(self) -> None:
        """Copy until the ranks have ended and the store has all, or time is over (`_end_in_time`), or trying again is
        no use; print what it has."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._renew, daemon=True).start()
        threading.Thread(target=self._end_in_time, daemon=True).start()
        last = False
        while not last or self._trouble:
            time.sleep(RETRY * last)
            last = self.over.wait(RETRY if self._trouble else POLL)  # then the pass sees all that they have saved
            trouble, lasting = "", False
            try:
                self._pass(last)
            except Exception as error:  # as above
                trouble, lasting = _shown(error), isinstance(error, Damaged | Refusal)
            if bool(trouble) != bool(self._trouble):
                away = f"is away: {trouble}; the job goes on, and copying is tried again"
                self._say(away if trouble else "can be reached again")
            self._trouble, self._away = trouble, bool(trouble)
            if last and lasting:
                break
        self._report()
        while self._finished and not self._trouble and not self._has_result():
            time.sleep(RETRY)

    def _has_result(self) -> bool:
        """Whether the store has the finished run. All nodes wait for the one that copies it, because Kubernetes and
        srun kill what is left of a job soon after its first process has ended."""
        found, self._away = False, True
        with contextlib.suppress(Exception):  # as above
            status = self._status()
            found = status.get("state") == "finished" and status.get("step") in self.store.manifests()
            self._away = False
        return found

    def _pass(self, last: bool) -> None:
        """Copy what is new, the newest checkpoint first: when copying is slow, only that one matters."""
        times = dict[Path, int]()
        for path in reversed(self.checkpoints.all()):
            with contextlib.suppress(FileNotFoundError):  # it has just been deleted
                times[path] = (path / MANIFEST).stat().st_mtime_ns
        new = [path for path, now in times.items() if self._done.get(path) != now]
        due = new or last or (self.lease.mine and time.monotonic() > self._pruned + PRUNED)
        if not due:
            return
        if not self.lease.mine and not self._orphaned:
            self._claim()
        there = self._there() if new or last else {}
        self._away = False
        unsent = {name: now for name, now in self._times().items() if self._sent.get(name) != now}
        # other nodes than that of rank 0 have a copy of its status, which grows old
        if unsent and _age(read_facts(self.run_dir / "status.json")[0]) >= _age(self._status()):
            for name, now in unsent.items():
                self.store.write(name, self.run_dir / name)
                self._sent[name] = now
        for path in new:
            try:
                if self._wanted(mine := read_manifest(path), there.get(mine.step)):
                    with self._held(path) as held:
                        self.store.put(held)
                    self._copied = True
                self._done[path] = times[path]
            except (Damaged, FileNotFoundError):
                if (path / MANIFEST).exists():  # else it was deleted meanwhile: there are newer ones
                    raise
        if self.lease.mine:
            self._prune()
            self._pruned = time.monotonic()

    @contextlib.contextmanager
    def _held(self, path: Path) -> Iterator[Path]:
        """A checkpoint's files by hard links in a hidden folder, which --keep does not delete under a slow upload; the
        checkpoint itself where links are not possible. After a kill the next save or start deletes the folder."""
        self._links, source = temporary_name(path), path
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self._links, ignore_errors=True)
            with contextlib.suppress(OSError):
                (held := self._links / path.name).mkdir(parents=True)
                file = stack.enter_context((held / LOCK).open("wb"))
                try_lock(file, time.monotonic() + 1)  # so that cleaning spares it
                for name in (*read_manifest(path).files, MANIFEST):
                    (held / name).hardlink_to(path / name)
                source = held
            yield source

    def _wanted(self, mine: Manifest, theirs: Manifest | None) -> bool:
        """Whether a checkpoint is this node's to copy: on a shared disk, that which this host has written."""
        if not self.settings.first and mine.host != socket.gethostname():
            return False
        again = theirs and theirs.host == mine.host and theirs.time != mine.time
        return not theirs or again or (theirs.kind, mine.kind) == ("snapshot", "checkpoint")

    def _prune(self) -> None:
        """Apply --keep, --keep-best and --keep-every there, also to what other nodes have copied."""
        found, keep, keep_best = self.store.manifests(), self.settings.keep, self.settings.keep_best
        if not found:
            return
        there = Checkpoints(self.store.copies, keep, Provenance(found[max(found)].best_by), keep_best)
        kept = {*map(step_of, [*there.best_paths(), *there.all()[-keep:]])}
        self.store.delete(kept | {step for step, manifest in found.items() if manifest.kept_for_ever})

    def _status(self) -> dict[str, Any]:
        """The run's status in the store; empty if there is none, or it is damaged."""
        self.store.copies.mkdir(exist_ok=True)
        (copy := self.store.copies / "status.json").write_bytes(self.store.read("status.json") or b"{}")
        return read_facts(copy)[0]

    def _times(self) -> dict[str, int]:
        return {name: (self.run_dir / name).stat().st_mtime_ns for name in FILES if (self.run_dir / name).is_file()}

    def _claim(self) -> None:
        """Take the lease. Refused if the run there has other options; an empty folder takes any."""
        if self.settings.first:
            self.lease.acquire()
        config, theirs = self.run_dir / FILES[0], self.store.read(FILES[0])
        if theirs and config.is_file():
            self.store.copies.mkdir(exist_ok=True)
            (copy := self.store.copies / FILES[0]).write_bytes(theirs)
            if changed := changed_options(read_config(copy), read_config(config), frozenset(self.settings.harmless)):
                name, there, here = changed[0]
                raise Refusal(f"--mirror {self.settings.url}: has another run: {name} is {there} there, {here} here")

    def _listen(self) -> None:
        """Read what the agent sends, and end within the time that is left."""
        while byte := os.read(0, 1):
            if byte in (DONE, FINISHED):
                self._finished = byte == FINISHED
                self._latest = min(self._latest, time.monotonic() + LONGEST)
                self.over.set()
            elif byte[0] in AGENT_SIGNALS:
                self._latest = min(self._latest, time.monotonic() + self.settings.grace)
        self._latest = min(self._latest, time.monotonic() + self.settings.grace)
        self._orphaned = True
        with contextlib.suppress(Exception):  # the next start of this job need not wait for it
            self.lease.release()

    def _end_in_time(self) -> None:
        """Give up when the time is over, or when the store has been away for --grace since the end of the ranks."""
        patience, tick = self.settings.grace, 0.1
        while time.monotonic() < self._latest and patience > 0:
            time.sleep(tick)
            patience -= tick * (self._away and self.over.is_set())
        self._trouble = (self._away and self._trouble) or "no time was left"
        self._report()
        if self._links:
            shutil.rmtree(self._links, ignore_errors=True)
        os._exit(0)

    def _renew(self) -> None:
        """Until the lease is released: uploads go on when the ranks have ended."""
        while True:
            time.sleep(lease.RENEWED)
            with contextlib.suppress(Exception):  # the next pass will find the same
                if self.lease.mine:
                    self.lease.renew()

    def _report(self) -> None:
        if (step := self.checkpoints.newest_step()) and (self._trouble or step not in map(step_of, self._done)):
            self._say(f"has not step {step}, which is in {self.run_dir} on {socket.gethostname()}: {self._trouble}")
        elif step and (self.settings.first or self._copied):
            self._say(f"has step {step}, the newest here")

    def _say(self, text: str) -> None:
        say(f"evenkeel: {self.settings.url}: {text}", to_stderr=True)


def _age(status: dict[str, Any]) -> tuple[int, float]:
    return len(status.get("world_sizes", [])), status.get("time", 0.0)


def _shown(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def main() -> int:
    """Begin, then watch. An exit code other than 0 comes before torchrun starts."""
    for number in AGENT_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a scheduler may send one to all processes; the agent says when it ends
    with TemporaryDirectory() as folder:
        try:
            copier = Copier(SimpleNamespace(**json.loads(sys.argv[1])), Path(folder, "copies"))
            if not copier.settings.again and (code := copier.begin()):
                return code
        except Refusal as refusal:
            say(f"evenkeel: {refusal}", to_stderr=True)
            return REFUSED
        say("ready")
        copier.watch()
        with contextlib.suppress(Exception):  # else it runs out
            copier.lease.release()
    os._exit(0)  # timers go on


if __name__ == "__main__":
    sys.exit(main())
