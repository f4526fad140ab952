"""The data sets that vitctl knows by name, one row each: content, source and reader.

To add a set, add a row to `DATA_SETS`. Sets of class folders and of text lists need no code, as `eurosat` and
`dtd` show; other layouts need a reader in `readers/`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vitctl.data.datasets.readers import arrays, imagenet, list_file, shapes
from vitctl.data.datasets.readers.arrays import read_cifar, read_dmlab
from vitctl.data.datasets.readers.class_folder import read_caltech101, read_fixed_classes
from vitctl.data.datasets.readers.list_file import read_lists, read_retinopathy
from vitctl.data.datasets.readers.original_files import Archive, MissingOriginalsError
from vitctl.data.writer.intake import Originals
from vitctl.errors import DataError


@dataclass(frozen=True)
class DataSet:
    """A data set that vitctl knows by name.

    Args:
        name: as typed, and the name of its folder of shards.
        num_classes: size of the head, whichever labels occur.
        archive: what holds the original files and where to get it, in words.
        aliases: other names, in lower case.
        downloads: the archives on the web; none if a login, a password or a program is needed.
        family: folder of the original files, if sets share one; default: `name`.
        how: how to get its shards, if not by `vitctl data prepare`.
        scored: split expression of its score, if not `test` or `validation`.
    """

    name: str
    num_classes: int
    sizes: Mapping[str, int]
    read: Callable[[Path], dict[str, Originals]] | None = None
    archive: str = ""
    aliases: tuple[str, ...] = ()
    downloads: tuple[Archive, ...] = ()
    family: str = ""
    make: Callable[[str], Originals] | None = None
    how: str = ""
    scored: str = ""

    @property
    def obtain(self) -> str:
        """The command or the steps that make its shards; "" for a set that comes with vitctl."""
        if self.how or self.read is None:
            return self.how
        return f"Make them from {self.archive}: `vitctl data prepare {self.name} --root ROOT`."

    def open(self, root: Path) -> dict[str, Originals]:
        """Read the original files below a folder. Raises DataError if they are missing or damaged."""
        if self.read is None:
            raise DataError(
                self.name, f"has no original files to read; {self.obtain or 'it comes with vitctl'}"
            )
        try:
            splits = self.read(root)
        except MissingOriginalsError as error:
            raise DataError(error, fix=f"unpack here: {self.archive}") from None
        for originals in splits.values():
            if (found := len(originals.class_names)) != self.num_classes:
                raise DataError(root, f"{found:,} classes, {self.name} has {self.num_classes:,}")
        return splits


def _shapes(task: str) -> DataSet:
    name, class_names = ("shapes" if task == "all" else f"shapes-{task}"), shapes.TASKS[task].class_names
    sizes = {"train": 8000 if task == "all" else 1000, "test": 1000}

    def make(split: str) -> Originals:
        items = shapes.items(task, split, sizes[split], 0)
        return Originals(items, class_names, f"vitctl shapes, task {task}")

    return DataSet(name, len(class_names), sizes, make=make)


def _archives(address: str, *rows: tuple[str, str, int], packed: bool = False) -> tuple[Archive, ...]:
    """Return archives of one site from rows of name, SHA-256 and size; `{}` in the address is the name."""
    return tuple(
        Archive(address.format(name), f"sha256:{digest}", size, packed=packed) for name, digest, size in rows
    )


def _three(train: int, validation: int, test: int) -> dict[str, int]:
    return {"train": train, "validation": validation, "test": test}


def _part_of_imagenet(letter: str, num_images: int, page: str, digest: str, num_bytes: int) -> DataSet:
    """Return ImageNet-A or -R: images of 200 of ImageNet's classes, `<wnid>/*.jpg`."""
    name, place, site = (
        f"imagenet_{letter}",
        f"imagenet-{letter}",
        "https://people.eecs.berkeley.edu/~hendrycks",
    )
    return DataSet(
        name,
        200,
        {"test": num_images},
        partial(
            read_fixed_classes,
            places=(place,),
            classes=name,
            source=f"ImageNet-{letter.upper()}",
            split="test",
        ),
        f"{place}.tar from https://github.com/hendrycks/{page}",
        (place,),
        _archives(f"{site}/{{}}.tar", (place, digest, num_bytes)),
    )


