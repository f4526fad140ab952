"""Known data sets by their names: listed, prepared, checked, exported."""

from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.data.datasets.conftest import SPLITS, keys_of, write
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.vtab import VTAB


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DTD in its full size, under names that are not the benchmark's."""
    return write(tmp_path_factory.mktemp("root"), {split: keys_of(split) for split in SPLITS})


@pytest.mark.slow
def test_list__is_a_table(vitctl: Vitctl, root: Path) -> None:
    said = vitctl("data", "list", "--root", root)
    assert (said.code, said.err) == (0, "")
    lines = {line.split()[0]: line for line in said.out.splitlines() if line[:1].strip()}
    assert set(DATA_SETS) <= set(lines)
    assert lines["dtd"].split()[-4:] == ["1,880", "1,880", "1,880", "shards"]
    assert lines["pets"].rstrip().endswith("absent")


def test_check__all_of_vtab_has_nineteen_rows(vitctl: Vitctl, tmp_path: Path) -> None:
    said = vitctl("data", "check", "vtab", "--root", tmp_path)
    assert (said.code, said.err) == (0, "")
    rows = said.out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [task.name for task in VTAB]
    assert all(row.rstrip().endswith("absent") for row in rows)


def test_check__a_set_that_is_not_the_benchmarks(vitctl: Vitctl, root: Path) -> None:
    said = vitctl("data", "check", "dtd", "--root", root)
    assert said.code == 2
    assert "NO MATCH: train800" in " ".join(said.out.split())
    assert (
        said.err
        == f"vitctl: {root}: not the benchmark's images: dtd; make them again from the original files\n"
    )


@pytest.mark.slow
def test_prepare__then_check_then_use(vitctl: Vitctl, tmp_path: Path) -> None:
    said = vitctl("data", "prepare", "digits")
    assert (said.code, said.err) == (0, "")
    assert said.out.endswith("ready: digits, 1,437 train, 360 test\n")
    said = vitctl("data", "check", "digits")
    assert (said.code, said.out.splitlines()[-1]) == (0, "all is well")
    assert (tmp_path / "data/digits/train/index.json").is_file()


def test_prepare__what_must_be_done_by_hand_is_one_line(vitctl: Vitctl) -> None:
    said = vitctl("data", "prepare", "resisc45")
    assert (said.code, said.err.count("\n")) == (2, 1)
    assert "NWPU-RESISC45.rar from https://gcheng-nwpu.github.io, unpacked with unrar or 7z" in said.err
    assert said.err.endswith("put the files into data/originals/resisc45\n")


def test_prepare__vtab_takes_what_is_there(vitctl: Vitctl, root: Path) -> None:
    said = vitctl("data", "prepare", "vtab", "--root", root)
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == "ready: dtd, 1,880 train, 1,880 validation, 1,880 test"
    assert "18 of 19 tasks are not in" in said.out
    said = vitctl("data", "prepare", "vtab")
    assert (said.code, said.err) == (
        2,
        "vitctl: data/originals: holds no data set of VTAB; see `vitctl data list`\n",
    )
