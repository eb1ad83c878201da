"""Data sets by name, from small real files of each format, and images that do not decode."""

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._utils import ExceptionWrapper
from torchvision import datasets as published

from evenkeel.common.errors import EndedByData, EndedHere, Refusal
from evenkeel.data.dataset import InMemory, split
from evenkeel.data.loader import Seeded
from evenkeel.tasks.classify import Classify
from evenkeel.tasks.datasets import ABOUT, BadSample, Fake, ImageFolder
from evenkeel.tasks.digits import digits
from tests.support.small_files import TEST, TRAIN, digit_images, write_cifar, write_folder, write_idx


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_idx_files(tmp_path: Path, name: Any, folder: str) -> None:
    write_idx(tmp_path / folder / "raw")
    task = Classify(dataset=name, data_dir=tmp_path)
    for found, first, count in ((task.train_dataset(), 0, TRAIN), (task.test_dataset(), TRAIN, TEST)):
        assert isinstance(found, InMemory)
        images, labels = found.tensors
        expected, numbers = digit_images(first, count, 28)
        assert images.dtype == torch.uint8
        assert torch.equal(images, torch.from_numpy(expected).unsqueeze(1))
        assert labels.tolist() == numbers.tolist()
        assert labels.dtype == torch.int64


def test_an_idx_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    write_idx(tmp_path / "MNIST" / "raw")
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(Refusal, match=r"^--dataset mnist: cannot read its files in .* \(.+\); delete them"):
        Classify(dataset="mnist", data_dir=tmp_path).train_dataset()


