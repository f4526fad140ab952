"""Find exact and near-duplicates, of test images in training data or within a data set, and show the pairs.

Exact duplicates have the same bytes; near-duplicates have perceptual hashes with a small Hamming distance.

Paper: Section 4.1: "we de-duplicate all pre-training datasets w.r.t. the test sets of the downstream tasks"
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import combinations, count
from math import inf
from pathlib import Path

import numpy as np
from PIL import Image

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.inspect.overview import Cell, cell, draw_sheet, label_text, save
from vitctl.data.source.splits import DIGEST, bytes_digest, default_splits, image_digest, select
from vitctl.data.source.stores import ShardSource, open_index
from vitctl.data.source.views import Source, sample_key
from vitctl.errors import DataError
from vitctl.system.files import write_csv
from vitctl.system.pool import Done, run_each
from vitctl.system.text import count_text, one_line

MATCHES = "matches.csv"
_PAIRS_ON_A_PAGE, _PAIRS_IN_A_ROW, _MAX_PAGES = 24, 3, 20
MAX_BITS, NEAR_BITS = 15, 6  # default 6: no pair of 500 ImageNet photos is that close
_NUM_CHUNKS, _CHUNK_BITS = 4, 16
_MAX_CANDIDATES = 2**21  # compared at a time
_SIDE = 32  # of the grey thumbnail
_SMALLEST_DECODED = 64
_FREQUENCIES = 11  # per axis; they include the 64 lowest
_FLAT = 32.0  # norm of the 64 coefficients below which an image is flat: one grey level of contrast
_IMAGES_PER_TASK = 64


@dataclass(frozen=True)
class Match:
    """An image and its duplicate; `bits` is the Hamming distance of their perceptual hashes, 0 if exact."""

    sample: int
    other: int
    bits: int
    is_exact: bool


@dataclass(frozen=True, eq=False)
class ImageHashes:
    """The hashes of all images of a source, in its order.

    Args:
        digests: of the bytes, `[n]` of 16 bytes.
        perceptual: uint64 `[n]`, see `perceptual_hash`; 0 if there is none.
        has_perceptual: bool `[n]`, False for images that cannot be decoded or are flat.
    """

    digests: np.ndarray
    perceptual: np.ndarray
    has_perceptual: np.ndarray


@dataclass(frozen=True)
class Found:
    """The images of a split that duplicate images of a test set, or earlier images of the same split."""

    name: str
    source: Source
    matches: tuple[Match, ...]
    own: Source
    own_name: str

    def labels(self, match: Match) -> tuple[str, str]:
        return label_text(self.own, match.sample), label_text(self.source, match.other)

    def has_other_label(self, match: Match) -> bool:
        own, other = self.labels(match)
        return bool(own and other) and own != other

    @property
    def num_exact(self) -> int:
        return sum(match.is_exact for match in self.matches)


def compare(
    own: Source,
    tests: Mapping[str, Path],
    *,
    max_bits: int,
    own_name: str = "",
    workers: int = 0,
    done: Done = lambda _: None,
) -> list[Found]:
    """Find the images of a split that are duplicates of test images.

    Args:
        max_bits: largest Hamming distance of near-duplicates, 0 to 15; -1 for exact duplicates only.
        done: called with the number of images read since the last call.
    """
    hashes, found = hash_images(own, workers=workers, done=done, perceptual=max_bits >= 0), []
    for name, folder in tests.items():
        source = ShardSource(open_index(folder))
        others = hash_images(source, workers=workers, done=done, perceptual=max_bits >= 0)
        matches = find_matches(hashes, others, max_bits=max_bits)
        found.append(Found(name, source, tuple(matches), own, own_name))
    return found


def compare_within(
    sides: Mapping[str, Source],
    *,
    max_bits: int,
    workers: int = 0,
    done: Done = lambda _: None,
    until: float = inf,
) -> list[Found]:
    """Find the duplicates in a data set: across its splits first, then within each split.

    Args:
        sides: splits by name, without shared images.
        until: time of `time.monotonic` after which images are left out.
    """
    hashes = {
        name: hash_images(source, workers=workers, done=done, perceptual=max_bits >= 0, until=until)
        for name, source in sides.items()
    }
    pairs = [*combinations(sides, 2), *((name, name) for name in sides)]
    return [
        Found(
            two, sides[two], tuple(find_matches(hashes[one], hashes[two], max_bits=max_bits)), sides[one], one
        )
        for one, two in pairs
    ]


def sides_of(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the splits of a data set; if it has only one, the two sides of its automatic split."""
    division = default_splits(list(sources)) if len(sources) == 1 else None
    if division:
        with suppress(DataError):  # too few labelled images to divide
            return {name: select(name, sources) for name in (division.train, division.scored)}
    return dict(sources)


