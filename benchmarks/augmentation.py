"""Random crops and RandAugment beside torchvision's and timm's: the tables of results/augmentation.md.

    python benchmarks/augmentation.py photographs.tar

Each side draws from its own generators. Crops: 20,000 boxes. RandAugment: 4,000 photographs of 224 pixels.
"Unchanged" counts images without a changed pixel; "change" is the mean over pixels, in levels of 255. Pillow
13 refuses timm's Posterize to no bits; those images count as black, as before Pillow 13.
"""

import argparse
import random
import tarfile
import time

import numpy as np
import torch
from PIL import Image
from timm.data.auto_augment import rand_augment_transform
from torchvision.transforms import RandomResizedCrop

from vitctl.data.images.transforms import (
    TrainTransform,
    augmentation_rng,
    inception_box,
    random_resized_box,
)

BOXES, IMAGES, SIDE = 20_000, 4_000, 224
SCALE, RATIO, GREY = (0.08, 1.0), (3 / 4, 4 / 3), (124, 116, 104)
TIMM = {"randaugment_rules": "timm", "randaugment_std": 0.5, "randaugment_increasing": True, "fill": GREY}
RULES = {
    "ours, timm's rules": {"randaugment_layers": 2, "randaugment_magnitude": 9, **TIMM},
    "ours, torchvision's rules, 2 of 27": {"randaugment_layers": 2, "randaugment_magnitude": 27},
}


def crops(height: int, width: int) -> dict[str, np.ndarray]:
    """Boxes of each side: `[BOXES, 4]`, top, left, height, width."""
    image = torch.empty(3, height, width, dtype=torch.uint8)
    theirs = [RandomResizedCrop.get_params(image, list(SCALE), list(RATIO)) for _ in range(BOXES)]
    rngs = [augmentation_rng(0, 0, sample) for sample in range(BOXES)]
    return {
        "torchvision": np.array(theirs),
        "`random_resized`": np.array([random_resized_box(height, width, rng, SCALE, RATIO) for rng in rngs]),
        "`inception`": np.array(
            [inception_box(height, width, rng, (0.05, 1.0), (0.75, 1.33)) for rng in rngs]
        ),
    }


def print_crops(height: int, width: int) -> None:
    """Print a table of the boxes in an image of this size."""
    print(f"\n| crop of {width} x {height} | mean area | below 20 % | mean width / height | below 1 |")
    print("|---|---|---|---|---|")
    for side, boxes in crops(height, width).items():
        area, ratio = boxes[:, 2] * boxes[:, 3] / (height * width), boxes[:, 3] / boxes[:, 2]
        small, narrow = 100 * (area < 0.2).mean(), 100 * (ratio < 1).mean()
        print(f"| {side} | {area.mean():.3f} | {small:.1f} % | {ratio.mean():.3f} | {narrow:.1f} % |")


def photographs(path: str) -> list[Image.Image]:
    """Every photograph of a tar, squashed to a square."""
    with tarfile.open(path) as tar:
        files = [tar.extractfile(member) for member in tar if member.name.lower().endswith((".jpeg", ".jpg"))]
        opened = [Image.open(file).convert("RGB") for file in files if file is not None]
    return [image.resize((SIDE, SIDE), Image.Resampling.BICUBIC) for image in opened]


def by_timm(image: Image.Image) -> np.ndarray:
    """`rand-m9-mstd0.5-inc1` of a program whose interpolation is bicubic."""
    hparams = {"img_mean": GREY, "interpolation": Image.Resampling.BICUBIC}
    try:
        return np.asarray(rand_augment_transform("rand-m9-mstd0.5-inc1", hparams)(image))
    except ValueError:
        return np.zeros((SIDE, SIDE, 3), np.uint8)


def print_distortions(path: str) -> None:
    """Print a table of what RandAugment does to photographs."""
    images = photographs(path)
    sides = {"timm, `rand-m9-mstd0.5-inc1`": lambda image, _: by_timm(image)}
    for name, values in RULES.items():
        transform = TrainTransform(SIDE, "none", flip=False, resample="bicubic_antialias", **values)
        sides[name] = lambda image, rng, transform=transform: (
            transform(np.array(image), rng).permute(1, 2, 0).numpy()
        )
    print("\n| RandAugment | unchanged | change | CPU ms |\n|---|---|---|---|")
    for name, distorted in sides.items():
        unchanged, changes, seconds = 0, [], 0.0
        for number in range(IMAGES):
            image = images[number % len(images)]
            before = time.process_time()
            found = distorted(image, augmentation_rng(0, 0, number))
            seconds += time.process_time() - before
            change = np.abs(found.astype(np.int64) - np.asarray(image)).mean()
            unchanged += change == 0
            changes.append(change)
        share, cost = 100 * unchanged / IMAGES, 1000 * seconds / IMAGES
        print(f"| {name} | {share:.1f} % | {np.mean(changes):.1f} | {cost:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("photographs", help="a tar of JPEG photographs")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    print_crops(375, 500)
    print_crops(200, 640)
    print_distortions(parser.parse_args().photographs)
