"""WebDataset shards: whole, cut, damaged and hostile ones; order, epochs and workers."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.clip.data import CaptionData
from tasks.clip.shards import Shards, captions_of, index, read_shards

Member = tuple[str, bytes]


def png(value: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(content, "PNG")
    return content.getvalue()


def write(path: Path, members: Sequence[Member]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def pairs(first: int, count: int) -> list[Member]:
    """Images whose value is their number, which the caption says."""
    members = []
    for number in range(first, first + count):
        members += [(f"{number:05d}.png", png(number)), (f"{number:05d}.txt", f"number {number}".encode())]
    return members


def shards(root: Path, count: int, each: int) -> Path:
    for number in range(count):
        write(root / f"{number:03d}.tar", pairs(each * number, each))
    return root


def numbers(found: Shards) -> list[int]:
    return [int(found[at].captions[0].split()[1]) for at in range(len(found))]


def test_samples_are_read_where_they_lie(tmp_path: Path) -> None:
    (found,) = read_shards(shards(tmp_path, 3, 4)).values()
    assert numbers(found) == list(range(12))
    assert [int(np.asarray(found[at].image)[0, 0, 0]) for at in range(12)] == list(range(12))
    assert set(read_shards(shards(tmp_path / "split" / "val", 1, 2).parent)) == {"val"}


def test_json_may_hold_several_captions_and_names_may_have_folders_and_dots(tmp_path: Path) -> None:
    content = json.dumps({"captions": ["one", " two ", "one", ""], "width": 8}).encode()
    path = write(tmp_path / "a.tar", [("x/a.b.JSON", b"{}"), ("x/c.json", content), ("x/c.JPG", png(1))])
    with pytest.warns(UserWarning, match=r"a\.tar: x/a has no image"):
        (found,) = read_shards(tmp_path).values()
    assert list(found[0].captions) == ["one", "two"]
    assert path.exists()


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("../../evil.png", png(0)), ("../../evil.txt", b"x")], "../../evil.png leads out of its folder"),
        ([("/etc/evil.png", png(0))], "/etc/evil.png leads out of its folder"),
        ([("a.png", png(0))], "a has no caption"),
        ([("a.txt", b"x")], "a has no image"),
        ([("a.png", png(0)), ("a.txt", b" \n")], "the caption of a is empty"),
        ([("a.png", png(0)), ("a.txt", b"\xff\xfe")], "the caption of a is no text in UTF-8"),
        ([("a.png", png(0)), ("a.json", b"{")], "the caption of a is no JSON"),
        ([("a.png", png(0)), ("a.json", b"[" * 100_000)], "the caption of a is no JSON"),
        ([("a.png", png(0)), ("a.json", b'{"caption": 3}')], "the caption of a is empty"),
        ([("a.png", png(0)), ("a.txt", b"x" * (1 << 21))], "the caption of a has 2097152 bytes"),
    ],
)
def test_what_cannot_be_used_is_named_and_the_rest_is_used(tmp_path: Path, members: list[Member], problem: str) -> None:
    rows, problems = index(write(tmp_path / "a.tar", [*members, *pairs(7, 1)]))
    assert len(rows) == 1
    assert problems[0].startswith(problem)
    with pytest.warns(UserWarning, match=r"left out of 1 shards: .*a\.tar: "):
        (found,) = read_shards(tmp_path).values()
    assert numbers(found) == [7]


def test_links_and_devices_are_no_files(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, kind in (("a.png", tarfile.SYMTYPE), ("b.png", tarfile.LNKTYPE), ("c.png", tarfile.CHRTYPE)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = kind, "/etc/passwd"
            tar.addfile(entry)
    rows, problems = index(tmp_path / "a.tar")
    assert (len(rows), problems) == (0, [f"{name}.png is no plain file" for name in "abc"])
    with (
        pytest.warns(UserWarning, match="a.png is no plain file"),
        pytest.raises(ValueError, match="no sample in its 1 shards, expected images with captions"),
    ):
        read_shards(tmp_path)


def test_a_shard_cut_anywhere_is_named_and_what_is_whole_is_used(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.tar", pairs(0, 6))
    content = whole.read_bytes()
    rows, problems = index(whole)
    assert (len(rows), problems) == (6, [])
    ends = rows[:, 2:4].sum(axis=1)
    for size in range(1, 6 * 2048, 200):
        cut = tmp_path / "cut.tar"
        cut.write_bytes(content[:size])
        found, problems = index(cut)
        assert np.array_equal(found, rows[: (ends <= size).sum()])
        assert any("cut short" in problem or "damaged" in problem for problem in problems), size
        assert "\n" not in "".join(problems)


def test_what_is_no_tar_is_named(tmp_path: Path) -> None:
    for content in (b"", b"no tar" * 500):
        (tmp_path / "a.tar").write_bytes(content)
        rows, problems = index(tmp_path / "a.tar")
        assert len(rows) == 0
        assert len(problems) == 1
    with pytest.raises(ValueError, match=r"no shard, expected \.tar files in it or in its folders train, val and test"):
        read_shards(tmp_path / "none")


def test_a_damaged_image_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", [("a.png", png(3)[:40]), ("a.txt", b"x")])
    (found,) = read_shards(tmp_path).values()
    with pytest.raises(ValueError, match=r"a\.tar: the image at byte 512: image data: no known image format"):
        found[0]
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.tar: 0 bytes at byte 512, expected 40: it has changed"):
        found[0]


def test_captions_in_a_file() -> None:
    assert captions_of(b"a cat\n", ".txt") == ["a cat"]
    assert captions_of(b'{"caption": "a cat"}', ".json") == ["a cat"]


def test_a_random_order_reads_few_shards_at_a_time(tmp_path: Path) -> None:
    (found,) = read_shards(shards(tmp_path, 20, 3)).values()
    order = found.shuffle(np.random.default_rng(0), 0)
    assert sorted(order) == list(range(60))
    assert not np.array_equal(order, found.shuffle(np.random.default_rng(1), 0))
    shard = found.rows[order, 0]
    windows = [set(shard[start : start + 24].tolist()) for start in (0, 24, 48)]
    assert [len(window) for window in windows] == [8, 8, 4]
    assert len(set(shard[:6].tolist())) > 2, "mixed within a window"


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize(("count", "each"), [(2, 12), (8, 3)], ids=["fewer shards than workers", "more"])
def test_every_epoch_has_each_sample_once_and_can_be_begun_in_the_middle(
    tmp_path: Path, count: int, each: int, workers: int
) -> None:
    shards(tmp_path / "train", count, each)
    shards(tmp_path / "val", 1, 2)
    data = CaptionData(root=str(tmp_path), image_size=8, context_length=16, batch_size=5, num_workers=workers)
    data.setup("fit")

    def epoch(number: int, done: int = 0) -> list[torch.Tensor]:
        loader = data.train_dataloader()
        loader.sampler.set_epoch(number)
        if done:
            loader.load_state_dict({**loader.state_dict(), "epoch": number, "batches": done})
        return [batch["caption_id"] for batch in loader]

    first, second = epoch(0), epoch(1)
    assert [len(batch) for batch in first] == [5, 5, 5, 5, 4]
    assert len(set(torch.cat(first).tolist())) == 24
    assert not torch.equal(torch.cat(first), torch.cat(second))
    rest = epoch(1, done=3)
    assert len(rest) == 2
    assert all(torch.equal(a, b) for a, b in zip(rest, second[3:], strict=True))


def test_what_has_no_val_is_split_sample_by_sample(tmp_path: Path) -> None:
    data = CaptionData(
        root=str(shards(tmp_path, 3, 10)), image_size=8, context_length=16, num_workers=0, val_fraction=0.2
    )
    data.setup("fit")
    data.setup("test")
    found = [set(numbers(data.datasets[split].samples)) for split in ("train", "val", "test")]
    assert [len(part) for part in found] == [21, 6, 3]
    assert set.union(*found) == set(range(30))
