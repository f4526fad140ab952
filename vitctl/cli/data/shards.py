"""`vitctl data shards | index`."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitctl.system.screen import ignore_output_errors

if TYPE_CHECKING:
    from vitctl.data.shards.index import Index
    from vitctl.data.writer.items import Originals

app = typer.Typer(help="Make, index and check WebDataset shards.", no_args_is_help=True)
MIB = 1 << 20


@app.command()
def shards(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder or .tar of class folders, .csv/.tsv of path,label[,split], torchvision:NAME, "
            "ImageNet's archives, .parquet, or shards."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the output: one folder of shards for each split.")],
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the shuffle.")] = 0,
    max_mib: Annotated[int, typer.Option("--max-mib", help="Maximum size of a shard, in MiB.", min=1)] = 256,
    max_samples: Annotated[
        int, typer.Option("--max-samples", help="Maximum number of images in a shard.", min=1)
    ] = 100_000,
    root: Annotated[
        Path | None, typer.Option("--root", help="known: and torchvision: folder of the original files.")
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="torchvision: download what is missing.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option("--workers", help="Processes that write; 0: this one; default: one per core.", min=-1),
    ] = -1,
    max_side: Annotated[
        int, typer.Option("--max-side", help="Shrink JPEG with a longer side to this many pixels.", min=0)
    ] = 0,
    quality: Annotated[
        int,
        typer.Option("--quality", help="Compress JPEG again with this quality, 1 to 100.", min=0, max=100),
    ] = 0,
    bad: Annotated[
        str,
        typer.Option(
            "--bad",
            help="Images that cannot be decoded: stop; skip them; or keep: do not check images (for "
            "large sets).",
        ),
    ] = "stop",
    drop_class: Annotated[
        list[str] | None, typer.Option("--drop-class", help="Leave a class out. Repeatable.")
    ] = None,
    keep_class: Annotated[
        list[str] | None,
        typer.Option("--keep-class", help="Keep a class in spite of a warning about it. Repeatable."),
    ] = None,
) -> None:
    """Write shards: images byte for byte, shuffled, with an index. For example: vitctl data shards photos/
    shards/

    Every file is used, or named with the reason in OUT/intake.csv; HEIC becomes JPEG.

    The shards are the same for any number of workers. If it was stopped, run the same command again to
    resume.
    """
    from vitctl.cli.show.intake import say_splits
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.datasets.detect import open_originals
    from vitctl.data.images.convert import Reencode
    from vitctl.data.writer.write import write_originals
    from vitctl.system.pool import default_workers

    ignore_output_errors()
    reencode = Reencode(max_side, quality) if max_side or quality else None
    workers = default_workers() if workers < 0 else workers
    found = open_originals(source, download=download, root=root)
    splits = _checked_splits(
        found, source, out, bad, drop_class or [], keep_class or [], workers, sys.argv[1:]
    )
    how: dict[str, Any] = {
        "seed": seed,
        "max_bytes": max_mib * MIB,
        "max_samples": max_samples,
        "workers": workers,
    }
    _write(splits, out, partial(write_originals, reencode=reencode, **how))
    say_splits(splits)
    CONSOLE.print(f"ready in {out}; train on them with --data {out}", markup=False, soft_wrap=True)


def shards_of(photographs: str, runs: Path) -> Path:
    """Make the shards of a folder of photographs beside the runs, once for each state of the folder, as
    `vitctl data shards` does.

    Args:
        photographs: a folder of class folders.
        runs: folder of run folders.

    Returns:
        the folder of shards.

    Raises:
        DataError: as `vitctl data shards`; or the photographs changed while their shards were made.
    """
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.datasets.detect import open_originals
    from vitctl.data.shards.index import find_splits
    from vitctl.data.writer.write import write_originals
    from vitctl.errors import DataError
    from vitctl.jobs.inputs.photographs import RECORD, fingerprint, shards_folder
    from vitctl.system.files import write_text
    from vitctl.system.pool import default_workers
    from vitctl.system.text import typed

    now = fingerprint(photographs)
    out = shards_folder(photographs, runs, now)
    if (out / RECORD).exists():
        CONSOLE.print(f"{photographs}: unchanged, using its shards in {out}", markup=False, soft_wrap=True)
        return out
    CONSOLE.print(f"{photographs}: photographs, making their shards in {out}", markup=False, soft_wrap=True)
    workers = default_workers()
    try:
        command = ["data", "shards", photographs, f"{photographs}-shards"]
        found = open_originals(photographs)
        splits = _checked_splits(found, photographs, out, "stop", [], [], workers, command)
        _write(splits, out, partial(write_originals, seed=0, workers=workers))
    except DataError as error:
        raise DataError(
            f"{error}; shards made by hand are given as --data {typed(f'{photographs}-shards')}"
        ) from None
    if find_splits(out).keys() != splits.keys() or fingerprint(photographs) != now:
        raise DataError(f"{photographs}: changed while its shards were made; run the same command again")
    write_text(out / RECORD, json.dumps(now) + "\n")
    return out


def _write(splits: "Mapping[str, Originals]", out: Path, write: "Callable[..., Index]") -> None:
    """Write every split, and print what was written."""
    from vitctl.cli.show.render import CONSOLE
    from vitctl.errors import DataError, writing
    from vitctl.system.files import inside
    from vitctl.system.text import bytes_text

    # A split that is there already is compared first: where it is another one, none is written beside it.
    places = {split: inside(out, split, error=DataError, where=one.source) for split, one in splits.items()}
    for split, originals in sorted(splits.items(), key=lambda one: not places[one[0]].exists()):
        with writing(places[split]), bar(f"writing {split}") as progress:
            index = write(
                originals,
                out,
                split,
                progress=progress,
                note=lambda line, split=split: CONSOLE.print(
                    f"{split}: {line}", markup=False, soft_wrap=True
                ),
            )
        size = bytes_text(sum(shard.num_bytes for shard in index.shards))
        CONSOLE.print(
            f"{split}: {index.num_samples:,} images of {len(index.class_names):,} classes in "
            f"{len(index.shards)} shard(s), {size}"
        )


def _checked_splits(
    found: "dict[str, Originals]",
    source: str,
    out: Path,
    bad: str,
    drop: list[str],
    keep: list[str],
    workers: int,
    command: "Sequence[str]",
) -> "Mapping[str, Originals]":
    """The splits of a source without what cannot be used; prints what is left out.

    `command` is completed in the error.
    """
    from vitctl.cli.show.intake import show_intake
    from vitctl.data.writer.intake import check_originals
    from vitctl.errors import DataError

    if bad not in ("stop", "skip", "keep"):
        raise DataError(f"--bad {bad}: choose stop, skip or keep")
    total, done = sum(len(originals.items) for originals in found.values()), 0
    with bar("checking images") as progress:

        def count(more: int) -> None:
            nonlocal done
            done += more
            if progress and more:
                progress(done, total)

        intake = check_originals(found, bad=bad, drop=drop, keep=keep, workers=workers, done=count)  # type: ignore[arg-type]
    show_intake(intake, source, out, stops=bad == "stop", command=command)
    return intake.splits


@app.command()
def index(
    shards: Annotated[
        list[str],
        typer.Argument(
            help="Shards of one split (.tar), the folder that holds them, or addresses; {000..127} and "
            "@FILE too."
        ),
    ],
    classes: Annotated[
        Path | None, typer.Option("--classes", help="Text file with a class name per line, in label order.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder that gets the index, for --data; local shards are linked there."),
    ] = None,
    image_key: Annotated[
        str, typer.Option("--image-key", help="Member that is the image, e.g. input.jpg.")
    ] = "",
    label_key: Annotated[
        str,
        typer.Option("--label-key", help="Member that is the label, e.g. target.cls or meta.json:category."),
    ] = "",
) -> None:
    """Index WebDataset shards of other programs: images jpg, png or webp, labels cls or json."""
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.shards.index import INDEX_FILE
    from vitctl.data.shards.make_index import check_same_shards, index_addresses, index_shards, link_shards
    from vitctl.data.shards.remote import is_remote
    from vitctl.data.shards.scan import Fields
    from vitctl.data.source.locate import INDEXED, expand
    from vitctl.errors import DataError, writing

    ignore_output_errors()
    given = [name for text in shards for name in ([text] if Path(text).exists() else expand(text))]
    folders = {name: sorted(map(str, Path(name).glob("*.tar"))) for name in given if Path(name).is_dir()}
    places = [path for name in given for path in folders.get(name, [name])]
    if not places:
        raise DataError(f"{shards[0]}: no .tar files here; give the shards or the folder that holds them")
    remote = any(map(is_remote, places))
    if remote and out is None:
        raise DataError(
            f"{places[0]}: an index cannot be written there; choose a local folder for it with --out FOLDER"
        )
    names = _names(classes) if classes else None
    if out is not None:
        check_same_shards(out, [place.rpartition("/")[2] for place in places])
    members = Fields(image_key, label_key)
    with writing(out or Path(places[0]).parent), bar("indexing shards") as progress:
        if remote and out is not None:
            made = index_addresses(
                places, out, class_names=names, source=INDEXED, members=members, progress=progress
            )
        else:
            paths = [Path(place) for place in places]
            if out is not None:
                paths = link_shards(paths, out)
            made = index_shards(paths, class_names=names, source=INDEXED, members=members, progress=progress)
    CONSOLE.print(
        f"{made.num_samples:,} images of {len(made.class_names):,} classes in {len(made.shards)} shard(s): "
        f"{made.folder / INDEX_FILE}",
        markup=False,
        soft_wrap=True,
    )


def _names(classes: Path) -> list[str]:
    from vitctl.errors import DataError
    from vitctl.system.bounds import LIST_FILE
    from vitctl.system.files import read_bytes

    try:
        return read_bytes(classes, LIST_FILE.limit, error=DataError).decode().splitlines()
    except UnicodeDecodeError:
        raise DataError(
            f"--classes {classes}: not UTF-8 text; give a text file with a class name per line"
        ) from None


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal; nothing elsewhere.

    It starts with the first step, after worker processes were forked.
    """
    from rich.progress import Progress

    from vitctl.cli.show.render import CONSOLE

    if not CONSOLE.is_terminal:
        yield None
        return
    progress = Progress(console=CONSOLE, transient=True)
    task = progress.add_task(title, total=None)

    def show(done: int, total: int) -> None:
        progress.start()
        progress.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        progress.stop()
