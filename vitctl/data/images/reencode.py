"""Optional re-encoding of JPEG files to smaller ones.

Nothing else in vitctl changes the bytes of an image.
"""

import io
import warnings
from dataclasses import dataclass

import PIL
from PIL import Image

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.errors import DataError

_USUAL_QUALITY = 90


@dataclass(frozen=True)
class Reencode:
    """How JPEG files are re-encoded; all other files stay unchanged.

    Args:
        max_side: limit on the longer side, in pixels: larger images are resized to it, all others stay
            unchanged. 0 for no limit: then every JPEG is compressed again, and the result is used only where
            it is smaller.
        quality: of the JPEG, 1 to 100; 0 for 90.

    Raises:
        DataError: both are 0, or a number is out of range.
    """

    max_side: int = 0
    quality: int = 0

    def __post_init__(self) -> None:
        if not (self.max_side >= 0 <= self.quality <= 100 and (self.max_side or self.quality)):
            raise DataError(
                f"max side {self.max_side}, quality {self.quality}: should be 1 pixel or more, 1 to 100"
            )

    def __str__(self) -> str:
        which = (
            f"JPEG longer than {self.max_side} pixels shrunk to that"
            if self.max_side
            else "JPEG compressed again"
        )
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
        except (
            OSError,
            SyntaxError,
            ValueError,
        ) as error:  # from Pillow, for damage that the header does not show
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
