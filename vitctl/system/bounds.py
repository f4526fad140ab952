"""Limits on the size of untrusted input, as one table. docs/bounds.md shows it; environment variables can
change it.

Each limit is checked before the memory or the time is spent. `VITCTL_MAX_<NAME>=...` sets one, in the unit of
the table.
"""

import os
from dataclasses import dataclass

from vitctl.errors import LaunchError

_MIB = 2**20
_UNITS = {"MiB": _MIB, "KiB": 2**10}


@dataclass(frozen=True)
class Bound:
    """One limit.

    Args:
        name: as in the table; `VITCTL_MAX_<NAME>` sets it.
        default: the limit where the variable is not set, in `unit`.
        unit: MiB and KiB are converted to bytes; any other unit is a plain count.
        what: description of what is limited.
    """

    name: str
    default: int
    unit: str
    what: str

    def __str__(self) -> str:
        unit = f", in {self.unit}" if self.unit in _UNITS else ""  # the number is bytes, the variable is not
        return f"{self.limit:,} ({self.variable}{unit})"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"VITCTL_MAX_{self.name.upper()}"

    @property
    def limit(self) -> int:
        """The current limit: in bytes, in seconds, or as a count.

        Raises:
            LaunchError: the variable holds no whole number above 0.
        """
        text = os.environ.get(self.variable, "")
        if text and not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text)):
            raise LaunchError(
                f"{self.variable}={text[:40]}: should be a whole number above 0, in {self.unit}"
            )
        return (int(text) if text else self.default) * _UNITS.get(self.unit, 1)


BOUNDS: list[Bound] = []


def _bound(name: str, default: int, unit: str, what: str) -> Bound:
    BOUNDS.append(Bound(name, default, unit, what))
    return BOUNDS[-1]


# Images
IMAGE_FILE = _bound("image_file", 64, "MiB", "one encoded image, or any other member of a shard")
PIXELS = _bound(
    "pixels", 89_478_485, "pixels", "height x width of an image, before and after its shorter side is scaled"
)
PICTURE = _bound("picture", 1024, "MiB", "memory to decode one image: pixels x bytes per pixel of its format")
LARGE = _bound("large", 192, "MiB", "images that need more memory are decoded by one loader worker at a time")
HELD = _bound(
    "held", 64, "MiB", "decoded images and files that a loader worker holds before it transforms them"
)
SCANS = _bound("scans", 100, "scans", "scans of a JPEG")
SCANNED = _bound("scanned", 1024, "MiB", "scans x pixels of a JPEG with more than one scan")
# Shards and indexes
SHARD = _bound("shard", 65_536, "MiB", "a remote shard, while it is indexed")
MEMBER_HEADER = _bound(
    "member_header", 64, "KiB", "headers of one member of a tar file: long names, pax records"
)
TAR_COMMENT = _bound(
    "tar_comment", 16, "MiB", "all global pax headers of a tar file; ours hold the class names"
)
LABEL_FILE = _bound("label_file", 1, "MiB", "the label of a sample in a shard")
INDEX = _bound("index", 256, "MiB", "index.json, a list of excluded images")
SHARD_LIST = _bound(
    "shard_list", 256, "MiB", "a list of shards, @shards.txt; a list of images on standard input"
)
# Original files of data sets
LIST_FILE = _bound("list_file", 256, "MiB", "a text, JSON or pickle file of a data set")
TABLE = _bound(
    "table",
    1024,
    "MiB",
    "a .csv or .tsv table; the text in a .parquet table, and its row groups in addition to the size of "
    "the file",
)
CLASSES = _bound("classes", 1_000_000, "classes", "classes without names, counted by the largest label")
RECORD = _bound("record", 256, "MiB", "a record of a TFRecord file")
UNPACKED = _bound(
    "unpacked", 1024, "MiB", "unpacked size of an archive, in addition to 100 times its packed size"
)
# Recipes and runs
RECIPE = _bound("recipe", 1, "MiB", "a recipe or a sweep")
RECIPE_LINE = _bound("recipe_line", 16, "KiB", "a line of a recipe or a sweep, and a value of --set")
DEPTH = _bound("depth", 32, "tables", "nesting of tables and lists in a recipe")
RUN_FILE = _bound("run_file", 64, "MiB", "result.json, state.json and other small files of a run")
LOG_LINE = _bound("log_line", 16, "MiB", "a line of log.jsonl; a longer one is ignored")
# Weights
WEIGHTS = _bound(
    "weights", 65_536, "MiB", "a weights file, and the unpacked size that an archive of weights declares"
)
WEIGHTS_GROWTH = _bound(
    "weights_growth",
    16,
    "times",
    "declared unpacked size of such an archive, as a multiple of its packed size; 256 MiB more are free",
)
TENSORS = _bound("tensors", 20_000, "tensors", "tensors in a weights file")
# Servers
HTTP_SECONDS = _bound(
    "http_seconds", 60, "s", "timeout of a read from a server, and grace period before the rate below applies"
)
HTTP_SLOWEST = _bound(
    "http_bytes_a_second", 1024, "B/s", "transfer rate below which a download is aborted and retried"
)


def check() -> None:
    """Check every variable that sets a limit. Called before workers start, so that the error comes from the
    main process.

    Raises:
        LaunchError: a variable holds no whole number above 0.
    """
    for bound in BOUNDS:
        _ = bound.limit


def table() -> str:
    """The limits as a table in Markdown."""
    rows = [f"| {b.what} | {b.default:,} {b.unit} | `{b.variable}` |" for b in BOUNDS]
    return "\n".join(["| what | at most | set by |", "|---|---|---|", *rows]) + "\n"
