import shutil
from pathlib import Path

import pytest

from tests.data.datasets.conftest import plant
from vitctl.data.datasets.catalog import open_split, read_originals, write_data_set
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.writer.write import write_split
from vitctl.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, name in enumerate(class_list("eurosat")):
        plant(tmp_path / f"2750/{name}/{name}_1.jpg", number)
    return tmp_path


def test_read_originals__asks_for_every_image_unless_told_otherwise(root: Path) -> None:
    with pytest.raises(
        DataError, match=r"not the whole of eurosat: train has 10 images, should have 27,000$"
    ):
        read_originals("eurosat", root)
    assert len(read_originals("EuroSAT", root, allow_partial=True)["train"].items) == 10


def test_read_originals__what_is_read_can_be_written(root: Path) -> None:
    originals = read_originals("eurosat", root, allow_partial=True)["train"]
    index = write_split(
        originals.items, root / "shards", originals.class_names, seed=0, source_text=originals.source
    )
    assert (index.num_samples, tuple(index.class_names)) == (10, class_list("eurosat"))


@pytest.mark.parametrize(
    ("name", "message"), [("digits", "digits: has no original files"), ("eurosta", "did you mean eurosat")]
)
def test_read_originals__refuses(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_originals(name, tmp_path)


def test_make_set__goes_on_where_it_was_killed_between_two_splits(tmp_path: Path) -> None:
    """The one split that is there is no whole set."""
    write_data_set(DATA_SETS["digits"], tmp_path / "digits")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "digits" / "train").iterdir()}
    shutil.rmtree(tmp_path / "digits" / "test")
    assert len(open_split("test", dataset="digits", root=str(tmp_path / "none"), scratch=tmp_path)) == 360
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "digits" / "train").iterdir()} == before
