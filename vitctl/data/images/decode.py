"""Decode images to pixels, and convert files to JPEG before storage: HEIC, and large JPEGs on request.

An image that cannot be decoded raises `BadSample`, whose reason is a category to count by. Only the
conversions change the bytes of an image.
"""

import io
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageFile, UnidentifiedImageError

from vitctl.data.images.image_types import image_extension, is_heic, refusal
from vitctl.data.images.jpeg import (
    LACKS_SCANS,
    Jpeg,
    cut_out,
    decode_rows,
    find_fault,
    lacks_scans,
    num_scans,
    read_header,
    restart_interval,
    unread_coding,
    with_end_marker,
)
from vitctl.data.images.pixel_digest import is_flat
from vitctl.errors import DataError
from vitctl.system import limits
from vitctl.system.process import acquire

# Pillow's plugins by `image_extension`; a file is opened by its signature's.
_PLUGINS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "gif": "GIF", "bmp": "BMP", "tif": "TIFF"}
_PLUGINS |= dict.fromkeys(("pbm", "pgm", "ppm"), "PPM")
_MAX_TEXT = 8 * 2**20  # bytes of a plain-text image, of which Pillow reads a few million per second
Truncated = Literal["refuse", "pad"]
# Peak memory of decoding, in bytes per pixel; measured in tests/data/test_costly_samples.py. By format, else
# by Pillow's mode; other modes need a second buffer for the conversion to RGB. For several scans, a JPEG
# decoder holds the coefficients of the complete image.
_BYTES_PER_PIXEL = {"WEBP": 24, "CMYK JPEG": 20, "RGB": 12, "L": 12, "P": 12, "1": 12}
_BYTES_PER_PIXEL |= {"one scan": 3, "several scans": 9}
_OTHER_BYTES_PER_PIXEL = 16
_ORIENTATION = 0x0112
# TIFF 6.0, sections 3 to 8 and 19: tags, and some of their values; libtiff's number of WEBP
_BITS_PER_SAMPLE, _COMPRESSION, _PHOTOMETRIC, _PLANAR, _SAMPLE_FORMAT = 258, 259, 262, 284, 339
_COLOUR_MAP, _WHITE_IS_ZERO, _UNSIGNED, _WEBP = 320, 0, 1, 50001


class BadSample(DataError):  # noqa: N818 - it names the sample, not the failure
    """An unusable sample: counted and skipped in training, an error in evaluation.

    `where` is a category to count by, such as `truncated` or `not an image`; `what` holds any details.
    """

    @property
    def reason(self) -> str:
        return self.where or self.what


class _Turn(NamedTuple):
    """The conversion of stored pixels for display: transpose first, then flip rows, then flip columns."""

    transpose: bool
    flip_rows: bool
    flip_columns: bool


# Exif 2.32, 4.6.4 A: the visual position of the 0th row and the 0th column of the stored pixels.
_TURNS = {
    1: _Turn(False, False, False),
    2: _Turn(False, False, True),
    3: _Turn(False, True, True),
    4: _Turn(False, True, False),
    5: _Turn(True, False, False),
    6: _Turn(True, False, True),
    7: _Turn(True, True, True),
    8: _Turn(True, True, False),
}


