"""Export of VTAB-1k in the community's layout: a folder per task with four lists and the images, with their
original bytes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from vitctl.data.datasets.catalog import open_split
from vitctl.data.datasets.readers.community import FORMAT, KEYS, NOTE
from vitctl.data.datasets.vtab import VtabTask
from vitctl.data.images.image_types import image_extension
from vitctl.data.shards.index import INDEX_FILE
from vitctl.data.source.provenance import source_text, source_texts
from vitctl.data.source.read import Source
from vitctl.data.writer.items import Item, Originals
from vitctl.data.writer.write import write_originals
from vitctl.system.files import write_text
from vitctl.system.text import escaped_json

Progress = Callable[[int, int], None]


def export_task(
    task: VtabTask, root: Path, out: Path, progress: Progress = lambda _done, _total: None
) -> Path:
    """Write a task in the community's layout, which trainers of adapters read; the folder appears whole, or
    not at all.

    Images keep their bytes and their format. `train800val200.txt` names the files of the other two lists, so
    nothing lies there twice. The original names are in `keys/`, so that `vitctl data check` can prove a copy.

    Args:
        task: a row of `VTAB`.
        root: folder of known data sets.
        out: gets a folder named as the community names the task.
        progress: called with (images done, images in all) of each split.

    Raises:
        DataError: the data set is not there, or an image cannot be read.
    """
    folder = out / task.community
    if folder.exists():
        return folder
    aside = out / f".{task.community}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    splits = _open(task, root)
    aside.mkdir(parents=True)  # it is ours alone: a link in its place is no folder to write into
    lists = {split: _write_images(aside, split, source, progress) for split, source in splits.items()}
    lists["train800val200"] = lists["train800"] + lists["val200"]
    for split, lines in lists.items():
        write_text(aside / f"{split}.txt", "".join(f"{line}\n" for line in lines))
    note = {
        "format": FORMAT,
        "task": task.name,
        "source": "; ".join(
            dict.fromkeys(text for source in splits.values() for text in source_texts(source))
        ),
        "lists_sha256": {
            split: hashlib.sha256((aside / f"{split}.txt").read_bytes()).hexdigest() for split in lists
        },
    }
    write_text(aside / NOTE, escaped_json(json.dumps(note, indent=1, ensure_ascii=False)) + "\n")
    os.replace(aside, folder)
    return folder


def export_shards(
    task: VtabTask, root: Path, out: Path, progress: Progress = lambda _done, _total: None
) -> Path:
    """Write a task's train800, val200 and test as shards, which `vitctl vtab --data OUT` takes.

    As `export_task`.
    """
    folder = out / task.data_set
    for split, source in _open(task, root).items():
        if not (folder / split / INDEX_FILE).exists():
            labels = source.labels().tolist()
            items = [Item(source.key(n), labels[n], partial(source.read, n)) for n in range(len(source))]
            write_originals(
                Originals(items, source.class_names, source_text(source)), folder, split, progress=progress
            )
    return folder


def _open(task: VtabTask, root: Path) -> dict[str, Source]:
    expressions = {"train800": task.train800, "val200": task.val200, "test": task.test}
    return {
        name: open_split(split, dataset=task.data_set, root=str(root)) for name, split in expressions.items()
    }


def _write_images(folder: Path, split: str, source: Source, progress: Progress) -> list[str]:
    """The images in the order of their keys; returns the lines of their list."""
    place = folder / "images" / split
    place.mkdir(parents=True)
    keys = [source.key(sample) for sample in range(len(source))]
    labels, lines, names = source.labels(), [], []
    for number, sample in enumerate(sorted(range(len(source)), key=keys.__getitem__)):
        data = source.read(sample)
        name = f"images/{split}/{number:06d}.{image_extension(data)}"
        (folder / name).write_bytes(data)
        lines.append(f"{name} {labels[sample]}")
        names.append(keys[sample])
        progress(number + 1, len(source))
    (folder / KEYS).mkdir(exist_ok=True)
    write_text(folder / KEYS / f"{split}.txt", "".join(f"{name}\n" for name in names))
    return lines
