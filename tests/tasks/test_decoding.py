"""`--decode fast` sees what `--decode exact` sees: the same part of each image, and the same files fail."""

import warnings
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import Tensor

from evenkeel.data.loader import Seeded
from evenkeel.tasks import decoding
from evenkeel.tasks.augmentation import look_at_photographs, of_photographs
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.datasets import BadSample, ImageFolder, read_image
from tests.support.jpegs import by_pillow, encoded, jpegs, photograph, turned

SIZE = 64


def folder(root: Path, content: bytes, suffix: str = ".jpg") -> Path:
    """One file for training, and the same for the test."""
    for part in ("train", "val"):
        (root / part / "class").mkdir(parents=True, exist_ok=True)
        (root / part / "class" / f"0{suffix}").write_bytes(content)
    return root


def both(root: Path, epoch: int = 0, part: str = "train", **options: Any) -> tuple[Tensor, Tensor]:
    """The only image as each way sees it, and a random number that is drawn afterwards beneath."""

    def sample(decode: Any) -> Tensor:
        task = Classify(dataset="imagefolder", data_dir=root, image_size=SIZE, decode=decode, **options)
        dataset = task.train_dataset() if part == "train" else task.test_dataset()
        image = Seeded(dataset, 0, part)._sample(epoch, 0, 0)[0]
        assert (image.shape, image.dtype) == ((3, SIZE, SIZE), torch.uint8)
        return torch.cat([image.flatten(), torch.randint(256, (8,), dtype=torch.uint8)])

    return sample("exact"), sample("fast")


def distance(one: Tensor, other: Tensor) -> float:
    return (one.float() - other.float()).abs().mean().item()


@pytest.mark.parametrize("augment", ["none", "basic", "trivial", "rand"])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}], ids=str)
def test_of_images_below_twice_the_size_all_pixels_are_the_same(tmp_path: Path, augment: str, options: Any) -> None:
    """As long as Pillow's libjpeg rounds as torchvision's; both are libjpeg-turbo."""
    root = folder(tmp_path, encoded(photograph(100, 75), quality=90, **options))
    for epoch in range(10):
        exact, fast = both(root, epoch, augment=augment)
        assert distance(exact, fast) < 0.5
        assert torch.equal(exact[-8:], fast[-8:]), "the same random numbers"
    assert distance(*both(root, part="val")) < 0.5


@pytest.mark.parametrize("times", [2, 5, 11])
def test_of_a_large_jpeg_the_same_part_is_seen(tmp_path: Path, times: int) -> None:
    root = folder(tmp_path, encoded(photograph(80 * times, 79 * times + 5), quality=90))
    pairs = [both(root, epoch, augment="basic") for epoch in range(10)]
    assert max(distance(exact[:-8], fast[:-8]) for exact, fast in pairs) < 4
    assert all(torch.equal(exact[-8:], fast[-8:]) for exact, fast in pairs)
    others = [distance(pairs[0][0], exact) for exact, _ in pairs[1:]]
    assert min(others) > 8, "the control: another part is further away"
    assert distance(*both(root, part="val")) < 4


