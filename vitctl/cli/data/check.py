"""`vitctl data check`: whether all shards are there, and unchanged since they were written."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitctl.cli.data.shards import bar

if TYPE_CHECKING:
    from vitctl.data.inspect.check_shards import Report
    from vitctl.data.shards.index import Index

_SHOWN_CLASSES, _SHOWN_PAIRS = 12, 100


def check(
    folder: Annotated[
        str,
        typer.Argument(help="Folder of shards, or of splits, or its address; or a known data set, or vtab."),
    ],
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Decode 1,000 images of each split instead of reading every shard."),
    ] = False,
    root: Annotated[Path, typer.Option("--root", help="Folder of known data sets, for a name.")] = Path(
        "data"
    ),
    workers: Annotated[
        int, typer.Option("--workers", help="Processes; 0: this one; default: one per core.", min=-1)
    ] = -1,
    accept_labels: Annotated[
        bool, typer.Option("--accept-labels", help="Accept that the same image has different labels.")
    ] = False,
) -> None:
    """Check shards: every byte, every member, every image decoded; missing or extra files; duplicate images.

    The same image with different labels is an error, except in a known data set or with --accept-labels.
    """
    from vitctl.cli.data.sets import check_known
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.inspect.check_shards import missing_images, unused_files, verify_index
    from vitctl.data.shards.index import find_splits, read_index
    from vitctl.data.shards.remote import is_remote
    from vitctl.data.source.locate import locate_all_splits
    from vitctl.errors import DataError
    from vitctl.system.pool import default_workers

    is_name = not is_remote(folder) and not Path(folder).exists()
    text = str(check_known(folder, root)) if is_name else folder
    problems, notes = unused_files(Path(text)) if not is_remote(text) else ([], [])
    if problems and not is_remote(text) and not find_splits(Path(text)):
        raise DataError("; ".join(problems))
    reports: dict[str, tuple[Report, Index]] = {}
    for split, place in locate_all_splits(text).items():
        if place.shards:
            raise DataError(
                f"{folder}: names some shards of a split; check takes the folder of a split, or its address"
            )
        try:
            opened = read_index(place.folder, place.base)
        except DataError as error:
            problems.append(str(error))
            continue
        with bar(f"checking {split}") as progress:
            report = verify_index(
                opened,
                decode_images="sample" if quick else "all",
                workers=default_workers() if workers < 0 else workers,
                progress=progress,
            )
        _show_split(split, report, opened)
        problems += report.problems
        reports[split] = report, opened
    if is_name:
        missing, partial = missing_images(folder, {split: index for split, (_, index) in reports.items()})
        problems, notes = problems + missing, notes + partial
    same, contradictions = _same_images(reports)
    notes += same
    for line in (*problems, *contradictions, *notes):
        CONSOLE.print(line, markup=False, soft_wrap=True)
    if problems:
        hidden = sum(report.num_problems - len(report.problems) for report, _ in reports.values())
        shown = f"{len(problems) + hidden:,} problem(s){f', {len(problems)} of them' if hidden else ''} listed above"
        raise DataError(f"{folder}: {shown}; make the shards again or copy the damaged ones")
    if contradictions and not (
        accept_labels or is_name
    ):  # published data sets have such images, and stay as they are
        raise DataError(
            f"{folder}: the same image has different labels, listed above; correct the labels and make the "
            f"shards again, or accept "
            "them with --accept-labels"
        )
    CONSOLE.print(_verdict(reports, quick, len(notes) + len(contradictions)), markup=False, soft_wrap=True)


def _verdict(reports: "Mapping[str, tuple[Report, Index]]", quick: bool, num_notes: int) -> str:
    if not quick:
        return (
            f"nothing is damaged or missing; {num_notes} note(s), see above" if num_notes else "all is well"
        )
    decoded, whole = (
        sum(getattr(report, name) for report, _ in reports.values())
        for name in ("num_decoded", "num_samples")
    )
    return f"no problem found in {decoded:,} of {whole:,} images; without --quick every byte is read and every image decoded"


def _show_split(split: str, report: "Report", index: "Index") -> None:
    """Images of each class, and the problems by file."""
    from vitctl.cli.show.render import show_table

    counts = sorted(zip(report.class_counts, index.class_names, strict=True), reverse=True)
    half = _SHOWN_CLASSES // 2
    shown = counts if len(counts) <= _SHOWN_CLASSES else [*counts[:half], *counts[-half:]]
    title = f"{split}: {report.num_samples:,} images, {report.num_decoded:,} decoded, {report.num_problems} problem(s)"
    name = "class" if shown == counts else f"class ({half} largest and {half} smallest of {len(counts):,})"
    show_table((name, "images"), [(name, f"{count:,}") for count, name in shown], title=title)
    if report.kinds:
        rows = [(kind.file, kind.kind, f"{kind.count:,}", kind.first) for kind in report.kinds]
        show_table(("file", "what", "how many", "first"), rows, left=("what", "first"))


def _same_images(reports: "Mapping[str, tuple[Report, Index]]") -> tuple[list[str], list[str]]:
    """Lines about duplicate images in and across splits, and about those with different labels."""
    from itertools import combinations

    from vitctl.data.inspect.check_shards import shared
    from vitctl.data.inspect.duplicates import label_text
    from vitctl.data.source.shard_source import ShardSource

    sources = {split: ShardSource(index) for split, (_, index) in reports.items()}
    found = [(split, split, report.repeated) for split, (report, _) in reports.items()]
    for one, other in combinations(reports, 2):
        found.append((one, other, tuple(shared(reports[one][0].digests, reports[other][0].digests))))
    notes, contradictions = list[str](), list[str]()
    for one, other, pairs in found:
        if not pairs:
            continue
        first, second = pairs[0]
        keys = f"first {sources[one].key(first)} and {sources[other].key(second)}"
        inside = f"{one}: {len(pairs):,} duplicate image(s), {keys}"
        notes.append(
            inside
            if one == other
            else f"{one} and {other}: share {len(pairs):,} image(s), {keys}; see `vitctl data dedup`"
        )
        wrong = []
        for pair in pairs:
            names = [
                label_text(sources[split], sample) for split, sample in zip((one, other), pair, strict=True)
            ]
            if all(names) and names[0] != names[1]:
                wrong.append((pair, names))
        for (first, second), names in wrong[:_SHOWN_PAIRS]:
            left, right = f"{one}/{sources[one].key(first)}", f"{other}/{sources[other].key(second)}"
            contradictions.append(
                f"the same image has different labels: {left} is {names[0]!r}, {right} is {names[1]!r}"
            )
        if len(wrong) > _SHOWN_PAIRS:
            contradictions.append(
                f"and {len(wrong) - _SHOWN_PAIRS:,} more in {' and '.join(dict.fromkeys((one, other)))}"
            )
    return notes, contradictions
