"""k8s/submit.py: from a topology to YAML that Kubernetes accepts and that changes no word, and the calls of kubectl."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evenkeel.common.errors import FAILED, REFUSED, Refusal
from evenkeel.distributed.exits import exit_code
from evenkeel.launch.k8s.kubectl import verdict
from evenkeel.launch.k8s.manifest import objects
from evenkeel.launch.k8s.options import Submit
from evenkeel.launch.k8s.submission import job_of, main
from evenkeel.launch.k8s.text import document, escaped
from evenkeel.launch.launchers import parse_arguments
from evenkeel.resilience.interruption import STOPPED
from tests.k8s.expansion import expanded, variables_of, words_of
from tests.support.processes import ROOT, environment, fork
from tests.support.readme import blocks
from tests.support.small_runs import ended

RUN = ["--", "--run-dir", "runs/big"]
NASTY = [
    'it\'s "quoted"',
    "two\nlines\n",
    "$(HOME) $$(HOME) $(",
    "a$",
    "größe 日本 🚢",
    "# no: comment",
    "- x",
    "\x85\u2028\x7f",
]

SETS = [
    "-g 1",
    "-n 2 -g 8",
    "-n 2:4 -g 8 --time 4h",
    "-n 2 -g 2 --gpu-resource none --cpus-per-gpu 1",
    "-n 4 -g 8 --rdma rdma/hca_shared_devices_a",
    "-n 4 -g 8 --rdma nvidia.com/hostdev=8 --gpu-resource amd.com/gpu",
    "-n 2:4 -g 8 --queue research",
    "-n 2 -g 8 --queue research --namespace team-a --name tide",
    "-g 4 --mem 64G --shm-size 8g --cpus-per-gpu 12",
    "-g 4 --runs mine --data images --user 4242",
    "-g 4 --wandb-secret wandb --user 4242:100",
    "-n 2 -g 8 --secret bucket --service-account trainer",
    "--kind trainjob -n 2 -g 8 --service-account trainer",
    "-n 3 -g 8 --max-restarts 0 --time 1-00:00:00",
    "--kind trainjob -n 2 -g 8 --time 30m",
    "--kind trainjob -n 4 -g 8 --queue research --runtime mine --data images --wandb-secret wandb --shm-size 1G",
]


def texts(words: str, *train: str, **environ: str) -> str:
    job = job_of(*parse_arguments(Submit, ["--image", "team/tide:1", *shlex.split(words), *RUN]))
    return document(*objects(replace(job, train_args=[*job.train_args, *train], environ=environ)))


def made(words: str, *train: str, **environ: str) -> dict[str, Any]:
    """The objects by their kinds."""
    return {it["kind"]: it for it in yaml.safe_load_all(texts(words, *train, **environ))}


def with_grace(seconds: int) -> dict[str, Any]:
    return objects(job_of(*parse_arguments(Submit, ["--image", "tide", *RUN, "--grace", str(seconds)])))[-1]


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.mark.parametrize("words", SETS)
def test_kubernetes_accepts_it(words: str) -> None:
    validate = pytest.importorskip("kubernetes_validate.utils")
    for it in made(words, NCCL_DEBUG="INFO").values():
        if it["kind"] != "TrainJob":  # Kubernetes itself does not know it
            newest = list(dict.fromkeys(validate.major_minor(version) for version in validate.all_versions()))[-4::3]
            for version in newest:  # the newest, and the oldest that is still maintained
                validate.validate(it, version, strict=True)
            with pytest.raises(validate.ValidationError):  # the control
                validate.validate({**it, "spec": {**it["spec"], "restartPolicy": "Never"}}, newest[-1], strict=True)


@pytest.mark.parametrize("words", SETS)
def test_kubeflow_trainer_accepts_it(words: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    model = {"Job": models.IoK8sApiBatchV1Job, "TrainJob": models.TrainerV1alpha1TrainJob}
    for it in made(words).values():
        if it["kind"] in model:
            read = model[it["kind"]].from_dict(it).to_dict()
            assert missing(it, read) == [], "a field that the model does not know is dropped"


def missing(given: Any, read: Any, path: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(read, dict):
        return [lost for key, it in given.items() for lost in missing(it, read.get(key), f"{path}/{key}")]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        return [lost for it, other in zip(given, read, strict=True) for lost in missing(it, other, path)]
    return [] if given == read else [path]


def test_the_control_a_lost_field_is_found() -> None:
    assert missing({"a": [{"b": 1, "c": 2}]}, {"a": [{"b": 1}]}) == ["/a/c"]


def test_values_arrive_in_the_process_as_they_were_typed() -> None:
    """Kubernetes expands $(NAME) in args and in values of env; the process is real."""
    labels = {"batch.kubernetes.io/controller-uid": "4711"}
    for words in ("-g 1", "-n 2 -g 1"):
        job = made(words, *NASTY, NCCL_ODD=NASTY[2], WANDB_MODE=NASTY[0])["Job"]
        container = container_of(job)
        variables = variables_of(container, 1, labels)
        assert {variables[name] for name in ("NCCL_ODD", "WANDB_MODE")} == {NASTY[2], NASTY[0]}
        program = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['NCCL_ODD']]))"
        words_of_pod = words_of(container, variables)
        assert words_of_pod[:3] == ["python", "-m", "evenkeel.launch.docker.container"]
        command = [sys.executable, "-c", program, *words_of_pod[3:]]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **variables})
        argv, odd = json.loads(done.stdout)
        assert argv[argv.index("--") + 1 :] == [*RUN[1:], *NASTY]
        assert odd == NASTY[2]
        if words != "-g 1":
            assert argv[argv.index("-nr") + 1] == "1", "this one is for Kubernetes to expand"


def test_the_control_without_escapes_a_value_changes() -> None:
    assert expanded("$(HOME) $$", {"HOME": "/"}) == "/ $"
    assert expanded("$(NONE) $x", {}) == "$(NONE) $x"


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_survives(text: str) -> None:
    (back,) = yaml.safe_load_all(document({"args": [text], text: {"value": text}}))
    assert back == {"args": [text], text: {"value": text}}
    assert expanded(escaped(text), {"HOME": "/"}) == text


@pytest.mark.parametrize(
    "word", ["yes", "No", "null", "~", "1e3", "0x1F", "012", "1:30", "2026-11-25", ".inf", "y", ""]
)
def test_a_word_that_looks_like_something_else_stays_a_word(word: str) -> None:
    assert yaml.safe_load(document({"it": word})) == {"it": word}


def test_no_secret_is_in_it() -> None:
    text = texts("-g 1 --wandb-secret mine", WANDB_API_KEY="a-key-4711", WANDB_PROJECT="tide")
    assert "4711" not in text
    env = {it["name"]: it for it in container_of(yaml.safe_load(text))["env"]}
    assert env["WANDB_API_KEY"]["valueFrom"] == {"secretKeyRef": {"name": "mine", "key": "WANDB_API_KEY"}}
    assert env["WANDB_PROJECT"]["value"] == "tide"


def test_which_ends_of_a_pod_are_counted() -> None:
    rules = made("-n 2 -g 1")["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {"values": []})["values"]}
    assert by_code == {REFUSED: "FailJob", STOPPED: "Ignore"}, "all others count"
    assert [rule["action"] for rule in rules if "onPodConditions" in rule] == ["Ignore"]


def test_a_pod_has_no_rights_and_time_to_save() -> None:
    job = with_grace(100)
    pod = job["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container_of(job)["securityContext"]["readOnlyRootFilesystem"]
    assert pod["terminationGracePeriodSeconds"] == 115
    assert made("-g 1")["Job"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 60
    writable = {it["mountPath"] for it in container_of(job)["volumeMounts"] if not it.get("readOnly")}
    assert writable == {"/app/runs", "/tmp", "/dev/shm"}


@pytest.mark.parametrize(
    ("words", "train", "claim"),
    [
        ("-g 1", [], "evenkeel-runs"),
        ("-g 1", ["--mirror", "s3://bucket/big"], None),
        ("-g 1 --runs mine", ["--mirror", "s3://bucket/big"], "mine"),
    ],
)
def test_with_a_mirror_no_claim_is_needed(words: str, train: list[str], claim: str | None) -> None:
    job = objects(job_of(*parse_arguments(Submit, ["--image", "tide", *shlex.split(words), *RUN, *train])))[-1]
    volumes = {it.pop("name"): it for it in job["spec"]["template"]["spec"]["volumes"]}
    assert volumes["runs"] == ({"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}})


@pytest.mark.parametrize("word", ["--init-from=runs/first", "--init_from runs/first", "--config big.toml"])
def test_weights_are_looked_for_in_the_pod(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("big.toml").write_text('init_from = "runs/first"')
    train_args = [*RUN[1:], *word.split(), "--init-partial"]
    job = objects(job_of(*parse_arguments(Submit, ["--image", "tide", "--", *train_args])))[-1]
    assert container_of(job)["args"][-len(train_args) :] == train_args


@pytest.mark.parametrize(
    ("words", "train", "line"),
    [
        ("-n 4:2", "", "-n 4:2: give a number of nodes, or MIN:MAX"),
        ("--kind trainjob -n 2:4", "", "-n 2:4: a TrainJob has a fixed number of nodes"),
        ("--kind trainjob --secret bucket", "", "--secret bucket: a TrainJob cannot name a Secret whole"),
        ("--time soon", "", "--time soon: give minutes"),
        ("--mem lots", "", "--mem lots: give a number with K, M, G or T"),
        ("--user root", "", "--user root: give UID or UID:GID as numbers"),
        ("--user 0", "", "--user 0: give UID or UID:GID as numbers, and not root"),
        ("--rdma a=b=c", "", "--rdma a=b=c: give the name of the resource"),
        ("--name Big_One", "", "--name Big_One: give small letters"),
        ("--name 'a b'", "", "--name 'a b': must not have spaces"),
        ("", "--run-dir elsewhere/big", "--run-dir elsewhere/big: only runs/ is on the claim"),
        ("", "--run-dir runs/../big", "--run-dir runs/../big: only runs/ is on the claim"),
        ("", "--lr -1", "--lr -1.0: must be at least 0"),
        ("--name big", "--run-dir runs/\udcff", r"runs/\udcff: is not UTF-8"),
    ],
)
def test_bad_options_are_one_line(words: str, train: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    train_args = shlex.split(train) or ["--run-dir", "runs/big"]
    argv = ["--image", "tide", *shlex.split(words), "--dry-run", "--", *train_args]
    assert exit_code(lambda: main(argv)) == REFUSED
    out, err = capsys.readouterr()
    assert err.startswith(f"evenkeel: {line}"), err
    assert err.count("\n") == 1
    assert not out


def test_the_file_is_what_submit_makes() -> None:
    text = (ROOT / "k8s" / "job.yaml").read_text()
    (command,) = re.findall(r"^#   (k8s/submit.py .*)", text, re.MULTILINE)
    without = {name: None for name in environment() if name.startswith(("WANDB_", "NCCL_", "OMP_NUM_"))}
    made_by_it = ended(fork(*shlex.split(command), env={**without, "OMP_NUM_THREADS": None})).stdout
    assert re.sub(r"^#.*\n|^\n", "", text, flags=re.MULTILINE) == made_by_it


def test_the_line_of_the_readme() -> None:
    (line,) = blocks("bash k8s")
    typed, train_args = parse_arguments(Submit, shlex.split(line)[1:])
    assert [it["kind"] for it in objects(job_of(typed, train_args))] == ["Service", "Job"]


KUBECTL = """#!{python}
import json, os, sys
from pathlib import Path
folder = Path(os.environ["CLUSTER"])
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([sys.argv[1:], sys.stdin.read() if sys.argv[1] == "apply" else ""]) + "\\n")
if sys.argv[1] == "logs":
    print("[pod/big-0/node] step 1/9", flush=True)
