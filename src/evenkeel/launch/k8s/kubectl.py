"""kubectl, and `k8s/submit.py --follow` by it: the log of all pods and the end of the job."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from ...common.errors import FAILED, REFUSED, Refusal
from ...common.keyboard import CtrlC
from ...resilience.interruption import KEYBOARD, STOPPED

RUNNING = ("ready", "jobsStatus")  # of the status of a Job and a TrainJob: changes when pods come and go
POLL = 2.0  # seconds between two questions to the API server


def kubectl(*words: str, given: str | None = None) -> str:
    """What kubectl prints; `given` is its input. A Refusal with its message if it fails."""
    try:
        done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, check=False)  # noqa: S607
    except FileNotFoundError:
        raise Refusal("kubectl: is not installed here; install it, or take the YAML from --dry-run") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if not re.match("[EIW][0-9]{4} ", line)]  # its own log
        raise Refusal(f"kubectl {words[0]}: {' '.join(said) or f'exit code {done.returncode}'}")
    return done.stdout


def follow(name: str, pods: str, where: Sequence[str]) -> int:
    """Print the log until the job is over; returns an exit code: 0 finished, 75 stopped, 2 refused, 1 failed.

    Args:
        name: KIND/NAME.
        pods: the label by which kubectl finds its pods.
        where: kubectl's words for the namespace.
    """
    log, since, said = _log(pods, where, time.time()), time.time(), ""
    shown: Any = None
    code: int | None = None
    with CtrlC() as ctrl_c:
        while code is None and not ctrl_c.wait(POLL):
            try:
                job = json.loads(kubectl("get", name, *where, "--output=json"))
                code, trouble, running = verdict(name, job), "", [job.get("status", {}).get(key) for key in RUNNING]
            except Refusal as refusal:
                code, trouble, running = STOPPED if "NotFound" in str(refusal) else None, str(refusal), shown
            if trouble not in ("", said):
                print(f"evenkeel: {name}: {trouble}", flush=True)
            if code is None and (running != shown or log.poll() is not None):  # it knows the pods of its start only
                log.terminate()
                log.wait()
                log = _log(pods, where, since)
            shown, said, since = running, trouble, time.time()
        ctrl_c.wait(POLL)  # for the rest of the log
        log.terminate()
        log.wait()
    if code is None:
        print(f"evenkeel: {name}: continues; `kubectl delete {' '.join([name, *where])}` ends it")
    return KEYBOARD if code is None else code


def _log(pods: str, where: Sequence[str], since: float) -> subprocess.Popen[bytes]:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since))
    words = ["logs", "--follow", "--prefix", "--ignore-errors", "--max-log-requests=1000"]
    words += ["--tail=-1", f"--since-time={moment}"]  # of pods found by a label, kubectl shows ten lines only
    return subprocess.Popen(["kubectl", *words, *where, "-l", pods], stderr=subprocess.DEVNULL)  # noqa: S607


def verdict(name: str, job: dict[str, Any]) -> int | None:
    """Say how a Job or TrainJob has ended; None while it has not."""
    told = {it["type"]: it for it in job.get("status", {}).get("conditions", ()) if it.get("status") == "True"}
    if "Complete" in told:
        print(f"evenkeel: {name}: finished", flush=True)
        return 0
    if not (failed := told.get("Failed")):
        return None
    reason, message = failed.get("reason", ""), " ".join(failed.get("message", "").split())
    if reason == "DeadlineExceeded":
        print(f"evenkeel: {name}: stopped by --time; delete it and submit it again to continue the run", flush=True)
        return STOPPED
    print(f"evenkeel: {name}: failed: {reason}: {message}", flush=True)
    return REFUSED if reason == "PodFailurePolicy" else FAILED