_CIFAR_SITE = "https://www.cs.toronto.edu/~kriz"
_FLOWERS_SITE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"
_PETS_SITE = "https://thor.robots.ox.ac.uk/~vgg/data/pets"
_SVHN_SITE = "https://ufldl.stanford.edu/housenumbers"
_PCAM_FILES = "https://zenodo.org/record/2546921/files/camelyonpatch_level_2_split"
_KITTI_SITE = "https://s3.eu-central-1.amazonaws.com/avg-kitti"
_NORB_FILES = "https://cs.nyu.edu/~ylclab/data/norb-v1.0-small"
_COLORECTAL = ("tumor", "stroma", "complex", "lympho", "debris", "mucosa", "adipose", "empty")

# Sets with two tasks on the same images. A digest is TensorFlow Datasets' for the same file, or torchvision's
# for the CIFAR archives and EuroSAT.
_CLEVR = partial(
    DataSet,
    sizes={"train": 70_000, "validation": 15_000},
    family="clevr",
    archive="CLEVR_v1.0.zip from https://cs.stanford.edu/people/jcjohns/clevr",
    downloads=(
        Archive(
            "https://dl.fbaipublicfiles.com/clevr/CLEVR_v1.0.zip",
            "sha256:5cd61cf1096ed20944df93c9adb31e74d189b8459a94f54ba00090e5c59936d1",
            19_021_600_724,
        ),
    ),
)
_DSPRITES = partial(
    DataSet,
    num_classes=16,
    sizes={"train": 737_280},
    family="dsprites",
    archive=f"{arrays.DSPRITES_FILE} from https://github.com/google-deepmind/dsprites-dataset",
    downloads=(
        Archive(
            f"https://github.com/google-deepmind/dsprites-dataset/raw/master/{arrays.DSPRITES_FILE}",
            packed=True,
        ),
    ),
)
_SMALLNORB = partial(
    DataSet,
    sizes={"train": 24_300, "test": 24_300},
    family="smallnorb",
    archive="the six smallnorb-*.mat.gz from https://cs.nyu.edu/~ylclab/data/norb-v1.0-small, "
    "packed or unpacked",
    downloads=_archives(
        _NORB_FILES + "/{}.mat.gz",
        (
            f"{arrays.NORB_STEMS['test']}-dat",
            "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
            130_799_817,
        ),
        (
            f"{arrays.NORB_STEMS['test']}-info",
            "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
            10_428,
        ),
        (
            f"{arrays.NORB_STEMS['train']}-dat",
            "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
            131_896_188,
        ),
        (
            f"{arrays.NORB_STEMS['train']}-info",
            "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
            71_052,
        ),
        packed=True,
    ),
)

