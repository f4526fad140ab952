import io

import numpy as np
import pytest
from PIL import Image
from scipy.fft import dctn

from tests.conftest import SHARED
from vitctl.data.datasets.readers.archives import archive_items
from vitctl.data.datasets.readers.png import encode_png
from vitctl.data.images.decode import BadSample
from vitctl.data.inspect.perceptual_hash import hash_images, perceptual_hash
from vitctl.data.source.unsharded import SyntheticSource

PHOTOS = SHARED / "imagenet-500.tar"


def smooth(seed: int, size: tuple[int, int] = (80, 60)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: int) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def distance(a: bytes, b: bytes) -> int:
    hashes = [perceptual_hash(data) for data in (a, b)]
    assert None not in hashes
    return bin(hashes[0] ^ hashes[1]).count("1")  # type: ignore[operator]


def test_perceptual_hash__is_the_signs_of_the_lowest_frequencies() -> None:
    """Against scipy's cosine transform, at the size where nothing is resized."""
    grey = np.random.default_rng(3).integers(0, 256, (32, 32), dtype=np.uint8)
    table = dctn(grey.astype(float), norm="ortho")
    places = sorted(
        ((row, column) for row in range(32) for column in range(32)), key=lambda at: (sum(at), at)
    )[1:65]
    values = np.array([table[at] for at in places])
    bits = "".join("1" if value > np.median(values) else "0" for value in values)
    assert perceptual_hash(encode_png(grey)) == int(bits, 2)
    assert bits.count("1") == 32


def test_perceptual_hash__of_nothing_there_is_none() -> None:
    assert perceptual_hash(b"text") is None
    assert perceptual_hash(encode_png(np.full((40, 40), 77, np.uint8))) is None
    assert perceptual_hash(encoded(smooth(0))[:200]) is None


@pytest.mark.parametrize("seed", range(5))
def test_perceptual_hash__survives_size_and_quality_and_tells_pictures_apart(seed: int) -> None:
    original = encoded(smooth(seed))
    for other in (smooth(seed, (160, 120)), smooth(seed, (40, 40)), smooth(seed).point(lambda v: v * 3 // 4)):
        assert distance(original, encoded(other, "JPEG", quality=60)) <= 6
    assert distance(original, encoded(smooth(seed + 100))) >= 16


@pytest.mark.skipif(not PHOTOS.exists(), reason=f"{PHOTOS.name} is not here")
def test_perceptual_hash__photographs_smaller_and_worse_keep_it_and_others_do_not() -> None:
    photos = [item.read() for item in archive_items(PHOTOS)[:60]]
    hashes = np.array([perceptual_hash(data) for data in photos], np.uint64)
    smaller = [Image.open(io.BytesIO(data)).convert("RGB").resize((224, 224)) for data in photos]
    again = np.array([perceptual_hash(encoded(image, "JPEG", quality=70)) for image in smaller], np.uint64)
    assert (np.bitwise_count(hashes ^ again) <= 6).mean() > 0.95
    between = np.bitwise_count(hashes[:, None] ^ hashes[None])[~np.eye(60, dtype=bool)]
    assert between.min() > 12 and 30 < between.mean() < 34


class Damaged(SyntheticSource):
    """Its second image cannot be read, its third is no image."""

    def read(self, sample: int) -> bytes:
        if sample == 1:
            raise BadSample("unreadable")
        return b"text" if sample == 2 else super().read(sample)


@pytest.mark.parametrize("workers", [0, 2])
def test_fingerprints__of_good_and_bad_images_in_order(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitctl.data.inspect.perceptual_hash._IMAGES_PER_TASK", 3)
    counted: list[int] = []
    source = Damaged(10, 3, 32)
    found = hash_images(source, workers=workers, done=counted.append)
    assert found.has_perceptual.tolist() == [True, False, False, *[True] * 7]
    assert found.perceptual.tolist() == [
        perceptual_hash(source.read(n)) if n not in (1, 2) else 0 for n in range(10)
    ]
    assert len(set(found.digests.tolist())) == 10
    if workers:
        assert sum(counted) == 10
    bare = hash_images(source, perceptual=False)
    assert bare.digests.tolist() == found.digests.tolist() and not bare.has_perceptual.any()
