"""Detects the type of a file from its name and first bytes: an image to decode, or a file to leave out, with
the reason.
"""

from collections.abc import Callable

from vitctl.data.images.heic import is_heic

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
IMAGE_SUFFIXES = tuple(f".{extension}" for extension in IMAGE_EXTENSIONS)
SYSTEM_FILE = "system file"
HEAD_BYTES = 300
_SYSTEM = {
    "__macosx",
    "thumbs.db",
    "ehthumbs.db",
    "desktop.ini",
    "@eadir",
    "$recycle.bin",
    "system volume information",
}
# Extensions of images: a file with one that cannot be decoded counts as a bad image, not as another kind of
# file.
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
# Based on TIFF: a decoder would read only the small preview.
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
    """Whether a part of a path is hidden, or a metadata file of an operating system (Thumbs.db, __MACOSX
    ...).
    """
    return any(part.startswith(".") or part.lower() in _SYSTEM for part in name.split("/"))


def exclusion_reason(name: str, head: Callable[[], bytes]) -> str:
    """Why a file is not read as an image; empty when it may be one, which decoding decides later.

    Args:
        name: its path, with `/`.
        head: returns its first `HEAD_BYTES` bytes; called only where the extension is not enough.
    """
    if is_system_file(name):
        return SYSTEM_FILE
    base = name.rpartition("/")[2]
    extension = base.rpartition(".")[2].lower() if "." in base else ""
    if extension in _RAW:
        return f"camera raw file: .{extension}; export it as JPEG"
    if extension in _CALLED_IMAGE:
        return ""
    data = head()
    if is_heic(data) or image_extension(data) not in (None, "bmp") or _is_bitmap(data):
        return ""
    return f"not an image: {content_type(data, extension)}"


def content_type(data: bytes, extension: str = "") -> str:
    """The content type of a file that is not a supported image, in a word or two."""
    known = next((word for signature, word in _OTHERS if data.startswith(signature)), None)
    if data[4:8] == b"ftyp":
        known = "AVIF" if data[8:11] == b"avi" else "video"
    if known or not data:
        return known or "empty file"
    return f".{extension} file" if extension else f"begins with {data[:8].hex(' ')}"


def _is_bitmap(data: bytes) -> bool:
    """Check the header size too: the signature "BM" alone may be the start of a text."""
    return data[:2] == b"BM" and int.from_bytes(data[14:18], "little") in (12, 40, 52, 56, 64, 108, 124)


def image_extension(data: bytes) -> str | None:
    """The extension for the image format that the first bytes of a file show; None when it is not a supported
    format.
    """
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
