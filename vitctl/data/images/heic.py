"""HEIC images, as phones write them: detected by their first bytes, and converted to JPEG."""

import io

from PIL import Image

from vitctl.data.images.decode import BadSample
from vitctl.system.bounds import PIXELS

QUALITY = 95
CONVERSION = f"HEIC made into JPEG, quality {QUALITY} without chroma subsampling, upright"
_HEIC = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
_MAX_BRANDS = 64


def is_heic(data: bytes) -> bool:
    """Whether a file is HEIF with HEVC inside, by its first bytes; 300 are enough."""
    if data[4:8] != b"ftyp":
        return False
    end = min(int.from_bytes(data[:4]), len(data), 16 + 4 * _MAX_BRANDS)
    brands = {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}
    return bool(brands & _HEIC)


def without_heic(data: bytes) -> bytes:
    """HEIC as the JPEG that `vitctl data shards` makes of it; any other file unchanged.

    Raises `BadSample` with the reason in words.
    """
    if not is_heic(data):
        return data
    try:
        return heic_to_jpeg(data)
    except BadSample as error:
        raise BadSample(str(error) if error.reason == "HEIC" else error.reason) from None


def heic_to_jpeg(data: bytes) -> bytes:
    """Convert to JPEG: orientation applied, colour profile kept, other metadata dropped.

    Raises:
        BadSample: `HEIC` where pillow-heif is not installed, `too large`, or `damaged`.
    """
    try:
        import pillow_heif
    except ImportError:
        raise BadSample("HEIC", "read with pillow-heif: pip install 'vitctl[heic]'") from None
    try:
        opened = pillow_heif.open_heif(io.BytesIO(data), convert_hdr_to_8bit=True)
        width, height = opened.size
        if width * height > PIXELS.limit:
            raise BadSample("too large", f"{width}x{height} pixels, should be at most {PIXELS.limit}")
        image = opened.to_pillow()
    except BadSample:
        raise
    except (ValueError, RuntimeError, EOFError, OSError, SyntaxError) as error:
        raise BadSample("damaged", " ".join(str(error).split())) from None
    file = io.BytesIO()
    profile = image.info.get("icc_profile")
    upright: Image.Image = image if image.mode in ("L", "RGB") else image.convert("RGB")
    upright.save(file, "JPEG", quality=QUALITY, subsampling=0, icc_profile=profile)
    return file.getvalue()
