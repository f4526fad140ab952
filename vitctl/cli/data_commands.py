"""`vitctl data list | prepare | shards | index`: commands that make shards."""

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vitctl.cli.flags import COLUMNS, MORE, Workers
from vitctl.system import limits
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import bytes_text, count_text, one_line, typed

if TYPE_CHECKING:
    from vitctl.data.shards.index import Index
    from vitctl.data.writer.intake import Bad, Intake, Known, Originals

app = typer.Typer(help="Make, index and check WebDataset shards.", no_args_is_help=True)
Root = Annotated[Path, typer.Option("--root", help="Folder of known data sets, one folder each")]
Columns = Annotated[str, typer.Option("--columns", help=COLUMNS)]
DATA = Path("data")
MIB = 1 << 20
_LEAST_LINES = 10  # lines about unusable files, however small the terminal


@app.command()
def shards(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Folder or .tar of class folders, .csv/.tsv of path,label[,split] or "
            "path,labels (cat;wild), ImageNet's archives, .parquet, known:NAME, or shards",
        ),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Output folder, with a folder of shards for each split")
    ],
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the shuffle", rich_help_panel=MORE)] = 0,
    max_mib: Annotated[
        int,
        typer.Option("--max-mib", help="Maximum size of a shard in MiB", min=1, rich_help_panel=MORE),
    ] = 256,
    max_samples: Annotated[
        int,
        typer.Option("--max-samples", help="Maximum number of images per shard", min=1, rich_help_panel=MORE),
    ] = 100_000,
    root: Annotated[
        Path | None,
        typer.Option("--root", help="Folder of the original files, for known:NAME"),
    ] = None,
    columns: Columns = "",
    workers: Workers = None,
    max_side: Annotated[
        int | None,
        typer.Option("--max-side", help="Shrink JPEGs whose longer side exceeds this many pixels", min=1),
    ] = None,
    quality: Annotated[
        int | None, typer.Option("--quality", help="Recompress JPEGs at this quality", min=1, max=100)
    ] = None,
    bad: Annotated[
        Literal["stop", "skip", "keep"],
        typer.Option(
            "--bad",
            help="Images that cannot be decoded: stop, skip them, or keep them unchecked (for large sets)",
        ),
    ] = "stop",
    drop_class: Annotated[
        list[str] | None, typer.Option("--drop-class", help="Omit this class; repeatable")
    ] = None,
    keep_class: Annotated[
        list[str] | None,
        typer.Option("--keep-class", help="Keep a class despite a warning about it; repeatable"),
    ] = None,
) -> None:
    """Write shards: images unchanged, shuffled, with an index.

    Every file is used, or listed with the reason in OUT/intake.csv. HEIC is converted to JPEG. The shards are
    the same for any number of workers. To resume an interrupted command, run it again.

    For example: vitctl data shards photos/ shards/
                 vitctl data shards table.csv shards/ --max-side 512
    Guide: docs/own-data.md, docs/data-sources.md
    """
    from vitctl.cli.show.console import say
    from vitctl.data.datasets.catalog import open_originals
    from vitctl.data.images.decode import Reencode
    from vitctl.data.source.splits import default_splits
    from vitctl.data.writer.shard_writer import write_originals
    from vitctl.system.files import check_free

    ignore_output_errors()
    check_free("OUT", out, [Path(source)])
    originals = open_originals(source, root=root, columns=columns)
    drop, keep = drop_class or [], keep_class or []
    splits = _checked_splits(
        originals, source, out, bad, drop, keep, number_of_workers(workers), sys.argv[1:]
    )
    reencode = Reencode(max_side or 0, quality or 0) if max_side or quality else None
    sizes: dict[str, Any] = {"max_bytes": max_mib * MIB, "max_samples": max_samples}
    write = partial(
        write_originals, reencode=reencode, seed=seed, workers=number_of_workers(workers), **sizes
    )
    _write(splits, out, write)
    choice = default_splits(list(splits))
    if choice is not None and choice.note:
        say(choice.note)
    is_one = len(next(iter(splits.values())).class_names) == 1
    then = (
        "they are of one class, so that none can be learned" if is_one else f"train on them with --data {out}"
    )
    say(f"ready in {out}; {then}")


def number_of_workers(workers: int | None = None) -> int:
    """Return the number of worker processes, of --workers or the default."""
    from vitctl.system.pool import default_workers

    return default_workers() if workers is None else workers


