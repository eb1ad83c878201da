"""The command line of ``k8s/submit.py``: check everything, then hand the job's YAML to kubectl."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from ...common.arguments import some_options
from ...common.display import show
from ...common.errors import Refusal
from ...run.records import read_config
from ..launchers import check_train_options, parse_arguments
from ..limits import check_memory, parse_time
from ..topology import CPU_PROCESSES, parse_nodes
from .kubectl import follow, kubectl
from .manifest import Job, objects
from .options import Submit
from .text import document

LONGEST_NAME = 50  # a pod's host name has 63 letters at most: the job's name, and what Kubernetes appends


def main(argv: Sequence[str]) -> int:
    """Check everything, submit the job, and print how to watch it."""
    typed, train_args = parse_arguments(Submit, argv)
    job = job_of(typed, train_args)
    text = document(*objects(job))
    if typed.dry_run:
        show(text)
        return 0
    where = ["--namespace", typed.namespace] if typed.namespace else []
    name, ended = f"{typed.kind}/{job.name}", " ".join(["kubectl delete", f"{typed.kind}/{job.name}", *where])
    if kubectl("get", name, *where, "--ignore-not-found", "--output=name").strip():
        raise Refusal(f"{name}: is there already; `{ended}` (its run stays, and continues), or give --name another")
    print(kubectl("apply", *where, "--filename=-", given=text), end="")
    owner = "jobset.sigs.k8s.io/jobset-name" if typed.kind == "trainjob" else "batch.kubernetes.io/job-name"
    pods = f"{owner}={job.name}"
    print(f"  pods     {' '.join(['kubectl get pods', *where, '-l', pods])}")
    print(f"  log      {' '.join(['kubectl logs -f --prefix --tail=-1', *where, '-l', pods])}")
    print(f"  cancel   {ended}", flush=True)
    return follow(name, pods, where) if typed.follow else 0


def job_of(typed: Submit, train_args: Sequence[str]) -> Job:
    """What a command line asks for; everything that can be refused here is."""
    _check(typed)
    seconds = None if typed.time is None else parse_time(typed.time) * 60
    for word in (*train_args, typed.image):
        if re.search("[\ud800-\udfff]", word):  # bytes of the command line that are not UTF-8
            raise Refusal(f"{word.encode(errors='backslashreplace').decode()}: is not UTF-8, so no YAML can hold it")
    config = check_train_options(_with_any_weights(train_args))
    assert config.run_dir is not None  # resolved
    below = PurePath("/app", config.run_dir)
    if ".." in below.parts or below.parts[:3] != ("/", "app", "runs") or len(below.parts) < 4:
        raise Refusal(f"--run-dir {config.run_dir}: only runs/ is on the claim; give a folder in it, such as runs/big")
    name = typed.name or re.sub("[^a-z0-9]+", "-", below.name.lower()).strip("-")
    if not re.fullmatch(f"[a-z]([-a-z0-9]{{0,{LONGEST_NAME - 2}}}[a-z0-9])?", name):
        raise Refusal(f"--name {name}: give small letters, digits and '-', {LONGEST_NAME} at most, a letter first")
    processes = typed.gpus or (CPU_PROCESSES if typed.gpu_resource == "none" else 1)
    return Job(name, typed, train_args, config, parse_nodes(typed.nodes), processes, seconds, os.environ)


def _with_any_weights(train_args: Sequence[str]) -> Sequence[str]:
    """train.py's options with a file of this machine as --init-from, if it is given, in a file of --config perhaps: the
    pod looks for it on the claim."""
    weights, others = some_options(train_args, ("--init-from", "--init_from"))
    file, _ = some_options(train_args, ("--config",))
    with suppress(Refusal):  # `check_train_options` says what is wrong with that file
        weights.init_from = weights.init_from or (file.config and read_config(Path(file.config)).get("init_from"))
    return [*others, f"--init-from={__file__}"] if weights.init_from else train_args


def _check(typed: Submit) -> None:
    """Checks that do not need torch."""
    for name, value in vars(typed).items():
        if isinstance(value, str) and re.search(r"[\s\x00-\x1f]", value):
            raise Refusal(f"--{name.replace('_', '-')} {value!r}: must not have spaces or ends of lines")
    for size in filter(None, (typed.mem, typed.shm_size)):
        check_memory(size)
    if not re.fullmatch("[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?", typed.user):
        raise Refusal(f"--user {typed.user}: give UID or UID:GID as numbers, and not root")
    if not re.fullmatch("([^=]+(=[1-9][0-9]{0,3})?)?", typed.rdma):
        raise Refusal(f"--rdma {typed.rdma}: give the name of the resource, or NAME=N")
    least, most = parse_nodes(typed.nodes)
    if typed.kind == "trainjob" and typed.secret:
        raise Refusal(f"--secret {typed.secret}: a TrainJob cannot name a Secret whole; use --service-account")
    if typed.kind == "trainjob" and least < most:
        raise Refusal(f"-n {typed.nodes}: a TrainJob has a fixed number of nodes; give one number, or --kind job")