answers = sorted(folder.glob(f"{{sys.argv[1]}}-*"))
if answers:
    print(answers[0].read_text(), end="")
    answers[0].unlink()
if (folder / "down").exists():
    sys.exit("error: the server is not reachable")
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the answers of a kubectl of the test's own, by command and number, and with its calls."""
    (tmp_path / "bin").mkdir()
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable))
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CLUSTER", str(tmp_path))
    return tmp_path


def calls(cluster: Path) -> list[Any]:
    return [json.loads(line) for line in (cluster / "calls").read_text().splitlines()]


COMMAND = ["--image", "tide", "-n", "2", "--namespace", "team", *RUN]


def test_it_is_applied_by_kubectl_without_a_shell(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster / "apply-0").write_text("job.batch/big created\n")
    assert main(COMMAND) == 0
    (asked, _), (applied, text) = calls(cluster)
    assert asked == ["get", "job/big", "--namespace", "team", "--ignore-not-found", "--output=name"]
    assert applied == ["apply", "--namespace", "team", "--filename=-"]
    assert [it["kind"] for it in yaml.safe_load_all(text)] == ["Service", "Job"]
    assert "kubectl delete job/big --namespace team" in capsys.readouterr().out


def test_a_job_that_is_there_is_not_touched(cluster: Path) -> None:
    (cluster / "get-0").write_text("job.batch/big\n")
    with pytest.raises(Refusal, match="job/big: is there already; `kubectl delete job/big --namespace team`"):
        main(COMMAND)
    assert [words[0] for words, _ in calls(cluster)] == ["get"]


