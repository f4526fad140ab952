import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.datasets.conftest import labels, plant
from vitctl.data.datasets.parquet import original_name, read
from vitctl.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
FEATURES = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog", "eel"], "_type": "ClassLabel"}}


def plant_table(path: Path, rows: list[tuple[bytes | None, str | None, int]], *, described: bool = True) -> None:
    """Row groups of two images, as the hub writes them."""
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": data, "path": name} for data, name, _ in rows], struct)
    table = pa.table({"image": images, "label": pa.array([label for *_, label in rows], pa.int64())})
    if described:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": FEATURES}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


@pytest.fixture
def images(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    return [plant(tmp_path_factory.mktemp("image") / "x", number) for number in range(5)]


def test_read__several_files_and_row_groups(images: list[bytes], tmp_path: Path) -> None:
    plant_table(tmp_path / "data/train-00001-of-00002.parquet", [(images[3], "d.jpg", 0), (images[4], "e.jpg", 2)])
    plant_table(tmp_path / "data/train-00000-of-00002.parquet", [(images[n], f"{n}.jpg", n) for n in range(3)])
    plant_table(tmp_path / "default/validation/0000.parquet", [(images[0], "x/v.jpg", 1), (images[1], "t.jpg", -1)])
    splits = read(tmp_path)
    assert labels(splits["train"]) == {"0.jpg": 0, "1.jpg": 1, "2.jpg": 2, "d.jpg": 0, "e.jpg": 2}
    assert [item.read() for item in splits["train"].items] == images
    assert labels(splits["validation"]) == {"v.jpg": 1}
    assert splits["train"].class_names == ("cat", "dog", "eel")


@pytest.mark.parametrize("names", [(None, None), ("image.jpg", "image.jpg"), ("a.jpg", None)])
def test_read__rows_are_numbered_where_names_do_not_tell_them_apart(
    names: tuple[str | None, ...], images: list[bytes], tmp_path: Path
) -> None:
    plant_table(tmp_path / "test-0.parquet", [(images[n], name, n) for n, name in enumerate(names)])
    assert labels(read(tmp_path)["test"]) == {"0": 0, "1": 1}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("n01440764_10026_n01440764.JPEG", "n01440764_10026.JPEG"),
        ("val/ILSVRC2012_val_00000001_n01751748.JPEG", "ILSVRC2012_val_00000001.JPEG"),
        ("n01440764_10026.JPEG", "n01440764_10026.JPEG"),
        ("pug_n01440764.JPEG", "pug_n01440764.JPEG"),
    ],
)
def test_original_name__of_imagenet(path: str, name: str) -> None:
    assert original_name(path) == name


def test_read__class_names_are_never_guessed(images: list[bytes], tmp_path: Path) -> None:
    plant_table(tmp_path / "train-0.parquet", [(images[0], "a.jpg", 1)], described=False)
    with pytest.raises(DataError, match=r"describes no classes; write their names to .*classes.txt, one per line"):
        read(tmp_path)
    (tmp_path / "classes.txt").write_text("one\ntwo\n")
    assert read(tmp_path)["train"].class_names == ("one", "two")


def test_read__refuses(images: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"should hold files like train-00000-of-00001.parquet or train/0000.parquet"):
        read(tmp_path)
    path = tmp_path / "train-0.parquet"
    cases: list[tuple[Any, dict[str, str], str]] = [
        ([(images[0], "a.jpg", 3)], {}, "1 labels are out of range, the first is 3 of 3 classes"),
        ([(images[0], "a.jpg", 0)], {"image": "img"}, "should have columns img and label, has image, label"),
    ]
    for rows, names, message in cases:
        plant_table(path, rows)
        with pytest.raises(DataError, match=message):
            read(tmp_path, **names)
    other = tmp_path / "other"
    plant_table(other / "train-0.parquet", [(None, "a.jpg", 0)])
    (item,) = read(other)["train"].items
    with pytest.raises(DataError, match="image 0 of row group 0 has no bytes"):
        item.read()
    third = tmp_path / "third"
    third.mkdir()
    (third / "train-0.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DataError, match=r"train-0.parquet: not a whole Parquet file") as caught:
        read(third)
    assert "\n" not in str(caught.value)
