"""Whatever is done to shards, an index or an image: a clean error or a correct sample."""

import io
import tarfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import MakeSplit
from tests.fuzz.mutate import fuzz, mutated
from tests.matrix import slow
from vitctl.data.images.decode import BadSample, decode, open_picture
from vitctl.data.images.transforms import TrainTransform, augmentation_rng
from vitctl.data.inspect.check_shards import verify_index
from vitctl.data.loader.batches import train_batches
from vitctl.data.shards.index import read_index
from vitctl.data.shards.tar import read_shard, split_name
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError

EXAMPLES = [100, pytest.param(3000, marks=pytest.mark.slow)]  # of each of the three kinds


def check_message(error: DataError, place: Path = Path()) -> None:
    """One line, which names the file."""
    assert "\n" not in str(error)
    assert place == Path() or str(place) in str(error)


def pictures() -> tuple[bytes, ...]:
    """A picture in every format that is read, with several modes and kinds of compression."""
    noise = np.random.default_rng(0).integers(0, 256, (24, 31, 4), dtype=np.uint8)
    rgba, files = Image.fromarray(noise, "RGBA"), []
    rgb, grey = rgba.convert("RGB"), Image.fromarray(noise[..., 0].astype(np.uint16) * 200)
    for image, kind, options in [
        (rgb, "JPEG", {"subsampling": 2}), (rgb, "JPEG", {"progressive": True}),
        (rgb, "JPEG", {"restart_marker_rows": 1}), (rgb, "PNG", {}), (rgb, "WEBP", {}), (rgb, "GIF", {}),
        (rgb, "BMP", {}), (rgb, "TIFF", {}), (rgb, "TIFF", {"compression": "tiff_deflate"}),
        (rgba, "PNG", {}), (rgba, "WEBP", {"lossless": True}), (rgba, "TIFF", {"compression": "tiff_lzw"}),
        (rgba.convert("CMYK"), "JPEG", {"progressive": True}), (rgba.convert("CMYK"), "TIFF", {}),
        (rgba.convert("P"), "PNG", {}), (rgba.convert("1"), "BMP", {}), (rgba.convert("L"), "JPEG", {}),
        (grey, "PNG", {}), (grey, "TIFF", {}),
    ]:  # fmt: skip
        file = io.BytesIO()
        image.save(file, kind, **options)
        files.append(file.getvalue())
    return tuple(files)


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_images__a_bad_sample_or_pixels(num_examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.system.limits.PIXELS", 2**20)

    def check(data: bytes) -> str:
        try:
            pixels = decode(data)
            picture = open_picture(data)
            assert (picture.height, picture.width) == pixels.shape[:2]
            np.testing.assert_array_equal(picture.region(0, 0, 1, 1), pixels[:1, :1])
            transformed = TrainTransform(8)(open_picture(data), augmentation_rng(0, 0, 0))
        except BadSample as error:
            check_message(error)
            return error.reason
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
        assert transformed.shape == (3, 8, 8)
        return "pixels"

    outcomes = fuzz(check, mutated(pictures()), num_examples)
    assert {"pixels", "not an image", "truncated", "damaged"} <= outcomes.keys()
    assert outcomes.keys() <= {"pixels", "not an image", "truncated", "damaged", "too large"}


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_shards__an_error_or_what_the_tar_says(
    make_split: MakeSplit, tmp_path: Path, num_examples: int
) -> None:
    index = make_split(4)
    original = (index.folder / index.shards[0].name).read_bytes()
    shard = tmp_path / "mutated.tar"

    def check(data: bytes) -> str:
        shard.write_bytes(data)
        try:
            rows = read_shard(shard).rows
        except DataError as error:
            check_message(error, shard)
            return "refused"
        told = told_by_tarfile(data)
        assert len(rows) == len(told)
        for row, (image, label) in zip(rows, told, strict=True):
            begin = int(row["header"] + row["data"])
            assert data[begin : begin + int(row["size"])] == image
            assert row["label"] == label
        return "read"

    assert {"refused", "read"} <= fuzz(check, mutated((original,)), num_examples).keys()


def told_by_tarfile(data: bytes) -> list[tuple[bytes, int]]:
    """Image and label of each sample by Python's tarfile, in the order of the keys."""
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            if file := tar.extractfile(member):
                key, extension = split_name(member.name)
                if key:
                    samples.setdefault(key, {})[extension] = file.read()
    return [(sample["png"], int(sample["cls"])) for sample in samples.values()]


@pytest.mark.parametrize("num_examples", EXAMPLES)
def test_index__an_error_or_one_that_holds_together(make_split: MakeSplit, num_examples: int) -> None:
    folder = make_split(9).folder
    path = folder / "index.json"
    original = path.read_bytes()

    def check(data: bytes) -> str:
        path.write_bytes(data)
        try:
            index = read_index(folder)
        except DataError as error:
            check_message(error, path)
            return "refused"
        source = ShardSource(index)
        assert len(source) == sum(shard.num_samples for shard in index.shards) == 9
        assert all((folder / shard.name).parent == folder for shard in index.shards)
        for sample in range(9):
            with suppress(BadSample):
                decode(source.read(sample))
        return "opened"

    assert check(original.replace(b'"noise"', b'"other"')) == "opened"
    assert fuzz(check, mutated((original,)), num_examples)["refused"] > num_examples // 2


def corrupt(data: bytes, how: int, rng: np.random.Generator) -> bytes:
    """Damage that every decoder must notice.

    A flipped bit within a JPEG's code shows only in the shard's digest.
    """
    if how == 0:  # the signature
        return bytes(8) + data[8:]
    if how == 1:  # all of it
        return rng.bytes(len(data))
    keep = int(rng.integers(len(data) // 4, len(data) // 2))  # the end, as after a torn download
    return data[:keep] + bytes(len(data) - keep)


@pytest.mark.parametrize("num_workers", [0, *slow(2)])
def test_corruptions__are_counted_one_by_one(tmp_path: Path, num_workers: int) -> None:
    rng = np.random.default_rng(7)
    files = pictures()[:4]  # JPEG and PNG
    items = [Item(f"k{n}", n % 3, lambda n=n: files[n % len(files)]) for n in range(250)]
    index = write_split(items, tmp_path / "train", tuple("abc"), seed=0, source_text="", max_samples=40)
    source = ShardSource(index)
    chosen = sorted(rng.choice(250, 100, replace=False).tolist())
    for number, sample in enumerate(chosen):
        row = index.rows[sample]
        data = corrupt(source.read(sample), number % 3, rng)
        with Path(source.location(sample)).open("r+b") as file:
            file.seek(int(row["header"] + row["data"]))
            file.write(data)
    order, transform = Order(250, 0), TrainTransform(8)
    sizes = {"batch_size": 50, "micro_batch": 25, "rank": 0, "num_processes": 1, "first_step": 0}
    batches = train_batches(source, order, transform, seed=0, num_workers=num_workers, **sizes)
    epoch = [next(batches) for _ in range(10)]
    bad = [entry for batch in epoch for entry in batch.bad]
    assert sorted(sample for sample, _, _ in bad) == chosen
    assert all(key == source.key(sample) for sample, key, _ in bad)
    assert {reason for _, _, reason in bad} <= {"not an image", "truncated", "damaged"}
    assert sum(int((batch.weights == 0).sum()) for batch in epoch) == 100
    assert len(verify_index(read_index(index.folder), decode_images="all").problems) == 100 + len(
        index.shards
    )
