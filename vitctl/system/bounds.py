"""How much is read of what others made: one table, which docs/bounds.md shows and environment variables can change.

Every bound is held before the memory or the time is spent. `VITCTL_MAX_<NAME>=...` sets one, in the unit of the table.
"""

import os
from dataclasses import dataclass

from vitctl.errors import LaunchError

_MIB = 2**20
_UNITS = {"MiB": _MIB, "KiB": 2**10}


@dataclass(frozen=True)
class Bound:
    """One bound.

    Args:
        name: as in the table; `VITCTL_MAX_<NAME>` sets it.
        usual: what holds where nobody set it, in `unit`.
        unit: MiB and KiB are bytes in the end; anything else is only counted.
        what: is bounded, in words.
    """

    name: str
    usual: int
    unit: str
    what: str

    def __str__(self) -> str:
        unit = f", in {self.unit}" if self.unit in _UNITS else ""  # the number is bytes, the variable is not
        return f"{self.most:,} ({self.variable}{unit})"

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return f"VITCTL_MAX_{self.name.upper()}"

    @property
    def most(self) -> int:
        """The bound as it holds now, in bytes, seconds or pieces.

        Raises:
            LaunchError: the variable holds no whole number above 0.
        """
        text = os.environ.get(self.variable, "")
        if text and not (text.isascii() and text.isdecimal() and len(text) < 16 and int(text)):
            raise LaunchError(f"{self.variable}={text[:40]}: should be a whole number above 0, in {self.unit}")
        return (int(text) if text else self.usual) * _UNITS.get(self.unit, 1)


BOUNDS: list[Bound] = []


def _bound(name: str, usual: int, unit: str, what: str) -> Bound:
    BOUNDS.append(Bound(name, usual, unit, what))
    return BOUNDS[-1]


# Pictures
IMAGE_FILE = _bound("image_file", 64, "MiB", "one encoded image, or any other member of a shard")
PIXELS = _bound(
    "pixels", 89_478_485, "pixels", "height x width of a picture, and of what scaling its shorter side makes of it"
)
PICTURE = _bound("picture", 1024, "MiB", "memory to decode one picture: pixels x bytes a pixel of its format")
LARGE = _bound("large", 192, "MiB", "a picture that needs more memory is decoded while no other loader worker does so")
HELD = _bound("held", 64, "MiB", "decoded pictures and files that a loader worker holds before it transforms them")
SCANS = _bound("scans", 100, "scans", "passes of a JPEG over its pixels")
SCANNED = _bound("scanned", 1024, "MiB", "scans x pixels of a JPEG with more than one")
# Shards and indexes
SHARD = _bound("shard", 65_536, "MiB", "a remote shard, while it is indexed")
MEMBER_HEADER = _bound("member_header", 64, "KiB", "headers of one member of a tar: long names, pax records")
TAR_COMMENT = _bound("tar_comment", 16, "MiB", "global pax headers of a tar together; ours hold the class names")
LABEL_FILE = _bound("label_file", 1, "MiB", "the label of a sample in a shard")
INDEX = _bound("index", 256, "MiB", "index.json, a list of excluded images")
SHARD_LIST = _bound("shard_list", 256, "MiB", "a list of shards, @shards.txt")
# Original files of data sets
LIST_FILE = _bound("list_file", 256, "MiB", "a text, JSON or pickle file of a data set")
TABLE = _bound(
    "table",
    1024,
    "MiB",
    "a .csv or .tsv table, the text in a .parquet table, and its row groups beyond the size of the file",
)
CLASSES = _bound("classes", 1_000_000, "classes", "classes that have no names, counted by their largest label")
RECORD = _bound("record", 256, "MiB", "a record of a TFRecord file")
UNPACKED = _bound("unpacked", 1024, "MiB", "what an archive holds, beside a hundred times its own size")
# Recipes and runs
RECIPE = _bound("recipe", 1, "MiB", "a recipe or a sweep")
RECIPE_LINE = _bound("recipe_line", 16, "KiB", "a line of one, and a value of --set")
DEPTH = _bound("depth", 32, "tables", "tables and lists inside each other in a recipe")
RUN_FILE = _bound("run_file", 64, "MiB", "result.json, state.json and other small files of a run")
LOG_LINE = _bound("log_line", 16, "MiB", "a line of log.jsonl; a longer one is no record")
# Weights
WEIGHTS = _bound("weights", 65_536, "MiB", "a weights file, and what an archive of weights claims to hold")
WEIGHTS_GROWTH = _bound("weights_growth", 16, "times", "what such an archive claims, by its own size, beside 256 MiB")
TENSORS = _bound("tensors", 20_000, "tensors", "tensors of a weights file")
# Servers
HTTP_SECONDS = _bound("http_seconds", 60, "s", "silence of a server, and an answer until it flows at the rate below")
HTTP_SLOWEST = _bound(
    "http_bytes_a_second", 1024, "B/s", "the rate below which an answer is cut off and asked for again"
)


def check() -> None:
    """Raise LaunchError where a variable that sets a bound holds no number; workers should not be the first to say so."""
    for bound in BOUNDS:
        _ = bound.most


def table() -> str:
    """The bounds as a table in Markdown."""
    rows = [f"| {b.what} | {b.usual:,} {b.unit} | `{b.variable}` |" for b in BOUNDS]
    return "\n".join(["| what | at most | set by |", "|---|---|---|", *rows]) + "\n"
