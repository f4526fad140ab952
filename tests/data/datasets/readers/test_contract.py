"""What every reader of a known set owes, with files made here: labels, order, bytes, a line on bad files."""

import gzip
import hashlib
import io
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.data.conftest import encoded
from tests.data.datasets.conftest import example, plant, record
from tests.data.datasets.readers.test_cifar import plant_release
from tests.matrix import each
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers import arrays
from vitctl.data.datasets.readers.arrays import DSPRITES_FILE, NORB_STEMS
from vitctl.data.datasets.readers.imagenet import CORRUPTIONS, imagenet_classes
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.images.decode import decode
from vitctl.data.writer.intake import read_item
from vitctl.errors import DataError

scipy_io = pytest.importorskip("scipy.io")
h5py = pytest.importorskip("h5py")

RNG = np.random.default_rng(0)
DIGITS = RNG.integers(0, 256, (32, 32, 3, 3), dtype=np.uint8)
TOYS = RNG.integers(0, 256, (3, 2, 96, 96), dtype=np.uint8)
TOY_INFO = np.array(
    [[4, 0, 0, 5], [6, 8, 34, 0], [7, 3, 12, 1]], "<i4"
)  # instance, elevation, azimuth, lighting
PATCHES = np.repeat(np.arange(3, dtype=np.uint8), 96 * 96 * 3).reshape(3, 96, 96, 3)
Splits = dict[str, dict[str, int]]


class Case(NamedTuple):
    """A set's files, its images in order, and files that must be refused: path -> (content, message).

    `kept` leads from a key to the file whose bytes its image keeps; None where images are made from others.
    """

    make: Callable[[Path], Any]
    splits: Splits
    refused: tuple[tuple[str, str | bytes, str], ...] = ()
    kept: str | None = "{}"


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def class_folders(place: str, folders: tuple[str, ...], suffix: str) -> Callable[[Path], None]:
    """Two images in the second and one in the last class; the names' order is not that of their numbers."""

    def make(root: Path) -> None:
        for folder in folders:
            (root / place / folder).mkdir(parents=True)
        for number, name in enumerate((f"{folders[1]}/x_10", f"{folders[1]}/x_2", f"{folders[-1]}/x_1")):
            plant(root / place / f"{name}{suffix}", number, form="TIFF" if suffix == ".tif" else "JPEG")
        (root / place / folders[1] / "Thumbs.db").write_bytes(b"not an image")
        (root / place / ".hidden").mkdir()

    return make


def dtd(root: Path) -> None:
    for number, word in enumerate(("train", "val", "test")):
        names = [f"polka-dotted/polka-dotted_{number:04d}.jpg", f"banded/banded_{number:04d}.jpg"]
        for name in names:
            plant(root / "dtd/images" / name, number)
        write(
            root,
            {f"dtd/labels/{word}1.txt": "\n".join(names), f"dtd/labels/{word}2.txt": "another partition"},
        )


def pets(root: Path) -> None:
    """One picture is a PNG and one a GIF, although both are named `.jpg`."""
    for name, form, mode in (
        ("Abyssinian_1", "JPEG", "RGB"),
        ("beagle_2", "PNG", "RGBA"),
        ("Egyptian_Mau_3", "GIF", "P"),
    ):
        plant(root / f"images/{name}.jpg", 7, form=form, mode=mode)
    write(
        root,
        {
            "annotations/trainval.txt": "#Image CLASS-ID SPECIES BREED ID\n"
            "beagle_2 5 2 4\nAbyssinian_1 1 1 1\n",
            "annotations/test.txt": "Egyptian_Mau_3 12 1 5\n",
        },
    )


BIRDS = (
    "001.Black_footed_Albatross/a.jpg",
    "200.Common_Yellowthroat/b.jpg",
    "001.Black_footed_Albatross/c.jpg",
)


def birds(root: Path) -> None:
    for number, name in enumerate(BIRDS):
        plant(root / "CUB_200_2011/images" / name, number)
    tables = {
        "classes": "".join(f"{number} {number:03d}.Bird_{number}\n" for number in range(1, 201)),
        "images": "".join(f"{number} {name}\n" for number, name in enumerate(BIRDS, 1)),
        "image_class_labels": "1 1\n2 200\n3 1\n",
        "train_test_split": "1 0\n2 1\n3 1\n",
    }
    write(root, {f"CUB_200_2011/{name}.txt": text for name, text in tables.items()})


