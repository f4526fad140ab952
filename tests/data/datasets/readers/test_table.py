"""Tables of paths, and parquet files of images."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.data.datasets.conftest import plant
from tests.matrix import each
from vitctl.data.datasets.catalog import open_originals
from vitctl.data.datasets.readers.table import read_table
from vitctl.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


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


@each(
    ("text", "message"),
    [
        (
            "1.jpg,dog\n",
            "columns are 1.jpg,dog, should be path,label or path,label,split; name yours with --columns",
        ),
        ("", "columns are , should be path,label"),
        ("path,label\n", "lists no images"),
        ("path,label\n1.jpg,dog\n9.jpg,dog\n8.jpg,dog\n", "2 of 3 files are missing, the first is 9.jpg"),
        ("path,label\n1.jpg\n", "line 2: should have 2 filled columns"),
        ("path,label\n1.jpg,\n", "line 2: should have 2 filled columns"),
        ("path,label\n1.jpg,dog,cat\n", "line 2: should have 2 filled columns"),
        ('path,label\n"1.jpg', "cannot be read as a table"),
        ("path,label\n1.jpg,a\n2.jpg,a;b\n", "1 of 2 values of the column 'label' have a ';', the first"),
    ],
)
def test_table__refuses(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_table(write(tmp_path, text))


def test_table__takes_the_only_folder_that_has_all_its_images(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def listed(*folders: str) -> list[str]:
        for name in ("1.jpg", "2.jpg"):
            for folder in folders:
                (tmp_path / folder).mkdir(exist_ok=True)
                (tmp_path / folder / name).write_bytes(b"x")
        (tmp_path / "labels.csv").write_text("path,label\n1,a\n2,b\n")
        return [item.key for item in read_table(tmp_path / "labels.csv")["train"].items]

    with pytest.raises(DataError, match="2 of 2 files are missing"):
        listed("test", "val_images")  # of another split, whose names are often the same
    assert listed("pics") == ["pics/1.jpg", "pics/2.jpg"]
    assert "labels.csv: its images are taken from pics, which has all of them" in capfd.readouterr().err
    with pytest.raises(DataError, match="may be those in masks or pics; write the folder"):
        listed("masks")
    (tmp_path / "pics/1.jpg").unlink()
    (tmp_path / "masks/2.jpg").unlink()
    with pytest.raises(
        DataError, match=r"2 of 2 files are missing.*looked beside the table and in masks, pics"
    ):
        listed()


def test_table__several_labels(tmp_path: Path) -> None:
    splits = read_table(write(tmp_path, "path,labels\n1.jpg,dog;cat\n2.jpg, cat\nx/3.jpg,ant; dog ;ant\n"))
    assert splits["train"].class_names == ("ant", "cat", "dog")
    found = [(item.label, item.size) for item in splits["train"].items]
    assert found == [((2, 1), 5), ((1,), 5), ((0, 2), 7)]
    numbers = read_table(write(tmp_path, "path\tlabels\n1.jpg\t3;1\n2.jpg\t02\n", "numbers.tsv"))["train"]
    assert [item.label for item in numbers.items] == [(3, 1), (2,)]
    assert numbers.class_names == ("0", "1", "2", "3")


def write_parquet(
    path: Path, labels: list[int], names: list[str] | None = None, image: Any = None, **columns: Any
) -> None:
    images = [{"bytes": b"image %d" % n * 50, "path": f"p{n}.jpg"} for n in range(len(labels))]
    table = pa.table({"image": image or images, "label": labels, **columns})
    if names:
        info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


def test_read_parquet__splits_names_and_bytes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", [2, 0, 1], ["a", "b", "c"])
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", [1, 1], ["a", "b", "c"])
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", [0, 2, 2], ["a", "b", "c"])
    splits = open_originals(str(tmp_path))
    assert sorted(splits) == ["test", "train"]
    test = splits["test"]
    assert test.class_names == ("a", "b", "c")
    found = [(item.key, item.label, item.read()) for item in test.items]
    assert found == [(f"p{n}.jpg", label, b"image %d" % n * 50) for n, label in enumerate((0, 2, 2))]
    train = splits["train"]
    assert [item.key for item in train.items] == list("01234")  # two files use the same paths
    assert [(item.label, item.read()[:7]) for item in train.items][3] == (1, b"image 0")


def test_read_parquet__imagenet_names_lose_their_second_class(tmp_path: Path) -> None:
    paths = ["n01440764_10026_n01440764.JPEG", "ILSVRC2012_val_00000001_n01751748.JPEG"]
    write_parquet(tmp_path / "x.parquet", [0, 1], image=[{"bytes": b"x", "path": path} for path in paths])
    (split,) = open_originals(str(tmp_path / "x.parquet")).values()
    assert [item.key for item in split.items] == ["n01440764_10026.JPEG", "ILSVRC2012_val_00000001.JPEG"]
    assert split.class_names == ("0", "1")


def test_read_parquet__plain_bytes_without_names(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", [3, 0], image=[b"one", b"two"])
    (split,) = open_originals(str(tmp_path / "x.parquet")).values()
    assert [(item.key, item.label, item.read()) for item in split.items] == [
        ("0", 3, b"one"),
        ("1", 0, b"two"),
    ]


def test_read_parquet__refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"x.parquet: not a complete parquet file"):
        open_originals(str(path))
    pq.write_table(pa.table({"picture": [b"x"], "label": [1]}), path)
    with pytest.raises(DataError, match=r"lacks a column with an image \(image, img, jpg, png\); found"):
        open_originals(str(path))
    write_parquet(path, [1], image=[None])
    with pytest.raises(DataError, match="every row should hold an encoded image"):
        open_originals(str(path))
    for label in (2, -2):
        write_parquet(path, [0, label], ["a", "b"])
        with pytest.raises(DataError, match=rf"image p1.jpg has label {label}, should be -1 to 1"):
            open_originals(str(path))
    write_parquet(tmp_path / "train-0.parquet", [0], ["a"])
    write_parquet(tmp_path / "train-1.parquet", [0], ["b"])
    path.unlink()
    with pytest.raises(DataError, match=r"train-1.parquet: its class names are not those of train-0.parquet"):
        open_originals(str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="parquet needs pyarrow; install it with"):
        open_originals(str(tmp_path))


def test_read_parquet__much_text_made_of_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dictionary holds the one text of all rows."""
    labels = pa.array(["x" * 40_000] * 3_000).dictionary_encode()
    pq.write_table(
        pa.table({"path": [f"{n}.png" for n in range(3_000)], "label": labels}), tmp_path / "x.parquet"
    )
    assert (tmp_path / "x.parquet").stat().st_size < 100_000
    monkeypatch.setattr("vitctl.system.limits.TABLE", 100 * 2**20)
    with pytest.raises(DataError, match=r"x.parquet: holds more bytes of text than 104,857,600"):
        open_originals(str(tmp_path / "x.parquet"))


