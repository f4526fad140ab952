"""Pictures inside a page: thumbnails of images, and those that `vitctl inspect` left in a run.

Bounded in bytes.
"""

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitctl.errors import CheckpointError, VitctlError
from vitctl.report.page.markup import Html, tag
from vitctl.system.files import read_bytes

INSPECT = "inspect"
THUMBNAIL = 112  # pixels of the longer side
_MOST_FILE = 16 * 2**20
_WIDEST = 1400
_MOST_PIXELS = 40_000_000
_KINDS = {".png": "image/png", ".svg": "image/svg+xml"}
_MOST_PICTURES = 40


@dataclass
class Budget:
    """How many bytes of pictures a page may still take."""

    left: int

    def takes(self, size: int) -> bool:
        """Whether there is room for `size` bytes, which are then taken."""
        if size > self.left:
            return False
        self.left -= size
        return True


def thumbnail(pixels: np.ndarray, alt: str, budget: Budget) -> Html | None:
    """A small JPEG, small images enlarged without blur; None where the page is full.

    Args:
        pixels: uint8 `[H, W, 3]`.
        alt: what it shows.
        budget: of the page.
    """
    image = Image.fromarray(np.ascontiguousarray(pixels))
    scale = THUMBNAIL / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    fitted = image.resize(size, Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS)
    file = io.BytesIO()
    fitted.save(file, "JPEG", quality=82)
    return _embedded(file.getvalue(), "image/jpeg", alt, budget, width=size[0], height=size[1])


def inspect_pictures(run: Path, budget: Budget) -> tuple[list[Html], list[str]]:
    """Figures of the PNG and SVG files under RUN/inspect, and a line for each that could not be shown.

    An SVG is shown as an image, in which a browser runs no script. Of a picture in both formats the smaller
    is taken.
    """
    figures, problems = [], []
    for number, path in enumerate(_files(run / INSPECT)):
        name = str(path.relative_to(run))
        if number >= _MOST_PICTURES:
            problems.append(f"more than {_MOST_PICTURES} pictures; the others are in {INSPECT}/")
            break
        title = " ".join(path.stem.replace("_", " ").replace("-", " ").split()) or name
        try:
            content, kind = _content(path)
        except (VitctlError, OSError, ValueError, Image.DecompressionBombError) as error:
            problems.append(f"{name}: {error}")
            continue
        picture = _embedded(content, kind, f"{title}, drawn by vitctl inspect", budget)
        if picture is None:
            problems.append(f"{name}: the page has no room for it")
        else:
            figures.append(
                tag("figure", tag("figcaption", title[:1].upper() + title[1:]), picture, class_="picture")
            )
    return figures, problems


def _files(folder: Path) -> Iterator[Path]:
    found: dict[Path, Path] = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.suffix.lower() in _KINDS and path.is_file() and not path.is_symlink():
            other = found.get(path.with_suffix(""))
            if other is None or path.stat().st_size < other.stat().st_size:
                found[path.with_suffix("")] = path
    yield from found.values()


def _content(path: Path) -> tuple[bytes, str]:
    """The bytes to embed: of an SVG its own, of a PNG those of a copy that is no wider than needed."""
    content = read_bytes(path, _MOST_FILE, error=CheckpointError)
    if path.suffix.lower() == ".svg":
        return content, _KINDS[".svg"]
    with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
        if image.width * image.height > _MOST_PIXELS:
            raise CheckpointError(f"{image.width} x {image.height} pixels are too many")
        if image.width <= _WIDEST:
            image.load()
            return content, _KINDS[".png"]
        smaller = image.convert("RGB").resize((_WIDEST, max(1, round(image.height * _WIDEST / image.width))))
    file = io.BytesIO()
    smaller.save(file, "PNG", optimize=True)
    return file.getvalue(), _KINDS[".png"]


def _embedded(content: bytes, kind: str, alt: str, budget: Budget, **more: object) -> Html | None:
    address = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return tag("img", src=address, alt=alt, **more) if budget.takes(len(address)) else None
