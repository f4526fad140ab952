"""`vitctl data stats | show | dedup`: what is in shards."""

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitctl.cli.data.shards import bar
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import one_line

if TYPE_CHECKING:
    from vitctl.data.inspect.stats import Stats

Folder = Annotated[Path, typer.Argument(help="Folder of shards, or of splits.")]
Place = Annotated[
    str, typer.Argument(help="Folder of shards, or of splits, or its address: https://, s3://, gs://, hf://.")
]
_SHOWN_PAIRS = 20
_SCHEME = re.compile(r"\w+:/")
Workers = Annotated[
    int, typer.Option("--workers", help="Processes; 0: this one; default: one per core.", min=-1)
]


def stats(
    folder: Place,
    images: Annotated[
        int, typer.Option("--images", help="Decode this many, spread over a split; 0: all.", min=0)
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    workers: Workers = -1,
) -> None:
    """Print images per class, sizes, formats, bytes, mean and standard deviation of the colours.

    For example: vitctl data stats shards/
    """
    from vitctl.data.inspect.stats import measure
    from vitctl.data.source.locate import locate_all_splits
    from vitctl.engine.journal import json_text
    from vitctl.system.pool import default_workers

    found: dict[str, Stats] = {}
    for split, place in locate_all_splits(folder).items():
        source = place.open(0)
        with bar(f"measuring {split}") as progress:
            total = min(images or len(source), len(source))
            found[split] = measure(
                source,
                num_images=images,
                workers=default_workers() if workers < 0 else workers,
                done=_adding(progress, total),
            )
    if as_json:
        print(json_text({split: one.as_json() for split, one in found.items()}, indent=1))
        return
    from vitctl.cli.show.render import show_table

    names = list(found)
    rows = list(zip(*(_column(found[split]) for split in names), strict=True))
    show_table(("", *names), [(row[0][0], *(text for _, text in row)) for row in rows])


def _column(one: "Stats") -> list[tuple[str, str]]:
    """One split as lines of a table."""
    from vitctl.system.text import bytes_text

    counts = sorted(one.images_per_class)
    share = 100 / max(1, one.num_sampled)
    return [
        ("images", f"{one.num_images:,}"),
        ("classes", f"{one.num_classes:,}"),
        (
            "images per class: min, median, max",
            f"{counts[0]:,}  {counts[len(counts) // 2]:,}  {counts[-1]:,}",
        ),
        ("classes without images", f"{counts.count(0):,}"),
        ("images without a label", f"{one.num_unlabelled:,}"),
        ("measured", f"{one.num_sampled:,}"),
        ("  unreadable", f"{one.num_unreadable:,}"),
        ("  rotated by their EXIF orientation", f"{one.num_turned:,}"),
        ("  formats", ", ".join(f"{name} {count * share:.0f} %" for name, count in one.formats.items())),
        ("  bytes, mean", bytes_text(one.mean_bytes)),
        ("  width: min, quartiles, max", "  ".join(f"{value:.0f}" for value in one.widths)),
        ("  height: min, quartiles, max", "  ".join(f"{value:.0f}" for value in one.heights)),
        ("  width / height", "  ".join(f"{value:.2f}" for value in one.aspects)),
        ("  mean of red, green, blue, 0 to 1", "  ".join(f"{value:.3f}" for value in one.mean)),
        ("  their standard deviation", "  ".join(f"{value:.3f}" for value in one.std)),
    ]


def show(
    folder: Place,
    out: Annotated[Path, typer.Argument(help="The .png to write.")],
    split: Annotated[str, typer.Option("--split", help="Which split; default: the first.")] = "",
    num_images: Annotated[
        int,
        typer.Option("--num-images", help="How many; 0: 40, or 6 rows with --augmented.", min=0, max=1000),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the choice, and of --augmented.")] = 0,
    augmented: Annotated[
        bool,
        typer.Option(
            "--augmented", help="Show beside each image its random crops and flips, as in training."
        ),
    ] = False,
    res: Annotated[int, typer.Option("--res", help="--augmented: image size in pixels.", min=1)] = 224,
) -> None:
    """Draw a sample of images with their classes on one page.

    For example: vitctl data show shards/ sheet.png
    """
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.images.transforms import TrainTransform
    from vitctl.data.inspect.contact_sheet import choose, save, show_augmented, show_images
    from vitctl.data.shards.remote import is_remote
    from vitctl.data.source.locate import locate_all_splits
    from vitctl.errors import DataError, writing

    splits = locate_all_splits(folder)
    name = split or next(iter(splits))
    if name not in splits:
        raise DataError(f"{folder}: has no split '{name}'; found: {', '.join(splits)}")
    if out.suffix.lower() != ".png":
        raise DataError(f"{out}: should be the name of a .png file")
    source = splits[name].open(0)
    last = folder.rstrip("/").rpartition("/")[2] if is_remote(folder) else Path(folder).resolve().name
    title = f"{last}, {name}" if last != name else name
    about = f"{len(source):,} images of {len(source.class_names):,} classes; seed {seed}"
    if augmented:
        samples = choose(len(source), num_images or 6, seed)
        page = show_augmented(source, samples, TrainTransform(res), seed=seed, title=title, subtitle=about)
    else:
        samples = choose(len(source), num_images or 40, seed)
        page = show_images(source, samples, columns=min(8, len(samples)), title=title, subtitle=about)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        save(page, out)
    CONSOLE.print(f"{len(samples)} images in {out}", markup=False, soft_wrap=True)


def dedup(
    folder: Folder,
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", help="Folder of a test set's shards. Repeatable; default: FOLDER itself."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Which split of FOLDER loses images.")] = "train",
    bits: Annotated[
        int,
        typer.Option(
            "--bits",
            help="Near-duplicates: perceptual hashes differ in at most this many of 64 bits; -1: identical "
            "files only.",
            min=-1,
            max=15,
        ),
    ] = 6,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="New folder for matches.csv and the pairs; default: beside the split."),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply", help="Exclude the images found from now on, by excluded.json beside the index."
        ),
    ] = False,
    workers: Workers = -1,
) -> None:
    """Find images of test sets, and near-duplicates of them, in training data.

    Without --against: near-duplicates in a data set, across its splits or the automatic one, and in each
    split.

    For example: vitctl data dedup shards/ --against pets/test --apply
    """
    from vitctl.cli.show.render import CONSOLE, show_table
    from vitctl.data.inspect.duplicates import compare, free_folder, write_report
    from vitctl.data.shards.index import read_index
    from vitctl.data.source.exclusion import FILE, write_exclusion
    from vitctl.data.source.shard_source import ShardSource
    from vitctl.errors import DataError, writing
    from vitctl.system.pool import default_workers

    if apply:
        ignore_output_errors()
    splits = _splits(folder)
    number = default_workers() if workers < 0 else workers
    say = partial(CONSOLE.print, markup=False, soft_wrap=True)
    if not against:
        if apply:
            raise DataError("--apply leaves out images of the test sets in --against FOLDER; give them")
        _dedup_within(folder, splits, bits, report, number)
        return
    if len(splits) > 1 and split not in splits:
        raise DataError(f"{folder}: has no split '{split}'; found: {', '.join(splits)}")
    place = splits[split] if split in splits else next(iter(splits.values()))
    tests = _test_sets(against, place)
    source = ShardSource(read_index(place))
    with bar("reading images") as progress:
        total = len(source) + sum(read_index(test).num_samples for test in tests.values())
        name = place.resolve().name
        matches = compare(
            source, tests, max_bits=bits, own_name=name, workers=number, done=_adding(progress, total)
        )
    rows = [
        (one.name, f"{len(one.source):,}", f"{one.num_exact:,}", f"{len(one.matches) - one.num_exact:,}")
        for one in matches
    ]
    show_table(("test set", "images", "identical", "near-duplicate"), rows)
    folder = free_folder(report or place.parent / f"{place.resolve().name}-dedup")
    with writing(folder):
        files = write_report(matches, folder)
    samples = sorted({match.sample for one in matches for match in one.matches})
    say(f"{len(samples):,} of {len(source):,} images of {place} are in a test set; report: {files[0].parent}")
    if apply and samples:
        with writing(place):
            number = write_exclusion(
                source.index, samples, reason=f"in {', '.join(tests)}; hashes within {bits} bits"
            )
        say(f"{number:,} images are left out from now on; remove {place / FILE} to include them again")
    elif samples:
        say("nothing was left out; check the pairs, then run the same command with --apply")