def test_read_parquet__several_labels(tmp_path: Path) -> None:
    images = [{"bytes": b"x", "path": f"{n}.jpg"} for n in range(3)]
    table = pa.table({"image": images, "labels": [[2, 0], [], [1, 1]]})
    info = {"info": {"features": {"labels": {"feature": {"names": ["a", "b", "c"]}, "_type": "Sequence"}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(info)}), tmp_path / "x.parquet")
    (split,) = open_originals(str(tmp_path / "x.parquet")).values()
    assert [(item.label, item.size) for item in split.items] == [((2, 0), 1), ((), 1), ((1,), 1)]
    assert split.class_names == ("a", "b", "c")
    pq.write_table(table, tmp_path / "x.parquet")
    (split,) = open_originals(str(tmp_path / "x.parquet")).values()
    assert split.class_names == ("0", "1", "2")


def test_read_parquet__a_table_of_paths(tmp_path: Path) -> None:
    for name in ("1.jpg", "2.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    path = tmp_path / "list.parquet"
    pq.write_table(
        pa.table({"path": ["1.jpg", "2.jpg"], "label": ["b", "a"], "split": ["train", "val"]}), path
    )
    splits = open_originals(str(path))
    found = {
        split: [(item.key, item.label, item.read()) for item in own.items] for split, own in splits.items()
    }
    assert found == {"train": [("1.jpg", 1, b"1.jpg")], "validation": [("2.jpg", 0, b"2.jpg")]}
    pq.write_table(pa.table({"path": ["1.jpg", "2.jpg"], "labels": [["b", "a"], ["a"]]}), path)
    (split,) = open_originals(str(path)).values()
    assert [item.label for item in split.items] == [(1, 0), (0,)]
    pq.write_table(
        pa.table(
            {"path": ["1.jpg"], "labels": [[]]},
            pa.schema({"path": pa.string(), "labels": pa.list_(pa.string())}),
        ),
        path,
    )
    with pytest.raises(DataError, match=r"list.parquet: should have a path and a label in every row"):
        open_originals(str(path))


def test_read_parquet__splits_share_their_classes_and_are_named_alike(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", [2, 0, 1])
    write_parquet(tmp_path / "dev-0.parquet", [0, 0])
    splits = open_originals(str(tmp_path))
    assert {split: own.class_names for split, own in splits.items()} == dict.fromkeys(
        ("train", "validation"), ("0", "1", "2")
    )
    write_parquet(tmp_path / "extra-0.parquet", [0])
    with pytest.raises(DataError, match=r"extra-0.parquet: its name begins with no split, such as train or"):
        open_originals(str(tmp_path))
    (tmp_path / "extra-0.parquet").unlink()
    plant(tmp_path / "cat/1.jpg")
    with pytest.raises(DataError, match=r"holds .*0.parquet and images such as cat/1.jpg; give the table"):
        open_originals(str(tmp_path))


def test_read_parquet__a_list_is_no_single_label(tmp_path: Path) -> None:
    (tmp_path / "1.jpg").write_bytes(b"1")
    pq.write_table(pa.table({"path": ["1.jpg"], "label": [["a", "b"]]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="name the column 'labels' if these are several labels"):
        open_originals(str(tmp_path / "x.parquet"))


def test_table__no_label_of_several(tmp_path: Path) -> None:
    splits = read_table(write(tmp_path, 'path;labels\n1.jpg;-1\n2.jpg;cat\nx/3.jpg;"dog;cat"\n'))
    assert [item.label for item in splits["train"].items] == [(), (0,), (1, 0)]
    with pytest.raises(DataError, match=r"1.jpg has the label ''; give it a class, or -1 for none"):
        read_table(write(tmp_path, "path,labels\n1.jpg,;\n2.jpg,cat\n"))
