"""`evenkeel.fit` in a Python that stays alive: the bits of train.py, resumes, Ctrl-C, and what it refuses."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import needs
from tests.support.processes import ROOT, TRAIN, checked, environment, finish, kill_group, read, run_forked, start
from tests.support.small_runs import SUPPORT, job, told_step, wait_for_step, weights_of

SHAPE = "epochs=3, batch_size=12, micro_batch=3, log_every=1, wandb='disabled'"
# as a kernel: a job of a shell's background would ignore Ctrl-C
CELL = f"""
from dataclasses import dataclass
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(SUPPORT)!r})
import evenkeel, recording_task
@dataclass
class Mine(recording_task.Recorded):
    pass

"""


class Notebook:
    """An interactive Python without a terminal: what a kernel is, without its messages."""

    def __init__(self, folder: Path) -> None:
        path = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        self.process = subprocess.Popen(
            [sys.executable, "-i", "-q"], cwd=folder, env=environment(path), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def type(self, code: str) -> None:
        self.process.stdin.write(code + "\nprint('DO' + 'NE')\n")
        self.process.stdin.flush()

    def shown(self) -> str:
        """Up to the end of what was typed last."""
        lines = []
        for line in self.process.stdout:
            if "DONE" in line:
                return "".join(lines)
            lines.append(line)
        raise AssertionError("the interpreter has ended:\n" + "".join(lines))

    def run(self, code: str) -> str:
        self.type(code)
        return self.shown()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    found = Notebook(tmp_path)
    found.run(CELL)
    yield found
    kill_group(found.process)


def call(task: str, run_dir: str, more: str = "") -> str:
    return f"metrics, model = evenkeel.fit({task}, run_dir={run_dir!r}, {SHAPE}, reduce='tree'{more})"


@pytest.mark.slow
def test_one_process_and_two_have_the_bits_of_train_py(notebook: Notebook, tmp_path: Path) -> None:
    run_forked(TRAIN, *job(tmp_path / "usual", "--reduce", "tree"))
    usual = weights_of(tmp_path / "usual")
    # settings that torch refuses to read by their older names
    notebook.run("import torch; torch.backends.fp32_precision = 'tf32'; matmul = torch.backends.cuda.matmul")
    told = notebook.run(call("Mine", "here"))
    assert "float32 products, tf32, CPU tf32, is reset to full" in told
    assert "finished" in told
    assert "tf32 tf32" in notebook.run("print(torch.backends.fp32_precision, matmul.fp32_precision)")
    assert weights_of(tmp_path / "here") == usual
    told = notebook.run("print(metrics, model.training, sum(p.numel() for p in model.parameters()))")
    assert f"{read(tmp_path / 'here')['metrics']} False 49" in told
    assert "2 ranks" in notebook.run(call("recording_task.Recorded", "two", ", processes=2"))
    assert weights_of(tmp_path / "two") == usual
    assert "finished at step 27" in notebook.run(call("Mine", "here")), "and leaves the folder unlocked"
    # the control: another seed
    notebook.run(call("Mine", "other", ", seed=1"))
    assert weights_of(tmp_path / "other") != usual
    # without the tree, after it: its settings have not stayed
    run_forked(TRAIN, *job(tmp_path / "ring"))
    notebook.run(call("Mine", "ring-here").replace("tree", "ring"))
    assert weights_of(tmp_path / "ring-here") == weights_of(tmp_path / "ring")


@pytest.mark.parametrize("processes", [1, needs.long(2)])
def test_ctrl_c_leaves_python_alive_and_the_last_step_saved(notebook: Notebook, tmp_path: Path, processes: int) -> None:
    run_forked(TRAIN, *job(tmp_path / "usual", "--reduce", "tree"))
    task = "Mine" if processes == 1 else "recording_task.Recorded"
    slow = tmp_path / "slow"
    slow.touch()
    # loader processes live on in the traceback, and have the run's lock open
    more = f", processes={processes}" if processes > 1 else ", num_workers=1"
    code = call(task, "run", f", checkpoint_every=0, pause=0.1, hold='{slow}'{more}")
    notebook.type(code)
    wait_for_step(tmp_path / "run", 3, notebook.process)
    os.kill(notebook.process.pid, signal.SIGINT)
    told = notebook.shown()
    assert "KeyboardInterrupt" in told
    assert "is saved" in told
    status = read(tmp_path / "run", "status.json")
    assert status["state"] == "stopped"
    assert told_step(tmp_path / "run") <= status["step"] < 27
    slow.unlink()
    assert f"step {status['step']}/27" in notebook.run(code)
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "usual")


def test_a_start_that_fails_while_it_reads_data_leaves_the_folder_free(notebook: Notebook) -> None:
    code = call("Mine", "run", ", max_steps=2")
    read_it = "recording_task.Recording.__getitem__"
    notebook.run(f"whole = {read_it}; {read_it} = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)")
    assert "KeyboardInterrupt" in notebook.run(code)
    notebook.run(f"{read_it} = whole")
    told = notebook.run(code)
    assert "step 2/2" in told, told
    assert "in use" not in told


REFUSED = {
    "evenkeel.fit('classify', epoch=3)": "Unrecognized options: --epoch=3; did you mean --epochs?",
    "evenkeel.fit('classify', learning_rate=3)": "--learning-rate: here it is --lr",
    "evenkeel.fit(Mine(), lr=1)": "fit(Mine(...)): give a task's name or class",
    "evenkeel.fit(Mine, ([1], [2]))": "fit(Mine, ...): give one task; its train_dataset() returns the data, and",
    "import torch; evenkeel.fit(Mine, data=(torch.ones(2), 1))": "fit(Mine, ...): give one task; its train_dataset()",
    "evenkeel.fit(Mine, processes='2')": "fit(processes='2'): must be a whole number from 1 on",
    "evenkeel.fit(Mine, processes=2)": "fit(processes=2): other processes cannot import Mine",
    "evenkeel.fit('classify', eval_only=True)": "fit(eval_only=True): fit trains",
    "evenkeel.fit('classify', script='other.py')": "fit(script='other.py'): No such file",
    "evenkeel.fit('classify', script=recording_task.__file__)": "has no train(run)",
    "import os; os.environ['RANK'] = '0'; evenkeel.fit('classify')": "fit: torchrun has started this process",
}


def test_what_is_refused_in_a_line(notebook: Notebook, tmp_path: Path) -> None:
    for code, line in REFUSED.items():
        told = notebook.run(code).strip().splitlines()
        assert told[-1].startswith("evenkeel.common.errors.Refusal: "), told
        assert line in told[-1]
    assert not (tmp_path / "runs").exists()
    program = [sys.executable, "-c", "import evenkeel; evenkeel.fit('classify', lr='high')"]
    assert checked(finish(start(program, cwd=tmp_path)), 2).stderr.startswith("evenkeel: --lr high: must be a")
