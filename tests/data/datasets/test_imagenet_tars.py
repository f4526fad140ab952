import io
import tarfile
from pathlib import Path

import pytest

from vitctl.data.originals import open_originals
from vitctl.errors import DataError

WNIDS = ("n01751748", "n01440764", "n15075141")
LABELS = "imagenet_2012_validation_synset_labels.txt"


def packed(files: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return archive.getvalue()


def plant(folder: Path) -> None:
    inner = {wnid: {f"{wnid}_{n}.JPEG": f"{wnid} {n}".encode() * 200 for n in range(3)} for wnid in WNIDS}
    train = packed({f"{wnid}.tar": packed(files) for wnid, files in inner.items()})
    (folder / "ILSVRC2012_img_train.tar").write_bytes(train)
    numbers = (2, 1, 4, 3)  # not in the order of their names
    validation = packed({f"ILSVRC2012_val_{n:08d}.JPEG": b"val %d" % n for n in numbers})
    (folder / "ILSVRC2012_img_val.tar").write_bytes(validation)
    (folder / LABELS).write_text("\n".join([WNIDS[2], WNIDS[0], WNIDS[0], WNIDS[1]]) + "\n")


def test_read_imagenet__tar_of_tars_and_flat_validation(tmp_path: Path) -> None:
    plant(tmp_path)
    splits = open_originals(str(tmp_path))
    assert list(splits) == ["train", "validation"]
    for split in splits.values():
        assert split.class_names == ("n01440764", "n01751748", "n15075141")
    train = {item.key: (item.label, item.read()) for item in splits["train"].items}
    assert len(train) == 9
    for key, (label, data) in train.items():
        wnid, number = key.removesuffix(".JPEG").split("_")
        assert (label, data) == (sorted(WNIDS).index(wnid), f"{wnid} {number}".encode() * 200)
    found = [(item.key, item.label, item.read()) for item in splits["validation"].items]
    labels = {1: 2, 2: 1, 3: 1, 4: 0}
    assert found == [(f"ILSVRC2012_val_{n:08d}.JPEG", label, b"val %d" % n) for n, label in labels.items()]


def test_read_imagenet__either_archive_alone(tmp_path: Path) -> None:
    plant(tmp_path)
    (tmp_path / "ILSVRC2012_img_train.tar").rename(tmp_path / "aside")
    assert list(open_originals(str(tmp_path))) == ["validation"]
    (tmp_path / "aside").rename(tmp_path / "ILSVRC2012_img_train.tar")
    (tmp_path / "ILSVRC2012_img_val.tar").unlink()
    assert list(open_originals(str(tmp_path))) == ["train"]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "cannot be read .*; should list a WordNet id per validation image"),
        ("490\n361\n171\n822\n", "holds '490', should hold WordNet ids such as n01751748, never numbers"),
        ("n01440764\n" * 3, "lists 3 labels, ILSVRC2012_img_val.tar holds 4 images"),
    ],
)
def test_read_imagenet__refuses_labels(tmp_path: Path, labels: str | None, message: str) -> None:
    plant(tmp_path)
    (tmp_path / LABELS).unlink()
    if labels is not None:
        (tmp_path / LABELS).write_text(labels)
    with pytest.raises(DataError, match=message):
        open_originals(str(tmp_path))


def test_read_imagenet__refuses_another_train_archive(tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(packed({"cat/1.JPEG": b"x"}))
    with pytest.raises(DataError, match=r"holds '1.JPEG', should hold one tar per class, such as n01440764.tar"):
        open_originals(str(tmp_path))
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(packed({"n01440764.tar": b"no tar at all" * 99}))
    with pytest.raises(DataError, match="damaged or cut off at byte 512"):
        open_originals(str(tmp_path))