def shards_of(photographs: str, runs: Path, columns: str = "", others: Sequence[Path] = ()) -> Path:
    """Convert photographs to shards beside the runs, once for each content.

    Args:
        photographs: a path with images that are no shards.
        runs: folder of run folders.
        columns: see `open_split`.
        others: folders of runs whose shards of the same photographs are used, too.

    Returns:
        the folder of shards.

    Raises:
        DataError: as `vitctl data shards`; or the photos changed while they were converted.
    """
    from vitctl.cli.show.console import say
    from vitctl.data.datasets.catalog import open_originals
    from vitctl.data.datasets.converted import (
        RECORD,
        find_shards,
        fingerprint,
        keep_looked,
        keep_record,
        shards_folder,
    )
    from vitctl.data.shards.index import find_splits
    from vitctl.data.writer.shard_writer import write_originals
    from vitctl.errors import DataError
    from vitctl.system.files import lock, opened_folder

    state = fingerprint(photographs, columns)
    out = find_shards(state, runs, *others)
    if out is None:
        originals = open_originals(photographs, columns=columns)
        out, known = shards_folder(photographs, runs, originals)
        if Path(photographs).is_dir() and out.resolve().is_relative_to(Path(photographs).resolve()):
            text = f"its shards would be written into it, to {out}"
            raise DataError(photographs, text, "start in another folder, or give --out with one elsewhere")
        out.mkdir(parents=True, exist_ok=True)
        with opened_folder(out) as descriptor:
            if lock(descriptor) is False:
                say(f"{photographs}: waiting for another command, which writes its photos to {out}")
                lock(descriptor, waits=True)
            if not (out / RECORD).exists():
                had = [one in of.found for of in known.values() for one in of.contents if of.found]
                new = f"; {len(had):,} images, {had.count(False):,} of them new" if had else ""
                say(f"{photographs}: writing its photos as shards to {out}{new}")
                splits = check_photographs(originals, photographs, out, "stop", known)
                _write(splits, out, partial(write_originals, seed=0, workers=number_of_workers()))
                if find_splits(out).keys() != splits.keys() or fingerprint(photographs, columns) != state:
                    text = "changed while its shards were written"
                    raise DataError(photographs, text, "run the same command again")
                keep_looked(out, known)
                keep_record(out, photographs, state)
                return out
        keep_record(out, photographs, state)
    say(f"{photographs}: unchanged; using the shards of its photos in {out}")
    return out


def check_photographs(
    originals: "dict[str, Originals]",
    photographs: str,
    out: Path | None,
    bad: "Bad",
    known: "Mapping[str, Known] | None" = None,
) -> "Mapping[str, Originals]":
    """Check photographs as `vitctl data shards` does, and return what their shards would hold.

    Args:
        originals: the splits.
        photographs: their path.
        out: gets the list of files that are left out; None: nothing is written.
        bad: of --bad; "keep" decodes nothing.
        known: as for `check_originals`.

    Raises DataError, whose message ends with a `vitctl data shards` command.
    """
    shards = f"{photographs.rstrip('/') or photographs}-shards"
    command, then = (
        ["data", "shards", photographs, shards],
        f"; then train on them with --data {typed(shards)}",
    )
    workers = number_of_workers()
    return _checked_splits(originals, photographs, out, bad, [], [], workers, command, then, known)


def _write(splits: "Mapping[str, Originals]", out: Path, write: "Callable[..., Index]") -> None:
    from vitctl.cli.show.console import progress_bar, say
    from vitctl.data.source.stores import ShardSource
    from vitctl.data.source.views import unlabelled_note
    from vitctl.errors import DataError, writing
    from vitctl.system.files import inside

    places = {
        split: inside(out, split, error=DataError, where=originals.source)
        for split, originals in splits.items()
    }
    # Existing splits first: if one of them differs, no new split is written.
    for split in sorted(splits, key=lambda split: not places[split].exists()):

        def note(line: str, split: str = split) -> None:
            say(f"{split}: {line}")

        with writing(places[split]), progress_bar(f"writing {split}") as progress:
            index = write(splits[split], out, split, progress=progress, note=note)
        size = bytes_text(sum(shard.num_bytes for shard in index.shards))
        classes = count_text(len(index.class_names), "class", "classes")
        say(
            f"{split}: {count_text(index.num_samples, 'image')} of {classes} in "
            f"{count_text(len(index.shards), 'shard')}, {size}"
        )
        if note_of_labels := unlabelled_note(ShardSource(index)):
            note(note_of_labels)