def test_kubectl_says_why_it_cannot(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cluster / "down").touch()
    with pytest.raises(Refusal, match="kubectl get: error: the server is not reachable"):
        main(COMMAND)
    monkeypatch.setenv("PATH", str(cluster))
    with pytest.raises(Refusal, match="kubectl: is not installed here"):
        main(COMMAND)


def test_follow_shows_the_log_to_the_end(cluster: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (cluster / "get-0").write_text("")
    (cluster / "get-1").write_text("{}")
    (cluster / "get-2").write_text(json.dumps({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}))
    assert main(["--follow", *COMMAND]) == 0
    out = capfd.readouterr().out
    logs = [words for words, _ in calls(cluster) if words[0] == "logs"]
    assert all("--tail=-1" in words and words[-1] == "batch.kubernetes.io/job-name=big" for words in logs)
    assert sorted({words[-3:][0] for words in logs}) == ["team"]
    assert "[pod/big-0/node] step 1/9" in out
    assert out.endswith("evenkeel: job/big: finished\n")


@pytest.mark.parametrize(
    ("kind", "reason", "code"),
    [
        ("Failed", "PodFailurePolicy", REFUSED),
        ("Failed", "BackoffLimitExceeded", FAILED),
        ("Failed", "DeadlineExceeded", STOPPED),
        ("Suspended", "JobSuspended", None),
    ],
)
def test_how_a_job_has_ended(kind: str, reason: str, code: int | None) -> None:
    conditions = [{"type": kind, "status": "True", "reason": reason, "message": "why\nnot"}]
    assert verdict("job/big", {"status": {"conditions": conditions}}) == code
