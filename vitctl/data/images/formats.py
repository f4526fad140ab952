"""What a file of the user is, by its name and its first bytes: an image to be looked at, or left out for a reason."""

from collections.abc import Callable

from vitctl.data.images.heic import is_heic

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
IMAGE_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
SYSTEM_FILE = "system file"
HEAD_BYTES = 300
_SYSTEM = {"__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "system volume information"}
# What its maker calls an image: unless it turns out to be one that we read, it is bad, and not merely something else.
_CALLED_IMAGE = {
    *IMAGE_EXTENSIONS,
    "jpe",
    "jfif",
    "pjpeg",
    "pjp",
    "heic",
    "heif",
    "hif",
    "avif",
    "dib",
    "jxl",
    "jp2",
    "apng",
}
# TIFF inside, of which only the small preview would be read.
_RAW = {"dng", "nef", "cr2", "cr3", "arw", "orf", "rw2", "pef", "srw", "raf"}
_OTHERS = (
    (b"%PDF", "PDF"),
    (b"PK\x03\x04", "zip archive"),
    (b"\x1f\x8b", "gzip archive"),
    (b"7z\xbc\xaf", "7z archive"),
    (b"8BPS", "Photoshop file"),
    (b"<svg", "SVG drawing"),
    (b"<?xml", "XML"),
    (b"\x1aE\xdf\xa3", "video"),
)


def is_system_file(name: str) -> bool:
    """Whether a part of a path is hidden, or litter that an operating system leaves everywhere."""
    return any(part.startswith(".") or part.lower() in _SYSTEM for part in name.split("/"))


def reason_against(name: str, head: Callable[[], bytes]) -> str:
    """Why a file is not taken for an image; empty when it may be one.

    The content decides: the name alone makes a file a candidate, which is decoded later, or a raw file of a camera.

    Args:
        name: its path, with `/`.
        head: gives its first `HEAD_BYTES` bytes; only asked where the name does not tell.
    """
    if is_system_file(name):
        return SYSTEM_FILE
    base = name.rpartition("/")[2]
    extension = base.rpartition(".")[2].lower() if "." in base else ""
    if extension in _RAW:
        return f"raw file of a camera: .{extension}; export it as JPEG"
    if extension in _CALLED_IMAGE:
        return ""
    data = head()
    if is_heic(data) or image_extension(data) not in (None, "bmp") or _is_bitmap(data):
        return ""
    return f"not an image: {what_it_is(data, extension)}"


def what_it_is(data: bytes, extension: str = "") -> str:
    """A word for the content of a file that is no image that is read."""
    known = next((word for signature, word in _OTHERS if data.startswith(signature)), None)
    if data[4:8] == b"ftyp":
        known = "AVIF" if data[8:11] == b"avi" else "video"
    if known or not data:
        return known or "empty file"
    return f".{extension} file" if extension else f"begins with {data[:8].hex(' ')}"


def _is_bitmap(data: bytes) -> bool:
    """Two letters are too little to go by: a text may begin with BM."""
    return data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in (12, 40, 52, 56, 64, 108, 124)


def image_extension(data: bytes) -> str | None:
    """The extension that the first bytes of a file stand for; None when they are no image that we read."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    return next((extension for signature, extension in _SIGNATURES if data.startswith(signature)), None)


_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
)