class Picture:
    """An image of known size, whose pixels are decoded lazily: only the requested region.

    Args:
        stored: decoded pixels, uint8 `[H, W, 3]`; or the header of a JPEG, which is decoded later.
        orientation: Exif orientation of the stored pixels.
    """

    def __init__(
        self, stored: np.ndarray | Jpeg, orientation: int = 1, truncated: Truncated = "refuse"
    ) -> None:
        self._stored, self._turn = stored, _TURNS.get(orientation, _TURNS[1])
        self._truncated: Truncated = truncated
        sides = (stored.height, stored.width) if isinstance(stored, Jpeg) else stored.shape[:2]
        self.height, self.width = sides[::-1] if self._turn.transpose else sides

    @property
    def num_bytes(self) -> int:
        return len(self._stored.data) if isinstance(self._stored, Jpeg) else self._stored.nbytes

    @property
    def is_turned(self) -> bool:
        """Return whether the stored pixels are rotated or mirrored for display."""
        return any(self._turn)

    def region(
        self, top: int, left: int, height: int, width: int, *, reduce: int = 1, reuse_buffer: bool = False
    ) -> np.ndarray:
        """Decode a rectangular region, in pixels of the displayed image.

        Args:
            reduce: 1 for the exact pixels; 2, 4 or 8 to decode a JPEG directly to 1/2, 1/4 or 1/8 of the
                size, with the region rounded outwards to integer pixels. Other formats ignore it.
            reuse_buffer: decode into a buffer of this thread, which the next call with `reuse_buffer`
                overwrites; faster.

        Returns:
            uint8 `[height, width, 3]`, or that divided by `reduce`.
        """
        turn = self._turn
        top = self.height - top - height if turn.flip_rows else top
        left = self.width - left - width if turn.flip_columns else left
        if turn.transpose:
            top, left, height, width = left, top, width, height
        box = top, left, top + height, left + width
        if isinstance(self._stored, Jpeg):
            pixels = self._of_jpeg(self._stored, box, reduce, reuse_buffer)
        else:
            pixels = self._stored[top : box[2], left : box[3]]
        if not any(turn):
            return pixels
        pixels = pixels.transpose(1, 0, 2) if turn.transpose else pixels
        return np.ascontiguousarray(pixels[:: -1 if turn.flip_rows else 1, :: -1 if turn.flip_columns else 1])

    def _of_jpeg(
        self, whole: Jpeg, box: tuple[int, int, int, int], reduce: int, reuse_buffer: bool
    ) -> np.ndarray:
        """Decode as little of a JPEG as a box needs: top, left, bottom, right."""
        top, left, bottom, right = box
        jpeg, y, x = cut_out(whole, *box, reduce)
        acquire(_jpeg_bytes(jpeg, bottom - y))
        pixels = decode_rows(jpeg, bottom - y, reduce, reuse_buffer=reuse_buffer)
        if pixels is not None:
            rows = slice((top - y) // reduce, -(-(bottom - y) // reduce))
            return pixels[rows, (left - x) // reduce : -(-(right - x) // reduce)]
        self._stored = _decode_with_pillow(whole.data, "jpg", self._truncated)[0]
        return self._stored[top:bottom, left:right]


def open_picture(data: bytes, *, exif_orientation: bool = True, truncated: Truncated = "refuse") -> Picture:
    """Open an image lazily; arguments and errors are those of `decode`.

    Only the header of an 8-bit baseline or progressive JPEG is parsed; other formats are decoded at once.
    """
    extension, jpeg = image_extension(data), None
    if extension is None and is_heic(data):
        data, extension = without_heic(data), "jpg"
    if extension == "jpg":
        data = with_end_marker(data)
        jpeg = read_header(data)
    if jpeg is None:
        pixels, orientation = _decode_with_pillow(data, extension, truncated)
        return Picture(pixels, orientation if exif_orientation else 1)
    _check_cost(jpeg.width, jpeg.height, "one scan" if jpeg.can_stop_early else "several scans")
    if not jpeg.has_one_scan:
        _check_scans(data, jpeg.width * jpeg.height)
    if truncated == "refuse" and not jpeg.can_stop_early and lacks_scans(data, jpeg.num_components):
        raise BadSample(*LACKS_SCANS)  # the decoder reports no error if the data end between two scans
    orientation = 1
    if exif_orientation and jpeg.has_metadata:
        file = io.BytesIO(data)
        with suppress(BadSample), _pillow_problems(), Image.open(file, formats=("JPEG",)) as image:
            orientation = _orientation(image)
    return Picture(jpeg, orientation, truncated)


def num_pixels(data: bytes) -> int:
    """Return how many pixels decoding an image would cost, by its header; 0 if it would be refused first."""
    with suppress(BadSample), _pillow_problems():
        if is_heic(data):
            import pillow_heif

            width, height = pillow_heif.open_heif(io.BytesIO(data)).size
        elif (extension := image_extension(data)) == "jpg" and (jpeg := read_header(data)):
            width, height = jpeg.width, jpeg.height
        elif extension:
            with Image.open(io.BytesIO(data), formats=(_PLUGINS[extension],)) as image:
                width, height = image.size
        else:
            return 0
        return width * height if width * height <= limits.PIXELS else 0
    return 0


def from_pillow(image: Image.Image, *, exif_orientation: bool = True) -> Picture:
    """Convert an image opened with Pillow to the pixels and orientation that `decode` returns."""
    with _pillow_problems():
        acquire(_check_cost(image.width, image.height, image.mode))
        pixels = _rgb(image)
        return Picture(pixels, _orientation(image) if exif_orientation else 1)


def decode(data: bytes, *, exif_orientation: bool = True, truncated: Truncated = "refuse") -> np.ndarray:
    """Decode an image to RGB.

    Greyscale, palette, alpha, CMYK and 16-bit images become 8-bit RGB: 12-bit and 16-bit values keep their
    eight high bits, and transparency is dropped, unless nothing would be left of the picture: see
    `_drawn_in_alpha`. Only the first frame of an animation is decoded.

    Args:
        data: the bytes of a JPEG, PNG, WEBP, GIF, BMP, TIFF, PNM or HEIC file.
        exif_orientation: rotate and mirror the image according to its Exif or XMP orientation; False keeps
            the stored pixels, as the authors' pipeline does. TIFF files are always oriented, because there it
            is part of the format.
        truncated: how to treat a JPEG whose data are truncated or damaged: `refuse` raises BadSample; `pad`
            returns an image with the missing rows as the decoder fills them (grey). A region above the
            damage, or between other restart markers, is decoded either way.

    Returns:
        uint8 `[H, W, 3]`, writable.

    Raises:
        BadSample: `not an image`, `unsupported format`, `unsupported pixels`, `too large`, `truncated` or
            `damaged`.
    """
    picture = open_picture(data, exif_orientation=exif_orientation, truncated=truncated)
    return picture.region(0, 0, picture.height, picture.width)


def _decode_with_pillow(data: bytes, extension: str | None, truncated: Truncated) -> tuple[np.ndarray, int]:
    """Return the stored pixels, and the orientation. Pillow ignores damaged JPEG data, so it is checked."""
    if extension is None:
        raise BadSample(*refusal(data))
    plugin = _PLUGINS[extension]
    if extension == "png":
        _check_png(data)
    if extension == "jpg" and (coding := unread_coding(data)):
        raise BadSample("unsupported format", f"{coding}; convert it to PNG")
    with _pillow_problems(plugin), Image.open(io.BytesIO(data), formats=(plugin,)) as image:
        kind = "CMYK JPEG" if (image.mode, plugin) == ("CMYK", "JPEG") else image.mode
        kind = plugin if plugin == "WEBP" else kind
        acquire(_check_cost(image.width, image.height, kind))
        if plugin == "JPEG":
            _check_scans(data, image.width * image.height)
        scaled = _scaled_pnm(image, data) if plugin == "PPM" else None
        pixels, orientation = _rgb(image) if scaled is None else scaled, _orientation(image)
        fault = find_fault(data) if plugin == "JPEG" and truncated == "refuse" else None
        if fault is not None:
            raise BadSample(*fault)
        return pixels, orientation


def _check_png(data: bytes) -> None:
    """Verify the checksums of the compressed pixels, which Pillow ignores: damage may show wrong pixels."""
    at = len(b"\x89PNG\r\n\x1a\n")
    while (end := at + 8 + int.from_bytes(data[at : at + 4])) + 4 <= len(data):
        named = data[at + 4 : end]
        if named.startswith(b"IDAT") and zlib.crc32(named) != int.from_bytes(data[end : end + 4]):
            raise BadSample("damaged", "the checksum of the compressed pixels is another (PNG)")
        at = end + 4


@contextmanager
def _pillow_problems(plugin: str = "image") -> Iterator[None]:
    """Convert whatever Pillow raises to a BadSample, and ignore its warnings about metadata and size."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except (BadSample, MemoryError):
            raise
        except UnidentifiedImageError:
            unknown = f"Pillow cannot open this {plugin}: convert it to PNG, if it is not damaged"
            raise BadSample("damaged", unknown) from None
        except Image.DecompressionBombError:
            raise BadSample("too large", f"should be at most {limits.PIXELS:,} pixels") from None
        except Exception as error:  # Pillow's plugins raise a dozen types for damaged files
            reason = "truncated" if isinstance(error, EOFError) or "truncated" in str(error) else "damaged"
            raise BadSample(reason, " ".join(str(error).split())) from None


def _check_cost(width: int, height: int, kind: str) -> int:
    """Check pixels and memory against their limits before decoding, and return the memory in bytes."""
    num_bytes = width * height * _BYTES_PER_PIXEL.get(kind, _OTHER_BYTES_PER_PIXEL)
    if not width * height:
        raise BadSample("not an image", f"{width}x{height} pixels")
    if width * height > limits.PIXELS:
        raise BadSample("too large", f"{width}x{height} pixels, should be at most {limits.PIXELS:,}")
    if num_bytes > limits.PICTURE:
        raise BadSample(
            "too large",
            f"{width}x{height} pixels need {num_bytes >> 20} MiB to decode, should be at most "
            f"{limits.PICTURE >> 20} MiB",
        )
    return num_bytes


def _jpeg_bytes(jpeg: Jpeg, num_rows: int) -> int:
    if jpeg.can_stop_early:
        return min(num_rows, jpeg.height) * jpeg.width * _BYTES_PER_PIXEL["one scan"]
    return jpeg.height * jpeg.width * _BYTES_PER_PIXEL["several scans"]


def _check_scans(data: bytes, num_pixels: int) -> None:
    """Limit decoding time: each scan of a JPEG processes all pixels, however few bytes it has."""
    scans = num_scans(data)
    if scans > limits.SCANS or (scans > 1 and scans * num_pixels > limits.SCANNED):
        raise BadSample(
            "too large",
            f"a JPEG with {scans} scans of {num_pixels} pixels, should be at most {limits.SCANS} scans, and "
            f"{limits.SCANNED:,} pixels in all of them",
        )


def _orientation(image: Image.Image) -> int:
    """Return the Exif orientation of an image, which must be loaded: a PNG may store it after the pixels."""
    if image.format == "TIFF":
        return 1  # Pillow has applied it
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata raises many types; the pixels are intact
        return 1


def _rgb(image: Image.Image) -> np.ndarray:
    """Return the stored pixels as 8-bit RGB, scaled from the range that the file declares.

    Raises BadSample for pixels without a known range, and for those that Pillow decodes wrongly.
    """
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    signed = not {*tags.get(_SAMPLE_FORMAT, ())} <= {_UNSIGNED}
    # A PGM file of more than 8 bits is scaled to 16 by Pillow.
    if image.mode == "F" or signed or (image.mode == "I" and image.format != "PPM"):
        raise BadSample(
            "unsupported pixels",
            "signed, 32-bit and floating-point pixels have no known range; convert to 8 or 16 bits, unsigned",
        )
    if tags.get(_COMPRESSION) == _WEBP:
        raise BadSample("unsupported format", "TIFF compressed by WEBP; convert it to PNG")
    layout = tags.get(_PLANAR, 1), tags.get(_COMPRESSION, 1), max(tags.get(_BITS_PER_SAMPLE, (1,)))
    if layout == (2, 1, 16):
        raise BadSample("unsupported pixels", "16-bit planes, not compressed; interleave the channels")
    if image.mode.startswith("I"):  # grey of 12 or 16 bits, which Pillow would clip at 255 instead of scaling
        deep, bits = np.asarray(image), tags.get(_BITS_PER_SAMPLE, (16,))[0]
        # Pillow has scaled a PGM to 65,535 = 257 * 255; rounding to nearest agrees with `_scaled_pnm`
        nearest = image.format == "PPM"
        high = (deep // 257 + (deep % 257 > 128) if nearest else deep >> (bits - 8)).astype(np.uint8)
        if tags and tags.get(_PHOTOMETRIC, 0) == _WHITE_IS_ZERO:  # Pillow inverts only 1 to 8 bits
            np.subtract(255, high, out=high)
        return np.repeat(high[:, :, None], 3, axis=2)
    if tags and image.mode in ("P", "PA") and max(tags[_COLOUR_MAP]) < 256:
        # Old writers stored 8 bits instead of 16, as libtiff's tools also assume; Pillow would show black.
        image = image.copy()
        image.putpalette(np.reshape(tags[_COLOUR_MAP], (3, -1)).T.astype(np.uint8).tobytes())
    pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    if not image.has_transparency_data or not is_flat(pixels):
        return pixels
    colour: tuple[int, int, int] = tuple(pixels[0, 0].tolist())
    del pixels
    return _drawn_in_alpha(image, colour)


def _drawn_in_alpha(image: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    """Return an image of one colour as its transparency shows it on white; on black if it is light."""
    alpha = (image if image.mode in ("LA", "RGBA") else image.convert("RGBA")).getchannel("A")
    low, high = alpha.getextrema()
    page = Image.new("RGB", image.size, colour if low == high else "white" if sum(colour) < 384 else "black")
    page.paste(colour, (0, 0), alpha)
    return np.array(page)


def _scaled_pnm(image: ImageFile.ImageFile, data: bytes) -> np.ndarray | None:
    """Return the pixels of a binary PGM or PPM whose white is neither 255 nor 16-bit grey, scaled to 255.

    None for other files. Pillow returns the same values, but takes a microsecond for each.
    """
    decoder, _, begin, how = image.tile[0]
    if decoder == "ppm_plain" and len(data) > _MAX_TEXT:
        raise BadSample("too large", f"{len(data):,} bytes of text, should be at most {_MAX_TEXT:,}")
    if decoder != "ppm" or not isinstance(how, tuple):
        return None
    white, bands = int(how[-1]), 3 if image.mode == "RGB" else 1
    count = image.width * image.height * bands
    samples = np.frombuffer(data, ">u2" if white > 255 else np.uint8, count, begin).reshape(image.height, -1)
    scaled = np.minimum(np.rint(np.arange(2**16) / white * 255), 255).astype(np.uint8)
    grey = np.stack([scaled[row] for row in samples]).reshape(image.height, image.width, bands)
    return grey if bands == 3 else np.repeat(grey, 3, axis=2)


# Encoding, and conversion to JPEG


def encode(image: Image.Image, plugin: str, **options: Any) -> bytes:
    """Return the file that Pillow's plugin, such as `PNG`, writes of an image."""
    file = io.BytesIO()
    image.save(file, plugin, **options)
    return file.getvalue()


_HEIC_QUALITY = 95
CONVERSION = f"HEIC made into JPEG, quality {_HEIC_QUALITY} without chroma subsampling, upright"
_USUAL_QUALITY = 90


def without_heic(data: bytes) -> bytes:
    """Convert HEIC to the JPEG that `vitctl data shards` writes.

    The orientation is applied and the colour profile kept; other metadata are dropped. Raises BadSample.
    """
    try:
        import pillow_heif
    except ImportError:
        raise BadSample("HEIC: read with pillow-heif: pip install 'vitctl[heic]'") from None
    with _pillow_problems("HEIC"):
        opened = pillow_heif.open_heif(io.BytesIO(data), convert_hdr_to_8bit=True)
        width, height = opened.size
        if width * height > limits.PIXELS:
            raise BadSample("too large", f"{width}x{height} pixels, should be at most {limits.PIXELS:,}")
        image = opened.to_pillow()
    upright: Image.Image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    profile = image.info.get("icc_profile")
    return encode(upright, "JPEG", quality=_HEIC_QUALITY, subsampling=0, icc_profile=profile)


@dataclass(frozen=True)
class Reencode:
    """Re-encodes JPEG files to smaller ones, which decode faster.

    Args:
        max_side: limit on the longer side, in pixels: larger images are resized to it, all others stay
            unchanged. 0 for no limit: then every JPEG is compressed again, and the result is used only if
            it is smaller.
        quality: of the JPEG, 1 to 100; 0 for 90.
    """

    max_side: int = 0
    quality: int = 0

    def __str__(self) -> str:
        shrunk = f"JPEG longer than {self.max_side} pixels shrunk to that"
        again = shrunk if self.max_side else "JPEG compressed again"
        return f"{again}, quality {self.quality or _USUAL_QUALITY}, Pillow {PIL.__version__}"

    def __call__(self, data: bytes) -> bytes:
        """Return the file to store in place of a JPEG. Raises BadSample if it cannot be decoded.

        Resizing uses Pillow's Lanczos filter; grey stays grey, CMYK becomes RGB; colour profile and EXIF data
        are kept. The result has restart markers, so that training decodes only the crop; see `cut_out`.
        """
        picture = open_picture(data)
        if self.max_side and max(picture.height, picture.width) <= self.max_side:
            return data
        with _pillow_problems("JPEG"):
            smaller = self._encode(with_end_marker(data))
        return smaller if self.max_side or len(smaller) < len(data) else data

    def _encode(self, data: bytes) -> bytes:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as opened:
            image: Image.Image = opened
            kept = {name: image.info[name] for name in ("icc_profile", "exif") if image.info.get(name)}
            if self.max_side:
                image.thumbnail((self.max_side, self.max_side), Image.Resampling.LANCZOS, reducing_gap=3.0)
            if image.mode not in ("L", "RGB"):
                kept.pop("icc_profile", None)  # a CMYK profile does not apply to RGB
                image = image.convert("RGB")
            interval = restart_interval(image.width, 8 if image.mode == "L" else 16)
            quality = self.quality or _USUAL_QUALITY
            return encode(image, "JPEG", quality=quality, restart_marker_blocks=interval, **kept)