def describe(found: Found) -> str:
    """Return a line with the numbers of duplicates and one pair, with different labels if possible."""
    wrong = [match for match in found.matches if found.has_other_label(match)]
    match = (wrong or found.matches)[0]
    where = found.own_name if found.own_name == found.name else f"{found.own_name} and {found.name}"
    left, right = (label or "no label" for label in found.labels(match))
    keys = sample_key(found.own, match.sample), sample_key(found.source, match.other)
    near = len(found.matches) - found.num_exact
    labels = f", {len(wrong):,} with different labels" if wrong else ""
    return (
        f"{where}: {found.num_exact:,} identical and {count_text(near, 'near-duplicate image')}{labels}, "
        f"such as {one_line(keys[0])} ({one_line(left)}) and {one_line(keys[1])} ({one_line(right)})"
    )


def free_folder(wanted: Path) -> Path:
    """Return the first of NAME, NAME-2, NAME-3 ... without a finished report or other files."""
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        if not folder.exists():
            break
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else [MATCHES]
        if MATCHES not in names and all(name.startswith(("pairs_", ".")) for name in names):
            break
    return folder


def write_report(found: Sequence[Found], folder: Path) -> list[Path]:
    """Write and return `matches.csv` and at most twenty pages of image pairs, the least certain first."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = _write_pages(found, folder)
    # Written last: a folder without it holds an unfinished report, and is used again.
    write_matches(found, folder / MATCHES)
    return [folder / MATCHES, *pages]


def write_matches(found: Sequence[Found], path: Path) -> None:
    """Write a table with a row for each pair: keys, kind, and labels of both images."""
    rows: list[tuple[object, ...]] = [
        ("key", "other_set", "other_key", "kind", "bits", "shard", "set", "label", "other_label")
    ]
    rows += [
        (
            sample_key(one.own, match.sample),
            one.name,
            sample_key(one.source, match.other),
            "exact" if match.is_exact else "near",
            match.bits,
            Path(one.own.location(match.sample)).name,
            one.own_name,
            *one.labels(match),
        )
        for one in found
        for match in one.matches
    ]
    write_csv(path, rows)


def _write_pages(found: Sequence[Found], folder: Path) -> list[Path]:
    files: list[Path] = []
    pairs = [(one, match) for one in found for match in one.matches]
    pairs.sort(key=lambda pair: (pair[1].is_exact, -pair[1].bits))
    for number in range(min(_MAX_PAGES, -(-len(pairs) // _PAIRS_ON_A_PAGE))):
        shown = pairs[number * _PAIRS_ON_A_PAGE : (number + 1) * _PAIRS_ON_A_PAGE]
        cells = [picture for one, match in shown for picture in _pair(one, match)]
        files.append(folder / f"pairs_{number:03d}.png")
        subtitle = "right: of a test set, or the earlier of the two; the most doubtful first"
        title = f"{count_text(len(pairs), 'pair')}, page {number + 1}"
        save(
            draw_sheet(cells, columns=min(2 * _PAIRS_IN_A_ROW, len(cells)), title=title, subtitle=subtitle),
            files[-1],
        )
    return files


def _pair(one: Found, match: Match) -> tuple[Cell, Cell]:
    left, right = cell(one.own, match.sample), cell(one.source, match.other)
    kind = "same bytes" if match.is_exact else f"{match.bits} bits apart"
    return Cell(left.pixels, left.caption, kind), Cell(right.pixels, right.caption, one.name)


def find_matches(own: ImageHashes, others: ImageHashes, *, max_bits: int) -> list[Match]:
    """Find the nearest duplicate of each image among others; exact duplicates take precedence.

    Args:
        own: images to check.
        others: images to compare with; if this is `own`, each image is compared with those before it.
        max_bits: see `compare`.

    Returns:
        at most one match per image of `own`, in order.
    """
    best: dict[int, Match] = {}
    if max_bits >= 0:
        rows, columns = np.flatnonzero(own.has_perceptual), np.flatnonzero(others.has_perceptual)
        pairs = near_pairs(own.perceptual[rows], others.perceptual[columns], max_bits)
        for row, column, bits in zip(
            rows[pairs[0]].tolist(), columns[pairs[1]].tolist(), pairs[2].tolist(), strict=True
        ):
            if (own is not others or column < row) and (row not in best or bits < best[row].bits):
                best[row] = Match(row, column, bits, False)
    by_digest = {digest: number for number, digest in reversed(list(enumerate(others.digests.tolist())))}
    best |= {
        row: Match(row, by_digest[digest], 0, True)
        for row, digest in enumerate(own.digests.tolist())
        if digest in by_digest and (own is not others or by_digest[digest] < row)
    }
    return [best[row] for row in sorted(best)]


def near_pairs(a: np.ndarray, b: np.ndarray, max_bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find pairs of words, uint64 `[n]` and `[m]`, with a Hamming distance of at most `max_bits`, 0 to 15.

    Words are split into four chunks of 16 bits. If at most `max_bits` bits differ, at least one chunk differs
    in at most a quarter of them; so only words with a similar chunk are compared.

    Returns:
        indices in `a`, indices in `b`, and Hamming distances, int64 `[p]` each, sorted by the first two.
    """
    if not 0 <= max_bits <= MAX_BITS:
        raise ValueError(f"max_bits is {max_bits}, should be 0 to {MAX_BITS}")
    masks = [
        sum(1 << bit for bit in bits)
        for count in range(max_bits // _NUM_CHUNKS + 1)
        for bits in combinations(range(_CHUNK_BITS), count)
    ]
    keys = []
    for chunk in range(_NUM_CHUNKS):
        of_a, of_b = (
            (words >> np.uint64(_CHUNK_BITS * chunk) & np.uint64(0xFFFF)).astype(np.int64) for words in (a, b)
        )
        order = np.argsort(of_b, kind="stable")
        starts = np.searchsorted(of_b[order], np.arange((1 << _CHUNK_BITS) + 1))
        keys += [_near_in_buckets(a, b, of_a ^ mask, order, starts, max_bits) for mask in masks]
    found = np.unique(np.concatenate(keys))
    rows, columns = np.divmod(found, max(1, len(b)))
    return rows, columns, np.bitwise_count(a[rows] ^ b[columns]).astype(np.int64)


def _near_in_buckets(
    a: np.ndarray, b: np.ndarray, buckets: np.ndarray, order: np.ndarray, starts: np.ndarray, max_bits: int
) -> np.ndarray:
    """Return near pairs (i, j) of each word of `a` and the `b` words in its bucket, as `i * len(b) + j`."""
    counts = starts[buckets + 1] - starts[buckets]
    rows = np.flatnonzero(counts)
    ends = np.cumsum(counts[rows])
    cuts = (
        np.searchsorted(ends, np.arange(_MAX_CANDIDATES, int(ends[-1]) if len(ends) else 0, _MAX_CANDIDATES))
        + 1
    )
    found = [np.zeros(0, np.int64)]
    for part in np.split(rows, cuts):
        sizes = counts[part]
        own = np.repeat(part, sizes)
        inside = np.arange(len(own)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        other = order[np.repeat(starts[buckets[part]], sizes) + inside]
        near = np.bitwise_count(a[own] ^ b[other]) <= max_bits
        found.append(own[near] * len(b) + other[near])
    return np.concatenate(found)


def hash_images(
    source: Source,
    *,
    workers: int = 0,
    done: Done = lambda _: None,
    perceptual: bool = True,
    until: float = inf,
) -> ImageHashes:
    """Read every image of a source, and compute its digest and its perceptual hash.

    Args:
        perceptual: False to compute digests only, without decoding.
        until: time of `time.monotonic` after which images are left out: they match nothing.
    """

    def hash_image(sample: int) -> tuple[bytes, int | None]:
        if time.monotonic() > until:
            return bytes_digest(f"{source.digest} {sample}".encode()), None
        try:
            data = source.read(sample)
            return bytes_digest(data), perceptual_hash(data) if perceptual else None
        except BadSample:
            return image_digest(source, sample), None

    hashed = run_each(hash_image, len(source), _IMAGES_PER_TASK, workers=workers, done=done)
    return ImageHashes(
        np.array([digest for digest, _ in hashed], DIGEST),
        np.array([words or 0 for _, words in hashed], np.uint64),
        np.array([words is not None for _, words in hashed], bool),
    )


def perceptual_hash(data: bytes) -> int | None:
    """Return the 64-bit perceptual hash (pHash): which of the 64 lowest DCT coefficients exceed their median.

    The image is resized to 32 x 32 grey pixels, for JPEG partly while decoding. The mean (DC coefficient) is
    not used. Copies that differ in size, compression or brightness have a Hamming distance of a few bits;
    unrelated images of 32 bits on average. None for an image that cannot be decoded, or is flat.
    """
    try:
        picture = open_picture(data)
        shorter = min(picture.height, picture.width)
        reduce = next(by for by in (8, 4, 2, 1) if by == 1 or shorter >= by * _SMALLEST_DECODED)
        pixels = picture.region(0, 0, picture.height, picture.width, reduce=reduce)
    except BadSample:
        return None
    small = Image.fromarray(pixels).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BILINEAR)
    transform, lowest = _transform()
    coefficients = (transform @ np.asarray(small, np.float64) @ transform.T).ravel()[lowest]
    if np.linalg.norm(coefficients) < _FLAT:
        return None
    bits = coefficients > np.median(coefficients)
    return int.from_bytes(np.packbits(bits).tobytes())


@cache
def _transform() -> tuple[np.ndarray, np.ndarray]:
    """Return the orthonormal DCT matrix `[11, 32]`, and flat indices of the 64 lowest frequencies, no DC."""
    frequency, pixel = np.arange(_FREQUENCIES)[:, None], np.arange(_SIDE)[None]
    rows = np.cos(np.pi * frequency * (2 * pixel + 1) / (2 * _SIDE)) * np.sqrt(2 / _SIDE)
    rows[0] /= np.sqrt(2)
    order = sorted(range(_FREQUENCIES**2), key=lambda place: (sum(divmod(place, _FREQUENCIES)), place))
    return rows, np.array(order[1:65])
