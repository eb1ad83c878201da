"""A thousand JPEGs by each decoder, and what is imported on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.processes import run
from tests.support.small_files import write_folder
from tests.tasks.test_decoding import WAYS, compare_with_pillow, use


@pytest.mark.parametrize("way", WAYS)
def test_a_thousand_files_have_pillows_pixels(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    seen = compare_with_pillow(1000, tmp_path / "0.jpg", way)
    assert min(seen["damaged"], seen["fails"]) > 40, "damaged files of both kinds"


@pytest.mark.parametrize(("decoders", "expect"), [("decoding.jpeg_decoders()", 0), ("{'': decode_jpeg}", 1)])
def test_no_import_warns_either(tmp_path: Path, decoders: str, expect: int) -> None:
    """In a process of its own, because a module warns once. The control is torchvision's own function."""
    write_folder(tmp_path)
    load = (
        "import warnings; warnings.filterwarnings('error', module='torchvision|torchcodec|evenkeel')\n"
        "from pathlib import Path; from torchvision.io import decode_jpeg, image\n"
        "from evenkeel.tasks import decoding; from evenkeel.tasks.classify import Classify\n"
        f"decoders = {decoders}; decoding.jpeg_decoders = lambda: decoders\n"
        f"options = {{'dataset': 'imagefolder', 'data_dir': Path({str(tmp_path)!r}), 'image_size': 16}}\n"
        "for decode in ('exact', 'fast'):\n"
        "    task = Classify(**options, augment='rand', decode=decode)\n"
        "    task.train_dataset()[0], task.test_dataset()[0]\n"
        "print(hasattr(image, '_warn_deprecated'))"
    )
    done = run([sys.executable, "-c", load], expect=None)
    if expect and done.stdout == "False\n":
        pytest.skip("this torchvision has no deprecated decoders")
    assert done.returncode == expect, done.stderr
    assert not expect or "DeprecationWarning: The image decoding" in done.stderr
