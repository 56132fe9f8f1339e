"""The data module: batches, splits, classes, options, and workers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from multimodal.data import DetectionPreprocess, detection_transform
from multimodal.data.scenes import SHAPES, draw_scene
from tasks.detr.augment import DetectionAugmentation
from tasks.detr.data import DetectionData, collate
from tests.tasks.detr.drawn import HEIGHT, WIDTH, coco, rectangles, write_coco
from tests.tasks.detr.test_voc import entry, lists, write

Batch = dict[str, Tensor]
STILL = DetectionAugmentation(horizontal_flip=0.0, scales=(1.0,), crop=0.0)
SMALL: dict[str, Any] = {"shortest_edge": 40, "num_workers": 0, "batch_size": 4}


def ready(stage: str = "fit", **options: Any) -> DetectionData:
    data = DetectionData(**{**SMALL, **options})
    data.setup(stage)
    return data


def batches(data: DetectionData, split: str = "train", epoch: int = 0) -> list[Batch]:
    loader = getattr(data, f"{split}_dataloader")()
    loader.sampler.set_epoch(epoch)
    return list(loader)


def names(data: DetectionData, split: str) -> list[str]:
    return [Path(record.file).name for record in data.datasets[split].samples.records]


# ---------------------------------------------------------------------------------------------------------- scenes


def test_the_drawn_scenes() -> None:
    data = DetectionData(batch_size=8, num_scenes=20, augment=STILL)
    assert (data.labels, data.num_classes) == (list(SHAPES), 8)
    assert data.category_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert data.in_memory
    data.setup("fit")
    data.setup("test")
    assert {split: len(data.datasets[split]) for split in ("train", "val", "test")} == {
        "train": 20,
        "val": 300,
        "test": 300,
    }
    first = data.datasets["val"][0]
    scene = draw_scene(2, 0)
    assert torch.equal(first["image"], detection_transform(data.preprocess)(scene.image))
    assert first["image"].shape == (3, 128, 128)
    x0, y0, x1, y1 = np.array(scene.boxes).T / 128
    expected = np.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0], 1)
    np.testing.assert_allclose(first["boxes"], expected, atol=1e-6)
    assert [SHAPES[label] for label in first["labels"]] == list(scene.shapes)


def test_no_scene_comes_twice() -> None:
    data = DetectionData(num_scenes=300)
    data.setup("fit")
    data.setup("test")
    seen = [data.datasets[split].samples[at].image.tobytes() for split in ("train", "val", "test") for at in range(50)]
    assert len(set(seen)) == 150


# --------------------------------------------------------------------------------------------------------- batches


def test_a_batch_is_what_the_task_expects(tmp_path: Path) -> None:
    content = coco(8)
    content["annotations"][0] |= {"iscrowd": 1, "area": 33.0}
    path = write_coco(tmp_path, content)
    Image.new("RGB", (30, 50)).save(tmp_path / "images/7.png")
    content["images"][7] |= {"width": 30, "height": 50}
    path.write_text(json.dumps(content))
    data = ready(root=str(tmp_path), batch_size=6, val_fraction=0.2, test_fraction=0.0, augment=STILL)
    (batch,) = batches(data)
    types = {
        "image": torch.float32,
        "valid": torch.bool,
        "boxes": torch.float32,
        "labels": torch.int64,
        "crowd": torch.bool,
        "area": torch.float32,
        "size": torch.int64,
        "image_id": torch.int64,
    }
    assert {name: value.dtype for name, value in batch.items()} == types
    for image, valid, boxes, labels, crowd, area, size, number in zip(*batch.values(), strict=True):
        at = int(number)
        height, width = (50, 30) if at == 7 else (HEIGHT, WIDTH)
        assert size.tolist() == [height, width]
        assert (labels >= 0).tolist() == [at != 7] * 2
        rows, columns = (66, 40) if at == 7 else (40, 60)
        assert valid[:rows, :columns].all()
        assert valid.sum() == rows * columns
        assert not image[:, ~valid].any()
        assert image[:, valid].any()
        if at == 7:
            assert not (boxes.any())
            assert not (crowd.any())
            assert not (area.any())
            continue
        y = 4 + at
        expected = torch.tensor([[13, y + 6, 16, 12], [33, y + 6, 16, 12]]) / torch.tensor([60, 40, 60, 40])
        torch.testing.assert_close(boxes, expected)
        assert labels.tolist() == [0, 1]
        assert crowd.tolist() == [at == 0, False]
        assert area.tolist() == [33.0 if at == 0 else 192.0, 192.0]


def test_a_batch_without_any_box() -> None:
    data = ready(num_scenes=30, shortest_edge=32)
    batch = collate([data.datasets["train"][at] for at in (9, 19, 29)])
    assert batch["labels"].tolist() == [[-1]] * 3
    assert batch["boxes"].shape == (3, 1, 4)
    assert batch["valid"].all()


def test_a_picture_of_one_pixel_in_a_batch(tmp_path: Path) -> None:
    content = coco(3)
    content["images"][0] |= {"width": 1, "height": 1}
    content["annotations"] = [{"id": 1, "image_id": 0, "category_id": 1, "bbox": [0, 0, 1, 1]}]
    write_coco(tmp_path, content)
    Image.new("RGB", (1, 1)).save(tmp_path / "images/0.png")
    data = ready(root=str(tmp_path), split_seed=1)
    samples = {int(n): b for part in ("train", "val") for b in batches(data, part) for n in b["image_id"]}
    assert 0 in samples
    row = samples[0]["image_id"].tolist().index(0)
    torch.testing.assert_close(samples[0]["boxes"][row, 0], torch.tensor([0.5, 0.5, 1.0, 1.0]))


def test_evaluation_is_not_augmented(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(10))
    data = ready(root=str(tmp_path), augment=DetectionAugmentation(horizontal_flip=1.0))
    for item in (data.datasets["val"][at] for at in range(len(data.datasets["val"]))):
        record = data.datasets["val"].samples.records[0]
        with Image.open(record.file) as file:
            expected = detection_transform(data.preprocess)(file.convert("RGB"))
        assert torch.equal(item["image"], expected)


def test_epochs_differ_and_workers_do_not_matter(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(20))
    options: dict[str, Any] = {"root": str(tmp_path), "seed": 3, "repeated_augmentation": 2}
    one, other = (batches(ready(**options, num_workers=workers), epoch=1) for workers in (0, 2))
    assert len(one) == len(other) == 4
    for left, right in zip(one, other, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    data = ready(**options)
    assert not torch.equal(data.datasets["train"][0, 0]["image"], data.datasets["train"][1, 0]["image"])


# ---------------------------------------------------------------------------------------------------------- splits


def test_images_without_a_split_are_split_at_random(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(40))
    data = ready(root=str(tmp_path), val_fraction=0.2, test_fraction=0.1)
    data.setup("test")
    parts = [names(data, split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [28, 8, 4]
    assert len({name for part in parts for name in part}) == 40
    again = ready(root=str(tmp_path), val_fraction=0.2, test_fraction=0.1)
    assert names(again, "train") == parts[0]
    other = ready(root=str(tmp_path), val_fraction=0.2, test_fraction=0.1, split_seed=1)
    assert names(other, "train") != parts[0]
    assert other.datasets["train"].fingerprint != again.datasets["train"].fingerprint
    assert data.datasets["train"].fingerprint == again.datasets["train"].fingerprint


def test_splits_of_the_data(tmp_path: Path) -> None:
    """Categories go by name: val may have other ids, and lack some."""
    write_coco(tmp_path, coco(5, ids=(3, 90)), "annotations/instances_train.json", "train")
    write_coco(tmp_path, coco(3, ids=(1,), names=("dog",)), "annotations/instances_val.json", "val")
    data = ready(root=str(tmp_path))
    assert (data.labels, data.category_ids) == (["cat", "dog"], [3, 90])
    assert data.preprocess.category_ids == (3, 90)
    assert [len(data.datasets[split]) for split in ("train", "val")] == [5, 3]
    assert data.datasets["val"][0]["labels"].tolist() == [1]
    with pytest.warns(UserWarning, match="no images for testing, so val is tested on"):
        data.setup("test")
    assert len(data.datasets["test"]) == 3


def test_a_class_that_train_does_not_have(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(), "train/_annotations.coco.json", "train")
    write_coco(tmp_path, coco(names=("cat", "bird")), "valid/_annotations.coco.json", "valid")
    with pytest.raises(ValueError, match=r"valid/_annotations.coco.json: class bird is none of the 2 classes"):
        ready(root=str(tmp_path))


def test_pascal_voc(tmp_path: Path) -> None:
    for stem in "abcdef":
        write(tmp_path, stem, entry("cat", (1, 1, 20, 20)), entry("dog", (30, 5, 50, 20), 1))
    lists(tmp_path, train="a\nb\nc\nd", val="e", test="f")
    data = ready(root=str(tmp_path), augment=STILL)
    (batch,) = batches(data)
    assert (data.labels, data.category_ids) == (["cat", "dog"], [1, 2])
    assert batch["crowd"].tolist() == [[False, True]] * 4
    assert batch["image_id"].tolist() != [0, 1, 2, 3]
    assert sorted(batch["image_id"].tolist()) == [0, 1, 2, 3]


def test_a_folder_with_both_is_coco(tmp_path: Path) -> None:
    write(tmp_path, "a", entry("bird", (1, 1, 20, 20)))
    write_coco(tmp_path, coco())
    assert DetectionData(root=str(tmp_path)).labels == ["cat", "dog"]
    assert DetectionData(root=str(tmp_path), dataset="voc").labels == ["bird"]


def test_a_file_of_annotations(tmp_path: Path) -> None:
    write(tmp_path, "a", entry("bird", (1, 1, 20, 20)))
    write_coco(tmp_path, coco(12), "mine.json")
    data = ready(root=str(tmp_path), annotations="mine.json")
    assert data.labels == ["cat", "dog"]
    assert [len(data.datasets[split]) for split in ("train", "val")] == [10, 1]


def test_too_few_images(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(1))
    with pytest.raises(ValueError, match="no image is left for val"):
        ready(root=str(tmp_path))


def test_the_blood_cells(shared: Path) -> None:
    data = ready(root=str(shared / "data/bccd"), shortest_edge=120, test_fraction=0.2)
    data.setup("test")
    assert {split: len(data.datasets[split]) for split in data.datasets} == {"train": 205, "val": 29, "test": 58}
    assert data.labels == ["WBC", "RBC", "Platelets"]
    for split in ("train", "val"):
        batch = batches(data, split)[0]
        real = batch["labels"] >= 0
        corners = batch["boxes"][real]
        assert (corners[:, :2] - corners[:, 2:] / 2 >= -1e-4).all()
        assert (corners[:, :2] + corners[:, 2:] / 2 <= 1 + 1e-4).all()
        assert batch["size"].tolist() == [[480, 640]] * 4
    assert batch["image"].shape == (4, 3, 120, 160)


# --------------------------------------------------------------------------------------------------------- classes


def test_classes_in_the_order_of_a_checkpoint(tmp_path: Path) -> None:
    content = coco(12)
    content["categories"].append({"id": 7, "name": "unused"})
    write_coco(tmp_path, content)
    data = ready("validate", root=str(tmp_path), labels=["dog", "horse", "cat", "dog"], category_ids=[18, 19, 17, 99])
    assert data.datasets["val"][0]["labels"].tolist() == [2, 0]
    assert (data.num_classes, data.category_ids) == (4, [18, 19, 17, 99])
    assert data.preprocess.category_ids == (18, 19, 17, 99)
    plain = ready("validate", root=str(tmp_path), labels=["dog", "cat"])
    assert plain.category_ids == [0, 1]


def test_classes_that_a_checkpoint_does_not_have(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(12))
    message = "annotations.json: class dog is none of the 2 classes of the checkpoint or of train (1 such)"
    with pytest.raises(ValueError, match=re.escape(message)):
        ready("validate", root=str(tmp_path), labels=["cat", "bird"])
    with pytest.raises(ValueError, match=r"drawn scenes: class circle is none of the 1 classes"):
        ready("validate", labels=["cat"])
    with pytest.raises(ValueError, match=r"data.category_ids has 1 ids, expected one for each of 2 data.labels"):
        DetectionData(labels=["a", "b"], category_ids=[1])


def test_ids_without_classes_are_those_of_another_data_set(tmp_path: Path) -> None:
    """Training that starts from a checkpoint is told its ids, but has classes of its own."""
    write_coco(tmp_path, coco(12))
    assert DetectionData(root=str(tmp_path), category_ids=[4, 5, 6]).category_ids == [1, 2]


# --------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "edges"),
    [
        ({}, (128, 128)),
        ({"shortest_edge": 64}, (64, 64)),
        ({"shortest_edge": 64, "longest_edge": 96}, (64, 96)),
        ({"longest_edge": 96}, (96, 96)),
        ({"root": "."}, (800, 1333)),
        ({"root": ".", "shortest_edge": 480}, (480, 800)),
        ({"root": ".", "longest_edge": 640}, (640, 640)),
    ],
)
def test_edges(tmp_path: Path, options: dict[str, Any], edges: tuple[int, int]) -> None:
    write_coco(tmp_path, coco())
    if "root" in options:
        options = {**options, "root": str(tmp_path)}
    preprocess = DetectionData(**options).preprocess
    assert (preprocess.shortest_edge, preprocess.longest_edge) == edges


def test_preprocessing_of_a_checkpoint(tmp_path: Path) -> None:
    """What a checkpoint holds are options of the data, as they are when it is measured."""
    preprocess = DetectionPreprocess(
        shortest_edge=48, longest_edge=96, mean=(0.5, 0.4, 0.3), std=(0.3, 0.2, 0.1), category_ids=(5, 9)
    )
    write_coco(tmp_path, coco())
    data = DetectionData(root=str(tmp_path), labels=["cat", "dog"], **preprocess.to_dict())
    assert data.preprocess == preprocess


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "coco"}, "data.root is missing, expected --data.root FOLDER for data.dataset coco"),
        ({"dataset": "voc", "source": "https://host/x"}, "for data.dataset voc; the data come from https://host/x"),
        ({"dataset": "scenes", "root": "x"}, "data.root is x and data.dataset scenes, which need none"),
        ({"annotations": "a.json"}, "data.annotations is a.json and data.dataset scenes"),
        ({"dataset": "voc", "root": ".", "annotations": "a.json"}, "data.annotations is a.json and data.dataset voc"),
        ({"root": "nowhere"}, "data root nowhere: no such folder, expected a folder with annotations and images"),
        ({"root": "EMPTY"}, "no annotations found, expected annotations.json"),
        ({"root": "EMPTY", "dataset": "voc"}, "no Pascal VOC folder, expected Annotations and JPEGImages in it"),
        ({"num_scenes": 0}, "num_scenes is 0, expected at least 1"),
        ({"mean": [0.5]}, "mean has 1 values and std 3"),
        ({"shortest_edge": 0}, "shortest_edge 0"),
        ({"batch_size": 0}, "batch_size is 0"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    if options.get("root") == "EMPTY":
        options = {**options, "root": str(tmp_path)}
    with pytest.raises(ValueError, match=message) as caught:
        DetectionData(**options)
    assert "\n" not in str(caught.value)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(12))
    for at in range(12):
        file = tmp_path / f"images/{at}.png"
        file.write_bytes(file.read_bytes()[:60])
    for workers in (0, 1):
        with pytest.raises(ValueError, match=r"images/\d+.png: damaged"):
            batches(ready(root=str(tmp_path), num_workers=workers))


def test_grey_images(tmp_path: Path) -> None:
    write_coco(tmp_path, coco(3))
    for at in range(3):
        rectangles([]).convert("L").save(tmp_path / f"images/{at}.png")
    (batch,) = batches(ready(root=str(tmp_path)))
    assert batch["image"].shape[1] == 3
