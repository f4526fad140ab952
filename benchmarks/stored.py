"""What `vitctl data shards` can make of photographs, and what this does to the loader and to the pixels:
`python benchmarks/stored.py`.

For each way to store them: bytes, images per CPU second with one loader worker (the ways take turns), and the
difference of training crops from those of the photographs as they came. A crop is drawn on the original; the
same part of the stored photograph, rounded to its pixels, is resized to 224.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from loader import PHOTOS, SIZE, unpack
from measure import Machine, in_fresh_process, take_turns

CAME = "as they came"
WAYS: dict[str, dict[str, Any]] = {
    CAME: {},
    "--quality 90": {"quality": 90},
    **{f"--max-side {side}": {"max_side": side} for side in (448, 384, 320, 256)},
}
HEAD = "stored | KiB each | images per CPU second | times as many | difference, mean | 95th percentile"
LOADER = str(Path(__file__).with_name("loader.py"))


def main() -> None:
    """Measure and print the table."""
    import torch

    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="a tar of JPEG files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000, help="per measurement")
    given, machine = parser.parse_args(), Machine()
    with tempfile.TemporaryDirectory() as folder:
        originals = unpack(given.photos, Path(folder), 1, WAYS)
        asked = {"side": "vitctl-antialias", "folder": folder, "images": given.images, "workers": 1}
        sides = {
            way: partial(in_fresh_process, LOADER, {**asked, "shards": way}, sys.executable) for way in WAYS
        }
        turns = take_turns(sides, given.rounds)
        rates = {way: np.array([one["per CPU second"] for one in found]) for way, found in turns.items()}
        print(f"| {HEAD} |\n|{'---|' * 6}")
        for way, found in rates.items():
            size, change, most = pixels(originals, Path(folder, way))
            ratios = found / rates[CAME]
            spread = f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"| {way} | {size:.0f} | {np.median(found):.0f} | {spread} | {change:.2f} | {most:.2f} |")
    print(machine.record(("torch", "pillow", "simplejpeg", "numpy")))


def pixels(originals: list[bytes], shards: Path) -> tuple[float, float, float]:
    """Return KiB of a stored photograph, and the mean and the 95th percentile of the differences."""
    from vitctl.data.shards.index import read_index
    from vitctl.data.source.stores import ShardSource

    source = ShardSource(read_index(shards))
    stored = {int(source.key(sample)): source.read(sample) for sample in range(len(source))}
    changes = [difference(data, stored[number], number) for number, data in enumerate(originals)]
    size = np.mean([len(data) for data in stored.values()]) / 1024
    return float(size), float(np.mean(changes)), float(np.quantile(changes, 0.95))


def difference(before: bytes, after: bytes, sample: int) -> float:
    """Return the mean absolute difference between a training crop of two files, in levels of 255."""
    from vitctl.data.images.decode import open_picture
    from vitctl.data.images.transforms import Drawn, TrainTransform, augmentation_rng

    transform = TrainTransform(SIZE, area_range=(0.08, 1.0), resample="bilinear_antialias", flip=False)
    pictures, rng = [open_picture(data) for data in (before, after)], augmentation_rng(0, 0, sample)
    box = transform.draw(pictures[0].height, pictures[0].width, rng).box
    crops = []
    for picture in pictures:
        down, across = picture.height / pictures[0].height, picture.width / pictures[0].width
        top, left = round(box[0] * down), round(box[1] * across)
        bottom, right = round((box[0] + box[2]) * down), round((box[1] + box[3]) * across)
        part = Drawn((top, left, bottom - top, right - left), (0, 0), False, rng)
        crops.append(transform.apply(picture, part).float())
    return float((crops[0] - crops[1]).abs().mean())


if __name__ == "__main__":
    main()
