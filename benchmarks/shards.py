"""Importing 50,000 small images beside `tar` and webdataset's writer: `python benchmarks/shards.py IMAGES.tar`.

The images of a tar file of class folders are unpacked first, so that all sides begin with the same folder,
which was read once before. `tar` packs the folder as it is; webdataset's writer is given image and label of
every file in the order of the folder; vitctl lists, checks, shuffles, writes, hashes and indexes. All of it
in one run, in turns.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import webdataset
from measure import Machine, Numbers, clock, medians, script_options, take_turns

from vitctl.data.datasets.catalog import open_originals
from vitctl.data.writer.write import write_split

MAX_SAMPLES = 5_000


def main() -> None:
    """Measure, and print a table."""
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("images", type=Path)
    parser.add_argument("--num-images", type=int, default=50_000)
    given, machine = parser.parse_args(), Machine()
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder) / "photos", Path(folder) / "out"
        num_images = unpack(given.images, root, given.num_images)
        works: dict[str, Callable[[], object]] = {
            "tar": partial(subprocess.run, ["tar", "cPf", out / "all.tar", root], check=True),
            "webdataset.ShardWriter": partial(write_with_webdataset, root, out),
            "vitctl, 1 process": partial(write_with_vitctl, root, out, 0),
            "vitctl, 2 workers": partial(write_with_vitctl, root, out, 2),
        }
        sides = {name: partial(timed, work, out) for name, work in works.items()}
        sides["tar"]()  # reads all files once
        found = take_turns(sides, given.rounds)
    print("| side | seconds | CPU seconds | images per CPU second |\n|---|---|---|---|")
    for name, rounds in found.items():
        one = medians(rounds)
        print(f"| {name} | {one['wall']:.1f} | {one['cpu']:.1f} | {num_images / one['cpu']:,.0f} |")
    print(json.dumps(machine.record(("vitctl", "webdataset", "numpy"))))


def unpack(archive: Path, root: Path, num_images: int) -> int:
    """Lay out the first images of the train split as class folders, and tell how many there are."""
    items = sorted(open_originals(str(archive))["train"].items, key=lambda item: item.key)[:num_images]
    for item in items:
        path = root / item.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(item.read())
    return len(items)


def write_with_webdataset(root: Path, out: Path) -> None:
    """The usual loop: a label per folder, image and label to the writer."""
    with webdataset.ShardWriter(f"{out}/%06d.tar", maxcount=MAX_SAMPLES, verbose=0) as writer:
        for label, folder in enumerate(sorted(root.iterdir())):
            for path in sorted(folder.iterdir()):
                writer.write(
                    {
                        "__key__": f"{folder.name}/{path.stem}",
                        "jpg": path.read_bytes(),
                        "cls": str(label).encode(),
                    }
                )


def write_with_vitctl(root: Path, out: Path, workers: int) -> None:
    """All that `vitctl data shards` does."""
    (split,) = open_originals(str(root)).values()
    write_split(
        split.items,
        out / "train",
        split.class_names,
        seed=0,
        source_text="",
        max_samples=MAX_SAMPLES,
        workers=workers,
    )


def timed(work: Callable[[], object], out: Path) -> Numbers:
    """Return the wall seconds, and the CPU seconds of this process and its children."""
    out.mkdir()
    numbers: Numbers = {}
    with clock(numbers):
        work()
    shutil.rmtree(out)
    return numbers


if __name__ == "__main__":
    main()
