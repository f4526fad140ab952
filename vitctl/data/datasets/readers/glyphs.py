"""Glyphs: letters of an invented alphabet, written by a formula, in the spirit of Omniglot.

A letter is two to four strokes between the nine points of a 3 x 3 lattice, straight or bent. Every writing of
it is turned, sheared, scaled, moved and shaken a little, with its own width of pen and its own pair of tones. A
picture is a pure function of (seed, split, index), and its label is its letter.
"""

import zlib
from functools import cache, partial

import numpy as np

from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.writer.intake import Item

NUM_LETTERS = 60
CLASS_NAMES = tuple(f"letter {number:02d}" for number in range(NUM_LETTERS))
_ALPHABET_SEED = 2021
_POINTS_PER_STROKE = 6
_LEAST_DIFFERENCE = 0.06  # mean over the pixels of two letters


def items(split: str, num_samples: int, seed: int, image_size: int = 32) -> list[Item]:
    """Return writings of one split, the letters in turn, drawn when they are read.

    Args:
        split: any name; splits of different names share no picture.
        num_samples: pictures in the split.
        seed: of the whole data set.
        image_size: height and width in pixels.
    """
    return [
        Item(f"{split}_{index:07d}", index % NUM_LETTERS, partial(_png, split, index, seed, image_size))
        for index in range(num_samples)
    ]


def picture(split: str, index: int, seed: int, image_size: int = 32) -> np.ndarray:
    """Draw one writing.

    Returns:
        uint8 `[image_size, image_size, 3]`.
    """
    rng = np.random.default_rng((seed, zlib.crc32(split.encode()), index))
    strokes = alphabet()[index % NUM_LETTERS]
    strokes = strokes + rng.normal(0, 0.05, (len(strokes), 1, 2)) + rng.normal(0, 0.025, strokes.shape)
    angle, shear = rng.normal(0, 0.14), rng.normal(0, 0.12)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ np.array(
        [[1, shear], [0, 1]]
    )
    scale = rng.uniform(0.55, 0.8) * rng.uniform(0.85, 1.15, 2)
    strokes = strokes @ turn.T * scale + rng.uniform(-0.12, 0.12, 2)
    ink = _ink(strokes, rng.uniform(0.08, 0.26), image_size)
    paper, pen = rng.uniform(0, 0.25, 3), rng.uniform(0.65, 1.0, 3)
    if rng.random() < 0.25:
        paper, pen = pen, paper
    canvas = paper + ink[:, :, None] * (pen - paper) + rng.normal(0, 0.02, (image_size, image_size, 3))
    return (np.clip(canvas, 0, 1) * 255 + 0.5).astype(np.uint8)


@cache
def alphabet() -> tuple[np.ndarray, ...]:
    """Return the strokes of every letter as polylines, `[strokes, points, 2]`, (y, x).

    They are centred, the longer side from -1 to 1. A letter that looks too much like an earlier one is skipped.
    """
    letters: list[np.ndarray] = []
    inks: list[np.ndarray] = []
    rng = np.random.default_rng(_ALPHABET_SEED)
    while len(letters) < NUM_LETTERS:
        strokes = _letter(rng)
        ink = _ink(0.7 * strokes, 0.12, 32)
        if all(np.abs(ink - other).mean() > _LEAST_DIFFERENCE for other in inks):
            letters.append(strokes)
            inks.append(ink)
    return tuple(letters)


def _letter(rng: np.random.Generator) -> np.ndarray:
    lattice = np.array([(y, x) for y in (-1.0, 0.0, 1.0) for x in (-1.0, 0.0, 1.0)])
    along = np.linspace(0, 1, _POINTS_PER_STROKE)[:, None]
    strokes, here = [], int(rng.integers(len(lattice)))
    for _ in range(int(rng.integers(2, 5))):
        there = int(rng.choice([point for point in range(len(lattice)) if point != here]))
        begin, end = lattice[here], lattice[there]
        side = (end - begin)[::-1] * (1, -1) * rng.choice([-0.45, 0.0, 0.0, 0.45])
        strokes.append(begin + along * (end - begin) + 4 * along * (1 - along) * side)
        here = there if rng.random() < 0.75 else int(rng.integers(len(lattice)))
    points = np.stack(strokes)
    low, high = points.min(axis=(0, 1)), points.max(axis=(0, 1))
    centred: np.ndarray = points - (low + high) / 2
    return np.asarray(centred * (2 / max(high - low)))


def _png(split: str, index: int, seed: int, image_size: int) -> bytes:
    return encode_png(picture(split, index, seed, image_size))


def _ink(strokes: np.ndarray, width: float, image_size: int) -> np.ndarray:
    """Return the share of each pixel that the pen covers: `[S, S]`, 0 to 1. Edges are one pixel soft."""
    line = (np.arange(image_size, dtype=np.float32) + 0.5) * (2 / image_size) - 1
    (y, x), (down, right) = (
        part.reshape(-1, 2).T.astype(np.float32)[:, :, None]
        for part in (strokes[:, :-1], np.diff(strokes, axis=1))
    )
    y, x = line - y, line - x  # [segments, S] each: numpy is quickest where the last axis is long
    length = np.maximum(down**2 + right**2, 1e-9)[:, :, None]
    along = np.clip(((y * down)[:, :, None] + (x * right)[:, None, :]) / length, 0, 1)
    off_y, off_x = y[:, :, None] - along * down[:, :, None], x[:, None, :] - along * right[:, :, None]
    squared = (off_y**2 + off_x**2).min(axis=0)
    return np.asarray(np.clip((width - np.sqrt(squared)) * (image_size / 2) + 0.5, 0, 1))
