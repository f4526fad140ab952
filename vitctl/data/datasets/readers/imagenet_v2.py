"""ImageNet-V2: 10,000 newly collected photographs of the 1,000 classes of ImageNet."""

from pathlib import Path

from vitctl.data.datasets.readers.files import class_list, need
from vitctl.data.datasets.readers.fixed_classes import class_items, nested
from vitctl.data.writer.items import Originals

ARCHIVE = "imagenetv2-matched-frequency.tar.gz from https://huggingface.co/datasets/vaishaal/ImageNetV2"
FOLDER = "imagenetv2-matched-frequency-format-val"
CLASS_NAMES = class_list("imagenet")


def read(root: Path) -> dict[str, Originals]:
    """All images as `test`; a folder's name is its class number, so that folder 10 does not come before
    folder 2.

    Args:
        root: holds `imagenetv2-matched-frequency-format-val/<0 to 999>/*.jpeg`.

    Raises:
        DataError: files or classes are missing.
    """
    folders = [str(number) for number in range(len(CLASS_NAMES))]
    items = class_items(need(root, FOLDER, archive=ARCHIVE), folders, nested, suffixes=(".jpeg", ".jpg"))
    return {"test": Originals(items, CLASS_NAMES, "ImageNet-V2, matched frequency")}