@pytest.mark.parametrize(("times", "smaller"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8), (20, 8)])
def test_a_large_jpeg_is_decoded_at_a_part_of_its_size(times: int, smaller: int) -> None:
    found: list[tuple[int, int]] = []

    def look(image: Any) -> tuple[int, decoding.Change]:
        def change(pixels: Tensor, by: int) -> Tensor:
            found.append((pixels.shape[-1], by))
            return pixels

        return image.width // 33, change

    for kind, by in (("JPEG", smaller), ("PNG", 1)):
        content = encoded(photograph(33 * times, 33 * times), kind)
        decoding.seen(Image.open(BytesIO(content)), content, look)
        assert found.pop() == (-(-33 * times // by), by)


def sixteen_bits() -> Any:
    return Image.fromarray((np.arange(90 * 100) * 7).reshape(90, 100).astype(np.uint16))


KINDS = {
    "grey.jpg": lambda: encoded(photograph(100, 90, mode="L")),
    "cmyk.jpg": lambda: encoded(photograph(100, 90, mode="CMYK")),
    "turned.jpg": lambda: encoded(photograph(100, 60), exif=turned(6)),
    "palette.png": lambda: encoded(photograph(100, 90, mode="P"), "PNG"),
    "transparent.png": lambda: encoded(photograph(100, 90, mode="RGBA"), "PNG"),
    "16 bits.png": lambda: encoded(sixteen_bits(), "PNG"),
    "16 bits.tif": lambda: encoded(sixteen_bits(), "TIFF"),
    "a png.jpg": lambda: encoded(photograph(100, 90), "PNG"),
    "webp.webp": lambda: encoded(photograph(100, 90), "WEBP"),
}


@pytest.mark.parametrize("name", KINDS)
def test_files_of_other_kinds(tmp_path: Path, name: str) -> None:
    root = folder(tmp_path, KINDS[name](), Path(name).suffix)
    for part in ("train", "val"):
        assert distance(*both(root, part=part, augment="basic")) < 0.5


@pytest.mark.parametrize("large", [False, True])
def test_damaged_files_fail_alike(tmp_path: Path, large: bool) -> None:
    whole = encoded(photograph(300, 280) if large else photograph(100, 90), quality=90)
    generator = np.random.default_rng(0)
    damaged = [whole[:length] for length in [*range(len(whole) - 4, len(whole)), *range(0, len(whole), 97)]]
    for _ in range(150):
        content = bytearray(whole)
        for place in generator.integers(0, len(whole), generator.integers(1, 5)):
            content[place] = generator.integers(256)
        damaged.append(bytes(content))
    folder(tmp_path, whole)
    exactly = ImageFolder(tmp_path, "train")
    fast = ImageFolder(tmp_path, "train", look=look_at_photographs("basic", SIZE))
    told: list[list[str]] = []
    for content in damaged:
        (tmp_path / "train" / "class" / "0.jpg").write_bytes(content)
        told.append([message(exactly), message(fast)])
    assert [one for one, _ in told] == [other for _, other in told]
    assert 50 < sum(one == "" for one, _ in told) < len(told) - 50, "some of both kinds"


def message(dataset: ImageFolder) -> str:
    """What is said of the only file, without the number of bytes that were left; empty if it decodes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dataset[0]
        except BadSample as bad:
            return str(bad).partition(" bytes not")[0].rstrip("0123456789")
    return ""


EXACT = "--decode exact"
DECODERS = ["TorchCodec", "torchvision"]
WAYS = [EXACT, *DECODERS, "Pillow"]


def use(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one of the decoders be the only one that is installed."""
    found = {name: decoder for name, decoder in decoding.jpeg_decoders().items() if name == way}
    if way in DECODERS and not found:
        pytest.skip(f"{way} has no decoder that loads here")
    monkeypatch.setattr(decoding, "jpeg_decoders", lambda: found)


def all_of_it(_image: Any) -> tuple[int, decoding.Change]:
    return 1, lambda pixels, _smaller: pixels


def compare_with_pillow(count: int, path: Path, way: str) -> Counter[str]:
    """Read `count` JPEGs, each from `path`, and count what was in them; they are what Pillow makes of them."""
    seen: Counter[str] = Counter()
    older = way == "torchvision" and tuple(map(int, torchvision.__version__.split(".")[:2])) < (0, 28)
    for number, (kinds, content) in enumerate(jpegs(count)):
        expected = by_pillow(content)
        path.write_bytes(content)
        try:
            found = read_image(path, None if way == EXACT else all_of_it)
        except BadSample:
            assert expected is None, f"{number}: {kinds}"
            seen["fails"] += 1
            continue
        assert expected is not None, f"{number}: {kinds}"
        assert found.shape == expected.shape, f"{number}: {kinds}"
        most = (found.int() - expected.int()).abs().max()
        # its libjpeg-turbo 2.0 does not interpolate between the lines of such colours
        assert most <= (2 if older and "4:4:0" in kinds else 0), f"{number}: {kinds}"
        seen += kinds
    return seen


@pytest.mark.parametrize("way", WAYS)
def test_every_decoder_gives_pillows_pixels(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    seen = compare_with_pillow(150, tmp_path / "0.jpg", way)
    rare = ["1x1", "L", "CMYK", "progressive", "restart by block", "restart by row", "damaged", "fails", "not YCbCr"]
    rare += ["quality 1", "quality 100", "4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "1:4"]
    assert min((seen[kind], kind) for kind in [*rare, *(f"turned {way}" for way in range(1, 9))]) >= (3, "")


def test_the_control_turning_and_inexact_decoders_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("torchvision", monkeypatch)
    exactly = decoding.jpeg_decoders()["torchvision"]
    for wrong in (lambda data: exactly(data).transpose(1, 2), lambda data: exactly(data) ^ 1):
        monkeypatch.setattr(decoding, "jpeg_decoders", lambda wrong=wrong: {"TorchCodec": wrong})
        with pytest.raises(AssertionError, match=r"\d: Counter"):
            compare_with_pillow(20, tmp_path / "0.jpg", "TorchCodec")


def test_exif_data_behind_the_first_scan_turn_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use("TorchCodec", monkeypatch)
    plain, exif = (encoded(photograph(100, 60), progressive=True, **options) for options in ({}, {"exif": turned(6)}))
    start = exif.index(decoding.APP1)
    segment = exif[start : start + 2 + int.from_bytes(exif[start + 2 : start + 4], "big")]
    between = plain.index(b"\xff\xc4", plain.index(b"\xff\xda"))
    path = tmp_path / "0.jpg"
    path.write_bytes(plain[:between] + segment + plain[between:])
    decoder = decoding.jpeg_decoders()["TorchCodec"]
    assert decoder(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)).shape == (3, 100, 60), "control"
    expected = by_pillow(plain)
    assert torch.equal(read_image(path, all_of_it), expected)


def test_exact_is_pillows_whole_image_and_then_the_transform(tmp_path: Path) -> None:
    """So a run that began with an older version goes on with the same pixels."""
    for number in range(5):
        content = encoded(photograph(300, 280, number), quality=90, exif=turned(6))
        expected = by_pillow(content)
        exact, fast = both(folder(tmp_path, content), part="val")
        assert torch.equal(exact[:-8], of_photographs("none", SIZE)(expected).flatten())
        assert not torch.equal(exact, fast), "the control: fast decodes such images at a quarter of their size"


@pytest.mark.parametrize("way", WAYS)
def test_nothing_warns_while_images_are_loaded(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(way, monkeypatch)
    root = folder(tmp_path, encoded(photograph(100, 75), exif=turned(6)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        both(root, augment="rand")
        both(root, part="val")
        if hasattr(torchvision.io.image, "_warn_deprecated"):  # the control, from torchvision 0.29 on
            with pytest.raises(DeprecationWarning, match="superseded by"):
                torchvision.io.decode_jpeg(torch.frombuffer(bytearray(encoded(photograph(9, 9))), dtype=torch.uint8))


def test_a_bad_test_image_is_black_in_the_size_of_the_others(tmp_path: Path) -> None:
    folder(tmp_path, encoded(photograph(100, 75))[:300])
    for decode in ("exact", "fast"):
        options: Any = {"on_bad_sample": "skip", "decode": decode}
        image, label = Classify(dataset="imagefolder", data_dir=tmp_path, image_size=SIZE, **options).test_dataset()[0]
        assert (image.shape, image.dtype, label, int(image.sum())) == ((3, SIZE, SIZE), torch.uint8, -1, 0)


def test_the_way_is_settled_when_a_run_begins() -> None:
    left_open = Classify(dataset="imagefolder")
    assert left_open.resolved(None).decode == "fast"
    assert left_open.resolved({"decode": "exact", "augment": "basic"}).decode == "exact"
    assert left_open.resolved({"decode": "fast"}).decode == "fast"
    assert left_open.resolved({"augment": "basic"}).decode == "exact", "older than the option"
    for recorded in (None, {}, {"decode": "exact"}):
        assert Classify(dataset="imagefolder", decode="fast").resolved(recorded).decode == "fast"
    assert left_open.resolved(None).options()["decode"] == "fast"
    assert "decode" not in Classify().resolved(None).options(), "the digits are not decoded"


def test_a_decoder_that_does_not_load_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_another_torch() -> decoding.Decoder:
        raise OSError("libtorchcodec_image.so: undefined symbol")

    monkeypatch.setattr(decoding, "_torchvision", lambda: torch.clone)
    monkeypatch.setattr(decoding, "_torchcodec", of_another_torch)
    assert decoding.jpeg_decoders.__wrapped__() == {"torchvision": torch.clone}