def _checked_splits(
    originals: "dict[str, Originals]",
    source: str,
    out: Path | None,
    bad: "Bad",
    drop: list[str],
    keep: list[str],
    workers: int,
    command: Sequence[str],
    then: str = "",
    known: "Mapping[str, Known] | None" = None,
) -> "Mapping[str, Originals]":
    """Return the splits of a source without unusable files, which are printed.

    Args:
        out: gets the list of skipped files; None: it is not written.
        command: words of the `vitctl data shards` command, which the error completes.
        then: what to do after it.

    Raises DataError if the user has to decide something first; only the list was written.
    """
    from vitctl.cli.show.console import counting
    from vitctl.data.writer.intake import check_originals
    from vitctl.errors import DataError, refuse

    total = sum(len(split.items) for split in originals.values())
    with counting("checking images", total) as done:
        intake = check_originals(
            originals, bad=bad, drop=drop, keep=keep, workers=workers, done=done, known=known
        )
    stops = bad == "stop" and bool(intake.bad)
    _print_intake(intake, out, stops=stops)
    problems, flags = list[str](), list[str]()
    if stops:
        problems, flags = [f"{count_text(len(intake.bad), 'image')} cannot be used"], ["--bad", "skip"]
    if intake.doubts:
        problems.append(f"{count_text(len(intake.doubts), 'problem')} with the classes")
        flags += [option for doubt in intake.doubts for option in doubt.options]
    left = {name for split in intake.splits.values() for name in split.class_names}
    left -= {name for option, name in pairwise(flags) if option == "--drop-class"}
    way_out = f", or type: {shlex.join(['vitctl', *command, *flags])}{then}"
    if then and len(left) < 2:
        way_out = "; to learn anything takes two classes"
    refuse(
        DataError,
        (
            problems,
            source,
            f"{' and '.join(problems)}, listed above; no shards were written",
            f"correct the files{way_out}",
        ),
        (not intake.splits, source, "no image is left to write"),
    )
    return intake.splits


def _print_intake(intake: "Intake", out: Path | None, *, stops: bool) -> None:
    """Print what is left out, at most a screenful, and write the complete list to OUT/intake.csv."""
    from vitctl.cli.show.console import say
    from vitctl.data.images.image_types import SYSTEM_FILE
    from vitctl.data.writer.intake import REPORT

    if out is not None and (intake.left_out or intake.bad or intake.converted):
        intake.write(out / REPORT)
    if intake.left_out:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in intake.counts())
        say(f"files left out: {len(intake.left_out):,} ({kinds})")
    if stops:
        say(f"images that cannot be used: {len(intake.bad):,}")
    files = [file for file in intake.left_out if file.reason != SYSTEM_FILE]
    files += intake.bad if stops else ()
    room = max(_LEAST_LINES, shutil.get_terminal_size().lines - 8)
    for file in files[:room]:
        say(f"  {one_line(file.name)}: {file.reason}")
    if len(files) > room:
        say(f"  and {len(files) - room:,} more" + (f"; all: {out / REPORT}" if out else ""))
    if intake.converted:
        from vitctl.data.images.decode import CONVERSION

        say(f"{len(intake.converted):,} {CONVERSION}")
    for note in intake.notes:
        say(note)
    for doubt in intake.doubts:
        say(doubt.text)


@app.command()
def index(
    shards: Annotated[
        list[str],
        typer.Argument(
            metavar="SHARDS",
            help="Shards of one split (.tar), their folder, or addresses; {000..127} and @FILE too",
        ),
    ],
    classes: Annotated[
        Path | None, typer.Option("--classes", help="Text file with one class name per line, in label order")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for the index, for --data; local shards are linked there"),
    ] = None,
    image_key: Annotated[
        str, typer.Option("--image-key", help="Member that is the image, e.g. input.jpg")
    ] = "",
    label_key: Annotated[
        str,
        typer.Option("--label-key", help="Member that is the label, e.g. target.cls or meta.json:category"),
    ] = "",
    workers: Workers = None,
) -> None:
    """Index WebDataset shards from other programs: images jpg, png or webp, labels cls or json.

    The index is the same for any number of workers. To resume an interrupted command, run it again.

    For example: vitctl data index shards/ --label-key cls
    Guide: docs/data-sources.md
    """
    from vitctl.cli.show.console import progress_bar, say
    from vitctl.data.shards.index import INDEX_FILE
    from vitctl.data.shards.indexing import index_shards
    from vitctl.data.shards.tar import Fields
    from vitctl.data.source.locate import INDEXED, expand, tars
    from vitctl.data.source.stores import ShardSource
    from vitctl.data.source.views import class_zero_note, unlabelled_note
    from vitctl.errors import DataError, writing
    from vitctl.system.remote import STORES, list_store

    ignore_output_errors()
    names = [name for text in shards for name in ([text] if Path(text).exists() else expand(text))]
    places = list[str]()
    for name in names:
        if name.partition("://")[0] in STORES and ("*" in name or not name.endswith(".tar")):
            places += list_store(name)
        else:
            places += sorted(map(str, tars(Path(name), "*.tar"))) if Path(name).is_dir() else [name]
    if not places:
        fix = "give the shards or their folder; of several splits, index each by itself, as in FOLDER/train"
        raise DataError(shards[0], "no .tar files here", fix)
    with writing(out or Path(places[0]).parent), progress_bar("indexing shards") as progress:
        made = index_shards(
            places,
            out,
            class_names=_class_names(classes) if classes else None,
            source=INDEXED,
            members=Fields(image_key, label_key),
            workers=number_of_workers(workers),
            progress=progress,
            note=say,
        )
    classes_text = (
        f"{count_text(len(made.class_names), 'class', 'classes')} in {count_text(len(made.shards), 'shard')}"
    )
    say(f"{count_text(made.num_samples, 'image')} of {classes_text}: {made.folder / INDEX_FILE}")
    for note in filter(None, (unlabelled_note(ShardSource(made)), class_zero_note(ShardSource(made)))):
        say(note)


