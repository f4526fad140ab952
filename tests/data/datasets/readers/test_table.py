from pathlib import Path

import pytest

from vitctl.data.datasets.readers.table import read_table
from vitctl.errors import DataError


def write(folder: Path, text: str, name: str = "table.csv") -> Path:
    for image in ("1.jpg", "2.jpg", "x/3.jpg"):
        (folder / image).parent.mkdir(exist_ok=True)
        (folder / image).write_bytes(image.encode())
    (folder / name).write_text(text)
    return folder / name


def test_table__names_are_sorted_by_code_point(tmp_path: Path) -> None:
    splits = read_table(write(tmp_path, "path,label\n1.jpg,dog\nx/3.jpg, cat\n2.jpg,dog\n"))
    assert splits["train"].class_names == ("cat", "dog")
    found = [(item.key, item.label, item.read()) for item in splits["train"].items]
    assert found == [("1.jpg", 1, b"1.jpg"), ("x/3.jpg", 0, b"x/3.jpg"), ("2.jpg", 1, b"2.jpg")]


def test_table__numbers_are_labels(tmp_path: Path) -> None:
    splits = read_table(write(tmp_path, "label\tpath\n10\t1.jpg\n02\t2.jpg\n", "table.tsv"))
    assert splits["train"].class_names == tuple(str(label) for label in range(11))
    assert [item.label for item in splits["train"].items] == [10, 2]


def test_table__splits_share_their_classes(tmp_path: Path) -> None:
    splits = read_table(
        write(tmp_path, "\ufeffpath,label,split\n1.jpg,b,train\n2.jpg,a,val\nx/3.jpg,c,fold_2\n")
    )
    assert {split: [item.key for item in found.items] for split, found in splits.items()} == {
        "train": ["1.jpg"],
        "validation": ["2.jpg"],
        "fold_2": ["x/3.jpg"],
    }
    assert {found.class_names for found in splits.values()} == {("a", "b", "c")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.jpg,dog\n", "columns are 1.jpg,dog, should be path,label or path,label,split; labels in place"),
        ("", "columns are , should be path,label"),
        ("path,label\n", "lists no images"),
        ("path,label\n1.jpg,dog\n9.jpg,dog\n8.jpg,dog\n", "2 of 3 files are missing, the first is 9.jpg"),
        ("path,label\n1.jpg\n", "line 2: should have 2 filled columns"),
        ("path,label\n1.jpg,\n", "line 2: should have 2 filled columns"),
        ("path,label\n1.jpg,dog,cat\n", "line 2: should have 2 filled columns"),
        ('path,label\n"1.jpg', "cannot be read as a table"),
        (
            "path,label\n1.jpg,a\n2.jpg,a;b\n",
            "1 of 2 values of the column 'label' have a ';', the first is 'a;b'",
        ),
    ],
)
def test_table__refuses(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_table(write(tmp_path, text))


def test_table__missing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_table(tmp_path / "none.csv")


def test_table__several_labels(tmp_path: Path) -> None:
    splits = read_table(write(tmp_path, "path,labels\n1.jpg,dog;cat\n2.jpg, cat\nx/3.jpg,ant; dog ;ant\n"))
    assert splits["train"].class_names == ("ant", "cat", "dog")
    found = [(item.label, item.size) for item in splits["train"].items]
    assert found == [((2, 1), 5), ((1,), 5), ((0, 2), 7)]
    numbers = read_table(write(tmp_path, "path\tlabels\n1.jpg\t3;1\n2.jpg\t02\n", "numbers.tsv"))["train"]
    assert [item.label for item in numbers.items] == [(3, 1), (2,)]
    assert numbers.class_names == ("0", "1", "2", "3")
