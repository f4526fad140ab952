"""Images that look the same: of one flat colour, and of several classes with the same pixels."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import encoded
from tests.matrix import slow
from vitctl.data.images.pixel_digest import pixel_digest, pixel_notes
from vitctl.data.inspect.check_shards import verify_index
from vitctl.data.inspect.overview import measure
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item, Originals, check_originals
from vitctl.data.writer.shard_writer import write_split


def photo(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, 9, 3), np.uint8)


def png(pixels: np.ndarray, **options: object) -> bytes:
    return encoded(Image.fromarray(pixels), **options)


def test_pixel_digest__tells_pixels_and_shapes_apart() -> None:
    wide = photo(0)
    others = [
        wide,
        wide.reshape(9, 8, 3),
        photo(1),
        np.zeros((8, 9, 3), np.uint8),
        np.full((1, 1, 3), 1, np.uint8),
    ]
    assert len({pixel_digest(one) for one in others}) == len(others)
    assert {len(pixel_digest(one)) for one in others} == {16}
    assert pixel_digest(np.asfortranarray(wide)) == pixel_digest(wide)
    assert pixel_digest(np.zeros((8, 9, 3), np.uint8)) == pixel_digest(np.zeros((2, 2, 3), np.uint8))


def test_pixel_notes__count_and_name() -> None:
    same, black = pixel_digest(photo(0)), pixel_digest(np.zeros((4, 4, 3), np.uint8))
    digests = [same, black, b"", same, b"", same, pixel_digest(photo(1)), same, black]
    labels = ["cat", "cat", "dog", "dog", "cat", "cat", "dog", "", "dog"]
    assert pixel_notes(digests, "{}.png".format, labels.__getitem__) == [
        "2 images of one flat colour, such as 1.png, 8.png",
        "1 image with the same pixels as an image of another class, such as 0.png (cat) and 3.png (dog)",
    ]
    assert pixel_notes([], str, str) == pixel_notes([b"", b""], str, str) == []


@pytest.mark.parametrize("workers", [0, *slow(2)])
def test_look_alikes__are_named_at_intake_by_check_and_by_stats(tmp_path: Path, workers: int) -> None:
    black = np.zeros((8, 9, 3), np.uint8)
    files = [
        ("cat/a.png", 0, png(photo(0))), ("cat/b.png", 0, png(black)), ("dog/c.png", 1, png(black)),
        ("dog/d.png", 1, png(photo(0), compress_level=0)), ("dog/e.png", 1, png(photo(1))),
    ]  # fmt: skip
    items = [Item(key, label, lambda data=data: data) for key, label, data in files]
    originals = Originals(items, ("cat", "dog"), "photos", is_user_data=True, prefix="train/")
    flat = "2 images of one flat colour, such as {0}cat/b.png, {0}dog/c.png"
    same = "1 image with the same pixels as an image of another class, such as {0}cat/a.png (cat)"
    same += " and {0}dog/d.png (dog)"
    intake = check_originals({"train": originals}, workers=workers)
    assert intake.notes == (flat.format("train/"), same.format("train/"))
    assert not intake.bad and not intake.doubts
    assert check_originals({"train": originals}, bad="keep").notes == ()
    index = write_split(items, tmp_path / "train", ("cat", "dog"), seed=1, source_text="x", max_samples=2)
    report, stats = verify_index(index, workers=workers), measure(ShardSource(index), workers=workers)
    sampled = verify_index(index, decode_images="sample")
    for notes in (report.notes, stats.notes, sampled.notes):
        assert [note.partition(", such as ")[0] for note in notes] == [
            line.partition(", such as ")[0] for line in (flat, same)
        ]
        assert all(f"{key}.png" in notes[0] for key in ("cat/b", "dog/c"))
        assert all(name in notes[1] for name in ("cat/a.png (cat)", "dog/d.png (dog)"))
    assert verify_index(index, decode_images="none").notes == ()
