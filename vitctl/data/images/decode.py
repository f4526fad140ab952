"""Encoded bytes to pixels. A picture that cannot be read becomes a `BadSample` with a word to count it by."""

import io
import warnings
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitctl.data.images.jpeg import (
    LACKS_SCANS,
    Jpeg,
    decode_rows,
    ended,
    find_fault,
    lacks_scans,
    num_scans,
    read_header,
)
from vitctl.data.images.orientation import stored_box, turn_of, turned
from vitctl.data.images.webp import is_webp, webp_size
from vitctl.errors import DataError
from vitctl.system.bounds import PICTURE, PIXELS, SCANNED, SCANS
from vitctl.system.memory_lock import acquire

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112
Truncated = Literal["refuse", "pad"]
# Memory that Pillow and we take while a picture is decoded, in bytes a pixel; measured, tests/data/test_costly_samples.py.
# By format, else by the mode of its pixels; other modes are made into RGB beside what they are.
_BYTES_A_PIXEL = {"WEBP": 24, "CMYK JPEG": 20, "RGB": 12, "L": 12, "P": 12, "1": 12}
_OTHER_BYTES_A_PIXEL = 16
_JPEG_BYTES_A_PIXEL, _PROGRESSIVE_BYTES_A_PIXEL = 3, 9


