"""Converts files to JPEG before they are stored: HEIC, as phones write it, and large JPEGs on request.

Nothing else in vitctl changes the bytes of an image.
"""

import io
import warnings
from dataclasses import dataclass

import PIL
from PIL import Image

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.images.image_types import is_heic
from vitctl.system.files import PIXELS

_HEIC_QUALITY = 95
CONVERSION = f"HEIC made into JPEG, quality {_HEIC_QUALITY} without chroma subsampling, upright"
_USUAL_QUALITY = 90


def without_heic(data: bytes) -> bytes:
    """Return HEIC as the JPEG that `vitctl data shards` makes of it, and any other file unchanged.

    In the JPEG the orientation is applied and the colour profile kept; other metadata are dropped.

    Raises:
        BadSample: pillow-heif is not installed, or the image is `too large` or `damaged`.
    """
    if not is_heic(data):
        return data
    try:
        import pillow_heif
    except ImportError:
        raise BadSample("HEIC: read with pillow-heif: pip install 'vitctl[heic]'") from None
    try:
        opened = pillow_heif.open_heif(io.BytesIO(data), convert_hdr_to_8bit=True)
        width, height = opened.size
        if width * height > PIXELS.limit:
            raise BadSample("too large", f"{width}x{height} pixels, should be at most {PIXELS.limit}")
        image = opened.to_pillow()
    except (ValueError, RuntimeError, EOFError, OSError, SyntaxError) as error:
        raise BadSample("damaged", " ".join(str(error).split())) from None
    file = io.BytesIO()
    upright: Image.Image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    upright.save(
        file, "JPEG", quality=_HEIC_QUALITY, subsampling=0, icc_profile=image.info.get("icc_profile")
    )
    return file.getvalue()


@dataclass(frozen=True)
class Reencode:
    """Re-encodes JPEG files to smaller ones.

    Args:
        max_side: limit on the longer side, in pixels: larger images are resized to it, all others stay
            unchanged. 0 for no limit: then every JPEG is compressed again, and the result is used only where
            it is smaller.
        quality: of the JPEG, 1 to 100; 0 for 90.
    """

    max_side: int = 0
    quality: int = 0

    def __str__(self) -> str:
        shrunk = f"JPEG longer than {self.max_side} pixels shrunk to that"
        which = shrunk if self.max_side else "JPEG compressed again"
        return f"{which}, quality {self.quality or _USUAL_QUALITY}, Pillow {PIL.__version__}"

    def __call__(self, data: bytes) -> bytes:
        """Return the file to store in place of a JPEG.

        Resizing uses Pillow's Lanczos filter; grey stays grey, CMYK becomes RGB; colour profile and EXIF data
        are kept.

        Raises:
            BadSample: it cannot be decoded.
        """
        picture = open_picture(data)
        if self.max_side and max(picture.height, picture.width) <= self.max_side:
            return data
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's warnings about metadata
                smaller = self._encode(data)
        except (OSError, SyntaxError, ValueError) as error:  # for damage that the header does not show
            raise BadSample("damaged", " ".join(str(error).split())) from None
        return smaller if self.max_side or len(smaller) < len(data) else data

    def _encode(self, data: bytes) -> bytes:
        file = io.BytesIO()
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as opened:
            image: Image.Image = opened
            kept = {name: image.info[name] for name in ("icc_profile", "exif") if image.info.get(name)}
            if self.max_side:
                image.thumbnail((self.max_side, self.max_side), Image.Resampling.LANCZOS, reducing_gap=3.0)
            if image.mode not in ("L", "RGB"):
                kept.pop("icc_profile", None)  # a CMYK profile does not apply to RGB
                image = image.convert("RGB")
            image.save(file, "JPEG", quality=self.quality or _USUAL_QUALITY, **kept)
        return file.getvalue()
