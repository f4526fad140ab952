"""Sets drawn by a formula: solid shapes over backgrounds, in the spirit of dSprites and CLEVR, and glyphs.

A picture is a pure function of (seed, split, index), and every factor behind it is known, so one generator
serves many tasks: shape, size, orientation, location, colour, count. The factor of the task is drawn
uniformly and kept clear of the border between two classes; the others vary freely.
"""

import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product

import numpy as np

from vitctl.data.writer.intake import Item

# Signed distance fields: distance of a point outside a shape of radius about 1, negative inside. Each takes x
# (to the right) and y (down), arrays of one shape, and returns distances in the same unit. Far from the edge
# they are bounds rather than distances; near it they are exact, which is what smooth edges need.

Array = np.ndarray


def _disc(x: Array, y: Array, radius: float = 1.0) -> Array:
    return np.asarray(np.sqrt(x * x + y * y) - radius)


def _box(x: Array, y: Array, half_width: float, half_height: float) -> Array:
    return np.asarray(np.maximum(np.abs(x) - half_width, np.abs(y) - half_height))


def _triangle(x: Array, y: Array) -> Array:
    side = (1.9 * np.abs(x) - 0.8 * (y + 1.1)) / np.float32(np.hypot(1.9, 0.8))
    return np.asarray(np.maximum(side, y - 0.8))


def _star(x: Array, y: Array) -> Array:
    fifth = np.float32(2 * np.pi / 5)
    turn = np.abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
    radius = np.sqrt(x * x + y * y)
    return np.asarray(
        (radius * np.cos(turn) - 1.08) * _STAR_NORMAL[0] + radius * np.sin(turn) * _STAR_NORMAL[1]
    )


def _heart(x: Array, y: Array) -> Array:
    """Return the distance to a heart: a square on its corner with a disc on each upper side."""
    y = y + 0.05
    u, v = (x + y) * np.sqrt(0.5, dtype=np.float32), (x - y) * np.sqrt(0.5, dtype=np.float32)
    body = _box(u - 0.1, v + 0.1, 0.58, 0.58)
    return np.asarray(
        np.minimum(body, np.minimum(_disc(u - 0.1, v - 0.48, 0.58), _disc(u + 0.48, v + 0.1, 0.58)))
    )


# Of the edge from a tip (1.08, 0) of the star to the corner between two tips, half as far from the middle.
_STAR_NORMAL = 0.3989551960001989, 0.9169704202341769

FIELDS: dict[str, Callable[[Array, Array], Array]] = {
    "circle": partial(_disc, radius=0.95),
    "square": partial(_box, half_width=0.8, half_height=0.8),
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "crescent": lambda x, y: np.asarray(np.maximum(_disc(x, y), -_disc(x, y + 0.55, 0.85))),  # opens upwards
}

SHAPES = tuple(FIELDS)
ORIENTED = ("triangle", "heart", "crescent")  # these have no rotational symmetry
COLOURS = {
    "red": 0.0,
    "orange": 0.085,
    "yellow": 0.16,
    "green": 0.34,
    "blue": 0.6,
    "purple": 0.79,
}  # hues, 0 to 1
SCALES = (0.20, 0.26, 0.32, 0.38, 0.44, 0.50)  # radius; the picture is 2 wide
ORIENTATIONS = tuple(range(0, 360, 45))  # degrees, clockwise
_CELLS = tuple(product((-1, 0, 1), repeat=2))  # y before x
LOCATIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "centre",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)
MAX_COUNT = 8


@dataclass(frozen=True)
class Shape:
    """One shape in a picture: its class numbers and exact geometry.

    Args:
        shape, colour, scale, orientation, location: indices into `SHAPES`, `COLOURS`, `SCALES`,
            `ORIENTATIONS` and `LOCATIONS`.
        radius: in half pictures.
        angle: in radians, clockwise.
        centre: (y, x), each -1 to 1.
        rgb: 0 to 1.
    """

    shape: int
    colour: int
    scale: int
    orientation: int
    location: int
    radius: float
    angle: float
    centre: tuple[float, float]
    rgb: np.ndarray


Scene = tuple[Shape, ...]


@dataclass(frozen=True)
class Task:
    """A question about the pictures: its answers in label order, and the answer for a scene."""

    class_names: tuple[str, ...]
    label: Callable[[Scene], int]
    shapes: tuple[str, ...] = SHAPES
    max_count: int = 1


