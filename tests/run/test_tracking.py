"""What a run tells: metrics.jsonl, logs, and Weights & Biases, which never ends a training nor learns a secret."""

import errno
import io
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evenkeel.config import Config
from evenkeel.data.plan import ENDLESS, Plan
from evenkeel.distributed.world import World
from evenkeel.run.records import LINE_SECONDS
from evenkeel.run.trackers import INIT_TIMEOUT, wandb_mode
from evenkeel.run.tracking import Tracker, start_logs
from tests.support.needs import small_disk

PLAN = Plan(samples=100, global_batch=10, micro_batch=5, epochs=2)
KEY = "5ec2e7" + "0123456789abcdef" * 2 + "fe"  # of a key's length and letters, and nobody's


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    package = logging.getLogger("evenkeel")
    handlers, level = list(package.handlers), package.level
    yield
    for handler in package.handlers:
        handler.close()
    package.handlers[:] = handlers
    package.setLevel(level)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return folder


def tracker(run_dir: Path, **options: Any) -> Tracker:
    return Tracker(Config(**options), PLAN, run_dir, attempt=1, world_size=2)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, each of them JSON as any program reads it."""

    def strict(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=strict) for line in text.splitlines()]


def test_each_event_is_a_line_of_json(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    it = tracker(run_dir)
    it.start(0)
    it.train(10, 1.5, 2.5, 0.1)
    it.evaluation(10, {"test/accuracy": 0.5, "test/loss": 1.25})
    it.event("checkpoint", 10, path="step-00000010")
    it.train(20, 0.5, 2.5, 0.0)
    it.close()
    kinds = [(line["kind"], line["step"]) for line in lines(run_dir)]
    assert kinds == [("start", 0), ("train", 10), ("eval", 10), ("checkpoint", 10), ("train", 20)]
    start, train, evaluation, *_ = lines(run_dir)
    assert (start["attempt"], start["world_size"]) == (1, 2)
    assert (train["train/loss"], train["train/lr"], train["epoch"]) == (1.5, 0.1, 1.0)
    assert train["train/samples_per_s"] > 0
    assert (evaluation["test/accuracy"], evaluation["test/loss"]) == (0.5, 1.25)
    assert abs(train["time"] - time.time()) < 60
    shown = capsys.readouterr().out
    assert "2 ranks, step 0/20" in shown
    assert "step 20/20  epoch 2/2  train/loss 0.5000  test/accuracy 0.5000" in shown
    assert "step 10/20  test/accuracy 0.5000  test/loss 1.2500\n" in shown
    assert "step 10/20  epoch 1/2" in shown, "the last step of the first epoch, in which one epoch is done"


def test_lines_of_training_are_seconds_apart(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a console without a progress bar: the first, the last, and those between that are due. All are recorded."""
    it = tracker(run_dir)
    for step in (1, 2, 3):
        it.train(step, 1.5, 2.5, 0.1)
    it.evaluation(3, {"test/accuracy": 0.5})
    it._last_line -= LINE_SECONDS
    for step in (4, 5, 20):
        it.train(step, 1.5, 2.5, 0.1)
    shown = [line.split("/20  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["step 1", "step 3", "step 4", "step 20"]
    assert [line["step"] for line in lines(run_dir) if line["kind"] == "train"] == [1, 2, 3, 4, 5, 20]


def test_a_loss_that_is_no_number_does_not_spoil_the_file(run_dir: Path) -> None:
    it = tracker(run_dir)
    for loss in (float("nan"), float("inf"), -float("inf"), 1.0):
        it.train(10, loss, 2.5, 0.1)
    assert [line["train/loss"] for line in lines(run_dir)] == [None, None, None, 1.0]


def test_a_stream_has_no_epoch(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = Plan(ENDLESS - ENDLESS % 8, global_batch=8, micro_batch=8, epochs=20, max_steps=50)
    Tracker(Config(), stream, run_dir, attempt=1, world_size=2).train(10, 1.5, 2.5, 0.1)
    assert "epoch" not in lines(run_dir)[-1]
    assert capsys.readouterr().out.splitlines()[-1].startswith("step 10/50  train/loss 1.5000  ")


def test_a_full_disk_costs_lines_and_leaves_no_part_of_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A part of a line would swallow the next one, too."""
    with small_disk(tmp_path / "disk", "64k") as folder:
        it = tracker(folder)
        (folder / "filler").write_bytes(bytes(40_000))
        for step in range(1000):
            it.event("train", step, text="x" * (step % 97))
        assert caplog.text.count("metrics.jsonl: [Errno 28] No space left on device") == 1, "and then every ten minutes"
        (folder / "filler").unlink()
        it.event("train", 1000)
        told = [line["step"] for line in lines(folder)]
        assert 20 < len(told) < 900
        assert told == sorted(told)
        assert told[-1] == 1000


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_has_a_log_and_rank_0_warns(run_dir: Path, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir / "logs" / "attempt-0001"
    start_logs(folder, World(rank, rank, 2, 2, torch.device("cpu"), launched=True))
    log = logging.getLogger("evenkeel.something")
    log.info("quiet")
    # to the file alone: pytest keeps what is logged, and xdist cannot send it on
    record = logging.makeLogRecord({"msg": os.fsdecode(b"name\xe9"), "levelname": "INFO", "name": log.name})
    logging.getLogger("evenkeel").handlers[0].emit(record)
    log.warning("loud")
    written = (folder / f"rank-{rank}.log").read_text()
    assert f"rank {rank} INFO evenkeel.something: quiet" in written
    assert f"rank {rank} INFO evenkeel.something: name\\udce9" in written
    assert f"rank {rank} WARNING evenkeel.something: loud" in written
    assert capsys.readouterr().err == ("evenkeel: WARNING: loud\n" if rank == 0 else "")


class FullDisk(io.StringIO):
    """A file that cannot be written."""

    def write(self, _text: str, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_log_on_a_full_disk_does_not_flood_stderr(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_logs(run_dir, World(0, 0, 1, 1, torch.device("cpu"), launched=False))
    package = logging.getLogger("evenkeel")
    (file,) = [handler for handler in package.handlers if isinstance(handler, logging.FileHandler)]
    file.stream.close()
    file.stream = FullDisk()  # type: ignore[assignment]
    package.error("loud")
    assert capsys.readouterr().err == "evenkeel: ERROR: loud\n"

    file.stream = io.StringIO()  # type: ignore[assignment]
    file.emit(logging.LogRecord("evenkeel", logging.ERROR, __file__, 1, "%d", ("no number",), None))
    assert "TypeError" in capsys.readouterr().err, "other trouble is shown"


def netrc(path: Path, host: str) -> None:
    path.write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    path.chmod(0o600)


HOW = "no key found; run `wandb login` or set WANDB_API_KEY, or use --wandb offline"
OFF, ON = ("disabled", HOW), ("online", "")
THEIRS = "api.wandb.ai"


@pytest.mark.parametrize("asked", ["online", "offline", "disabled"])
def test_what_is_asked_for_is_done(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    for key, mode in [("", ""), (KEY, "offline"), (KEY, "disabled")]:
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_MODE", mode)
        assert wandb_mode(asked) == (asked, "")


@pytest.mark.parametrize(
    ("variables", "files", "expected"),
    [
        ({}, {}, OFF),
        ({"WANDB_API_KEY": ""}, {}, OFF),
        ({"WANDB_API_KEY": KEY}, {}, ON),
        ({"WANDB_IDENTITY_TOKEN_FILE": "/somewhere"}, {}, ON),
        *(({"WANDB_MODE": mode}, {}, (mode, "")) for mode in ("offline", "online", "disabled")),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": KEY}, {}, ("offline", "")),
        ({}, {"home/.netrc": "github.com"}, OFF),
        ({}, {"home/.netrc": THEIRS}, ON),
        ({}, {"home/_netrc": THEIRS}, ON),
        ({"NETRC": "elsewhere"}, {"home/.netrc": THEIRS, "elsewhere": "github.com"}, OFF),
        ({"NETRC": "elsewhere"}, {"elsewhere": THEIRS}, ON),
        ({"NETRC": "nowhere"}, {"elsewhere": THEIRS}, OFF),
        *(({}, {"home/.netrc": text}, OFF) for text in (b"machine", b"\xff\xfe\x00", b"machine api.wandb.ai\n odd")),
        ({"WANDB_BASE_URL": "https://wandb.example.org:8080"}, {"home/.netrc": THEIRS}, OFF),
        ({"WANDB_BASE_URL": "https://wandb.example.org:8080"}, {"home/.netrc": "wandb.example.org:8080"}, ON),
    ],
)
def test_auto_is_on_where_wandb_would_find_a_key_and_says_how_to_turn_it_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], files: dict[str, Any], expected: Any
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "NETRC" else value)
    for name, content in files.items():
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            netrc(tmp_path / name, content)
    assert wandb_mode("auto") == expected


def test_wandb_looks_for_keys_in_the_same_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` looks without importing wandb; here is wandb's own opinion."""
    theirs = pytest.importorskip("wandb.sdk.lib.wbauth.wbnetrc")
    for base, host in [("https://api.wandb.ai", "api.wandb.ai"), ("http://127.0.0.1:8080", "127.0.0.1:8080")]:
        monkeypatch.setenv("WANDB_BASE_URL", base)
        for path in (tmp_path / "home" / ".netrc", tmp_path / "home" / "_netrc"):
            for machine in (host, "127.0.0.1", "github.com"):
                netrc(path, machine)
                assert (wandb_mode("auto")[0] == "online") == (theirs.read_netrc_auth(host=base) is not None)
            path.unlink()


class FakeWandb(SimpleNamespace):
    """In the place of the wandb module; notes what it is asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(Settings=lambda **settings: settings, asked={}, logged=[], ended=[], error=error)

    def init(self, **asked: Any) -> Any:
        self.asked = asked
        if self.error:
            raise self.error
        log, end = self.logged, self.ended
        self.summary: dict[str, float] = {}
        return SimpleNamespace(
            log=lambda values, step: log.append((step, values)),
            finish=lambda exit_code: end.append(exit_code),
            summary=self.summary,
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
    return module


def test_off_is_only_logged_and_does_not_import_wandb(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import fails
    with caplog.at_level(logging.INFO):
        tracker(run_dir).start_wandb(None, {})
        tracker(run_dir, wandb="disabled").start_wandb("kept", {})
    assert capsys.readouterr().out == ""
    assert caplog.messages == [f"Weights & Biases is off: {why}" for why in (HOW, "as asked")]


@pytest.mark.parametrize(
    ("mode", "variables", "expected"),
    [
        ("online", {}, {"id": "kept", "mode": "online", "resume": "allow", "project": "evenkeel", "name": "mine"}),
        ("offline", {}, {"id": "kept", "mode": "offline", "resume": None, "config": {"lr": 0.1}}),
        ("online", {"WANDB_PROJECT": "thesis", "WANDB_NAME": "3"}, {"project": "thesis", "name": "3"}),
        ("online", {"WANDB_SWEEP_ID": "abc"}, {"id": None}),  # the agent of a sweep names the run
        ("online", {}, {"settings": {"init_timeout": INIT_TIMEOUT}}),  # short, because all ranks wait with rank 0
        ("online", {"WANDB_INIT_TIMEOUT": "300"}, {"settings": {"init_timeout": 300.0}}),
    ],
)
def test_one_wandb_run_over_all_attempts(
    run_dir: Path, fake: FakeWandb, monkeypatch: pytest.MonkeyPatch, mode: str, variables: Any, expected: dict[str, Any]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracker(run_dir, wandb=mode).start_wandb("kept", {"lr": 0.1})
    assert fake.asked | expected == fake.asked
    assert fake.asked["dir"] == run_dir
    assert INIT_TIMEOUT <= 30


def test_wandb_hears_what_metrics_jsonl_hears(run_dir: Path, fake: FakeWandb) -> None:
    it = tracker(run_dir, wandb="online")
    it.start_wandb(None, {})
    it.train(10, 1.5, 2.5, 0.1)
    it.evaluation(10, {"test/accuracy": 0.5})
    it.close(75)
    it.close()
    assert [step for step, _ in fake.logged] == [10, 10]
    told = [{k: v for k, v in line.items() if k == "epoch" or "/" in k} for line in lines(run_dir)]
    assert [values for _, values in fake.logged] == told, "by the same names"
    assert (told[0]["train/loss"], told[0]["epoch"]) == (1.5, 1.0)
    assert fake.logged[1][1] == {"test/accuracy": 0.5}
    assert (fake.ended, fake.summary) == ([75], {})
    it = tracker(run_dir, wandb="online")
    it.start_wandb(None, {})
    it.send(10, {"best/step": 10, "best/validation/accuracy": 0.9})
    it.close()
    assert fake.summary == {"best/step": 10, "best/validation/accuracy": 0.9}, "of a run that is finished"


def test_a_report_that_cannot_be_made_costs_a_line(
    run_dir: Path, fake: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no run in this folder."""
    it = tracker(run_dir, wandb="offline", wandb_report=True)
    it.start_wandb("kept", {})
    it.close()
    assert caplog.text.count("--wandb-report: no report was sent: ") == 1
    assert fake.ended == [0]


def test_wandb_that_dies_later_ends_no_training(
    run_dir: Path, fake: FakeWandb, caplog: pytest.LogCaptureFixture
) -> None:
    it = tracker(run_dir, wandb="online")
    it.start_wandb("kept", {})
    cast(Any, it._trackers["Weights & Biases"])._run.log = lambda *_, **__: 1 / 0
    it.train(10, 1.5, 2.5, 0.1)
    it.train(20, 1.5, 2.5, 0.1)
    it.close()
    assert caplog.text.count("Weights & Biases is off from here on: ZeroDivisionError") == 1
    assert [line["kind"] for line in lines(run_dir)] == ["train", "train"]


@pytest.mark.parametrize(
    ("module", "told"),
    [(FakeWandb(ValueError("no such server")), "ValueError: no such server"), (None, "ModuleNotFoundError")],
)
def test_trouble_with_wandb_never_ends_a_training(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)
    it = tracker(run_dir, wandb="online")
    it.start_wandb("kept", {})
    assert f"Weights & Biases is off: {told}" in caplog.text
    it.train(10, 1.5, 2.5, 0.1)
    it.close()
    assert [line["kind"] for line in lines(run_dir)] == ["train"]


def test_stdout_on_full_disk(run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115  (closing it fails)
    monkeypatch.setattr(sys, "stdout", full)
    tracker(run_dir).train(10, 1.5, 2.5, 0.1)
    assert "No space left on device" in caplog.text
    with pytest.raises(OSError, match="No space"):
        full.close()
