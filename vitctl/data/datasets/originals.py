"""The data sets that have original files, as one table: what they hold, and which reader understands them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from vitctl.data.datasets.readers import (
    birds,
    caltech101,
    cars196,
    cifar,
    clevr,
    colorectal,
    dmlab,
    dsprites,
    dtd,
    eurosat,
    flowers102,
    imagenet,
    imagenet21k,
    imagenet_v2,
    kitti,
    objectnet,
    patch_camelyon,
    pets,
    resisc45,
    retinopathy,
    smallnorb,
    sun397,
    svhn,
    uc_merced,
)
from vitctl.data.writer.items import Originals

Make = Callable[[Path], None]
Read = Callable[[Path], dict[str, Originals]]


@dataclass(frozen=True)
class DataSet:
    """A data set that vitctl knows by name.

    Args:
        name: as it is typed, and the name of its folder of shards.
        num_classes: size of the head, whichever labels occur.
        sizes: images per split.
        obtain: the command or the steps that make its shards.
        aliases: other names, in lower case.
        make: writes the shards of a set that comes with vitctl.
        read: opens the original files below a folder.
        native: how large the images are, in words.
    """

    name: str
    num_classes: int
    sizes: Mapping[str, int]
    obtain: str = ""
    aliases: tuple[str, ...] = ()
    make: Make | None = field(default=None, compare=False)
    read: Read | None = field(default=None, compare=False)
    native: str = ""


def _row(
    name: str,
    num_classes: int,
    sizes: Mapping[str, int],
    native: str,
    reader: Any,
    *aliases: str,
    **arguments: Any,
) -> DataSet:
    """A set read by a module of `datasets/`; the `arguments` tell its reader which of several labels or
    releases is meant.
    """
    obtain = f"Make them from {reader.ARCHIVE}: `vitctl data prepare {name} --root ROOT`."
    return DataSet(
        name, num_classes, sizes, obtain, aliases, read=partial(reader.read, **arguments), native=native
    )


def _three(train: int, validation: int, test: int) -> dict[str, int]:
    return {"train": train, "validation": validation, "test": test}


_CIFAR = {"train": 50_000, "test": 10_000}
_CLEVR = {"train": 70_000, "validation": 15_000}
_DSPRITES = {"train": 737_280}
_FLOWERS = _three(1_020, 1_020, 6_149)
_PETS = {"train": 3_680, "test": 3_669}
_NORB = {"train": 24_300, "test": 24_300}

KNOWN = (
    _row("caltech101", 102, {"train": 3_060, "test": 6_084}, "about 300x200", caltech101, "caltech-101"),
    _row("cifar10", 10, _CIFAR, "32x32", cifar, "cifar-10", release=cifar.CIFAR10),
    _row("cifar100", 100, _CIFAR, "32x32", cifar, "cifar-100", release=cifar.CIFAR100),
    _row("dtd", 47, _three(1_880, 1_880, 1_880), "300 to 640", dtd),
    _row("flowers102", 102, _FLOWERS, "500+", flowers102, "oxford_flowers102", "flowers"),
    _row("pets", 37, _PETS, "200 to 600", pets, "oxford_iiit_pet"),
    _row("sun397", 397, _three(76_128, 10_875, 21_750), "120x120 and more", sun397),
    _row("svhn", 10, {"train": 73_257, "test": 26_032}, "32x32", svhn, "svhn_cropped"),
    _row("patch_camelyon", 2, _three(262_144, 32_768, 32_768), "96x96", patch_camelyon, "pcam", "camelyon"),
    _row("eurosat", 10, {"train": 27_000}, "64x64", eurosat),
    _row("resisc45", 45, {"train": 31_500}, "256x256", resisc45),
    _row(
        "retinopathy",
        5,
        _three(35_126, 10_906, 42_670),
        "at most 540x540",
        retinopathy,
        "diabetic_retinopathy",
    ),
    _row("clevr-count", 8, _CLEVR, "480x320", clevr, "clevr_count", task="count"),
    _row("clevr-dist", 6, _CLEVR, "480x320", clevr, "clevr_dist", "clevr-distance", task="distance"),
    _row("dmlab", 6, _three(65_550, 22_628, 22_735), "480x360", dmlab),
    _row("kitti-dist", 4, _three(6_347, 423, 711), "about 1242x375", kitti, "kitti", "kitti-distance"),
    _row("dsprites-loc", 16, _DSPRITES, "64x64", dsprites, "dsprites_loc", "dsprites-xpos", task="location"),
    _row(
        "dsprites-ori",
        16,
        _DSPRITES,
        "64x64",
        dsprites,
        "dsprites_ori",
        "dsprites-orientation",
        task="orientation",
    ),
    _row(
        "smallnorb-azim", 18, _NORB, "96x96", smallnorb, "smallnorb_azi", "smallnorb-azimuth", task="azimuth"
    ),
    _row(
        "smallnorb-elev",
        9,
        _NORB,
        "96x96",
        smallnorb,
        "smallnorb_ele",
        "smallnorb-elevation",
        task="elevation",
    ),
    _row("cars196", 196, {"train": 8_144, "test": 8_041}, "about 700x480", cars196, "cars", "stanford_cars"),
    _row("birds", 200, {"train": 5_994, "test": 5_794}, "about 500x375", birds, "cub", "caltech_birds2011"),
    _row("uc_merced", 21, {"train": 2_100}, "256x256", uc_merced),
    _row("colorectal", 8, {"train": 5_000}, "150x150", colorectal, "colorectal_histology"),
    DataSet(
        "imagenet",
        1000,
        {"train": 1_281_167, "validation": 50_000},
        "Make them: `vitctl data shards IMAGENET_FOLDER ROOT/NAME`, a folder with train/<wnid>/ and "
        "val/<wnid>/.",
        ("imagenet2012", "ilsvrc2012", "in1k"),
        read=imagenet.read,
        native="about 500x375",
    ),
    # The 14,197,122 here and the 18,574 of ObjectNet are unverified: recalled, no source at hand shows them.
    _row(
        "imagenet21k",
        imagenet21k.NUM_CLASSES,
        {"train": 14_197_122},
        "about 500x375",
        imagenet21k,
        "in21k",
        "i21k",
    ),
    _row("imagenet_v2", 1000, {"test": 10_000}, "about 500x375", imagenet_v2, "imagenet-v2", "imagenetv2"),
    _row("objectnet", objectnet.NUM_CLASSES, {"test": 18_574}, "about 1000x1000", objectnet),
)