class BadSample(DataError):  # noqa: N818 - it names the sample, not the failure
    """One sample that cannot be used: counted and skipped in training, an error in evaluation.

    Args:
        reason: a few words to count by, such as `truncated` or `not an image`.
        detail: what exactly was found, for the message.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class Picture:
    """An encoded image whose size is known, and whose pixels are decoded when and as far as they are asked for.

    Args:
        pixels: uint8 `[H, W, 3]`, when they are there already.
        data: the file of a common JPEG, and
        jpeg: its header, when they are not.
        orientation: 1 to 8 as Exif counts, how those pixels are turned to become the picture.
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
            raise ValueError("a picture has either pixels or a JPEG's header")
        self.height, self.width = stored[::-1] if self._turn.transpose else stored

    @property
    def num_bytes(self) -> int:
        """Memory that it takes as it is."""
        return len(self._data) + (0 if self._pixels is None else self._pixels.nbytes)

    @property
    def is_turned(self) -> bool:
        """Whether the pixels are stored another way than they are shown."""
        return any(self._turn)

    def region(
        self, top: int, left: int, height: int, width: int, *, reduce: int = 1, short_lived: bool = False
    ) -> np.ndarray:
        """Decode a part.

        Args:
            top: first row.
            left: first column.
            height: of the part, in pixels.
            width: of the part, in pixels.
            reduce: 1 for the exact pixels; 2, 4 or 8 to let a JPEG decode straight to this fraction of the size, the part
                rounded outwards to whole pixels. Other pictures give the exact pixels still.
            short_lived: let the next short-lived part decoded in this thread overwrite this one, which is quicker.

        Returns:
            uint8 `[height, width, 3]`, or of a fraction of it.

        Raises:
            BadSample: as `decode`.
        """
        part = stored_box(self._turn, (top, left, height, width), self.height, self.width)
        return turned(self._stored(*part, reduce, short_lived), self._turn)

    def _stored(self, top: int, left: int, height: int, width: int, reduce: int, short_lived: bool) -> np.ndarray:
        if self._jpeg is not None:
            acquire(_jpeg_bytes(self._jpeg, top + height))
            pixels = decode_rows(self._data, self._jpeg, top + height, reduce, short_lived=short_lived)
            if pixels is not None:
                rows = slice(top // reduce, -(-(top + height) // reduce))
                return pixels[rows, left // reduce : -(-(left + width) // reduce)]
            self._pixels, self._jpeg = _decode_with_pillow(self._data, PIXELS.limit, self._truncated)[0], None
        assert self._pixels is not None
        return self._pixels[top : top + height, left : left + width]


def open_picture(
    data: bytes, *, max_pixels: int | None = None, exif_orientation: bool = True, truncated: Truncated = "refuse"
) -> Picture:
    """Find out the size of an image. Of a common JPEG only the header is read; anything else is decoded.

    Args and errors are those of `decode`.
    """
    data = ended(data)
    max_pixels = PIXELS.limit if max_pixels is None else max_pixels
    jpeg = read_header(data)
    if jpeg is None:
        pixels, orientation = _decode_with_pillow(data, max_pixels, truncated)
        return Picture(pixels, orientation=orientation if exif_orientation else 1)
    if jpeg.width * jpeg.height > max_pixels:
        raise BadSample("too large", f"{jpeg.width}x{jpeg.height} pixels, should be at most {_told(max_pixels)}")
    _check_memory(jpeg.width, jpeg.height, _jpeg_bytes(jpeg, jpeg.height))
    _check_scans(data, jpeg.width * jpeg.height)
    if truncated == "refuse" and not jpeg.can_stop and lacks_scans(data, jpeg.num_colours):
        raise BadSample(*LACKS_SCANS)  # the decoder says nothing where the code ends between two scans
    orientation = jpeg.orientation if exif_orientation else 1
    return Picture(data=data, jpeg=jpeg, orientation=orientation, truncated=truncated)


def decode(
    data: bytes, *, max_pixels: int | None = None, exif_orientation: bool = True, truncated: Truncated = "refuse"
) -> np.ndarray:
    """Decode an image to RGB.

    Grey, palette, alpha, CMYK and 16-bit pictures become 8-bit RGB: transparency is dropped, and 16-bit
    values keep their high byte. Of an animation the first frame is taken.

    Args:
        data: the bytes of a JPEG, PNG, WEBP, GIF, BMP or TIFF file.
        max_pixels: refuse pictures of more pixels than this, before any of them is decoded; None: as docs/bounds.md says.
        exif_orientation: turn the picture upright as its Exif or XMP data says; False leaves the pixels as they are stored,
            as the authors' pipeline does. A TIFF file is always turned: there the orientation belongs to the format.
        truncated: what a JPEG is whose code ends before its last row, or is damaged: `refuse`: a bad sample; `pad`: a picture
            whose missing rows are what the decoder makes of nothing. A part that lies above the damage is decoded either way.

    Returns:
        uint8 `[H, W, 3]`, writable.

    Raises:
        BadSample: `not an image`, `too large`, `truncated` or `damaged`.
    """
    picture = open_picture(data, max_pixels=max_pixels, exif_orientation=exif_orientation, truncated=truncated)
    return picture.region(0, 0, picture.height, picture.width)


def _decode_with_pillow(data: bytes, max_pixels: int, truncated: Truncated) -> tuple[np.ndarray, int]:
    """The pixels as they are stored, and the orientation. Pillow says nothing of damage in a JPEG's code."""
    if is_webp(data):
        _check_size("WEBP", *webp_size(data), max_pixels)  # Pillow makes room for all of it before it tells the size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's remarks on metadata; the bound on pixels is ours
        try:
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                kind = "CMYK JPEG" if (image.mode, image.format) == ("CMYK", "JPEG") else image.mode
                _check_size(kind, image.width, image.height, max_pixels)
                if image.format == "JPEG":
                    _check_scans(data, image.width * image.height)
                pixels, orientation = _rgb(image), _orientation(image)
                fault = find_fault(data) if image.format == "JPEG" and truncated == "refuse" else None
                if fault is not None:
                    raise BadSample(*fault)
                return pixels, orientation
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
    """Before a picture is decoded; a large one waits for its turn here. Raises BadSample where it is too large."""
    if width * height > max_pixels:
        raise BadSample("too large", f"{width}x{height} pixels, should be at most {_told(max_pixels)}")
    needed = width * height * _BYTES_A_PIXEL.get(kind, _OTHER_BYTES_A_PIXEL)
    _check_memory(width, height, needed)
    acquire(needed)


def _told(max_pixels: int) -> str:
    return str(PIXELS) if max_pixels == PIXELS.limit else f"{max_pixels}"


def _check_memory(width: int, height: int, needed: int) -> None:
    if needed > PICTURE.limit:
        raise BadSample(
            "too large",
            f"{width}x{height} pixels need {needed >> 20} MiB to decode, should be at most {PICTURE.limit >> 20} ({PICTURE.variable})",
        )


def _jpeg_bytes(jpeg: Jpeg, num_rows: int) -> int:
    """Memory to decode a common JPEG: one in several passes keeps the coefficients of all of it."""
    if jpeg.can_stop:
        return min(num_rows, jpeg.height) * jpeg.width * _JPEG_BYTES_A_PIXEL
    return jpeg.height * jpeg.width * _PROGRESSIVE_BYTES_A_PIXEL


def _check_scans(data: bytes, num_pixels: int) -> None:
    """Each scan of a JPEG goes over all its pixels, however few bytes it has. Raises BadSample where that takes too long."""
    scans = num_scans(data)
    if scans > SCANS.limit or (scans > 1 and scans * num_pixels > SCANNED.limit):
        bounds = f"{SCANS.variable}, {SCANNED.variable}"
        raise BadSample(
            "too large", f"a JPEG that passes {scans} times over {num_pixels} pixels, more than is allowed ({bounds})"
        )


def _orientation(image: Image.Image) -> int:
    """Of a loaded image: a PNG may tell it behind its pixels."""
    if image.format == "TIFF":
        return 1  # Pillow has turned it
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata raise as many types as damaged pixels, and these are whole
        return 1


def _rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I"):  # 16-bit grey, which Pillow would clip at 255 instead of scaling
        high = np.asarray(image) >> 8  # in place from here on: of wide numbers each copy counts
        grey = np.clip(high, 0, 255, out=high).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if image.mode == "F":
        raise BadSample("damaged", "floating-point pixels have no known range")
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))
