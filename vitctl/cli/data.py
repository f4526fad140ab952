"""`vitctl data shards | index | check`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

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
    out: Annotated[Path, typer.Argument(help="Folder that gets a folder of shards for each split.")],
    seed: Annotated[int, typer.Option("--seed", help="Of the shuffle.")] = 0,
    max_mib: Annotated[int, typer.Option("--max-mib", help="Largest shard.", min=1)] = 256,
    max_samples: Annotated[int, typer.Option("--max-samples", help="Most images in a shard.", min=1)] = 100_000,
    root: Annotated[
        Path | None, typer.Option("--root", help="known: and torchvision: folder of the original files.")
    ] = None,
    download: Annotated[bool, typer.Option("--download", help="torchvision: download what is missing.")] = False,
) -> None:
    """Write shards: images byte for byte as they are, shuffled, with an index. For example: vitctl data shards photos/ shards/"""
    from vitctl.cli.render import CONSOLE, bytes_text
    from vitctl.data.originals import open_originals
    from vitctl.data.shards import write_split

    for split, originals in open_originals(source, download=download, root=root).items():
        with _bar(f"writing {split}") as progress:
            index = write_split(
                originals.items,
                out / split,
                originals.class_names,
                seed=seed,
                source_text=originals.source,
                max_bytes=max_mib * MIB,
                max_samples=max_samples,
                progress=progress,
            )
        size = bytes_text(sum(shard.num_bytes for shard in index.shards))
        CONSOLE.print(
            f"{split}: {index.num_samples:,} images of {len(index.class_names):,} classes in {len(index.shards)} shard(s), {size}"
        )
    CONSOLE.print(f"ready in {out}; train on them with --data {out}", markup=False, soft_wrap=True)


@app.command()
def index(
    shards: Annotated[list[Path], typer.Argument(help="Shards of one split (.tar), or the folder that holds them.")],
    classes: Annotated[
        Path | None, typer.Option("--classes", help="Text file with a class name per line, in label order.")
    ] = None,
) -> None:
    """Index WebDataset shards that somebody else made: images jpg, png or webp, labels cls or json."""
    from vitctl.cli.render import CONSOLE
    from vitctl.data.index import index_shards
    from vitctl.errors import DataError

    paths = [path for given in shards for path in (sorted(given.glob("*.tar")) if given.is_dir() else [given])]
    if not paths:
        raise DataError(f"{shards[0]}: no .tar files here; give the shards or the folder that holds them")
    names = classes.read_text(encoding="utf-8").splitlines() if classes else None
    with _bar("indexing shards") as progress:
        made = index_shards(paths, class_names=names, source="indexed by vitctl", progress=progress)
    CONSOLE.print(
        f"{made.num_samples:,} images of {len(made.class_names):,} classes in {len(made.shards)} shard(s): {made.folder / 'index.json'}",
        markup=False,
        soft_wrap=True,
    )


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="Folder of shards, or of splits.")],
    images: Annotated[
        str, typer.Option("--images", help="Decode 'all' images, a 'sample' of 1,000, or 'none'.")
    ] = "sample",
) -> None:
    """Check shards against their index: every byte, every member, images decoded, images per class."""
    from vitctl.cli.render import CONSOLE, show_table
    from vitctl.data.index import find_splits, read_index
    from vitctl.data.verify import verify_index
    from vitctl.errors import DataError

    if images not in ("all", "sample", "none"):
        raise DataError(f"--images {images}: choose all, sample or none")
    how: Literal["all", "sample", "none"] = images  # type: ignore[assignment]
    problems: list[str] = []
    splits = find_splits(folder)
    if not splits:
        raise DataError(f"{folder}: no index.json here or one folder down; write one with `vitctl data index {folder}`")
    for split, place in splits.items():
        opened = read_index(place)
        with _bar(f"checking {split}") as progress:
            report = verify_index(opened, decode_images=how, progress=progress)
        counts = sorted(zip(report.class_counts, opened.class_names, strict=True), reverse=True)
        shown = counts if len(counts) <= 12 else [*counts[:6], *counts[-6:]]
        rows = [(name, f"{count:,}") for count, name in shown]
        title = (
            f"{split}: {report.num_samples:,} images, {report.num_decoded:,} decoded, {report.num_problems} problem(s)"
        )
        show_table(
            (
                "class" if len(shown) == len(counts) else f"class (6 largest and 6 smallest of {len(counts):,})",
                "images",
            ),
            rows,
            title=title,
        )
        problems += report.problems
    for problem in problems:
        CONSOLE.print(problem, markup=False, soft_wrap=True)
    if problems:
        raise DataError(
            f"{folder}: {len(problems)} problem(s), listed above; make the shards again or copy the damaged ones"
        )
    CONSOLE.print("all is well")


@contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on a terminal; nothing elsewhere."""
    from rich.progress import Progress

    from vitctl.cli.render import CONSOLE

    if not CONSOLE.is_terminal:
        yield None
        return
    with Progress(console=CONSOLE, transient=True) as progress:
        bar = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