def _class_names(file: Path) -> list[str]:
    from vitctl.errors import DataError
    from vitctl.system.files import read_bytes

    try:
        return read_bytes(file, limits.LIST_FILE, error=DataError).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError(
            f"--classes {file}", "not UTF-8 text", "give a text file with one class name per line"
        ) from None


@app.command("list")
def list_sets(
    root: Root = DATA,
) -> None:
    """List all known data sets: use, classes, sizes, available or not.

    For example: vitctl data list --root data
    Guide: docs/vtab.md
    """
    from vitctl.cli.show.console import show_table
    from vitctl.data.datasets.inventory import list_inventory

    splits = ("train", "validation", "test")
    rows = [
        (
            holding.name,
            ", ".join(holding.uses),
            f"{holding.num_classes:,}",
            *("" if size is None else f"{size:,}" for size in map(holding.sizes.get, splits)),
            holding.state,
        )
        for holding in list_inventory(root)
    ]
    header = ("name", "used for", "classes", "train", "val", "test", "here")
    show_table(header, rows, left=("used for", "here"))


@app.command()
def prepare(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Known data set; vtab: all its data sets whose files are here; or imagenet_real",
        ),
    ],
    root: Root = DATA,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from", help="Original files, a community VTAB-1k folder, or Hugging Face's parquet files"
        ),
    ] = None,
    no_download: Annotated[bool, typer.Option("--no-download", help="Download nothing")] = False,
    workers: Workers = None,
    allow_partial: Annotated[
        bool,
        typer.Option("--allow-partial", help="Accept incomplete splits; every result then says so"),
    ] = False,
) -> None:
    """Download a known data set, if its licence allows it, and write its shards.

    For example: vitctl data prepare pets
    Guide: docs/vtab.md
    """
    from vitctl.cli.show.console import progress_of_steps, say
    from vitctl.data.datasets.vtab import VTAB
    from vitctl.errors import DataError, writing
    from vitctl.jobs.prepare import is_present, prepare_data_set, prepare_real

    def say_ready(name: str, sizes: Mapping[str, int]) -> None:
        say(f"ready: {name}, {', '.join(f'{size:,} {split}' for split, size in sizes.items())}")

    ignore_output_errors()
    with writing(root), progress_of_steps() as progress:
        if name == "imagenet_real":
            say(f"ready: {prepare_real(root, progress)}")
        elif name == "vtab":
            options: dict[str, Any] = {
                "source": from_,
                "workers": number_of_workers(workers),
                "progress": progress,
            }
            missing = [task.name for task in VTAB if not is_present(task, root, from_)]
            for task in VTAB:
                if task.name not in missing:
                    say_ready(task.name, prepare_data_set(task.data_set, root, download=False, **options))
            place = from_ or root / "originals"
            if missing:
                tasks = f"{len(missing)} of {len(VTAB)} tasks are not in {place}: {', '.join(missing)}"
                say(f"{tasks}; for each: vitctl data prepare NAME")
            if len(missing) == len(VTAB):
                raise DataError(place, "holds no data set of VTAB", "see `vitctl data list`")
        else:
            sizes = prepare_data_set(
                name,
                root,
                source=from_,
                download=not no_download,
                allow_partial=allow_partial,
                progress=progress,
            )
            say_ready(name, sizes)
