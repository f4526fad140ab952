"""The 19 tasks against the benchmark's own table."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.data.datasets.conftest import BY_NAME
from vitctl.data.datasets.catalog import find_data_set, known_size
from vitctl.data.datasets.readers.files import class_list
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

# What the community's trainers list, in the order of their folders.
COMMUNITY = {
    "cifar": 100,
    "caltech101": 102,
    "dtd": 47,
    "oxford_flowers102": 102,
    "oxford_iiit_pet": 37,
    "svhn": 10,
    "sun397": 397,
    "patch_camelyon": 2,
    "eurosat": 10,
    "resisc45": 45,
    "diabetic_retinopathy": 5,
    "clevr_count": 8,
    "clevr_dist": 6,
    "dmlab": 6,
    "kitti": 4,
    "dsprites_loc": 16,
    "dsprites_ori": 16,
    "smallnorb_azi": 18,
    "smallnorb_ele": 9,
}
NUM_TEST = {
    "caltech101": 6_084,
    "cifar100": 10_000,
    "dtd": 1_880,
    "flowers102": 6_149,
    "pets": 3_669,
    "sun397": 21_750,
    "svhn": 26_032,
    "patch_camelyon": 32_768,
    "eurosat": 5_400,
    "resisc45": 6_300,
    "retinopathy": 42_670,
    "clevr-count": 15_000,
    "clevr-dist": 15_000,
    "dmlab": 22_735,
    "kitti-dist": 711,
    "dsprites-loc": 73_728,
    "dsprites-ori": 73_728,
    "smallnorb-azim": 12_150,
    "smallnorb-elev": 12_150,
}


def test_vtab__nineteen_tasks_in_three_groups() -> None:
    assert [sum(task.group == group for task in VTAB) for group in GROUPS] == [7, 4, 8]
    assert {task.community: task.num_classes for task in VTAB} == COMMUNITY


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_vtab__classes_are_those_of_the_data_set(task: VtabTask) -> None:
    assert task.num_classes == find_data_set(task.data_set).num_classes


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.name)
def test_vtab__a_thousand_images_apart_from_the_test(task: VtabTask) -> None:
    sizes = find_data_set(task.data_set).sizes
    (train,), (validation,), (test,) = (
        resolve(split, sizes) for split in (task.train800, task.val200, task.test)
    )
    assert train == ("train", 0, 800)
    assert validation.stop - validation.start == 200
    assert resolve(task.train, sizes) == [train, validation]
    for part in (train, validation):
        assert part.split != test.split or part.stop <= test.start


def test_vtab__test_splits_are_whole() -> None:
    sizes = {task.name: known_size(task.data_set, task.test) for task in VTAB}
    assert {name: size[0] for name, size in sizes.items() if size} == NUM_TEST


# BiT, Appendix F: random crop, flip. The ViT paper follows it at 384 pixels for all tasks (B.1.1).
BIT_AUGMENTATION = {
    "caltech101": (True, True),
    "cifar100": (True, True),
    "dtd": (True, True),
    "flowers102": (True, True),
    "pets": (True, True),
    "sun397": (True, True),
    "svhn": (True, True),
    "patch_camelyon": (True, True),
    "eurosat": (True, True),
    "resisc45": (True, True),
    "retinopathy": (True, True),
    "clevr-count": (False, True),
    "clevr-dist": (False, True),
    "dmlab": (False, True),
    "kitti-dist": (False, True),
    "dsprites-loc": (False, False),
    "dsprites-ori": (True, False),
    "smallnorb-azim": (True, False),
    "smallnorb-elev": (True, True),
}


def test_vtab__crops_and_flips_as_bit() -> None:
    assert {task.name: (task.crop, task.flip) for task in VTAB} == BIT_AUGMENTATION


def test_vtab__clevr_validation_as_published() -> None:
    names = [f"CLEVR_train_{number:06d}.png" for number in range(70_000)]
    (part,) = resolve(BY_NAME["clevr-dist"].val200, {"train": len(names)})
    chosen = md5_order(names, part.split)[part.start : part.stop]
    assert [names[number] for number in chosen[:3]] == [
        f"CLEVR_train_{number}.png" for number in ("035084", "029360", "004525")
    ]


def test_vtab__smallnorb_tests_on_what_validation_left() -> None:
    sizes = find_data_set("smallnorb-azim").sizes
    order = md5_order(range(sizes["test"]), "test")
    (validation,), (test,) = (
        resolve(split, sizes) for split in (BY_NAME["smallnorb-azim"].val200, BY_NAME["smallnorb-azim"].test)
    )
    assert not set(order[validation.start : validation.stop]) & set(order[test.start : test.stop])
    assert len(np.unique(order[test.start : test.stop])) == 12_150


def _eurosat_keys() -> list[str]:
    hundreds = dict(zip(class_list("eurosat"), (30, 30, 30, 25, 25, 20, 25, 30, 25, 30), strict=True))
    return [f"{name}_{name}_{n}.jpg" for name, count in hundreds.items() for n in range(1, 100 * count + 1)]


ALL_KEYS: dict[str, Callable[[], list[str]]] = {
    "cifar100": lambda: list(map(str, range(50_000))),
    "patch_camelyon": lambda: [f"train_{number}" for number in range(262_144)],
    "eurosat": _eurosat_keys,
    "clevr-count": lambda: [f"CLEVR_train_{number:06d}.png" for number in range(70_000)],
    "dsprites-ori": lambda: list(map(str, range(737_280))),
}


@pytest.mark.parametrize("name", ALL_KEYS)
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


@pytest.mark.parametrize("name", OTHER_KEYS)
def test_val200_and_test__digests_follow_from_the_names(name: str) -> None:
    task, keys = BY_NAME[name], {split: make() for split, make in OTHER_KEYS[name].items()}
    assert {split: len(held) for split, held in keys.items()} == find_data_set(name).sizes
    digests = []
    for expression in (task.val200, task.test):
        (part,) = resolve(expression, find_data_set(name).sizes)
        held = keys[part.split]
        digests.append(names_digest(held[n] for n in md5_order(held, part.split)[part.start : part.stop]))
    assert VAL200_AND_TEST_DIGESTS[name] == tuple(digests)


def test_digests__of_two_questions_about_the_same_images_are_the_same() -> None:
    for one, two in (
        ("clevr-count", "clevr-dist"),
        ("dsprites-loc", "dsprites-ori"),
        ("smallnorb-azim", "smallnorb-elev"),
    ):
        assert VAL200_AND_TEST_DIGESTS[one] == VAL200_AND_TEST_DIGESTS[two]


def test_is_published_train800__keys_of_another_kind_do_not_match() -> None:
    assert is_published_train800(BY_NAME["cifar100"], ["images/train800/000000.jpg"]) is False


def test_is_published_train800__is_silent_where_nothing_was_published() -> None:
    assert is_published_train800(BY_NAME["caltech101"], []) is None
    assert set(TRAIN800_DIGESTS) < set(BY_NAME)