TASKS = {
    "all": Task(
        tuple(f"{colour} {shape}" for shape, colour in product(SHAPES, COLOURS)),
        lambda scene: scene[0].shape * len(COLOURS) + scene[0].colour,
    ),
    "shape": Task(SHAPES, lambda scene: scene[0].shape),
    "colour": Task(tuple(COLOURS), lambda scene: scene[0].colour),
    "scale": Task(tuple(f"radius {radius:.2f}" for radius in SCALES), lambda scene: scene[0].scale),
    "orientation": Task(
        tuple(f"{degrees} degrees" for degrees in ORIENTATIONS),
        lambda scene: scene[0].orientation,
        shapes=ORIENTED,
    ),
    "location": Task(LOCATIONS, lambda scene: scene[0].location),
    "count": Task(
        tuple(str(n) for n in range(1, MAX_COUNT + 1)), lambda scene: len(scene) - 1, max_count=MAX_COUNT
    ),
}


def items(task: str, split: str, num_samples: int, seed: int, image_size: int = 32) -> list[Item]:
    """Return the pictures of one split of a task in `TASKS`, drawn on demand; different splits share none."""
    chosen = TASKS[task]
    return [
        Item(
            f"{split}_{index:07d}",
            chosen.label(scene(task, split, index, seed)),
            partial(_png, picture, task, split, index, seed, image_size),
        )
        for index in range(num_samples)
    ]


def scene(task: str, split: str, index: int, seed: int) -> Scene:
    """Return the factors of one picture."""
    return _scene(TASKS[task], _generator(split, index, seed))


def picture(task: str, split: str, index: int, seed: int, image_size: int = 32) -> np.ndarray:
    """Draw one picture, uint8 `[image_size, image_size, 3]`."""
    rng = _generator(split, index, seed)
    shapes = _scene(TASKS[task], rng)
    canvas = _background(rng, image_size)
    for shape in shapes:
        _draw(canvas, shape)
    canvas += 0.012 * rng.standard_normal(canvas.shape[1:], np.float32)
    levels: np.ndarray = np.clip(canvas, 0, 1) * 255 + 0.5
    return levels.astype(np.uint8).transpose(1, 2, 0)


