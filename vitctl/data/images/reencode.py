"""Smaller photographs, for those who want them: the one place where the bytes of an image are changed."""

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
    """How JPEG files are written anew; all other files stay byte for byte as they are.

    Args:
        max_side: photographs whose longer side is longer are shrunk to it, in pixels, and no others are touched; 0 for no
            bound: then every JPEG is compressed again, and kept only where that made it smaller.
        quality: of the JPEG, 1 to 100; 0 for 90.

    Raises:
        DataError: neither is given, or a number is out of range.
    """

    max_side: int = 0
    quality: int = 0

    def __post_init__(self) -> None:
        if not (self.max_side >= 0 <= self.quality <= 100 and (self.max_side or self.quality)):
            raise DataError(f"max side {self.max_side}, quality {self.quality}: should be 1 pixel or more, 1 to 100")

    def __str__(self) -> str:
        which = f"JPEG longer than {self.max_side} pixels shrunk to that" if self.max_side else "JPEG compressed again"
        return f"{which}, quality {self.quality or _USUAL_QUALITY}, Pillow {PIL.__version__}"

    def __call__(self, data: bytes) -> bytes:
        """The file to store in place of a JPEG.

        The longer side is resized with Pillow's Lanczos filter; grey stays grey, CMYK becomes RGB; colour profile and
        EXIF data stay.

        Raises:
            BadSample: it cannot be decoded.
        """
        picture = open_picture(data)
        if self.max_side and max(picture.height, picture.width) <= self.max_side:
            return data
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's remarks on metadata
                smaller = self._encode(data)
        except (OSError, SyntaxError, ValueError) as error:  # Pillow's, for damage that the header does not show
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
                kept.pop("icc_profile", None)  # it speaks of the inks
                image = image.convert("RGB")
            image.save(file, "JPEG", quality=self.quality or _USUAL_QUALITY, **kept)
        return file.getvalue()
