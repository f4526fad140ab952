"""`vitctl data check`: whether all shards are there, and unchanged since they were written."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitctl.cli.data.shards import bar

if TYPE_CHECKING:
    from vitctl.data.inspect.verify import Report
    from vitctl.data.shards.index import Index

_SHOWN_CLASSES = 12


def check(
    folder: Annotated[
        str, typer.Argument(help="Folder of shards, or of splits, or its address; or a known data set, or vtab.")
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Decode 1,000 images of each split instead of reading every shard.")
    ] = False,
    root: Annotated[Path, typer.Option("--root", help="Folder of known data sets, for a name.")] = Path("data"),
    workers: Annotated[
        int, typer.Option("--workers", help="Processes; 0: this one; default: one per core.", min=-1)
    ] = -1,
) -> None:
    """Check shards: every byte, every member, every image decoded; missing or extra files; duplicate images."""
    from vitctl.cli.data.sets import check_known
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.inspect.completeness import missing_images, unused_files
    from vitctl.data.inspect.verify import verify_index
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
    notes += _same_images(reports)
    for line in (*problems, *notes):
        CONSOLE.print(line, markup=False, soft_wrap=True)
    if problems:
        hidden = sum(report.num_problems - len(report.problems) for report, _ in reports.values())
        shown = f"{len(problems) + hidden:,} problem(s){f', {len(problems)} of them' if hidden else ''} listed above"
        raise DataError(f"{folder}: {shown}; make the shards again or copy the damaged ones")
    CONSOLE.print(_verdict(reports, quick, len(notes)), markup=False, soft_wrap=True)


def _verdict(reports: "Mapping[str, tuple[Report, Index]]", quick: bool, num_notes: int) -> str:
    if not quick:
        return f"nothing is damaged or missing; {num_notes} note(s), see above" if num_notes else "all is well"
    decoded, whole = (
        sum(getattr(report, name) for report, _ in reports.values()) for name in ("num_decoded", "num_samples")
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


def _same_images(reports: "Mapping[str, tuple[Report, Index]]") -> Iterator[str]:
    """A line for each split with duplicate images, and for each two splits that share images. Neither is damage."""
    from itertools import combinations

    from vitctl.data.inspect.hamming import shared
    from vitctl.data.source.read import ShardSource

    sources = {split: ShardSource(index) for split, (_, index) in reports.items()}
    for split, (report, _) in reports.items():
        if report.repeated:
            first, later = report.repeated[0]
            keys = f"{sources[split].key(first)} and {sources[split].key(later)}"
            yield f"{split}: {len(report.repeated):,} duplicate image(s), first {keys}"
    for one, other in combinations(reports, 2):
        if both := shared(reports[one][0].digests, reports[other][0].digests):
            keys = f"{sources[one].key(both[0][0])} and {sources[other].key(both[0][1])}"
            yield f"{one} and {other}: share {len(both):,} image(s), first {keys}; see `vitctl data dedup`"
