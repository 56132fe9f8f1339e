"""CIFAR-10 and CIFAR-100: what is read, and what is said where they cannot be."""

from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torchvision.datasets import CIFAR10

from multimodal.data import Augmentation
from tasks.vit.data import ImageData


def ready(**options: Any) -> ImageData:
    data = ImageData(**{"image_size": 32, "channels": 3, "num_workers": 0, **options})
    data.setup("fit")
    data.setup("test")
    return data


def test_cifar(cifar: Path) -> None:
    data = ready(dataset="cifar10", root=str(cifar), val_fraction=0.2)
    assert {split: len(data.datasets[split]) for split in data.datasets} == {"train": 800, "val": 200, "test": 200}
    assert data.num_classes == 10
    assert data.labels[:3] == ["airplane", "automobile", "bird"]
    assert data.preprocess.mean == (0.4914, 0.4822, 0.4465)
    assert data.augmentation == Augmentation(crop_padding=4, horizontal_flip=0.5)
    images, labels = CIFAR10(cifar, train=False), [data.labels[row["label"]] for row in data.datasets["test"]]
    assert labels == [images.classes[target] for target in images.targets]
    item = data.datasets["test"][7]["image"] * torch.tensor(data.preprocess.std)[:, None, None]
    pixels = (item + torch.tensor(data.preprocess.mean)[:, None, None]) * 255
    assert torch.equal(pixels.round().to(torch.uint8), torch.from_numpy(images.data[7]).permute(2, 0, 1))


def test_cifar_100(cifar: Path) -> None:
    data = ready(dataset="cifar100", root=str(cifar), channels=1)
    assert (data.num_classes, data.labels[17]) == (100, "kind_17")
    assert {split: len(data.datasets[split]) for split in data.datasets} == {"train": 100, "val": 100, "test": 200}
    assert data.datasets["train"][0]["image"].shape == (1, 32, 32)


def test_cifar_is_downloaded_only_where_it_is_not(
    cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(url: str, *_: Any, **__: Any) -> None:
        asked.append(url)
        raise URLError("no route to host")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", refuse)
    ImageData(dataset="cifar10", root=str(cifar), image_size=32, channels=3)
    assert not asked
    message = r"^data root .*: no whole cifar-10-batches-py in it, and https://\S+ cannot be downloaded \(.*no route"
    with pytest.raises(ValueError, match=message):
        ImageData(dataset="cifar10", root=str(tmp_path / "elsewhere"), image_size=32, channels=3)
    assert asked == [CIFAR10.url]
    assert f"downloading {CIFAR10.url}" in caplog.text
    batch = cifar / "cifar-10-batches-py" / "data_batch_3"
    batch.write_bytes(batch.read_bytes() + b".")
    with pytest.raises(ValueError, match=message):
        ImageData(dataset="cifar10", root=str(cifar), image_size=32, channels=3)
    with pytest.raises(ValueError, match="a file, expected a folder for cifar-10-batches-py"):
        ImageData(dataset="cifar10", root=str(batch), image_size=32, channels=3)
    assert len(asked) == 2
