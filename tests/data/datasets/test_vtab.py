"""The 19 tasks against the benchmark's own table."""

from collections.abc import Callable

import pytest

from tests.data.datasets.conftest import BY_NAME
from tests.matrix import each, spread
from vitctl.data.datasets.catalog import find_data_set, known_size
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.datasets.vtab import (
    GROUPS,
    MINI,
    TRAIN800_DIGESTS,
    VAL200_AND_TEST_DIGESTS,
    VTAB,
    VtabTask,
    is_published_train800,
    names_digest,
)
from vitctl.data.source.splits import md5_order, resolve

ALL = VTAB + MINI

# Folder in the community's copy, classes, test images, random crop and flip. The augmentation is that of BiT,
# Appendix F, which the ViT paper follows at 384 pixels for all tasks (B.1.1).
PUBLISHED = {
    "caltech101": ("caltech101", 102, 6_084, True, True),
    "cifar100": ("cifar", 100, 10_000, True, True),
    "dtd": ("dtd", 47, 1_880, True, True),
    "flowers102": ("oxford_flowers102", 102, 6_149, True, True),
    "pets": ("oxford_iiit_pet", 37, 3_669, True, True),
    "sun397": ("sun397", 397, 21_750, True, True),
    "svhn": ("svhn", 10, 26_032, True, True),
    "patch_camelyon": ("patch_camelyon", 2, 32_768, True, True),
    "eurosat": ("eurosat", 10, 5_400, True, True),
    "resisc45": ("resisc45", 45, 6_300, True, True),
    "retinopathy": ("diabetic_retinopathy", 5, 42_670, True, True),
    "clevr-count": ("clevr_count", 8, 15_000, False, True),
    "clevr-dist": ("clevr_dist", 6, 15_000, False, True),
    "dmlab": ("dmlab", 6, 22_735, False, True),
    "kitti-dist": ("kitti", 4, 711, False, True),
    "dsprites-loc": ("dsprites_loc", 16, 73_728, False, False),
    "dsprites-ori": ("dsprites_ori", 16, 73_728, True, False),
    "smallnorb-azim": ("smallnorb_azi", 18, 12_150, True, False),
    "smallnorb-elev": ("smallnorb_ele", 9, 12_150, True, True),
}


def test_vtab__nineteen_tasks_in_three_groups_as_published() -> None:
    assert [sum(task.group == group for task in VTAB) for group in GROUPS] == [7, 4, 8]
    sizes = {task.name: known_size(task.data_set, task.test) for task in VTAB}
    assert {
        task.name: (task.community, task.num_classes, (sizes[task.name] or (0,))[0], task.crop, task.flip)
        for task in VTAB
    } == PUBLISHED


@each("task", ALL)
def test_vtab__classes_are_those_of_the_data_set(task: VtabTask) -> None:
    assert task.num_classes == find_data_set(task.data_set).num_classes


@each("task", ALL)
def test_vtab__a_thousand_images_apart_from_the_test(task: VtabTask) -> None:
    sizes = find_data_set(task.data_set).sizes
    (train,), (validation,), (test,) = (
        resolve(split, sizes) for split in (task.train800, task.val200, task.test)
    )
    assert (train.split, train.start, train.stop) == ("train", 0, 800)
    assert validation.stop - validation.start == 200
    assert resolve(task.train, sizes) == [train, validation]
    for part in (train, validation):
        assert part.split != test.split or part.stop <= test.start


def _eurosat_keys() -> list[str]:
    hundreds = dict(zip(class_list("eurosat"), (30, 30, 30, 25, 25, 20, 25, 30, 25, 30), strict=True))
    return [f"{name}_{name}_{n}.jpg" for name, count in hundreds.items() for n in range(1, 100 * count + 1)]


ALL_KEYS: dict[str, Callable[[], list[str]]] = {
    "cifar100": lambda: list(map(str, range(50_000))),
    "patch_camelyon": lambda: [f"train_{number}" for number in range(262_144)],
    "eurosat": _eurosat_keys,
    "clevr-count": lambda: [f"CLEVR_train_{number:06d}.png" for number in range(70_000)],
}


@pytest.mark.parametrize("name", spread(1, ALL_KEYS))
def test_is_published_train800__proves_the_images_by_their_names(name: str) -> None:
    """Names and counts of the original files are enough; no image is needed."""
    task, keys = BY_NAME[name], ALL_KEYS[name]()
    assert len(keys) == find_data_set(name).sizes["train"]
    chosen = [keys[number] for number in md5_order(keys, "train")[:800]]
    assert is_published_train800(task, chosen) is True
    assert is_published_train800(task, chosen[::-1]) is True
    assert is_published_train800(task, [*chosen[1:], keys[-1]]) is False


OTHER_KEYS: dict[str, dict[str, Callable[[], list[str]]]] = {
    "cifar100": {"train": ALL_KEYS["cifar100"], "test": lambda: list(map(str, range(10_000)))},
    "svhn": {"train": lambda: list(map(str, range(73_257))), "test": lambda: list(map(str, range(26_032)))},
    "eurosat": {"train": _eurosat_keys},
    "resisc45": {
        "train": lambda: [f"{c}_{c}_{n:03d}.jpg" for c in class_list("resisc45") for n in range(1, 701)]
    },
    "clevr-dist": {
        "train": ALL_KEYS["clevr-count"],
        "validation": lambda: [f"CLEVR_val_{number:06d}.png" for number in range(15_000)],
    },
    "smallnorb-elev": dict.fromkeys(("train", "test"), lambda: list(map(str, range(24_300)))),
}


@pytest.mark.parametrize("name", spread(2, OTHER_KEYS))
def test_val200_and_test__digests_follow_from_the_names(name: str) -> None:
    task, keys = BY_NAME[name], {split: make() for split, make in OTHER_KEYS[name].items()}
    assert {split: len(held) for split, held in keys.items()} == find_data_set(name).sizes
    digests = []
    for expression in (task.val200, task.test):
        (part,) = resolve(expression, find_data_set(name).sizes)
        held = keys[part.split]
        digests.append(names_digest(held[n] for n in md5_order(held, part.split)[part.start : part.stop]))
    assert VAL200_AND_TEST_DIGESTS[name] == tuple(digests)


def test_is_published_train800__keys_of_another_kind_do_not_match() -> None:
    assert is_published_train800(BY_NAME["cifar100"], ["images/train800/000000.jpg"]) is False


def test_is_published_train800__is_silent_where_nothing_was_published() -> None:
    assert is_published_train800(BY_NAME["caltech101"], []) is None
    assert set(TRAIN800_DIGESTS) < set(BY_NAME)
