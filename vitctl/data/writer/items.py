"""One original image, and one split of them before it is written: what readers of data sets give to the
writer of shards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitctl.errors import DataError
from vitctl.system.parsing import parsing


@dataclass(frozen=True)
class Item:
    """One original image.

    Args:
        key: its name, unique in the split; any text.
        label: class number, -1 for none; or several class numbers, in a split whose images may have several.
        read: gives the encoded image, which is stored as it is.
        size: bytes of it; None when only `read` can tell.
    """

    key: str
    label: int | tuple[int, ...]
    read: Callable[[], bytes]
    size: int | None = None


def read_item(item: Item) -> bytes:
    """The encoded image of an item.

    Raises DataError when what it is made from is damaged, whatever it is made from.
    """
    with parsing(item.key, DataError, "cannot be read"):
        return item.read()


@dataclass(frozen=True)
class LeftOut:
    """A file of the source that is no image of the split, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Originals:
    """One split before it is written.

    Args:
        items: its images.
        class_names: in label order.
        source: where they come from, in words.
        is_user_data: files and classes are as a user arranged them, and are looked at before they are
            written; see `check_originals`.
        left_out: files that its reader left out.
        empty_classes: class folders without an image.
        prefix: what stands before the keys of the items in the names of the source, such as `val/`.
    """

    items: Sequence[Item]
    class_names: tuple[str, ...]
    source: str
    is_user_data: bool = False
    left_out: tuple[LeftOut, ...] = ()
    empty_classes: tuple[str, ...] = ()
    prefix: str = ""