_ROWS = (
    # Sets that come with vitctl
    DataSet(
        "digits",
        10,
        arrays.DIGITS_SIZES,
        make=lambda split: Originals(
            arrays.digit_items(split), tuple("0123456789"), "scikit-learn digit scans"
        ),
    ),
    DataSet(
        "glyphs",
        shapes.NUM_LETTERS,
        shapes.GLYPHS_SIZES,
        make=lambda split: Originals(
            shapes.glyph_items(split, shapes.GLYPHS_SIZES[split], 0),
            shapes.GLYPH_NAMES,
            "vitctl glyphs generator",
        ),
    ),
    *map(_shapes, shapes.TASKS),
    # VTAB
    DataSet(
        "caltech101",
        102,
        {"train": 3_060, "test": 6_084},
        read_caltech101,
        "101_ObjectCategories.tar.gz of caltech-101.zip from https://data.caltech.edu/records/mzrjq-6wc02",
        ("caltech-101",),
        (
            Archive(
                "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip?download=1",
                "sha256:331234750fc7f77520e50d9565e8b6907b03565e30320da1401130db08c61f91",
                137_414_764,
                inner=("caltech-101/101_ObjectCategories.tar.gz",),
            ),
        ),
    ),
    DataSet(
        "cifar10",
        10,
        {"train": 50_000, "test": 10_000},
        partial(
            read_cifar,
            folder="cifar-10-batches-py",
            splits={"train": tuple(f"data_batch_{n}" for n in range(1, 6)), "test": ("test_batch",)},
            prefix="",
            source="CIFAR-10",
        ),
        f"cifar-10-python.tar.gz from {_CIFAR_SITE}/cifar.html",
        ("cifar-10",),
        (
            Archive(
                f"{_CIFAR_SITE}/cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a", 170_498_071
            ),
        ),
    ),
    DataSet(
        "cifar100",
        100,
        {"train": 50_000, "test": 10_000},
        partial(
            read_cifar,
            folder="cifar-100-python",
            splits={"train": ("train",), "test": ("test",)},
            prefix="fine_",
            source="CIFAR-100",
        ),
        f"cifar-100-python.tar.gz from {_CIFAR_SITE}/cifar.html",
        ("cifar-100",),
        (
            Archive(
                f"{_CIFAR_SITE}/cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85", 169_001_437
            ),
        ),
    ),
    DataSet(
        "dtd",
        47,
        _three(1_880, 1_880, 1_880),
        partial(
            read_lists,
            images="dtd/images",
            lists={
                "train": "dtd/labels/train1.txt",
                "validation": "dtd/labels/val1.txt",
                "test": "dtd/labels/test1.txt",
            },
            classes="dtd",
            source="DTD r1.0.1, partition 1",
        ),
        "dtd-r1.0.1.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/dtd",
        downloads=(
            Archive(
                "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
                "sha256:e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
                625_239_812,
            ),
        ),
    ),
    DataSet(
        "flowers102",
        102,
        _three(1_020, 1_020, 6_149),
        list_file.read_flowers102,
        "102flowers.tgz, imagelabels.mat and setid.mat from "
        "https://www.robots.ox.ac.uk/~vgg/data/flowers/102",
        ("oxford_flowers102", "flowers"),
        (
            Archive(
                f"{_FLOWERS_SITE}/102flowers.tgz",
                "sha256:2d01ecc807db462958cfe3d92f57a8c252b4abd240eb955770201e45f783b246",
                344_862_509,
            ),
            Archive(
                f"{_FLOWERS_SITE}/imagelabels.mat",
                "sha256:4903e94206bac23bf772aadf06451916df56b58fc483a62db32a97b82656651d",
                502,
                packed=True,
            ),
            Archive(
                f"{_FLOWERS_SITE}/setid.mat",
                "sha256:46b8678f91fd95d3c8f4feab80d271a6c834a1dd896fe29fd3e6ad9ce5c8dccd",
                14_989,
                packed=True,
            ),
        ),
    ),
    DataSet(
        "pets",
        37,
        {"train": 3_680, "test": 3_669},
        # Some files named `.jpg` are PNG or GIF; their bytes are kept.
        partial(
            read_lists,
            images="images",
            lists={"train": "annotations/trainval.txt", "test": "annotations/test.txt"},
            classes="pets",
            source="Oxford-IIIT Pets",
            suffix=".jpg",
            column=2,
        ),
        "images.tar.gz and annotations.tar.gz from https://www.robots.ox.ac.uk/~vgg/data/pets",
        ("oxford_iiit_pet",),
        _archives(
            _PETS_SITE + "/{}.tar.gz",
            ("annotations", "52425fb6de5c424942b7626b428656fcbd798db970a937df61750c0f1d358e91", 19_173_078),
            ("images", "67195c5e1c01f1ab5f9b6a5d22b8c27a580d896ece458917e61d459337fa318d", 791_918_971),
        ),
    ),
    DataSet(
        "sun397",
        397,
        _three(76_128, 10_875, 21_750),
        list_file.read_sun397,
        "SUN397.tar.gz from https://vision.princeton.edu/projects/2010/SUN",
    ),
    DataSet(
        "svhn",
        10,
        {"train": 73_257, "test": 26_032},
        arrays.read_svhn,
        "train_32x32.mat and test_32x32.mat from http://ufldl.stanford.edu/housenumbers",
        ("svhn_cropped",),
        _archives(
            _SVHN_SITE + "/{}_32x32.mat",
            ("train", "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8", 182_040_794),
            ("test", "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b", 64_275_384),
            packed=True,
        ),
    ),
    DataSet(
        "patch_camelyon",
        2,
        _three(262_144, 32_768, 32_768),
        arrays.read_patch_camelyon,
        "the six camelyonpatch_level_2_split_*.h5.gz from https://zenodo.org/records/2546921, unpacked with "
        "gunzip",
        ("pcam", "camelyon"),
        _archives(
            _PCAM_FILES + "_{}.h5.gz",
            ("train_x", "d619e741468a7ab35c7e4a75e6821b7e7e6c9411705d45708f2a0efc8960656c", 6_421_353_462),
            ("train_y", "b74126d2c01b20d3661f9b46765d29cf4e4fba6faba29c8e0d09d406331ab75a", 21_378),
            ("valid_x", "f82ee1670d027b4ec388048d9eabc2186b77c009655dae76d624c0ecb053ccb2", 805_965_320),
            ("valid_y", "ce1ae30f08feb468447971cfd0472e7becd0ad96d877c64120c72571439ae48c", 3_038),
            ("test_x", "79174c2201ad521602a5888be8f36ee10875f37403dd3f2086caf2182ef87245", 800_875_929),
            ("test_y", "0a522005fccc8bbd04c5a117bfaf81d8da2676f03a29d7499f71d0a0bd6068ef", 3_040),
        ),
    ),
    DataSet(
        "eurosat",
        10,
        {"train": 27_000},
        partial(
            read_fixed_classes,
            places=("EuroSAT_RGB", "2750"),
            classes="eurosat",
            source="EuroSAT RGB",
            key="{folder}_{file}",
        ),
        "EuroSAT_RGB.zip from https://zenodo.org/records/7711810, or the older EuroSAT.zip",
        downloads=(
            Archive(
                "https://huggingface.co/datasets/torchgeo/eurosat/resolve/"
                "c877bcd43f099cd0196738f714544e355477f3fd/EuroSAT.zip",
                "md5:c8fa014336c82ac7804f0398fcb19387",
                94_280_567,
            ),
        ),
    ),
    DataSet(
        "resisc45",
        45,
        {"train": 31_500},
        # Copies on the Hugging Face hub have other splits than VTAB.
        partial(
            read_fixed_classes,
            places=("NWPU-RESISC45",),
            classes="resisc45",
            source="NWPU-RESISC45",
            key="{folder}_{file}",
        ),
        "NWPU-RESISC45.rar from https://gcheng-nwpu.github.io, unpacked with unrar or 7z",
    ),
    DataSet(
        "retinopathy",
        5,
        _three(35_126, 10_906, 42_670),
        read_retinopathy,
        "train.zip.*, test.zip.* (joined with cat) and trainLabels.csv.zip of the Kaggle competition "
        "diabetic-retinopathy-detection, and https://storage.googleapis.com/kaggle-forum-message-attachments/"
        "90528/2877/retinopathy_solution.csv",
        ("diabetic_retinopathy",),
    ),
    _CLEVR("clevr-count", 8, read=partial(list_file.read_clevr, task="count"), aliases=("clevr_count",)),
    _CLEVR(
        "clevr-dist",
        6,
        read=partial(list_file.read_clevr, task="distance"),
        aliases=("clevr_dist", "clevr-distance"),
    ),
    DataSet(
        "dmlab",
        6,
        _three(65_550, 22_628, 22_735),
        read_dmlab,
        "dmlab.tar.gz from https://storage.googleapis.com/dmlab-vtab/dmlab.tar.gz",
        downloads=(
            Archive(
                "https://storage.googleapis.com/dmlab-vtab/dmlab.tar.gz",
                "sha256:638b18fa69a5d61bbc310cd0b87ac603a39f41de0fdb07b6e77de274a24480a4",
                3_017_022_789,
            ),
        ),
    ),
    DataSet(
        "kitti-dist",
        4,
        _three(6_347, 423, 711),
        list_file.read_kitti,
        "data_object_image_2.zip, data_object_label_2.zip and, in devkit_object/, devkit_object.zip "
        "from https://www.cvlibs.net/datasets/kitti/eval_object.php",
        ("kitti", "kitti-distance"),
        (
            Archive(
                f"{_KITTI_SITE}/data_object_image_2.zip",
                "sha256:351c5a2aa0cd9238b50174a3a62b846bc5855da256b82a196431d60ff8d43617",
                12_569_945_557,
            ),
            Archive(
                f"{_KITTI_SITE}/data_object_label_2.zip",
                "sha256:4efc76220d867e1c31bb980bbf8cbc02599f02a9cb4350effa98dbb04aaed880",
                5_601_213,
            ),
            Archive(
                f"{_KITTI_SITE}/devkit_object.zip",
                "sha256:ce0b76b69c0c5f89690a0d65b7302bbbdb962a0c7e8aba6efc7050d1b04b4cf1",
                63_794,
                into="devkit_object",
            ),
        ),
    ),
    _DSPRITES(
        "dsprites-loc",
        read=partial(arrays.read_dsprites, task="location"),
        aliases=("dsprites_loc", "dsprites-xpos"),
    ),
    _DSPRITES(
        "dsprites-ori",
        read=partial(arrays.read_dsprites, task="orientation"),
        aliases=("dsprites_ori", "dsprites-orientation"),
    ),
    _SMALLNORB(
        "smallnorb-azim",
        18,
        read=partial(arrays.read_smallnorb, task="azimuth"),
        aliases=("smallnorb_azi", "smallnorb-azimuth"),
    ),
    _SMALLNORB(
        "smallnorb-elev",
        9,
        read=partial(arrays.read_smallnorb, task="elevation"),
        aliases=("smallnorb_ele", "smallnorb-elevation"),
    ),
    # Few-shot
    DataSet(
        "cars196",
        196,
        {"train": 8_144, "test": 8_041},
        list_file.read_cars196,
        "cars_train.tgz, cars_test.tgz, car_devkit.tgz and cars_test_annos_withlabels.mat of Stanford Cars",
        ("cars", "stanford_cars"),
    ),
    DataSet(
        "birds",
        200,
        {"train": 5_994, "test": 5_794},
        list_file.read_birds,
        "CUB_200_2011.tgz from https://data.caltech.edu/records/65de6-vp158",
        ("cub", "caltech_birds2011"),
        (
            Archive(
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
                "sha256:0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
                1_150_585_339,
            ),
        ),
    ),
    DataSet(
        "uc_merced",
        21,
        {"train": 2_100},
        partial(
            read_fixed_classes,
            places=("UCMerced_LandUse/Images", "Images"),
            classes="uc_merced",
            source="UC Merced",
            key="{file}",
            suffixes=(".tif",),
        ),
        "UCMerced_LandUse.zip from http://weegee.vision.ucmerced.edu/datasets/landuse.html",
    ),
    DataSet(
        "colorectal",
        8,
        {"train": 5_000},
        partial(
            read_fixed_classes,
            places=("Kather_texture_2016_image_tiles_5000",),
            classes=_COLORECTAL,
            folders=tuple(f"{number:02d}_{name.upper()}" for number, name in enumerate(_COLORECTAL, 1)),
            source="Kather 2016",
            key="{name}/{file}",
            suffixes=(".tif",),
        ),
        "Kather_texture_2016_image_tiles_5000.zip from https://zenodo.org/records/53169",
        ("colorectal_histology",),
        (
            Archive(
                "https://zenodo.org/record/53169/files/Kather_texture_2016_image_tiles_5000.zip",
                "sha256:936d0b95ae0f04f1f7b18a2b7e8c55776c3e887d102f645bcee752d1a6626a32",
                258_098_431,
            ),
        ),
    ),
    # ImageNet and related sets. The 14,197,122 of ImageNet-21k and the 18,574 of ObjectNet are unverified:
    # recalled, without a source.
    DataSet(
        "imagenet",
        1000,
        {"train": 1_281_167, "validation": 50_000},
        imagenet.read_imagenet,
        "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar from https://image-net.org, packed or unpacked, "
        "or Kaggle's ILSVRC/",
        ("imagenet2012", "ilsvrc2012", "in1k"),
        how="Make them: `vitctl data shards IMAGENET_FOLDER ROOT/NAME`, a folder with train/<wnid>/ and "
        "val/<wnid>/.",
    ),
    DataSet(
        "imagenet21k",
        21_843,
        {"train": 14_197_122},
        imagenet.read_imagenet21k,
        "fall11_whole.tar of https://image-net.org, packed, or unpacked to a .tar or a folder per synset",
        ("in21k", "i21k"),
    ),
    DataSet(
        "imagenet_v2",
        1000,
        {"test": 10_000},
        # A folder's name is its class number, so folder 10 does not come before folder 2.
        partial(
            read_fixed_classes,
            places=("imagenetv2-matched-frequency-format-val",),
            classes="imagenet",
            folders=tuple(map(str, range(1000))),
            source="ImageNet-V2, matched frequency",
            suffixes=(".jpeg", ".jpg"),
            split="test",
        ),
        "imagenetv2-matched-frequency.tar.gz from https://huggingface.co/datasets/vaishaal/ImageNetV2",
        ("imagenet-v2", "imagenetv2"),
        (
            Archive(
                "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/"
                "imagenetv2-matched-frequency.tar.gz",
                "sha256:f0c37fdf925916b19ea1323cd9a2208cdb6959ba2c32eef2a7fc393835c9ca7c",
                1_264_079_360,
            ),
        ),
    ),
    _part_of_imagenet(
        "a",
        7_500,
        "natural-adv-examples",
        "3bb3632277e6ba6392ea64c02ddbf4dd2266c9caffd6bc09c9656d28f012589e",
        687_552_512,
    ),
    _part_of_imagenet(
        "r",
        30_000,
        "imagenet-r",
        "18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
        2_191_079_936,
    ),
    DataSet(
        "imagenet_sketch",
        1000,
        {"test": 50_889},
        partial(
            read_fixed_classes,
            places=("sketch",),
            classes="imagenet",
            source="ImageNet-Sketch",
            suffixes=(".jpeg",),
            split="test",
        ),
        "ImageNet-Sketch.zip from https://github.com/HaohanWang/ImageNet-Sketch",
        ("imagenet-sketch", "sketch"),
    ),
    DataSet(
        "imagenet_c",
        1000,
        dict.fromkeys(imagenet.CORRUPTIONS, 250_000),
        imagenet.read_imagenet_c,
        "noise.tar, blur.tar, weather.tar and digital.tar (extra.tar: four more) from "
        "https://zenodo.org/records/2235448",
        ("imagenet-c",),
        scored="+".join(name for name, (_, error) in imagenet.CORRUPTIONS.items() if error),
    ),
    DataSet(
        "objectnet",
        113,
        {"test": 18_574},
        imagenet.read_objectnet,
        "objectnet-1.0.zip from https://objectnet.dev (its password stands there; it must not be used for "
        "training)",
    ),
    DataSet(
        "jft300m",
        18_291,
        {"train": 303_000_000, "validation": 49_511},
        aliases=("jft", "jft-300m"),
        how="JFT-300M is private to Google.",
    ),
)
DATA_SETS = {row.name: row for row in _ROWS}
