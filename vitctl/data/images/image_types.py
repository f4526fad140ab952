"""Detect a file's type from its name and first bytes: an image to decode, or why to skip it."""

import re
from collections.abc import Callable

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "pbm", "pgm", "ppm", "pnm")
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
# Extensions of images: a file with one that cannot be decoded is a bad image, not another kind of file.
_CALLED_IMAGE = {
    *IMAGE_EXTENSIONS,
    *("jpe", "jfif", "pjpeg", "pjp", "heic", "heif", "hif", "avif", "dib", "jxl", "jp2", "apng"),
}
# Based on TIFF: a decoder would read only the small preview.
_RAW = {"dng", "nef", "cr2", "cr3", "arw", "orf", "rw2", "pef", "srw", "raf"}
_OTHERS = (
    (b"%PDF", "PDF"),
    (b"PK\x03\x04", "zip archive"),
    (b"\x1f\x8b", "gzip archive"),
    (b"7z\xbc\xaf", "7z archive"),
    (b"<svg", "SVG drawing"),
    (b"<?xml", "XML"),
    (b"\x1aE\xdf\xa3", "video"),
    (b"\xff\xd8", "damaged JPEG"),  # an intact one continues with ff
)
# Images that are not decoded. For JPEG 2000 and AVIF the reason is memory: docs/bounds.md
_UNREAD = (
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"8BPS", "Photoshop file"),
    (b"MM\0+", "big-endian BigTIFF"),
    (b"II\xbc", "JPEG XR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"#?RGBE", "Radiance HDR"),
    (b"P7\n", "PAM"),
    (b"PF\n", "PFM"),
    (b"Pf\n", "PFM"),
    (b"v/1\x01", "OpenEXR"),
    (b"qoif", "QOI"),
    (b"SIMPLE  =", "FITS"),
    (b"\0\0\1\0", "ICO"),
)
_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"BM", "bmp"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"II+\0", "tif"),  # BigTIFF
)
_NETPBM = ("pbm", "pgm", "ppm")  # P1 to P3 as text, P4 to P6 in binary
_NETPBM_SIZE = re.compile(rb"P[1-6](?:\s|#[^\r\n]*[\r\n])++\d+\s+\d+\s")
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
_MAX_BRANDS = 64
_BITMAP_HEADERS = (12, 40, 52, 56, 64, 108, 124)  # bytes


def is_system_file(name: str) -> bool:
    """Return whether a path has a hidden part, or operating system metadata (Thumbs.db, __MACOSX ...)."""
    return any(part.startswith(".") or part.lower() in _SYSTEM for part in name.split("/"))


def exclusion_reason(name: str, head: Callable[[], bytes]) -> str:
    """Return why a file is not read as an image; empty if it may be one, which decoding decides later.

    `head` returns its first `HEAD_BYTES` bytes or more, and is called only if the extension is not enough.
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
    kind = image_extension(data)
    # The signature of a bitmap or of Netpbm may be the start of a text, so more of the header is checked.
    is_text = kind == "bmp" and int.from_bytes(data[14:18], "little") not in _BITMAP_HEADERS
    is_text |= kind in _NETPBM and not _NETPBM_SIZE.match(data)
    is_image = is_heic(data) or (kind is not None and not is_text)
    return "" if is_image else ": ".join(refusal(data, extension))


def refusal(data: bytes, extension: str = "") -> tuple[str, str]:
    """Return why a file whose `image_extension` is None is not decoded: a category, and its format."""
    brands = _brands(data)
    unread = next((word for signature, word in _UNREAD if data.startswith(signature)), "")
    unread = "AVIF" if brands & _AVIF_BRANDS else unread
    if unread:
        return "unsupported format", f"{unread}; convert it to PNG or JPEG"
    known = next((word for signature, word in _OTHERS if data.startswith(signature)), brands and "video")
    other = f".{extension} file" if extension else f"begins with {data[:8].hex(' ')}"
    return "not an image", known or (other if data else "empty file")


def image_extension(data: bytes) -> str | None:
    """Return the extension of the image format that the first bytes show; None if it is not supported."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    if data[:1] == b"P" and b"1" <= data[1:2] <= b"6" and data[2:3].isspace():
        return _NETPBM[(data[1] - ord("1")) % 3]
    for signature, extension in _SIGNATURES:
        if data.startswith(signature):
            return extension
    return None


def is_heic(data: bytes) -> bool:
    """Return whether a file is HEIF with HEVC inside, by its first bytes; 300 are enough."""
    return data[4:8] == b"ftyp" and bool(_brands(data) & _HEIC_BRANDS)


def _brands(data: bytes) -> set[bytes]:
    """Return the brands of an ISO base media file, such as HEIF; empty for other files."""
    if data[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(data[:4]), len(data), 16 + 4 * _MAX_BRANDS)
    return {data[8:12], *(data[at : at + 4] for at in range(16, end, 4))}
