"""What a run on another machine says and does."""

import sys
from pathlib import Path

from evenkeel.common.processes import REFUSAL
from tests.run.test_checkpoint import flip_a_bit
from tests.run.test_fingerprint import OTHER, another_machine, elsewhere, here, small
from tests.support.processes import contents_of, finish_all, fork_ranks, read, records, run, torchrun
from tests.support.small_files import write_folder


def test_libraries_count_that_the_task_uses_only_later(tmp_path: Path) -> None:
    """Pillow or another decoder reads the first file, and torchvision mixes, when the run has long begun."""
    write_folder(tmp_path)
    look = (
        "import torch; from pathlib import Path; from evenkeel.run.fingerprint import fingerprint\n"
        "from evenkeel.tasks.classify import Classify; from evenkeel.tasks import decoding\n"
        f"folder = {{'dataset': 'imagefolder', 'data_dir': Path({str(tmp_path)!r})}}\n"
        "for options in ({}, {'mixup': 0.2}, {**folder, 'decode': 'exact'}, {**folder, 'decode': 'fast'}):\n"
        "    (task := Classify(**options)).train_dataset()\n"
        "    print(*sorted({'pillow', 'torchcodec', 'torchvision'} & set(fingerprint(task, torch.device('cpu')))))\n"
        "print('TorchCodec' in decoding.jpeg_decoders())"
    )
    none, *mixed, fast, loads = run([sys.executable, "-c", look]).stdout.splitlines()
    assert none == ""
    assert mixed == ["pillow torchvision"] * 2
    assert fast == ("pillow torchcodec torchvision" if loads == "True" else "pillow torchvision")


@another_machine
def test_a_resume_elsewhere_warns_once_and_is_remembered_and_on_more_ranks_is_nothing(run_dir: Path) -> None:
    finish_all(fork_ranks(2, *small(run_dir, 2)))
    assert "void" not in here(run_dir, 4).stderr, "the number of ranks is no part of it"
    assert read(run_dir)["bits_void_from"] is None
    (warning,) = [line for line in elsewhere(run_dir, 6).stderr.splitlines() if "void" in line]
    told = r"evenkeel: WARNING: from step 4 on bit-for-bit equality is void: cpu_capability "
    assert warning.startswith(told)
    assert warning.endswith(" -> DEFAULT")
    (record,) = records(run_dir, "bits")
    assert (record["step"], list(record["differences"])) == (4, ["cpu_capability"])
    assert record["differences"]["cpu_capability"][1] == "DEFAULT"
    assert "void" not in elsewhere(run_dir, 8).stderr, "nothing has changed since"
    assert "from step 8 on" in here(run_dir, 10).stderr
    assert [record["step"] for record in records(run_dir, "bits")] == [4, 8]
    assert read(run_dir)["bits_void_from"] == 4, "the first step counts"


@another_machine
def test_steps_that_are_done_again_in_the_old_place_are_good(run_dir: Path) -> None:
    """The other machine dies by kill -9 before its first checkpoint: nothing that it did is left."""
    here(run_dir, 2, "--die-at", 9)
    run(torchrun(1, *small(run_dir, 6, "--die-at", 9, "--keeper", "off")), env=OTHER, expect=1)
    assert [record["step"] for record in records(run_dir, "bits")] == [2]
    here(run_dir, 6, "--die-at", 9)
    assert [record["step"] for record in records(run_dir, "start")] == [0, 2, 2]
    assert read(run_dir)["bits_void_from"] is None


@another_machine
def test_strict_bits_refuses_on_all_ranks_and_changes_nothing(run_dir: Path) -> None:
    finish_all(fork_ranks(2, *small(run_dir, 2, "--strict-bits")))
    before = contents_of(run_dir)
    done = run(torchrun(2, *small(run_dir, 4, "--strict-bits")), env=OTHER, expect=-REFUSAL)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("evenkeel: ")]
    assert line.startswith("evenkeel: --strict-bits: from step 2 on the bits might differ: cpu_capability ")
    assert line.endswith(" -> DEFAULT; restore that, or continue without --strict-bits")
    assert contents_of(run_dir) == before
    refused = elsewhere(run_dir, 4, "--strict-bits", expect=2)
    assert refused.stderr.splitlines() == [line]
    assert contents_of(run_dir) == before
    elsewhere(run_dir, 2, "--strict-bits")  # finished: nothing is computed
    here(run_dir, 4, "--strict-bits")
    assert records(run_dir, "start")[-1]["step"] == 2


@another_machine
def test_strict_bits_judges_by_the_checkpoint_that_is_whole(run_dir: Path) -> None:
    here(run_dir, 2)
    elsewhere(run_dir, 4)
    flip_a_bit(run_dir / "checkpoints" / "step-00000004" / "state.pt")
    refused = elsewhere(run_dir, 6, "--strict-bits", expect=2)
    assert "--strict-bits: from step 2 on" in refused.stderr
    here(run_dir, 6, "--strict-bits")
    assert read(run_dir)["bits_void_from"] is None


@another_machine
def test_ranks_that_differ_among_themselves_are_named(tmp_path: Path) -> None:
    run_dir, mixed = tmp_path / "run", tmp_path / "mixed.py"
    mixed.write_text(
        "import os, sys\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.environ['ATEN_CPU_CAPABILITY'] = 'default'\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    refused = run(torchrun(2, mixed, *small(run_dir, 2, "--strict-bits")), expect=-REFUSAL)
    assert "--strict-bits: from step 0 on the bits might differ: cpu_capability of rank 1 " in refused.stderr
    assert not (run_dir / "config.toml").exists()
    done = run(torchrun(2, mixed, *small(run_dir, 2)))
    assert "from step 0 on bit-for-bit equality is void: cpu_capability of rank 1 " in done.stderr
    assert list(records(run_dir, "bits")[0]["differences"]) == ["cpu_capability of rank 1"]
    assert read(run_dir)["bits_void_from"] == 0


@another_machine
def test_the_checkpoint_of_another_node_is_judged_and_nothing_written_on_this_one(tmp_path: Path) -> None:
    """Two nodes with a disk each, as far as their ranks can tell; only the second one has the run."""
    node, first, second = tmp_path / "node.py", tmp_path / "disk-0", tmp_path / "disk-1"
    node.write_text(
        "import os, sys\n"
        "os.environ |= {'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1'}\n"
        "arguments = [argument.replace('RANK', os.environ['RANK']) for argument in sys.argv[1:]]\n"
        "os.execv(sys.executable, [sys.executable, *arguments])\n"
    )
    here(second, 2)
    before = contents_of(second)
    both = torchrun(2, node, *small(tmp_path / "disk-RANK", 4))
    refused = run([*both, "--strict-bits"], env=OTHER, expect=-REFUSAL)
    assert "--strict-bits: from step 2 on" in refused.stderr
    assert contents_of(second) == before
    assert [path.name for path in first.iterdir()] == [".lock"]
    done = run(both, env=OTHER)
    assert "from step 2 on bit-for-bit equality is void" in done.stderr
    assert read(first)["bits_void_from"] == 2
