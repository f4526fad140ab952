"""Signed distance fields: how far a point lies outside a shape of radius about 1, negative inside.

Every function takes x (to the right) and y (down), arrays of one shape, and gives distances in the same unit.
Far from the edge they are bounds rather than distances; near it they are true, which is what smooth edges
need.
"""

import numpy as np

Array = np.ndarray


def _disc(x: Array, y: Array, radius: float = 1.0) -> Array:
    return np.asarray(np.sqrt(x * x + y * y) - radius)


def _box(x: Array, y: Array, half_width: float, half_height: float) -> Array:
    return np.asarray(np.maximum(np.abs(x) - half_width, np.abs(y) - half_height))


def circle(x: Array, y: Array) -> Array:
    """A disc."""
    return _disc(x, y, 0.95)


def square(x: Array, y: Array) -> Array:
    """A square."""
    return _box(x, y, 0.8, 0.8)


def triangle(x: Array, y: Array) -> Array:
    """A tall triangle that points up."""
    side = (1.9 * np.abs(x) - 0.8 * (y + 1.1)) / np.float32(np.hypot(1.9, 0.8))
    return np.asarray(np.maximum(side, y - 0.8))


def star(x: Array, y: Array) -> Array:
    """A star of five points."""
    fifth = np.float32(2 * np.pi / 5)
    turn = np.abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
    radius = np.sqrt(x * x + y * y)
    return np.asarray(
        (radius * np.cos(turn) - 1.08) * _STAR_NORMAL[0] + radius * np.sin(turn) * _STAR_NORMAL[1]
    )


def heart(x: Array, y: Array) -> Array:
    """A heart: a square on its corner with a disc on each upper side."""
    y = y + 0.05
    u, v = (x + y) * np.sqrt(0.5, dtype=np.float32), (x - y) * np.sqrt(0.5, dtype=np.float32)
    body = _box(u - 0.1, v + 0.1, 0.58, 0.58)
    return np.asarray(
        np.minimum(body, np.minimum(_disc(u - 0.1, v - 0.48, 0.58), _disc(u + 0.48, v + 0.1, 0.58)))
    )


def crescent(x: Array, y: Array) -> Array:
    """A waxing moon, open to the upper side."""
    return np.asarray(np.maximum(_disc(x, y), -_disc(x, y + 0.55, 0.85)))


def _inner_corner_normal() -> tuple[float, float]:
    """Normal of the edge from a tip (1.08, 0) of the star to the corner between two tips."""
    corner = 0.5 * np.array([np.cos(np.pi / 5), np.sin(np.pi / 5)])
    edge = corner - np.array([1.08, 0])
    normal = np.array([edge[1], -edge[0]]) / np.hypot(*edge)
    return float(normal[0]), float(normal[1])


_STAR_NORMAL = _inner_corner_normal()

FIELDS = {
    "circle": circle,
    "square": square,
    "triangle": triangle,
    "star": star,
    "heart": heart,
    "crescent": crescent,
}
