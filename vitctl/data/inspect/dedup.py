"""Finds exact and near-duplicates, of test images in training data or within a data set, and shows them in
pairs.

Paper: Section 4.1: "we de-duplicate all pre-training datasets w.r.t. the test sets of the downstream tasks"
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path

import numpy as np

from vitctl.data.inspect.contact_sheet import Cell, cell, draw_sheet, save
from vitctl.data.inspect.hamming import Match, find_matches
from vitctl.data.inspect.perceptual_hash import ImageHashes, hash_images
from vitctl.data.shards.index import read_index
from vitctl.data.source.shard_source import ShardSource
from vitctl.data.source.views import Source, sample_key
from vitctl.system.pool import Done
from vitctl.system.tables import write_csv

_PAIRS_ON_A_PAGE, _PAIRS_IN_A_ROW = 24, 3
MATCHES = "matches.csv"
_MAX_PAGES = 20


@dataclass(frozen=True)
class Found:
    """The images of a split that are duplicates of images in one test set, or of earlier images in the split
    itself.
    """

    name: str
    source: Source
    matches: tuple[Match, ...]
    own: Source
    own_name: str

    def labels(self, match: Match) -> tuple[str, str]:
        """The class names of both images, see `label_text`."""
        return label_text(self.own, match.sample), label_text(self.source, match.other)

    def has_other_label(self, match: Match) -> bool:
        """Whether both images have labels, and different ones."""
        own, other = self.labels(match)
        return bool(own and other) and own != other

    @property
    def num_exact(self) -> int:
        """Matches that are the same file, byte for byte."""
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
        own: the split to deduplicate.
        tests: split folders by name.
        max_bits: largest Hamming distance of near-duplicates, 0 to 15; -1 for exact duplicates only.
        own_name: of the split, for the report.
        workers: worker processes; 0: this process.
        done: called with the number of images read since the last call.
    """

    def read(source: Source) -> ImageHashes:
        return hash_images(source, workers=workers, done=done, perceptual=max_bits >= 0)

    hashes, found = read(own), []
    for name, folder in tests.items():
        source = ShardSource(read_index(folder))
        found.append(
            Found(name, source, tuple(find_matches(hashes, read(source), max_bits=max_bits)), own, own_name)
        )
    return found


def compare_within(
    sides: Mapping[str, Source], *, max_bits: int, workers: int = 0, done: Done = lambda _: None
) -> list[Found]:
    """Find the duplicates in a data set: those across its splits first, then those in each split.

    Args:
        sides: splits by name, each with images of its own.
        max_bits, workers, done: as for `compare`.
    """
    hashes = {
        name: hash_images(source, workers=workers, done=done, perceptual=max_bits >= 0)
        for name, source in sides.items()
    }
    pairs = [*combinations(sides, 2), *((name, name) for name in sides)]
    return [
        Found(
            two, sides[two], tuple(find_matches(hashes[one], hashes[two], max_bits=max_bits)), sides[one], one
        )
        for one, two in pairs
    ]


def label_text(source: Source, sample: int) -> str:
    """The class names of an image, joined by `;` where there are several; empty for an image without a label."""
    labels = source.labels(np.array([sample])).reshape(-1).tolist()
    return ";".join(sorted(source.class_names[label] for label in labels if label >= 0))


def free_folder(wanted: Path) -> Path:
    """The given folder, or the first of NAME-2, NAME-3 ... that is new or empty: an earlier report is never
    overwritten.
    """
    tries = (wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}") for number in count(1))
    return next(path for path in tries if not path.exists() or (path.is_dir() and _is_ours_to_fill(path)))


def _is_ours_to_fill(folder: Path) -> bool:
    """Whether a folder is empty, or holds the pages of an unfinished report."""
    names = [path.name for path in folder.iterdir()]
    return MATCHES not in names and all(name.startswith(("pairs_", ".")) for name in names)


def write_report(found: Sequence[Found], folder: Path) -> list[Path]:
    """Write `matches.csv`, and pages of image pairs (image of the split, test image), the least certain
    first.

    Returns:
        the files; at most twenty pages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pages = _write_pages(found, folder)
    rows: list[tuple[object, ...]] = [
        ("key", "test_set", "test_key", "kind", "bits", "shard", "set", "label", "test_label")
    ]
    for one in found:
        for match in one.matches:
            kind = "exact" if match.is_exact else "near"
            keys = sample_key(one.own, match.sample), one.name, sample_key(one.source, match.other)
            shard = Path(one.own.location(match.sample)).name
            rows.append((*keys, kind, match.bits, shard, one.own_name, *one.labels(match)))
    table = (
        folder / MATCHES
    )  # written last: a folder without it holds an unfinished report, and is used again
    write_csv(table, rows)
    return [table, *pages]


def _write_pages(found: Sequence[Found], folder: Path) -> list[Path]:
    files: list[Path] = []
    pairs = [(one, match) for one in found for match in one.matches]
    pairs.sort(key=lambda pair: (pair[1].is_exact, -pair[1].bits))
    for number in range(min(_MAX_PAGES, -(-len(pairs) // _PAIRS_ON_A_PAGE))):
        shown = pairs[number * _PAIRS_ON_A_PAGE : (number + 1) * _PAIRS_ON_A_PAGE]
        cells = [picture for one, match in shown for picture in _pair(one, match)]
        files.append(folder / f"pairs_{number:03d}.png")
        subtitle = "right: of a test set, or the earlier of the two; the most doubtful first"
        title = f"{len(pairs):,} pairs, page {number + 1}"
        save(
            draw_sheet(cells, columns=min(2 * _PAIRS_IN_A_ROW, len(cells)), title=title, subtitle=subtitle),
            files[-1],
        )
    return files


def _pair(one: Found, match: Match) -> tuple[Cell, Cell]:
    left, right = cell(one.own, match.sample), cell(one.source, match.other)
    kind = "same bytes" if match.is_exact else f"{match.bits} bits apart"
    return Cell(left.pixels, left.caption, kind), Cell(right.pixels, right.caption, one.name)