def _png(draw: Callable[..., np.ndarray], *which: str | int) -> bytes:
    """Draw a picture, and encode it as PNG without compression, which noisy pictures gain little from.

    Pillow takes ten times as long for 32 x 32 pixels.

    Source: W3C, Portable Network Graphics (Third Edition), sections 5 and 11.2
    """
    pixels = draw(*which)
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)  # filter type 0 precedes each row
    rows[:, 1:] = pixels.reshape(height, -1)
    chunks = (
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),  # 8 bits a channel, RGB
        (b"IDAT", zlib.compress(rows.tobytes(), 0)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _generator(split: str, index: int, seed: int) -> np.random.Generator:
    return np.random.default_rng((seed, zlib.crc32(split.encode()), index))


def _scene(task: Task, rng: np.random.Generator) -> Scene:
    count = int(rng.integers(1, task.max_count + 1))
    cells = rng.permutation(len(_CELLS))[:count].tolist()
    return tuple(_shape(task, rng, cell) for cell in cells)


def _shape(task: Task, rng: np.random.Generator, location: int) -> Shape:
    crowded = task.max_count > 1
    shape = SHAPES.index(task.shapes[rng.integers(len(task.shapes))])
    colour, scale, orientation = rng.integers(
        (len(COLOURS), 2 if crowded else len(SCALES), len(ORIENTATIONS))
    ).tolist()
    jitter = rng.uniform(-1, 1, 6).tolist()
    radius = SCALES[scale] + 0.02 * jitter[0]
    spread, reach = (
        min(0.64, 0.92 - radius),
        0.03 if crowded else 0.12,
    )  # large shapes stay inside the picture
    y, x = _CELLS[location]
    return Shape(
        shape=shape,
        colour=colour,
        scale=scale,
        orientation=orientation,
        location=location,
        radius=radius,
        angle=math.radians(ORIENTATIONS[orientation] + 15 * jitter[1]),
        centre=(spread * y + reach * jitter[2], spread * x + reach * jitter[3]),
        rgb=_rgb(list(COLOURS.values())[colour] + 0.012 * jitter[4], 0.88, 0.88 + 0.1 * jitter[5]),
    )


def _draw(canvas: np.ndarray, shape: Shape) -> None:
    """Paint a shape with antialiased edges: a soft shadow, then the body, lit from the top left."""
    y, x = _grid(canvas.shape[1])
    y, x = (y - shape.centre[0]) / shape.radius, (x - shape.centre[1]) / shape.radius
    cos, sin = math.cos(shape.angle), math.sin(shape.angle)
    pixels = shape.radius * canvas.shape[1] / 2
    distance = FIELDS[SHAPES[shape.shape]](cos * x + sin * y, cos * y - sin * x) * pixels
    canvas *= 1 - 0.45 * np.exp(np.minimum(-distance, 0) / (0.4 * pixels))
    light = np.clip(0.9 - 0.14 * (x + y), 0.6, 1.15)
    cover = np.clip(0.5 - distance, 0, 1)
    canvas += cover * (light * shape.rgb[:, None, None] - canvas)


def _background(rng: np.random.Generator, image_size: int) -> np.ndarray:
    """Draw two muted tones that blend, with a slow ripple across: `[3, S, S]`, 0 to 1."""
    y, x = _grid(image_size)
    hue, saturation, value, spread, turn, ripple_turn, frequency, phase = rng.uniform(0, 1, 8).tolist()
    value = 0.22 + 0.6 * value
    near = _rgb(hue, 0.3 * saturation, value)
    far = _rgb(
        hue + 0.3 * (spread - 0.5), 0.3 * saturation, min(0.95, max(0.12, value + 0.5 * (spread - 0.5)))
    )
    blend = 0.5 + 0.35 * (math.cos(2 * math.pi * turn) * x + math.sin(2 * math.pi * turn) * y)
    across = math.cos(math.pi * ripple_turn) * x + math.sin(math.pi * ripple_turn) * y
    ripple = 1 + 0.07 * np.sin((3 + 9 * frequency) * across + 2 * math.pi * phase)
    canvas: np.ndarray = (near[:, None, None] + blend * (far - near)[:, None, None]) * ripple
    return canvas


def _rgb(hue: float, saturation: float, value: float) -> np.ndarray:
    """Convert HSV to RGB, all 0 to 1."""
    ramp = np.abs((hue + np.array([0, 2 / 3, 1 / 3])) % 1 * 6 - 3) - 1
    return np.asarray(value * (1 - saturation + saturation * np.clip(ramp, 0, 1)), np.float32)


@lru_cache
def _grid(image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pixel centres from -1 to 1: y `[S, 1]` and x `[1, S]`."""
    line = ((np.arange(image_size) + 0.5) * (2 / image_size) - 1).astype(np.float32)
    return line[:, None], line[None, :]


# Glyphs: letters of an invented alphabet, in the spirit of Omniglot. A letter is two to four strokes between
# the nine points of a 3 x 3 lattice, straight or bent. Each drawing of it is turned, sheared, scaled, moved
# and jittered a little, with a random pen width and a random pair of tones. The label of a picture is its
# letter.

NUM_LETTERS = 60
GLYPHS_SIZES = {"train": 10_000, "test": 1_000}
GLYPH_NAMES = tuple(f"letter {number:02d}" for number in range(NUM_LETTERS))
_ALPHABET_SEED = 2021
_POINTS_PER_STROKE = 6
_LEAST_DIFFERENCE = 0.06  # mean absolute pixel difference of two letters


def glyph_items(split: str, num_samples: int, seed: int, image_size: int = 32) -> list[Item]:
    """Return the glyphs of one split, cycling through the letters, drawn on demand; splits share none."""
    return [
        Item(
            f"{split}_{index:07d}",
            index % NUM_LETTERS,
            partial(_png, glyph_picture, split, index, seed, image_size),
        )
        for index in range(num_samples)
    ]


def glyph_picture(split: str, index: int, seed: int, image_size: int = 32) -> np.ndarray:
    """Draw one glyph, uint8 `[image_size, image_size, 3]`."""
    rng = np.random.default_rng((seed, zlib.crc32(split.encode()), index))
    strokes = glyph_alphabet()[index % NUM_LETTERS]
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
def glyph_alphabet() -> tuple[np.ndarray, ...]:
    """Return the strokes of every letter as polylines, `[strokes, points, 2]`, (y, x), all different.

    They are centred, the longer side from -1 to 1.
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


def _ink(strokes: np.ndarray, width: float, image_size: int) -> np.ndarray:
    """Return the share of each pixel that the pen covers, `[S, S]`, 0 to 1, with antialiased edges."""
    line = (np.arange(image_size, dtype=np.float32) + 0.5) * (2 / image_size) - 1
    (y, x), (down, right) = (
        part.reshape(-1, 2).T.astype(np.float32)[:, :, None]
        for part in (strokes[:, :-1], np.diff(strokes, axis=1))
    )
    y, x = line - y, line - x  # NumPy is fastest if the last axis is long
    length = np.maximum(down**2 + right**2, 1e-9)[:, :, None]
    along = np.clip(((y * down)[:, :, None] + (x * right)[:, None, :]) / length, 0, 1)
    off_y, off_x = y[:, :, None] - along * down[:, :, None], x[:, None, :] - along * right[:, :, None]
    squared = (off_y**2 + off_x**2).min(axis=0)
    return np.asarray(np.clip((width - np.sqrt(squared)) * (image_size / 2) + 0.5, 0, 1))
