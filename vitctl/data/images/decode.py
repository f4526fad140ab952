"""Decode images to pixels.

An image that cannot be decoded raises `BadSample`, whose reason is a category to count by.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitctl.data.images.jpeg import (
    LACKS_SCANS,
    Jpeg,
    decode_rows,
    find_fault,
    lacks_scans,
    num_scans,
    read_header,
    with_end_marker,
)
from vitctl.data.images.orientation import stored_box, turn_of, turned
from vitctl.data.images.webp import is_webp, webp_size
from vitctl.errors import DataError
from vitctl.system.bounds import PICTURE, PIXELS, SCANNED, SCANS
from vitctl.system.memory_lock import acquire

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112
Truncated = Literal["refuse", "pad"]
# Peak memory while an image is decoded, in bytes per pixel; measured in tests/data/test_costly_samples.py.
# By format, else by Pillow's mode; other modes need a second buffer for the conversion to RGB.
_BYTES_PER_PIXEL = {"WEBP": 24, "CMYK JPEG": 20, "RGB": 12, "L": 12, "P": 12, "1": 12}
_OTHER_BYTES_PER_PIXEL = 16
_JPEG_BYTES_PER_PIXEL, _PROGRESSIVE_BYTES_PER_PIXEL = 3, 9


class BadSample(DataError):  # noqa: N818 - it names the sample, not the failure
    """One sample that cannot be used: counted and skipped in training, an error in evaluation.

    Args:
        reason: category to count by, such as `truncated` or `not an image`.
        detail: what was found, for the message.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Picture:
    """An image whose size is known, and whose pixels are decoded lazily: only the region that is requested.

    Args:
        pixels: uint8 `[H, W, 3]`, when they are decoded already.
        data: else the file of a baseline or progressive JPEG, and
        jpeg: its header.
        orientation: Exif orientation, 1 to 8: how stored pixels are rotated and mirrored to be shown.
        truncated: see `decode`.
    """

    def __init__(
        self,
        pixels: np.ndarray | None = None,
        *,
        data: bytes = b"",
        jpeg: Jpeg | None = None,
        orientation: int = 1,
        truncated: Truncated = "refuse",
    ) -> None:
        self._pixels, self._data, self._jpeg, self._turn = pixels, data, jpeg, turn_of(orientation)
        self._truncated: Truncated = truncated
        if jpeg is not None and pixels is None:
            stored = jpeg.height, jpeg.width
        elif pixels is not None and jpeg is None:
            stored = pixels.shape[0], pixels.shape[1]
        else:
            raise ValueError("a picture needs either pixels or the header of a JPEG")
        self.height, self.width = stored[::-1] if self._turn.transpose else stored

    @property
    def num_bytes(self) -> int:
        """Memory that this object holds now."""
        return len(self._data) + (0 if self._pixels is None else self._pixels.nbytes)

    @property
    def is_turned(self) -> bool:
        """Whether the stored pixels are rotated or mirrored to be shown."""
        return any(self._turn)

    def region(
        self, top: int, left: int, height: int, width: int, *, reduce: int = 1, reuse_buffer: bool = False
    ) -> np.ndarray:
        """Decode a rectangular region.

        Args:
            top: first row.
            left: first column.
            height: of the region, in pixels.
            width: of the region, in pixels.
            reduce: 1 for the exact pixels; 2, 4 or 8 to decode a JPEG directly to 1/2, 1/4 or 1/8 of the
                size, with the region rounded outwards to whole pixels. Other formats ignore it.
            reuse_buffer: decode into a buffer of this thread, which the next call with `reuse_buffer`
                overwrites; faster.

        Returns:
            uint8 `[height, width, 3]`, or that divided by `reduce`.

        Raises:
            BadSample: as `decode`.
        """
        part = stored_box(self._turn, (top, left, height, width), self.height, self.width)
        return turned(self._stored(*part, reduce, reuse_buffer), self._turn)

    def _stored(
        self, top: int, left: int, height: int, width: int, reduce: int, reuse_buffer: bool
    ) -> np.ndarray:
        if self._jpeg is not None:
            acquire(_jpeg_bytes(self._jpeg, top + height))
            pixels = decode_rows(self._data, self._jpeg, top + height, reduce, reuse_buffer=reuse_buffer)
            if pixels is not None:
                rows = slice(top // reduce, -(-(top + height) // reduce))
                return pixels[rows, left // reduce : -(-(left + width) // reduce)]
            self._pixels, self._jpeg = _decode_with_pillow(self._data, PIXELS.limit, self._truncated)[0], None
        assert self._pixels is not None
        return self._pixels[top : top + height, left : left + width]


def open_picture(
    data: bytes,
    *,
    max_pixels: int | None = None,
    exif_orientation: bool = True,
    truncated: Truncated = "refuse",
) -> Picture:
    """Open an image lazily: of an 8-bit baseline or progressive JPEG only the header is parsed; other formats
    are decoded at once.

    Args and errors are those of `decode`.
    """
    data = with_end_marker(data)
    max_pixels = PIXELS.limit if max_pixels is None else max_pixels
    jpeg = read_header(data)
    if jpeg is None:
        pixels, orientation = _decode_with_pillow(data, max_pixels, truncated)
        return Picture(pixels, orientation=orientation if exif_orientation else 1)
    if jpeg.width * jpeg.height > max_pixels:
        raise BadSample(
            "too large", f"{jpeg.width}x{jpeg.height} pixels, should be at most {_limit_text(max_pixels)}"
        )
    _check_memory(jpeg.width, jpeg.height, _jpeg_bytes(jpeg, jpeg.height))
    _check_scans(data, jpeg.width * jpeg.height)
    if truncated == "refuse" and not jpeg.can_stop_early and lacks_scans(data, jpeg.num_components):
        raise BadSample(*LACKS_SCANS)  # the decoder reports no error where the data end between two scans
    orientation = jpeg.orientation if exif_orientation else 1
    return Picture(data=data, jpeg=jpeg, orientation=orientation, truncated=truncated)


def from_pillow(image: Image.Image, *, exif_orientation: bool = True) -> Picture:
    """An image that Pillow has opened, with the pixels and the orientation that `decode` gives of its file.

    Args:
        image: in any mode, loaded or not.
        exif_orientation: as for `decode`.

    Raises:
        BadSample: as `decode`.
    """
    with _pillow_problems(b"", PIXELS.limit):
        _check_size(image.mode, image.width, image.height, PIXELS.limit)
        pixels = _rgb(image)
        return Picture(pixels, orientation=_orientation(image) if exif_orientation else 1)


def decode(
    data: bytes,
    *,
    max_pixels: int | None = None,
    exif_orientation: bool = True,
    truncated: Truncated = "refuse",
) -> np.ndarray:
    """Decode an image to RGB.

    Greyscale, palette, alpha, CMYK and 16-bit images become 8-bit RGB: transparency is dropped, and 16-bit
    values keep their high byte. Of an animation the first frame is decoded.

    Args:
        data: the bytes of a JPEG, PNG, WEBP, GIF, BMP or TIFF file.
        max_pixels: refuse images with more pixels, before decoding; None: the limit in docs/bounds.md.
        exif_orientation: rotate and mirror the image according to its Exif or XMP orientation; False keeps
            the stored pixels, as the authors' pipeline does. TIFF files are always oriented, because there it
            is part of the format.
        truncated: how to treat a JPEG whose data are truncated or damaged: `refuse` raises BadSample; `pad`
            returns an image with the missing rows as the decoder fills them (grey). A region above the damage
            is decoded either way.

    Returns:
        uint8 `[H, W, 3]`, writable.

    Raises:
        BadSample: `not an image`, `too large`, `truncated` or `damaged`.
    """
    picture = open_picture(
        data, max_pixels=max_pixels, exif_orientation=exif_orientation, truncated=truncated
    )
    return picture.region(0, 0, picture.height, picture.width)


def _decode_with_pillow(data: bytes, max_pixels: int, truncated: Truncated) -> tuple[np.ndarray, int]:
    """The stored pixels, and the orientation.

    Pillow does not report damage in the compressed data of a JPEG.
    """
    if is_webp(data):
        _check_size("WEBP", *webp_size(data), max_pixels)  # before Pillow allocates memory for all pixels
    with _pillow_problems(data, max_pixels), Image.open(io.BytesIO(data), formats=_FORMATS) as image:
        kind = "CMYK JPEG" if (image.mode, image.format) == ("CMYK", "JPEG") else image.mode
        _check_size(kind, image.width, image.height, max_pixels)
        if image.format == "JPEG":
            _check_scans(data, image.width * image.height)
        pixels, orientation = _rgb(image), _orientation(image)
        fault = find_fault(data) if image.format == "JPEG" and truncated == "refuse" else None
        if fault is not None:
            raise BadSample(*fault)
        return pixels, orientation


@contextmanager
def _pillow_problems(data: bytes, max_pixels: int) -> Iterator[None]:
    """Whatever Pillow raises inside becomes a BadSample.

    Its warnings, about metadata and size, are ignored: we check the size.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except BadSample:
            raise
        except UnidentifiedImageError:
            raise BadSample("not an image", f"begins with {data[:8].hex(' ') or 'nothing'}") from None
        except Image.DecompressionBombError:
            raise BadSample("too large", f"should be at most {max_pixels} pixels") from None
        except MemoryError:
            raise
        except Exception as error:  # Pillow's plugins raise a dozen types for damaged files
            reason = "truncated" if isinstance(error, EOFError) or "truncated" in str(error) else "damaged"
            raise BadSample(reason, " ".join(str(error).split())) from None


def _check_size(kind: str, width: int, height: int, max_pixels: int) -> None:
    """Check the size before decoding, and acquire the memory lock for a large image.

    Raises BadSample where it is too large.
    """
    if width * height > max_pixels:
        raise BadSample("too large", f"{width}x{height} pixels, should be at most {_limit_text(max_pixels)}")
    needed = width * height * _BYTES_PER_PIXEL.get(kind, _OTHER_BYTES_PER_PIXEL)
    _check_memory(width, height, needed)
    acquire(needed)


def _limit_text(max_pixels: int) -> str:
    return str(PIXELS) if max_pixels == PIXELS.limit else f"{max_pixels}"


def _check_memory(width: int, height: int, needed: int) -> None:
    if needed > PICTURE.limit:
        raise BadSample(
            "too large",
            f"{width}x{height} pixels need {needed >> 20} MiB to decode, should be at most "
            f"{PICTURE.limit >> 20} ({PICTURE.variable})",
        )


def _jpeg_bytes(jpeg: Jpeg, num_rows: int) -> int:
    """Memory to decode a JPEG: with several scans the decoder holds the coefficients of the whole image."""
    if jpeg.can_stop_early:
        return min(num_rows, jpeg.height) * jpeg.width * _JPEG_BYTES_PER_PIXEL
    return jpeg.height * jpeg.width * _PROGRESSIVE_BYTES_PER_PIXEL


def _check_scans(data: bytes, num_pixels: int) -> None:
    """Limit decoding time: each scan of a JPEG processes all pixels, however few bytes it has.

    Raises BadSample above the limit.
    """
    scans = num_scans(data)
    if scans > SCANS.limit or (scans > 1 and scans * num_pixels > SCANNED.limit):
        bounds = f"{SCANS.variable}, {SCANNED.variable}"
        raise BadSample(
            "too large", f"a JPEG with {scans} scans of {num_pixels} pixels, more than is allowed ({bounds})"
        )


def _orientation(image: Image.Image) -> int:
    """The Exif orientation of a loaded image.

    It must be loaded, because a PNG may store it after the pixels.
    """
    if image.format == "TIFF":
        return 1  # Pillow has applied it
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata raises many types; the pixels are intact
        return 1


def _rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255 instead of scaling
        high = np.asarray(image) >> 8  # in place from here on, to save memory
        grey = np.clip(high, 0, 255, out=high).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadSample("damaged", "floating-point pixels have no known range")
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))