def _dedup_within(
    folder: Path, splits: dict[str, Path], bits: int, report: Path | None, workers: int
) -> None:
    """Print and report the duplicates of a data set, those on different sides of a split first."""
    from vitctl.cli.show.render import CONSOLE, show_table
    from vitctl.data.inspect.duplicates import compare_within, free_folder, write_report
    from vitctl.data.source.exclusion import open_shards
    from vitctl.data.source.splits import default_splits, select
    from vitctl.data.source.views import sample_key
    from vitctl.errors import DataError, writing

    sources = {name: open_shards(place) for name, place in splits.items()}
    sides = dict(sources)
    own = default_splits(list(sources)) if len(sources) == 1 else None
    with suppress(DataError):  # too few labelled images to divide
        sides = {name: select(name, sources) for name in (own.train, own.scored)} if own else sides
    with bar("reading images") as progress:
        done = _adding(progress, sum(map(len, sides.values())))
        found = compare_within(sides, max_bits=bits, workers=workers, done=done)
    rows = [
        (
            *(one.own_name, one.name, f"{one.num_exact:,}", f"{len(one.matches) - one.num_exact:,}"),
            f"{sum(map(one.has_other_label, one.matches)):,}",
        )
        for one in found
    ]
    show_table(("of", "and of", "identical", "near-duplicate", "of other labels"), rows, left=("and of",))
    say = partial(CONSOLE.print, markup=False, soft_wrap=True)
    pairs = [(one, match) for one in found for match in one.matches]
    pairs.sort(key=lambda pair: (pair[0].own_name == pair[0].name, not pair[0].has_other_label(pair[1])))
    for one, match in pairs[:_SHOWN_PAIRS]:
        left, right = (label or "no label" for label in one.labels(match))
        about = ["identical" if match.is_exact else f"{match.bits} bits apart"]
        about += ["different labels"] if one.has_other_label(match) else []
        about += ["on different sides of the split"] if one.own_name != one.name else []
        names = f"{sample_key(one.own, match.sample)} ({left}) and {sample_key(one.source, match.other)} ({right})"
        say(f"  {one_line(names)}: {', '.join(about)}")
    target = free_folder(report or folder.parent / f"{folder.resolve().name}-dedup")
    with writing(target):
        files = write_report(found, target)
    say(f"{len(pairs):,} pairs, {min(len(pairs), _SHOWN_PAIRS):,} shown; report: {files[0].parent}")


def _test_sets(against: list[Path], place: Path) -> dict[str, Path]:
    """The splits to compare one with, by name; it is never one of them."""
    from vitctl.errors import DataError

    tests = {
        f"{test.name}/{name}" if test.resolve().name != name else str(test): found
        for test in against
        for name, found in _splits(test).items()
        if found.resolve() != place.resolve()
    }
    if not tests:
        raise DataError(
            f"--against {against[0]}: is the split itself; leave --against out to look for duplicates in it"
        )
    return tests


def _splits(folder: Path) -> dict[str, Path]:
    from vitctl.data.shards.index import find_splits
    from vitctl.data.source.locate import no_index_message
    from vitctl.errors import DataError

    if _SCHEME.match(str(folder)):
        raise DataError(f"{folder}: is an address; this command reads local folders only")
    splits = find_splits(folder)
    if not splits:
        raise DataError(no_index_message(str(folder)))
    return splits


def _adding(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    """Turn a callback (done, total) into one that counts increments."""
    done = 0

    def add(more: int) -> None:
        nonlocal done
        done += more
        if progress:
            progress(done, total)

    return add
