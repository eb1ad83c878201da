"""What `sweep` refuses, how runs are named and typed, and its table."""

import json
from pathlib import Path
from typing import Any

import pytest

from evenkeel.cli.sweep import Setting, SweepCommand, _refuse_changes, _started, name_of, read, table
from evenkeel.common.errors import Refusal
from evenkeel.launch.topology import Command
from tests.support.processes import TRAIN
from tests.support.raised import refusal_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr = [0.1]", "lr is in no table; put options into [fixed], or as lists into [grid]"),
        ("[fixed]\nlr = 0.1", "has no table [grid] with lists of values"),
        ("[grid]", "has no table [grid]"),
        ("[grid]\nlr = 0.1", "lr = 0.1 in [grid] must be a list of values"),
        ("[fixed]\nlr = 1\n[grid]\nlr = [2]", "lr is in [fixed] and in [grid]"),
        ("[grid]\nrun-dir = ['a']", "run_dir: sweep sets it for each run"),
        ("[grid", "not TOML"),
        ("[grid]\nlr = [0.1, 0.1]", "two runs would be "),
        ("[grid]\nlrr = [0.1]", "Unrecognized options: --lrr"),
        ("[grid]\nlr = [-1.0]", "--lr -1.0: "),
        ("[fixed]\nmirror = 's3://a/b'\n[grid]\nlr = [1.0, 2.0]", "--mirror s3://a/b: each run needs a URL of its own"),
    ],
)
def test_what_a_file_may_not_have_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (file := tmp_path / "sweep.toml").write_text(text)
    assert expected in refusal_of(SweepCommand(file, run_dir=tmp_path / "runs", script=Path(TRAIN)))
    assert not (tmp_path / "runs").exists()


def test_a_run_is_named_after_its_values() -> None:
    assert name_of({"lr": 0.1, "freeze": ["a", "b"], "task": "my/file.py:T"}) == "lr=0.1,freeze=a+b,task=my_file.py_T"


def test_the_grid_is_read_with_either_spelling(tmp_path: Path) -> None:
    (file := tmp_path / "sweep.toml").write_text("[fixed]\nbatch-size = 8\n[grid]\nmax_steps = [1, 2]\n")
    assert read(file) == ({"batch_size": 8}, {"max_steps": [1, 2]})


def setting(folder: Path, lr: float, seed: int, loss: Any = None) -> Setting:
    found = Setting({"lr": lr, "seed": seed}, folder / f"{lr}-{seed}", ())
    if loss is not None:
        found.run_dir.mkdir()
        (found.run_dir / "summary.json").write_text(json.dumps({"metrics": {"test/loss": loss}}))
    return found


def test_a_finished_run_has_the_options_of_the_file_however_it_has_settled_them(tmp_path: Path) -> None:
    recorded = 'data_dir = "pixels"\nmicro_batch = 8\nfreeze = ["body"]\nlr = 0.1\n'
    (tmp_path / "config.toml").write_text(recorded)
    run = Setting({}, tmp_path, ())
    _refuse_changes(run, {"data_dir": "./pixels/", "micro_batch": "auto", "freeze": "body", "lr": 0.1})
    with pytest.raises(Refusal, match=r"has finished with --lr 0.1, and the file has 0.2; name another"):
        _refuse_changes(run, {"lr": 0.2})


def test_the_log_of_a_run_has_no_secret_and_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "runs\udcff" / "lr=1"
    options = ("--token=hunter2", "--lr=1", f"--run-dir={folder}")
    assert _started(Command(("echo", "--", "train.py", *options), {}), folder).wait() == 0
    log = folder.with_name("lr=1.out")
    head, output = log.read_bytes().splitlines()
    assert (log.stat().st_mode & 0o777, head[:19]) == (0o600, b"$ echo -- train.py ")
    assert b"hunter2" not in head
    assert head.endswith(b"/runs\xff/lr=1'")
    assert output.startswith(b"-- train.py --token=hunter2"), "the control: it is the program's"


def test_the_table_has_the_mean_and_the_deviation_of_a_sample(tmp_path: Path) -> None:
    runs = [setting(tmp_path, 0.1, 1, 1.0), setting(tmp_path, 0.1, 2, 3.0), setting(tmp_path, 0.2, 1, 5.0)]
    rows = [line.split("  ") for line in table([*runs, setting(tmp_path, 0.2, 2)], ("seed",))]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert cells == [["setting", "runs", "test/loss"], ["lr=0.1", "2/2", "2 ± 1.414"], ["lr=0.2", "1/2", "5"]]
    assert len(table(runs, ())) == 4, "the control: a line for each"
    assert table(runs, ("seed", "lr"))[1].startswith("all      3/3")
