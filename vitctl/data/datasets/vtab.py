"""The 19 tasks of VTAB-1k as one table, and a table of the same shape that needs no download."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vitctl.errors import DataError


@dataclass(frozen=True)
class VtabTask:
    """A task: 800 training images, 200 for choosing settings, the full test split, and the augmentations.

    `train800`, `val200` and `test` are split expressions over the shards of `data_set` in md5 order.
    `community` is the task's folder in the layout of the community's copy.
    """

    name: str
    group: str
    data_set: str
    num_classes: int
    train800: str
    val200: str
    test: str
    flip: bool
    crop: bool
    community: str = ""

    @property
    def splits(self) -> dict[str, str]:
        return {"train800": self.train800, "val200": self.val200, "test": self.test}

    @property
    def train(self) -> str:
        return f"{self.train800}+{self.val200}"


def _row(
    name: str,
    group: str,
    num_classes: int,
    train800: str,
    val200: str,
    test: str,
    augment: str = "",
    community: str = "",
) -> VtabTask:
    return VtabTask(
        name,
        group,
        name,
        num_classes,
        train800,
        val200,
        test,
        "f" in augment,
        "c" in augment,
        community or name,
    )


NATURAL, SPECIALIZED, STRUCTURED = "natural", "specialized", "structured"
GROUPS = (NATURAL, SPECIALIZED, STRUCTURED)

# Splits are those of the original benchmark code. Augmentation, c random crop and f flip, is that of BiT,
# Appendix F, which the paper follows (B.1.1): it flips digits too, and does not crop images whose label is a
# count or a distance.
VTAB = (
    _row("caltech101", NATURAL, 102, "train[:800]", "train[2754:2954]", "test", "cf"),
    _row("cifar100", NATURAL, 100, "train[:800]", "train[45000:45200]", "test", "cf", "cifar"),
    _row("dtd", NATURAL, 47, "train[:800]", "validation[:200]", "test", "cf"),
    _row("flowers102", NATURAL, 102, "train[:800]", "validation[:200]", "test", "cf", "oxford_flowers102"),
    _row("pets", NATURAL, 37, "train[:800]", "train[2944:3144]", "test", "cf", "oxford_iiit_pet"),
    _row("sun397", NATURAL, 397, "train[:800]", "validation[:200]", "test", "cf"),
    _row("svhn", NATURAL, 10, "train[:800]", "train[65931:66131]", "test", "cf"),
    _row("patch_camelyon", SPECIALIZED, 2, "train[:800]", "validation[:200]", "test", "cf"),
    _row("eurosat", SPECIALIZED, 10, "train[:800]", "train[16200:16400]", "train[21600:]", "cf"),
    _row("resisc45", SPECIALIZED, 45, "train[:800]", "train[18900:19100]", "train[25200:]", "cf"),
    _row(
        "retinopathy", SPECIALIZED, 5, "train[:800]", "validation[:200]", "test", "cf", "diabetic_retinopathy"
    ),
    _row("clevr-count", STRUCTURED, 8, "train[:800]", "train[63000:63200]", "validation", "f", "clevr_count"),
    _row("clevr-dist", STRUCTURED, 6, "train[:800]", "train[63000:63200]", "validation", "f", "clevr_dist"),
    _row("dmlab", STRUCTURED, 6, "train[:800]", "validation[:200]", "test", "f"),
    _row("kitti-dist", STRUCTURED, 4, "train[:800]", "validation[:200]", "test", "f", "kitti"),
    _row(
        "dsprites-loc",
        STRUCTURED,
        16,
        "train[:800]",
        "train[589824:590024]",
        "train[663552:]",
        "",
        "dsprites_loc",
    ),
    _row(
        "dsprites-ori",
        STRUCTURED,
        16,
        "train[:800]",
        "train[589824:590024]",
        "train[663552:]",
        "c",
        "dsprites_ori",
    ),
    _row("smallnorb-azim", STRUCTURED, 18, "train[:800]", "test[:200]", "test[50%:]", "c", "smallnorb_azi"),
    _row("smallnorb-elev", STRUCTURED, 9, "train[:800]", "test[:200]", "test[50%:]", "cf", "smallnorb_ele"),
)

# Sets that come with vitctl: real digit scans, and factors of the shapes generator, in VTAB's three groups.
# The augmentation is ours: only what keeps every label true, so digits are not flipped.
_MINI_SPLITS = ("train[:800]", "train[800:1000]", "test")
MINI = (
    _row("digits", NATURAL, 10, *_MINI_SPLITS, "c"),
    _row("shapes-shape", NATURAL, 6, *_MINI_SPLITS, "cf"),
    _row("shapes-colour", SPECIALIZED, 6, *_MINI_SPLITS, "cf"),
    _row("shapes-scale", STRUCTURED, 6, *_MINI_SPLITS),
    _row("shapes-orientation", STRUCTURED, 8, *_MINI_SPLITS),
    _row("shapes-location", STRUCTURED, 9, *_MINI_SPLITS),
    _row("shapes-count", STRUCTURED, 8, *_MINI_SPLITS),
)

SUITES: dict[str, tuple[VtabTask, ...]] = {"vtab": VTAB, "mini": MINI}


def in_vtab1k(split: str, data_set: str) -> str:
    """Translate a task's split expression for a copy with the splits train800, val200 and test.

    Raises DataError if the copy does not have these images.
    """
    for task in VTAB:
        known = {task.train: "train800+val200", "train800+val200": "train800+val200"}
        for name, expression in task.splits.items():
            known |= {expression: name, name: name}
        if task.data_set == data_set and split in known:
            return known[split]
    raise DataError(
        f"the VTAB-1k copy of {data_set} has the splits train800, val200 and test; '{split}' needs the "
        f"complete data set"
    )


# Published digests of train800, for tasks whose image names were all published (from the lists of TensorFlow
# Datasets' output that the authors of Visual Prompt Tuning released), or follow from the rule (dSprites).
TRAIN800_DIGESTS = {
    "cifar100": "ac3a4b7f6d6c32f7",
    "dtd": "b6cbbd31253a3442",
    "pets": "c207b9671bc42ca0",
    "patch_camelyon": "21eaea5228a490c0",
    "eurosat": "2a2d9a1c3370755c",
    "retinopathy": "287b231ea1feb0b9",
    "clevr-count": "2755742128ae24c0",
    "clevr-dist": "2755742128ae24c0",
    "kitti-dist": "c34261afd61ba4b4",
    "dsprites-loc": "a28a98f0345bb70e",
    "dsprites-ori": "a28a98f0345bb70e",
}
# Names in the published lists that differ from the keys; for one task the extension is not published.
_PUBLISHED_NAMES: dict[str, tuple[Callable[[str], str], ...]] = {
    "cifar100": (lambda key: f"train_{int(key):05d}",),
    "eurosat": (lambda key: key.partition("_")[2],),
    "retinopathy": (str, lambda key: f"{key}.jpeg", lambda key: f"{key}.jpg"),
}
# Digests of the keys of val200 and test, if they follow from the rule and the names of the original files.
VAL200_AND_TEST_DIGESTS: dict[str, tuple[str, str]] = {
    "cifar100": ("39fc89976ed8eae5", "b4c5c7bc17b83de5"),
    "svhn": ("dfd72c5b4bd745ab", "9855a4a8620c3476"),
    "patch_camelyon": ("d6e3e99d74f635b8", "88c08c8d389b37d1"),
    "eurosat": ("6efca7747c93a4d2", "5107b3dfe4738830"),
    "resisc45": ("a8a70354d6587bee", "b09e0fdbf020cbb0"),
    "clevr-count": ("6570e8229f7bc1b9", "42a56f130f4dcfe8"),
    "clevr-dist": ("6570e8229f7bc1b9", "42a56f130f4dcfe8"),
    "dsprites-loc": ("a6443103b336d27a", "99ec872fdedb2b0d"),
    "dsprites-ori": ("a6443103b336d27a", "99ec872fdedb2b0d"),
    "smallnorb-azim": ("c943a70a6b09a5cc", "d17490579f02e716"),
    "smallnorb-elev": ("c943a70a6b09a5cc", "d17490579f02e716"),
}


def names_digest(names: Iterable[str]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the sorted names, one per line."""
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()[:16]


def is_published_train800(task: VtabTask, keys: Iterable[str]) -> bool | None:
    """Return whether these are the keys of the benchmark's 800 images; None if no digest is known."""
    if task.name not in TRAIN800_DIGESTS:
        return None
    held = list(keys)
    try:
        digests = {names_digest(map(name, held)) for name in _PUBLISHED_NAMES.get(task.name, (str,))}
    except ValueError:  # keys of another kind, such as a copy's
        return False
    return TRAIN800_DIGESTS[task.name] in digests
