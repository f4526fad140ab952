"""The 19 tasks of VTAB-1k as one table, and a table of the same shape that needs no download."""

from dataclasses import dataclass


@dataclass(frozen=True)
class VtabTask:
    """A task: 1,000 training images, the whole test split, and which augmentations keep its labels true.

    `train` and `test` are split expressions over the shards of `data_set` in md5 order.
    """

    name: str
    group: str
    data_set: str
    num_classes: int
    train: str
    test: str
    flip: bool
    crop: bool


def _row(name: str, group: str, data_set: str, num_classes: int, train: str, test: str, augment: str = "") -> VtabTask:
    return VtabTask(name, group, data_set, num_classes, train, test, "f" in augment, "c" in augment)


NATURAL, SPECIALIZED, STRUCTURED = "natural", "specialized", "structured"
GROUPS = (NATURAL, SPECIALIZED, STRUCTURED)

# Splits are those of the original benchmark code. Augmentation: c random crop, f flip, where neither changes the label;
# digits keep their handedness, and every structured task is resized only.
VTAB = (
    _row("caltech101", NATURAL, "caltech101", 102, "train[:800]+train[2754:2954]", "test", "cf"),
    _row("cifar100", NATURAL, "cifar100", 100, "train[:800]+train[45000:45200]", "test", "cf"),
    _row("dtd", NATURAL, "dtd", 47, "train[:800]+validation[:200]", "test", "cf"),
    _row("flowers102", NATURAL, "flowers102", 102, "train[:800]+validation[:200]", "test", "cf"),
    _row("pets", NATURAL, "pets", 37, "train[:800]+train[2944:3144]", "test", "cf"),
    _row("sun397", NATURAL, "sun397", 397, "train[:800]+validation[:200]", "test", "cf"),
    _row("svhn", NATURAL, "svhn", 10, "train[:800]+train[65931:66131]", "test", "c"),
    _row("patch_camelyon", SPECIALIZED, "patch_camelyon", 2, "train[:800]+validation[:200]", "test", "cf"),
    _row("eurosat", SPECIALIZED, "eurosat", 10, "train[:800]+train[16200:16400]", "train[21600:]", "cf"),
    _row("resisc45", SPECIALIZED, "resisc45", 45, "train[:800]+train[18900:19100]", "train[25200:]", "cf"),
    _row("retinopathy", SPECIALIZED, "retinopathy", 5, "train[:800]+validation[:200]", "test", "cf"),
    _row("clevr-count", STRUCTURED, "clevr-count", 8, "train[:800]+train[63000:63200]", "validation"),
    _row("clevr-dist", STRUCTURED, "clevr-dist", 6, "train[:800]+train[63000:63200]", "validation"),
    _row("dmlab", STRUCTURED, "dmlab", 6, "train[:800]+validation[:200]", "test"),
    _row("kitti-dist", STRUCTURED, "kitti-dist", 4, "train[:800]+validation[:200]", "test"),
    _row("dsprites-loc", STRUCTURED, "dsprites-loc", 16, "train[:800]+train[589824:590024]", "train[663552:]"),
    _row("dsprites-ori", STRUCTURED, "dsprites-ori", 16, "train[:800]+train[589824:590024]", "train[663552:]"),
    _row("smallnorb-azim", STRUCTURED, "smallnorb-azim", 18, "train[:800]+test[:200]", "test[50%:]"),
    _row("smallnorb-elev", STRUCTURED, "smallnorb-elev", 9, "train[:800]+test[:200]", "test[50%:]"),
)

# Sets that come with vitctl: real digit scans, and factors of the shapes generator, in VTAB's three groups.
_MINI_TRAIN = "train[:800]+train[800:1000]"
MINI = (
    _row("digits", NATURAL, "digits", 10, _MINI_TRAIN, "test", "c"),
    _row("shapes-shape", NATURAL, "shapes-shape", 6, _MINI_TRAIN, "test", "cf"),
    _row("shapes-colour", SPECIALIZED, "shapes-colour", 6, _MINI_TRAIN, "test", "cf"),
    _row("shapes-scale", STRUCTURED, "shapes-scale", 6, _MINI_TRAIN, "test"),
    _row("shapes-orientation", STRUCTURED, "shapes-orientation", 8, _MINI_TRAIN, "test"),
    _row("shapes-location", STRUCTURED, "shapes-location", 9, _MINI_TRAIN, "test"),
    _row("shapes-count", STRUCTURED, "shapes-count", 8, _MINI_TRAIN, "test"),
)

SUITES: dict[str, tuple[VtabTask, ...]] = {"vtab": VTAB, "mini": MINI}