@pytest.mark.parametrize(("name", "kind"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, kind: int) -> None:
    for attribute, value in write_cifar(tmp_path, kind).items():
        monkeypatch.setattr(getattr(published, f"CIFAR{kind}"), attribute, value)
    task = Classify(dataset=name, data_dir=tmp_path)
    for found, first, count in ((task.train_dataset(), 0, TRAIN), (task.test_dataset(), TRAIN, TEST)):
        assert isinstance(found, InMemory)
        images, labels = found.tensors
        expected, numbers = digit_images(first, count, 32)
        assert images.is_contiguous()
        assert torch.equal(images, torch.from_numpy(expected).unsqueeze(1).expand(-1, 3, -1, -1))
        assert labels.tolist() == [int(number) * (1 if kind == 10 else 11) for number in numbers]
    assert task.classes == kind


def test_images_are_normalised_as_their_data_set_or_the_weights_ask(tmp_path: Path) -> None:
    """The network sees the digits in 0 .. 1, as the file says them up to rounding, and MNIST with mean 0."""
    task = Classify()
    images, _ = digits(train=True).tensors
    seen = task.inputs(images)
    assert (seen.min(), seen.max()) == (0, 1)
    mnist = Classify(dataset="mnist", data_dir=tmp_path)
    grey = torch.full((1, 1, 28, 28), 33, dtype=torch.uint8)  # 0.1294 of white
    assert mnist.inputs(grey)[0, 0, 0, 0].item() == pytest.approx((33 / 255 - 0.1307) / 0.3081)
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, -1, -1)
    colour = Classify(dataset="fake", image_size=16)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (ABOUT["fake"].mean, ABOUT["fake"].std))
    assert torch.equal(colour.inputs(every), (every.float() / 255 - mean) / std), "the same bits, however it is done"
    pretrained = Classify(model_="efficientnet_v2_l", pretrained=True)  # whose weights have seen -1 .. 1
    black = pretrained.inputs(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    assert torch.equal(black, torch.full((1, 3, 8, 8), -1.0))


def test_fake_images_are_made_of_their_numbers_alone() -> None:
    task = Classify(dataset="fake", fake_samples=50, fake_classes=7, image_size=16)
    train, test = task.train_dataset(), task.test_dataset()
    assert (len(train), len(test), task.classes) == (50, 10, 7)
    torch.manual_seed(5)
    image, label = train[8]
    torch.manual_seed(6)
    assert torch.equal(train[8][0], image)
    assert (image.shape, image.dtype, label) == ((3, 16, 16), torch.uint8, 1)
    assert not torch.equal(image, test[8][0])
    assert not torch.equal(Fake(50, 16, 7)[9][0], image)
    pixels = torch.stack([Fake(50, 32, 7)[i][0] for i in range(50)]) / 255
    mean, std = ABOUT["fake"].mean[0], ABOUT["fake"].std[0]
    assert (pixels.mean().item(), pixels.std().item()) == (pytest.approx(mean, abs=0.01), pytest.approx(std, abs=0.01))


def test_a_folder_of_images(tmp_path: Path) -> None:
    paths = write_folder(tmp_path)
    task = Classify(dataset="imagefolder", data_dir=tmp_path, image_size=16)
    train, test = task.train_dataset(), task.test_dataset()
    assert (len(train), len(test), task.classes) == (TRAIN, TEST, 3)
    bare = ImageFolder(tmp_path, "train")
    for index in (0, 40, TRAIN - 1):
        image, label = bare[index]
        with Image.open(paths[index]) as expected:
            assert image.shape == (3, expected.height, expected.width)
        assert label == int(paths[index].parent.name[-1])
        resized, label_of_resized = train[index]
        assert (resized.shape, resized.dtype, label_of_resized) == ((3, 16, 16), torch.uint8, label)
    assert Classify(dataset="imagefolder", data_dir=tmp_path).size == 224


def test_what_is_no_folder_of_images_is_refused(tmp_path: Path) -> None:
    def refusal() -> str:
        task = Classify(dataset="imagefolder", data_dir=tmp_path)
        with pytest.raises(Refusal, match=f"^--data-dir {tmp_path}: ") as caught:
            assert [task.train_dataset(), task.test_dataset()]
        return str(caught.value)

    assert f"is not an image folder ({tmp_path / 'train'}: No such file" in refusal()
    (tmp_path / "train").mkdir()
    assert "has no folders); --dataset imagefolder reads" in refusal()
    (tmp_path / "train" / "a").mkdir()
    assert f"({tmp_path / 'val'}: No such file" in refusal()
    (tmp_path / "val" / "b").mkdir(parents=True)
    assert "Found no valid file for the classes a" in refusal()
    Image.new("RGB", (4, 4)).save(tmp_path / "train" / "a" / "1.png")
    assert "val/b is a class without training images" in refusal()


def test_an_image_that_does_not_decode_is_named_with_its_path_and_index(tmp_path: Path) -> None:
    bad = write_folder(tmp_path)[7]
    bad.write_bytes(bad.read_bytes()[:300])
    train = ImageFolder(tmp_path, "train")
    assert train[6][0].dtype == torch.uint8
    with pytest.raises(BadSample) as caught:
        train[7]
    message = str(caught.value)
    assert message.startswith(f"training sample 7, {bad}, does not decode: OSError: ")
    assert message.endswith("; repair it, or continue without it by --on-bad-sample skip")
    bad.write_bytes(b"no image at all")
    with pytest.raises(BadSample, match="does not decode: UnidentifiedImageError: cannot identify image file;"):
        train[7]


def test_a_file_that_cannot_be_read_is_never_skipped(tmp_path: Path) -> None:
    """It may be there again next time, and then the run would be another one."""
    gone = write_folder(tmp_path)[7]
    train = ImageFolder(tmp_path, "train", on_bad_sample="skip")
    gone.unlink()
    with pytest.raises(EndedByData) as caught:
        train[7]
    assert str(caught.value).startswith(f"training sample 7, {gone}, cannot be read: No such file or directory; such")
    gone.symlink_to(gone.with_name("nowhere"))
    with pytest.raises(EndedByData, match="No such file"):
        train[7]


@pytest.mark.parametrize("kind", [BadSample, EndedByData])
def test_what_is_wrong_with_a_sample_comes_in_one_line_out_of_a_loading_process(tmp_path: Path, kind: Any) -> None:
    bad = write_folder(tmp_path)[0]
    train = ImageFolder(tmp_path, "train")
    bad.unlink()
    if kind is BadSample:
        bad.write_bytes(b"no image at all")
    with pytest.raises(kind) as caught:
        train[0]
    told = pickle.dumps(ExceptionWrapper((kind, caught.value, caught.tb), "in DataLoader worker process 0"))
    with pytest.raises(kind) as again:
        pickle.loads(told).reraise()
    assert isinstance(again.value, EndedHere)
    assert str(again.value) == str(caught.value)
    assert str(again.value).startswith(f"training sample 0, {bad}, ")
    assert "\n" not in str(again.value)


@pytest.mark.parametrize("byte_order", ["<", ">"])
def test_sixteen_bits_of_grey_are_scaled(tmp_path: Path, byte_order: str) -> None:
    write_folder(tmp_path)
    values = np.array([[0, 128, 129, 257, 32896, 65279, 65535]])
    (tmp_path / "train" / "class-0" / "000.jpg").unlink(missing_ok=True)
    name = "000.png" if byte_order == "<" else "000.tif"
    path = tmp_path / "train" / "class-0" / name
    Image.fromarray(values.astype(f"{byte_order}u2")).save(path)
    train = ImageFolder(tmp_path, "train")
    image, _ = train[0]
    assert os.fsdecode(train.paths[0]) == f"class-0/{name}"
    assert image.dtype == torch.uint8
    assert image.tolist() == [[[0, 0, 1, 1, 128, 254, 255]]] * 3


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_without_a_white_are_bad(tmp_path: Path, kind: Any) -> None:
    write_folder(tmp_path)
    Image.fromarray(np.ones((4, 4), kind)).save(tmp_path / "train" / "class-0" / "000.tif")
    train = ImageFolder(tmp_path, "train")
    number = [os.fsdecode(path) for path in train.paths].index("class-0/000.tif")
    with pytest.raises(BadSample, match=r"its pixels are .* of 32 bits"):
        train[number]


def test_a_bad_sample_has_a_stand_in_of_its_own_in_each_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_folder(tmp_path)
    for index in (7, 8):
        paths[index].write_bytes(b"no image at all")

    def load(index: int, epoch: int) -> torch.Tensor:
        again = Seeded(ImageFolder(tmp_path, "train", on_bad_sample="skip"), seed=0, purpose="train")
        image: torch.Tensor = again._sample(epoch, index, index)[0]
        return image

    with caplog.at_level(logging.WARNING):
        assert torch.equal(load(7, 0), load(7, 0)), "whichever process loads it"
    others = [load(index, epoch) for index in (7, 8) for epoch in range(6)]
    assert len({(tuple(image.shape), image.sum().item()) for image in others}) > 6
    assert f"training sample 7, {paths[7]}, does not decode: " in caplog.text
    assert "another image is used instead; 1 bad files so far on this rank" in caplog.text

    caplog.clear()
    train = ImageFolder(tmp_path, "train", on_bad_sample="skip")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert train[7][0].dtype == torch.uint8
            assert train[8][0].dtype == torch.uint8
    assert len(caplog.records) == 2, "each file once"
    for path in paths:
        path.write_bytes(b"no image at all")
    with pytest.raises(BadSample, match="nor do 100 others that were drawn instead"):
        train[7]


def test_a_bad_sample_is_replaced_by_one_of_its_part_of_a_split(tmp_path: Path) -> None:
    paths = write_folder(tmp_path)
    task = Classify(dataset="imagefolder", data_dir=tmp_path, image_size=16, on_bad_sample="skip")
    rest, _ = split(task.train_dataset(), 0.5, seed=0)
    for index in {*range(TRAIN)} - {*rest.indices}:
        paths[index].unlink()  # an error, if it is read
    paths[rest.indices[0]].write_bytes(b"no image at all")
    assert all(rest[0][1] in range(task.classes) for _ in range(20))


def test_bad_test_images_are_left_out_of_the_metrics(tmp_path: Path) -> None:
    write_folder(tmp_path)
    task = Classify(dataset="imagefolder", data_dir=tmp_path, image_size=16, on_bad_sample="skip")
    torch.manual_seed(0)
    model = task.model().eval()

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        test = task.test_dataset()
        batch = torch.utils.data.default_collate([test[i] for i in range(len(test))])
        return task.summarize({name: values.double().mean(0) for name, values in task.metrics(model, batch).items()})

    files = sorted((tmp_path / "val").rglob("*.jpg"))
    for path in files[3:5]:
        path.write_bytes(b"no image at all")
    with_bad = evaluate()
    for path in files[3:5]:
        path.unlink()
    without = evaluate()
    assert with_bad.pop("left_out") == pytest.approx(2 / TEST)
    assert with_bad == pytest.approx(without)
    assert "left_out" not in without