def mat(**variables: Any) -> bytes:
    file = io.BytesIO()
    scipy_io.savemat(file, variables)
    return file.getvalue()


def flowers_sets(**changed: list[int]) -> bytes:
    sets = {"trnid": [2, 5], "valid": [1], "tstid": [3, 4, 6]} | changed
    return mat(**{name: np.array([ids], np.uint16) for name, ids in sets.items()})


def flowers(root: Path) -> None:
    for number in range(1, 7):
        plant(root / f"jpg/image_{number:05d}.jpg", number)
    (root / "imagelabels.mat").write_bytes(mat(labels=np.array([[77, 1, 102, 5, 77, 2]], np.uint8)))
    (root / "setid.mat").write_bytes(flowers_sets())


def car_rows(classes: list[int]) -> bytes:
    fields = [(name, "O") for name in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class", "fname")]
    rows = [(1, 2, 3, 4, number, f"{n:05d}.jpg") for n, number in enumerate(classes, 1)]
    return mat(annotations=np.array([rows], fields))


def car_names(count: int) -> bytes:
    return mat(class_names=np.array([[f"Maker Model {number}" for number in range(count)]], dtype=object))


def cars(root: Path) -> None:
    (root / "devkit").mkdir()
    (root / "devkit/cars_meta.mat").write_bytes(car_names(196))
    (root / "devkit/cars_train_annos.mat").write_bytes(car_rows([14, 1, 196]))
    (root / "cars_test_annos_withlabels.mat").write_bytes(car_rows([3]))
    for number, name in enumerate(("train/00001", "train/00002", "train/00003", "test/00001")):
        plant(root / f"cars_{name}.jpg", number)


SUN_CLASSES = (
    "/a/abbey",
    "/a/apartment_building/outdoor",
    *(f"/z/class_{number:03d}" for number in range(395)),
)
SUN = {
    "tr": "/a/abbey/sun_aa.jpg",
    "va": "/a/apartment_building/outdoor/sun_bb.jpg",
    "te": "/z/class_394/sun_cc.jpg",
}


def sun397(root: Path) -> None:
    for word, name in SUN.items():
        plant(root / f"SUN397{name}", form="PNG" if word == "te" else "JPEG")
        write(root, {f"sun397_tfds_{word}.txt": f"{name}\n"})
    write(root, {"SUN397/ClassName.txt": "\n".join(SUN_CLASSES[::-1])})


def scene(name: str, *depths: float) -> dict[str, Any]:
    return {"image_filename": name, "objects": [{"pixel_coords": [10, 20, depth]} for depth in depths]}


def clevr(root: Path) -> None:
    for word in ("train", "val"):
        names = [f"CLEVR_{word}_{number:06d}.png" for number in range(2)]
        scenes = [scene(names[0], 12.5, 8.0, 9.1), scene(names[1], *range(11, 21))]
        write(
            root, {f"CLEVR_v1.0/scenes/CLEVR_{word}_scenes.json": json.dumps({"info": {}, "scenes": scenes})}
        )
        for number, name in enumerate(names):
            plant(root / "CLEVR_v1.0/images" / word / name, number, form="PNG", mode="RGBA")


def clevr_labels(first: int, second: int) -> Splits:
    return {
        split: {f"CLEVR_{word}_000000.png": first, f"CLEVR_{word}_000001.png": second}
        for split, word in (("train", "train"), ("validation", "val"))
    }


CLEVR_SCENES = "CLEVR_v1.0/scenes/CLEVR_train_scenes.json"
DRIVES = (
    "2011_09_26_drive_0005_sync",
    "2011_09_26_drive_0001_sync",
    "2011_09_28_drive_0016_sync",
    "2011_10_03_drive_0047_sync",
)


def thing(kind: str, depth: float) -> str:
    return f"{kind} 0.00 0 -1.57 614.24 181.78 727.31 284.77 1.57 1.73 4.15 1.00 1.75 {depth} -1.62\n"


def kitti(root: Path) -> None:
    """Image n was frame number (3, 1, 4, 2)[n], of which there is one for each drive."""
    scenes = (
        thing("Car", 8.0) + thing("Van", 30.0) + thing("DontCare", -1000.0),
        thing("Pedestrian", 3.0) + thing("Truck", 8.01),
        thing("Car", 20.5),
        thing("Cyclist", 5.0) + thing("Tram", 6.0),
    )
    for number, text in enumerate(scenes):
        plant(root / f"training/image_2/{number:06d}.png", number, form="PNG")
        write(root, {f"training/label_2/{number:06d}.txt": text})
    frames = "".join(f"{drive[:10]} {drive} 0000000001\n" for drive in DRIVES)
    mapping = "devkit_object/mapping"
    write(root, {f"{mapping}/train_rand.txt": "3,1,4,2", f"{mapping}/train_mapping.txt": frames})


def retinopathy(root: Path) -> None:
    for name in ("train/10_left", "train/10_right", "test/1_left", "test/1_right", "test/2_left"):
        plant(root / f"{name}.jpeg", 200, size=(60, 40))
    write(
        root,
        {
            "trainLabels.csv": "image,level\n10_right,4\n10_left,0\n",
            "retinopathy_solution.csv": "image,level,Usage\n1_left,2,Public\n"
            "1_right,1,Private\n2_left,3,Private\n",
        },
    )


def digits_mat(pixels: np.ndarray, digits: list[int]) -> bytes:
    return mat(X=pixels, y=np.array(digits, np.uint8)[:, None])


def svhn(root: Path) -> None:
    for split in ("train", "test"):
        (root / f"{split}_32x32.mat").write_bytes(digits_mat(DIGITS, [10, 1, 9]))


def hdf5(**arrays: np.ndarray) -> bytes:
    file = io.BytesIO()
    with h5py.File(file, "w") as opened:
        for name, array in arrays.items():
            opened.create_dataset(name, data=array)
    return file.getvalue()


def patch_camelyon(root: Path) -> None:
    for word in ("train", "valid", "test"):
        for part, array in (("x", PATCHES), ("y", np.array([0, 1, 1], np.uint8).reshape(-1, 1, 1, 1))):
            path = root / f"camelyonpatch_level_2_split_{word}_{part}.h5"
            path.write_bytes(hdf5(**{part: array}))


def sprites(pixels: np.ndarray) -> bytes:
    """Packed as published, the pickled metadata included."""
    file = io.BytesIO()
    np.savez_compressed(file, imgs=pixels, metadata=np.array({"author": "x"}, dtype=object))
    return file.getvalue()


def dsprites(root: Path) -> None:
    """The white pixel of row n is pixel number n."""
    pixels = np.zeros((2050, 64 * 64), np.uint8)
    pixels[np.arange(2050), np.arange(2050)] = 1
    (root / DSPRITES_FILE).write_bytes(sprites(pixels.reshape(-1, 64, 64)))


def norb(array: np.ndarray) -> bytes:
    """As the authors describe their files; short shapes are padded to three lengths."""
    magic = {1: 0x1E3D4C55, 4: 0x1E3D4C54}[array.itemsize]
    lengths = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<ii{len(lengths)}i", magic, array.ndim, *lengths) + array.tobytes()


def smallnorb(root: Path) -> None:
    """The training files packed, the test files not."""
    for part, array in (("dat", TOYS), ("info", TOY_INFO)):
        packed = gzip.compress(norb(array), mtime=0)
        (root / f"{NORB_STEMS['train']}-{part}.mat.gz").write_bytes(packed)
        (root / f"{NORB_STEMS['test']}-{part}.mat").write_bytes(norb(array[:1]))


def dmlab_file(*labels: int, colour: int = 0) -> bytes:
    written = b""
    for label in labels:
        image = encoded(Image.new("RGB", (6, 5), (colour, label, 0)), "JPEG")
        name = f"video_{colour}_{label}.jpg".encode()
        written += record(example({"image": image, "filename": name, "label": label}))
    return written


DMLAB_TEST = "dmlab-test.tfrecord-00000-of-00001"


def dmlab(root: Path) -> None:
    names = (
        "train.tfrecord-00000-of-00002",
        "train.tfrecord-00001-of-00002",
        "validation.tfrecord-00000-of-00001",
    )
    for number, name in enumerate(names):
        (root / f"dmlab-{name}").write_bytes(dmlab_file(5, number, colour=number))
    (root / DMLAB_TEST).write_bytes(dmlab_file(5, 3, colour=3))


MAPPINGS = "objectnet-1.0/mappings"


def objectnet(root: Path) -> None:
    """113 shared classes, the first of them two of ImageNet's, and one that ImageNet lacks."""
    new_of_old = np.random.default_rng(0).permutation(1000).tolist()
    shared = {f"Object {n:03d}": f"thing {n}, its kin" for n in range(113)}
    shared["Object 000"] = "thing 530, its kin; thing 409, its kin"
    folders = {f"object_{n:03d}": f"Object {n:03d}" for n in range(113)} | {"air_freshener": "Air freshener"}
    old_of_new = {str(new): old for old, new in enumerate(new_of_old)}
    files = {
        "imagenet_to_label_2012_v2": "".join(f"thing {new}, its kin\n" for new in new_of_old),
        "pytorch_to_imagenet_2012_id.json": json.dumps(old_of_new),
        "objectnet_to_imagenet_1k.json": json.dumps(shared),
        "folder_to_objectnet_label.json": json.dumps(folders),
    }
    write(root, {f"{MAPPINGS}/{name}": text for name, text in files.items()})
    for number, folder in enumerate(folders):
        framed = np.full((9, 10, 3), (255, 0, 0), np.uint8)
        framed[2:-2, 2:-2] = (0, number, 0)
        place = root / f"objectnet-1.0/images/{folder}/abc{number}.png"
        place.parent.mkdir(parents=True)
        Image.fromarray(framed).save(place)


CORRUPTED = [(s, wnid, k) for s in range(1, 6) for wnid, k in (("n01440764", 0), ("n15075141", 999))]


def imagenet_c(root: Path) -> None:
    """As the archives unpack: some people keep the archives' names as folders, so every other one does."""
    for number, (name, (archive, _)) in enumerate(CORRUPTIONS.items()):
        for severity, wnid, label in CORRUPTED:
            place = root / (archive if number % 2 else "") / name / str(severity) / wnid / "a.JPEG"
            plant(place, number + severity + label % 7)


def cifar_splits(num_files: int) -> Splits:
    labels = [3, 1, 0, 9]
    counts = {"train": 4 * num_files, "test": 4}
    return {split: {str(n): labels[n % 4] for n in range(count)} for split, count in counts.items()}


NORB_TEST_INFO = f"{NORB_STEMS['test']}-info.mat"
EUROSAT, RESISC = class_list("eurosat"), class_list("resisc45")
TISSUES = (
    "01_TUMOR",
    "02_STROMA",
    "03_COMPLEX",
    "04_LYMPHO",
    "05_DEBRIS",
    "06_MUCOSA",
    "07_ADIPOSE",
    "08_EMPTY",
)
NUMBERS = tuple(map(str, range(1000)))
V2 = "imagenetv2-matched-frequency-format-val"
LAND = class_list("uc_merced")
OUT = "is outside this folder"
CASES: dict[str, Case] = {
    "eurosat": Case(
        class_folders("2750", EUROSAT, ".jpg"),
        {"train": {"Forest_x_10.jpg": 1, "Forest_x_2.jpg": 1, "SeaLake_x_1.jpg": 9}},
        kept=None,
    ),
    "resisc45": Case(
        class_folders("NWPU-RESISC45", RESISC, ".jpg"),
        {"train": {"airport_x_10.jpg": 1, "airport_x_2.jpg": 1, "wetland_x_1.jpg": 44}},
        kept=None,
    ),
    "uc_merced": Case(
        class_folders("UCMerced_LandUse/Images", LAND, ".tif"),
        {"train": {"x_10.tif": 1, "x_2.tif": 1, "x_1.tif": 20}},
        kept=None,
    ),
    "colorectal": Case(
        class_folders("Kather_texture_2016_image_tiles_5000", TISSUES, ".tif"),
        {"train": {"stroma/x_10.tif": 1, "stroma/x_2.tif": 1, "empty/x_1.tif": 7}},
        kept=None,
    ),
    "imagenet_v2": Case(
        class_folders(V2, NUMBERS, ".jpeg"),
        {"test": {"1/x_10.jpeg": 1, "1/x_2.jpeg": 1, "999/x_1.jpeg": 999}},
        kept=V2 + "/{}",
    ),
    **{
        f"imagenet_{letter}": Case(
            class_folders(f"imagenet-{letter}", class_list(f"imagenet_{letter}"), ".jpg"),
            {
                "test": {
                    f"{class_list(f'imagenet_{letter}')[label]}/x_{number}.jpg": label
                    for label, number in ((1, 10), (1, 2), (199, 1))
                }
            },
            kept=f"imagenet-{letter}/{{}}",
        )
        for letter in "ar"
    },
    "imagenet_sketch": Case(
        class_folders("sketch", class_list("imagenet"), ".JPEG"),
        {"test": {"n01443537/x_10.JPEG": 1, "n01443537/x_2.JPEG": 1, "n15075141/x_1.JPEG": 999}},
        kept="sketch/{}",
    ),
    "imagenet_c": Case(
        imagenet_c,
        {name: {f"{s}/{wnid}/a.JPEG": k for s, wnid, k in CORRUPTED} for name in CORRUPTIONS},
        kept=None,
    ),
    "dtd": Case(
        dtd,
        {
            split: {f"polka-dotted/polka-dotted_000{n}.jpg": 30, f"banded/banded_000{n}.jpg": 0}
            for n, split in enumerate(("train", "validation", "test"))
        },
        (
            ("dtd/labels/val1.txt", "furry/a.jpg\n", r"val1.txt: furry is not one of the 47 classes"),
            ("dtd/labels/val1.txt", "banded/a.jpg\n", "images: 1 of 1 listed images are missing, .*"),
            ("dtd/labels/val1.txt", "../../banded/a.jpg\n", "not one of the 47 classes"),
        ),
        "dtd/images/{}",
    ),
    "pets": Case(
        pets,
        {"train": {"beagle_2.jpg": 4, "Abyssinian_1.jpg": 0}, "test": {"Egyptian_Mau_3.jpg": 11}},
        (
            ("annotations/test.txt", "beagle_2 38 2 4\n", "test.txt: 1 labels are out of range, .* 37 of 37"),
            ("annotations/test.txt", "beagle_2 five 2\n", "test.txt: every row should have a class"),
            ("annotations/test.txt", "beagle_2\n", r"line 'beagle_2' should have at least 2 columns"),
            ("annotations/test.txt", "pug_9 26 2 1\n", "1 of 1 listed images are missing, the first is"),
            ("annotations/test.txt", "../x 26 2 1\n", OUT),
            ("annotations/test.txt", "/x 26 2 1\n", OUT),
        ),
        "images/{}",
    ),
    "birds": Case(
        birds,
        {
            "train": {f"CUB_200_2011/images/{BIRDS[1]}": 199, f"CUB_200_2011/images/{BIRDS[2]}": 0},
            "test": {f"CUB_200_2011/images/{BIRDS[0]}": 0},
        },
        (
            ("CUB_200_2011/classes.txt", "2 a\n1 b\n", "classes.txt: should number the classes from 1"),
            ("CUB_200_2011/classes.txt", "1 a\n", "out of range"),
            ("CUB_200_2011/train_test_split.txt", "1 0\n", "should number the same images as images.txt"),
            ("CUB_200_2011/image_class_labels.txt", "1 1\n2 201\n3 1\n", "1 labels are out of range, .*"),
            ("CUB_200_2011/image_class_labels.txt", "1 1\n2 x\n3 1\n", "should have a class number, 1"),
            ("CUB_200_2011/images.txt", "1 a.jpg\n2\n3 c.jpg\n", "line '2' should have at least 2 columns"),
            ("CUB_200_2011/images.txt", "1 a.jpg\n2 ../../b.jpg\n3 c.jpg\n", OUT),
        ),
    ),
    "flowers102": Case(
        flowers,
        {
            "train": {"image_00002.jpg": 0, "image_00005.jpg": 76},
            "validation": {"image_00001.jpg": 76},
            "test": {"image_00003.jpg": 101, "image_00004.jpg": 4, "image_00006.jpg": 1},
        },
        (
            ("setid.mat", flowers_sets(tstid=[3, 7]), "image numbers run from 3 to 7, should be 1 to 6"),
            ("imagelabels.mat", mat(labels=np.array([[0, 103]], np.uint8)), "2 labels are out of range"),
            ("imagelabels.mat", mat(other=np.zeros(3)), "has no variable labels"),
        ),
        "jpg/{}",
    ),
    "cars196": Case(
        cars,
        {"train": {"00001": 13, "00002": 0, "00003": 195}, "test": {"00001": 2}},
        (
            ("devkit/cars_train_annos.mat", car_rows([14, 197]), "1 labels are out of range, .* 196 of 196"),
            ("devkit/cars_train_annos.mat", mat(annotations=np.zeros((1, 3))), "should have the fields"),
            ("devkit/cars_meta.mat", car_names(197), "197 classes, cars196 has 196"),
        ),
        None,
    ),
    "sun397": Case(
        sun397,
        {"train": {SUN["tr"]: 0}, "validation": {SUN["va"]: 1}, "test": {SUN["te"]: 396}},
        (
            ("sun397_tfds_tr.txt", "/a/abbeys/sun_aa.jpg\n", "/a/abbeys is not one of the"),
            ("sun397_tfds_tr.txt", "/a/abbey/x.jpg\n", "1 of 1 listed images are missing, the first is"),
            ("SUN397/ClassName.txt", "/a/abbey\n", "not one of the 1 classes"),
        ),
        "SUN397{}",
    ),
    "clevr-count": Case(
        clevr,
        clevr_labels(0, 7),
        (
            (CLEVR_SCENES, '{"scenes": [{"image_filename": "x.png"}]}', "not a file of CLEVR scenes"),
            (CLEVR_SCENES, json.dumps({"scenes": [scene("x.png", 1)]}), "1 labels are out of range, .*"),
            (CLEVR_SCENES, json.dumps({"scenes": [scene("x.png", 1, 2, 3)]}), "images are missing, .* x.png"),
            (CLEVR_SCENES, json.dumps({"scenes": [scene("../x.png", 1, 2, 3)]}), OUT),
        ),
        None,
    ),
    "clevr-dist": Case(clevr, clevr_labels(0, 5), kept=None),
    "kitti-dist": Case(
        kitti,
        {
            "train": {"000001.png": 1},
            "validation": {"000000.png": 0},
            "test": {"000002.png": 2, "000003.png": 3},
        },
        (
            ("devkit_object/mapping/train_rand.txt", "3,1,4,5", "line numbers should be 1 to 4"),
            ("devkit_object/mapping/train_rand.txt", "3 1 4", "should be line numbers separated by commas"),
            ("devkit_object/mapping/train_mapping.txt", "2011_09_26 drive\n", "should have at least 3"),
            ("training/label_2/000002.txt", "Car 0.00 0", "should have at least 15 columns"),
            ("training/label_2/000002.txt", thing("Car", 1).replace(" 1 ", " near "), "column 14 should"),
        ),
        "training/image_2/{}",
    ),
    "retinopathy": Case(
        retinopathy,
        {
            "train": {"10_right": 4, "10_left": 0},
            "validation": {"1_left": 2},
            "test": {"1_right": 1, "2_left": 3},
        },
        (
            ("trainLabels.csv", "image,level\n10_left,5\n", "1 labels are out of range, the first is 5 of 5"),
            ("trainLabels.csv", "image,level\n10_left,\n", "should have a class number, 0 to 4"),
            ("trainLabels.csv", "image,grade\n10_left,1\n", "every row should have the columns image"),
            ("trainLabels.csv", "image,level\n11_left,1\n", "images are missing, the first is 11_left.jpeg"),
            ("trainLabels.csv", "image,level\n../x,1\n", OUT),
            ("retinopathy_solution.csv", "image,level,Usage\n1_left,2,Public\n", "no row has Usage Private"),
        ),
        None,
    ),
    "cifar10": Case(lambda root: plant_release(root, "cifar10"), cifar_splits(5), kept=None),
    "cifar100": Case(lambda root: plant_release(root, "cifar100"), cifar_splits(1), kept=None),
    "svhn": Case(
        svhn,
        {split: {"0": 0, "1": 1, "2": 9} for split in ("train", "test")},
        (
            ("train_32x32.mat", digits_mat(DIGITS, [1, 2]), r"X is uint8 \(32, 32, 3, 3\) for 2 labels"),
            ("train_32x32.mat", digits_mat(DIGITS.astype(float), [1, 2, 3]), "X is float64"),
            ("train_32x32.mat", digits_mat(DIGITS, [1, 2, 11]), "1 labels are out of range, the first is 11"),
        ),
        None,
    ),
    "patch_camelyon": Case(
        patch_camelyon,
        {
            split: {f"{word}_0": 0, f"{word}_1": 1, f"{word}_2": 1}
            for split, word in (("train", "train"), ("validation", "valid"), ("test", "test"))
        },
        (("camelyonpatch_level_2_split_train_y.h5", hdf5(y=np.zeros(2, np.uint8)), "train_x.h5: x is"),),
        None,
    ),
    "dsprites-loc": Case(
        dsprites,
        {"train": {str(row): row // 64 % 16 for row in range(2050)}},
        (
            (DSPRITES_FILE, sprites(np.zeros((2, 32, 32), np.uint8)), r"imgs is uint8 \(2, 32, 32\)"),
            (DSPRITES_FILE, sprites(np.zeros((2, 64, 64))), "imgs is float64"),
            (DSPRITES_FILE, sprites(np.array([{}], dtype=object)), "imgs is object"),
        ),
        None,
    ),
    "dsprites-ori": Case(dsprites, {"train": dict.fromkeys(map(str, range(2050)), 0)}, kept=None),
    "smallnorb-azim": Case(
        smallnorb,
        {"train": {"0": 0, "1": 17, "2": 6}, "test": {"0": 0}},
        ((NORB_TEST_INFO, norb(TOY_INFO), r"images are \(1, 2, 96, 96\) and info \(3, 4\), should be"),),
        None,
    ),
    "smallnorb-elev": Case(smallnorb, {"train": {"0": 0, "1": 8, "2": 3}, "test": {"0": 0}}, kept=None),
    "dmlab": Case(
        dmlab,
        {
            "train": {"video_0_5.jpg": 5, "video_0_0.jpg": 0, "video_1_5.jpg": 5, "video_1_1.jpg": 1},
            "validation": {"video_2_5.jpg": 5, "video_2_2.jpg": 2},
            "test": {"video_3_5.jpg": 5, "video_3_3.jpg": 3},
        },
        (
            (DMLAB_TEST, dmlab_file(6), "1 labels are out of range, the first is 6 of 6 classes"),
            (DMLAB_TEST, record(example({"filename": b"a"})), "an example has 0 values of 'label'"),
            (DMLAB_TEST, dmlab_file(5)[:-3], "truncated within the record"),
        ),
        None,
    ),
    "objectnet": Case(
        objectnet,
        {"test": {f"object_{n:03d}/abc{n}.png": n for n in range(113)}},
        (
            (f"{MAPPINGS}/folder_to_objectnet_label.json", "[]", "label.json: should be a JSON table$"),
            (
                f"{MAPPINGS}/objectnet_to_imagenet_1k.json",
                '{"Object 001": "thing 1, its kin"}',
                "should be 113$",
            ),
            (f"{MAPPINGS}/objectnet_to_imagenet_1k.json", '{"Object 001": "x"}', "do not match"),
        ),
        None,
    ),
}
OF_IMAGES = {".jpg", ".jpeg", ".png", ".tif"}


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def root(name: str, tmp_path: Path) -> Path:
    CASES[name].make(tmp_path)
    return tmp_path


def test_cases__are_all_sets_but_those_with_tests_of_their_own() -> None:
    with_files = {name for name, row in DATA_SETS.items() if row.read is not None}
    assert with_files - CASES.keys() == {"caltech101", "imagenet", "imagenet21k"}


def test_open__labels_order_and_images(name: str, root: Path) -> None:
    case, splits = CASES[name], DATA_SETS[name].open(root)
    assert set(splits) == set(DATA_SETS[name].sizes)
    assert {split: [(item.key, item.label) for item in o.items] for split, o in splits.items()} == {
        split: list(labels.items()) for split, labels in case.splits.items()
    }
    written = {
        hashlib.sha256(path.read_bytes()).digest()
        for path in root.rglob("*")
        if path.suffix.lower() in OF_IMAGES
    }
    for originals in splits.values():
        for item in originals.items[:3]:
            data = read_item(item)
            assert item.size in (None, len(data))
            assert decode(data).shape[2] == 3
            if case.kept is not None:
                assert data == (root / case.kept.format(item.key)).read_bytes()
            elif item.size is not None:
                assert hashlib.sha256(data).digest() in written


def test_open__refuses_what_a_set_must_not_hold(name: str, root: Path) -> None:
    for path, content, message in CASES[name].refused:
        before = (root / path).read_bytes()
        (root / path).write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(DataError, match=message) as caught:
            DATA_SETS[name].open(root)
        assert "\n" not in str(caught.value)
        (root / path).write_bytes(before)


def test_open__any_list_missing_damaged_or_too_large_is_one_line(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bound in ("LIST_FILE", "TABLE", "RECORD"):
        monkeypatch.setattr(f"vitctl.system.limits.{bound}", 2**20)
    ignored = {"Thumbs.db", "train2.txt", "val2.txt", "test2.txt"}
    files = [
        path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix.lower() not in OF_IMAGES
    ]
    for path in (path for path in files if path.name not in ignored):
        before = path.read_bytes()
        for content in (None, b"\xff\xfe\x00", b"9" * (2**20 + 1)):
            if content is None and path.name.endswith("of-00002"):
                continue  # a split's other file is still there, which only the number of images tells
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            arrays.open_hdf5.cache_clear()
            with pytest.raises(DataError) as caught:
                DATA_SETS[name].open(root)
            assert "\n" not in str(caught.value)
            path.write_bytes(before)


def test_open__class_folders_that_are_missing_or_unknown(tmp_path: Path) -> None:
    for name, places in (("eurosat", EUROSAT), ("imagenet_v2", NUMBERS)):
        folder = tmp_path / {"eurosat": "EuroSAT_RGB", "imagenet_v2": V2}[name]
        for place in (*places[1:], "zebra", ".hidden"):
            (folder / place).mkdir(parents=True)
        message = f"should hold {len(places)} class folders; 1 missing: {places[0]}; 1 unknown: zebra$"
        with pytest.raises(DataError, match=message):
            DATA_SETS[name].open(tmp_path)


@each("row", [row for row in DATA_SETS.values() if row.read])
def test_open__an_empty_folder_names_what_belongs_there(row: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"unpack here: ") as caught:
        row.open(tmp_path)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert row.archive in str(caught.value)


# What the table above does not show


def test_arrays__pixels_are_those_of_the_files(tmp_path: Path) -> None:
    wanted = {
        "svhn": ("train", 2, DIGITS[..., 2]),
        "patch_camelyon": ("test", 2, PATCHES[2]),
        "smallnorb-azim": ("train", 1, np.repeat(TOYS[1, 0][:, :, None], 3, axis=2)),
    }
    for name, (split, row, pixels) in wanted.items():
        (tmp_path / name).mkdir()
        CASES[name].make(tmp_path / name)
        item = DATA_SETS[name].open(tmp_path / name)[split].items[row]
        np.testing.assert_array_equal(decode(item.read()), pixels)


def test_objectnet__classes_are_named_after_imagenets_and_the_red_frame_is_gone(tmp_path: Path) -> None:
    wnids = class_list("imagenet")
    objectnet(tmp_path)
    split = DATA_SETS["objectnet"].open(tmp_path)["test"]
    assert split.class_names[0] == f"Object 000 ({wnids[409]} {wnids[530]})"
    assert split.class_names[7] == f"Object 007 ({wnids[7]})"
    assert imagenet_classes(split.class_names[0]) == [wnids[409], wnids[530]]
    assert imagenet_classes(wnids[3]) == imagenet_classes("Object (odd)") == []
    pixels = decode(split.items[5].read())
    assert pixels.shape == (5, 6, 3)
    assert pixels.reshape(-1, 3).tolist() == [[0, 5, 0]] * 30


def test_retinopathy__images_are_treated_when_they_are_read(tmp_path: Path) -> None:
    retinopathy(tmp_path)
    with Image.open(io.BytesIO(DATA_SETS["retinopathy"].open(tmp_path)["train"].items[0].read())) as image:
        assert (image.format, image.size) == ("JPEG", (540, 400))  # the red field is 60 wide: scaled by ten


def test_sun397__without_lists_the_packed_split_asks_for_all_images(tmp_path: Path) -> None:
    sun397(tmp_path)
    (tmp_path / "sun397_tfds_va.txt").unlink()
    with pytest.raises(DataError, match=r"sun397_tfds_va.txt is missing; unpack here: .* package"):
        DATA_SETS["sun397"].open(tmp_path)
    for word in ("tr", "te"):
        (tmp_path / f"sun397_tfds_{word}.txt").unlink()
    with pytest.raises(DataError, match=r"these 3 images are not the 108,753 of SUN397, .* unpack"):
        DATA_SETS["sun397"].open(tmp_path)


def test_imagenet_c__a_folder_that_is_not_a_class(tmp_path: Path) -> None:
    plant(tmp_path / "fog/3/n00000000/a.JPEG")
    with pytest.raises(DataError, match=r"n00000000 is not one of the 1,000 classes, such as n01440764$"):
        DATA_SETS["imagenet_c"].open(tmp_path)
