"""`vitctl data shards` on folders as people have them: nothing is lost without a word."""

import csv
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Vitctl
from tests.matrix import slow, spread
from vitctl.data.images.decode import decode
from vitctl.data.shards.index import find_splits
from vitctl.data.source.splits import open_shards


def picture(number: int, form: str = "JPEG", **options: object) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (24, 32, 3), np.uint8)
    Image.fromarray(pixels).save(file, form, **options)
    return file.getvalue()


def plant(root: Path, classes: tuple[str, ...] = ("cat", "dog"), per_class: int = 10) -> None:
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for image in range(per_class):
            (root / name / f"{image}.jpg").write_bytes(picture(100 * number + image))


def listed(folder: Path) -> dict[str, tuple[str, str]]:
    with (folder / "intake.csv").open(newline="") as file:
        return {row["file"]: (row["what"], row["reason"]) for row in csv.DictReader(file)}


def keys(folder: Path) -> set[str]:
    source = open_shards(folder)
    return {source.key(n) for n in range(len(source))}


def test_shards__every_file_is_used_or_named(vitctl: Vitctl, tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    photos = tmp_path / "photos"
    plant(photos)
    with Image.open(photos / "cat/0.jpg") as image:
        exif = Image.Exif()
        exif[0x0112] = 6
        heif.from_pillow(image).save(photos / "cat/phone.heic", exif=exif.tobytes())
    (photos / "cat/old.jfif").write_bytes(picture(1))
    (photos / "cat/nameless").write_bytes(picture(2, "PNG"))
    (photos / "cat/wrong.png").write_bytes(picture(3))
    (photos / "cat/letter.pdf").write_bytes(b"%PDF-1.7")
    (photos / "cat/note").write_bytes(b"BM is how this text begins")
    (photos / "cat/raw.dng").write_bytes(picture(4, "TIFF"))
    (photos / "README.txt").write_text("mine")
    (photos / "__MACOSX/cat").mkdir(parents=True)
    (photos / "__MACOSX/cat/._0.jpg").write_bytes(b"fork")
    for litter in (".DS_Store", "cat/Thumbs.db", "dog/desktop.ini", "dog/.hidden.jpg"):
        (photos / litter).write_bytes(b"litter")
    said = vitctl("data", "shards", "photos", "out")
    assert (said.code, said.err) == (0, "")
    assert "__MACOSX" not in said.out
    assert "files left out: 9 (system file 5, not an image 3, camera raw file 1)" in said.out
    assert "cat/letter.pdf: not an image: PDF" in said.out
    assert "1 HEIC made into JPEG" in said.out

    files = {path.relative_to(photos).as_posix() for path in photos.rglob("*") if path.is_file()}
    found = keys(tmp_path / "out/train")
    out = listed(tmp_path / "out")
    left = {name for name, (what, _) in out.items() if what == "left out"}
    assert files == found | (left - {"__MACOSX"}) | {"__MACOSX/cat/._0.jpg"}
    assert {"cat/phone.heic", "cat/old.jfif", "cat/nameless", "cat/wrong.png"} <= found
    assert out["cat/phone.heic"][0] == "converted"

    source = open_shards(tmp_path / "out/train")
    stored = {source.key(n): source.read(n) for n in range(len(source))}
    assert stored["cat/nameless"] == picture(2, "PNG")  # byte for byte
    heic = decode(stored["cat/phone.heic"])
    upright = np.rot90(decode(picture(0)), -1)
    assert heic.shape == upright.shape == (32, 24, 3)
    assert np.abs(heic.astype(int) - upright).mean() < 40  # two lossy codes of noise
    assert vitctl("data", "check", "out").code == 0


def test_shards__heic_without_its_library_is_named_with_what_to_install(
    vitctl: Vitctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path / "photos")
    (tmp_path / "photos/cat/phone.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    said = vitctl("data", "shards", "photos", "out", "--workers", 0)
    assert said.code == 2
    assert "cat/phone.heic: HEIC: read with pillow-heif: pip install 'vitctl[heic]'" in said.out


def test_shards__all_bad_images_are_named_and_skipped_on_request(vitctl: Vitctl, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    plant(photos)
    whole = picture(7)
    (photos / "cat/cut.jpg").write_bytes(whole[:-40])
    (photos / "cat/empty.jpg").touch()
    (photos / "cat/text.jpg").write_bytes(b"not a picture")
    (photos / "dog/page.jpeg").write_bytes(b"%PDF-1.7")
    at = whole.index(b"\xff\xc0") + 5
    (photos / "dog/vast.jpg").write_bytes(whole[:at] + b"\xff\xf0\xff\xf0" + whole[at + 4 :])
    (photos / "dog/gone.jpg").symlink_to(photos / "nowhere.jpg")
    (photos / "dog/half.jpg").write_bytes(whole[:2])
    (photos / "dog/two\nlines.jpg").write_bytes(whole)
    wrong = {
        "dog/half.jpg": "not an image: damaged JPEG",
        "dog/two\\nlines.jpg": "its name has a control character",
        "cat/cut.jpg": "truncated",
        "cat/empty.jpg": "empty file",
        "cat/text.jpg": "not an image",
        "dog/page.jpeg": "not an image: PDF",
        "dog/vast.jpg": "too large",
        "dog/gone.jpg": "unreadable",
    }
    said = vitctl("data", "shards", "photos", "out")
    assert said.code == 2
    assert said.err == (
        "vitctl: photos: 8 images cannot be used, listed above; no shards were written; correct the files, "
        "or type: "
        "vitctl data shards photos out --bad skip\n"
    )
    assert [
        f"{name}: {reason}" for name, reason in wrong.items() if f"  {name}: {reason}" not in said.out
    ] == []
    assert find_splits(tmp_path / "out") == {}
    in_file = {name.replace("\n", "\\n"): what for name, (what, _) in listed(tmp_path / "out").items()}
    assert in_file == dict.fromkeys(wrong, "bad")
    said = vitctl("data", "shards", "photos", "out", "--bad", "skip")
    assert (said.code, said.err) == (0, "")
    assert all(f"  {name}: {reason}" in said.out for name, reason in wrong.items())
    assert keys(tmp_path / "out/train") == {f"{name}/{n}.jpg" for name in ("cat", "dog") for n in range(10)}
    assert "8 bad images left out" in json.loads((tmp_path / "out/train/index.json").read_text())["source"]
    said = vitctl("data", "shards", "photos", "x", "--bad", "some")
    assert said.err.startswith("vitctl: data shards: --bad some: some is not one of stop, skip, keep; see: ")


def test_shards__a_long_list_goes_to_the_file(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    for number in range(300):
        (tmp_path / f"photos/cat/bad{number}.jpg").touch()
    said = vitctl("data", "shards", "photos", "out")
    assert said.code == 2 and "more; all: out/intake.csv" in said.out
    assert len(said.out.splitlines()) < 60
    assert len(listed(tmp_path / "out")) == 300


@pytest.mark.slow
def test_shards__a_class_without_an_image_is_refused_unless_dropped(vitctl: Vitctl, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    plant(photos, ("cat", "dog", "emu"))
    (photos / "owl").mkdir()
    (photos / "owl/1.pdf").write_bytes(b"%PDF")
    (photos / "linked").symlink_to(photos / "cat")
    for path in (photos / "emu").iterdir():
        path.write_bytes(b"")
    line = ("data", "shards", "photos", "out", "--bad", "skip")
    said = vitctl(*line)
    assert said.code == 2
    assert "class 'emu' has no usable image: fix some, or type --drop-class emu" in said.out
    assert "class 'owl' has no image: add some, or type --drop-class owl" in said.out
    assert "class 'linked' has no image" in said.out and "linked: a link to a folder" in said.out
    said = vitctl(*line, "--drop-class", "emu", "--drop-class", "owl", "--drop-class", "linked")
    assert said.code == 0
    source = open_shards(tmp_path / "out/train")
    assert source.class_names == ("cat", "dog") and np.bincount(source.labels()).tolist() == [10, 10]
    assert "there is no class 'owll'; did you mean owl?" in vitctl(*line, "--drop-class", "owll").err


@pytest.mark.slow
def test_shards__a_class_in_test_alone_is_refused_unless_named(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos/train", ("cat", "dog"))
    plant(tmp_path / "photos/Test", ("bat", "cat", "dog"), per_class=3)
    said = vitctl("data", "shards", "photos", "out")
    assert said.code == 2 and "class 'bat' is in test alone" in said.out
    assert vitctl("data", "shards", "photos", "kept", "--keep-class", "bat").code == 0
    assert open_shards(tmp_path / "kept/train").class_names == ("bat", "cat", "dog")
    assert vitctl("data", "shards", "photos", "out", "--drop-class", "bat").code == 0
    for split, count in (("train", 10), ("test", 3)):
        source = open_shards(tmp_path / "out" / split)
        assert source.class_names == ("cat", "dog")
        assert np.bincount(source.labels()).tolist() == [count, count]
    assert listed(tmp_path / "out")["Test/bat/0.jpg"] == ("left out", "class dropped")


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_shards__a_folder_that_cannot_be_read_is_an_error(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    (tmp_path / "photos/dog").chmod(0)
    said = vitctl("data", "shards", "photos", "out")
    (tmp_path / "photos/dog").chmod(0o755)
    assert said.code == 2 and "cannot be read (Permission denied)" in said.err


@pytest.mark.slow
def test_shards__a_class_is_not_dropped_and_kept(vitctl: Vitctl, tmp_path: Path) -> None:
    """Twins of two splits were both: what was proposed kept a class, and dropped its images."""
    plant(tmp_path / "p" / "train", per_class=2)
    plant(tmp_path / "p" / "test", ("cat\u200b", "dog"), 2)
    said = vitctl("data", "shards", "p", "out").out
    assert "are named nearly the same" in said and "--drop-class" not in said
    said = vitctl("data", "shards", "p", "out", "--drop-class", "dog", "--keep-class", "dog").err
    assert "--drop-class and --keep-class name 'dog'" in said
    assert vitctl("data", "shards", "p", "a", "--drop-class", "cat\u200b").code == 0
    assert "there is no class 'nope'" in vitctl("data", "shards", "a", "b", "--keep-class", "nope").err


def test_photographs_beside_a_tar__are_refused_at_every_door(vitctl: Vitctl, tmp_path: Path) -> None:
    """`data shards` read the photographs, and all others the tar, without a word."""
    plant(tmp_path / "p", per_class=2)
    assert vitctl("data", "shards", "p", "s").code == 0
    for path in (tmp_path / "s/train").glob("*.tar"):
        path.rename(tmp_path / "p" / path.name)
    for door in (("data", "shards", "p", "out"), ("finetune", "--data", "p", "--dry-run", "--from", "none")):
        said = vitctl(*door)
        assert (said.code, "and photographs such as" in said.err) == (2, True), (door, said.err)


@pytest.mark.slow
def test_shards__a_set_in_one_piece_says_how_it_will_be_cut(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    said = vitctl("data", "shards", "photos", "out")
    assert "no test split: holding out 20 % of each class for evaluation" in said.out
    shutil.copytree(tmp_path / "photos", tmp_path / "both/train")
    shutil.copytree(tmp_path / "photos", tmp_path / "both/valid")
    said = vitctl("data", "shards", "both", "two")
    assert said.code == 0 and "'train' is trained on, 'validation' is scored" in said.out


def test_shards__what_is_no_plain_file_is_named_and_never_opened(vitctl: Vitctl, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), "red").save(tmp_path / "set" / name / "0.png")
    os.mkfifo(tmp_path / "set" / "a" / "pipe.jpg")
    said = vitctl("data", "shards", "set", "out", "--workers", "0")
    assert (said.code, said.err) == (0, "")
    listed = (tmp_path / "out" / "intake.csv").read_text()
    assert "a/pipe.jpg" in listed and "a FIFO, a socket or a device" in listed


def test_shards__what_it_says_to_type_is_enough(vitctl: Vitctl, tmp_path: Path) -> None:
    """A bad image, a class of bad images, an empty class, twins and a class of the test split alone: one
    refusal.
    """
    photos = tmp_path / "photos"
    plant(photos / "train", ("cat", "Cat", "dog", "emu"))
    plant(photos / "test", ("cat", "it's"))
    (photos / "train/owl").mkdir()
    for name in ("cat/bad.jpg", *(f"emu/{n}.jpg" for n in range(10))):
        (photos / "train" / name).write_bytes(b"")
    said = vitctl("data", "shards", "photos", "out")
    assert said.code == 2 and said.err.count("\n") == 1 and find_splits(tmp_path / "out") == {}
    command = shlex.split(said.err.partition("or type: ")[2])
    assert command[:5] == ["vitctl", "data", "shards", "photos", "out"]
    assert (vitctl(*command[1:]).code, set(find_splits(tmp_path / "out"))) == (0, {"train", "test"})


STRUCTURES = {
    "a class called train": (("bus", "car", "train"), "class 'train' is named like a split, and 'bus'"),
    "folds": (
        ("fold1/cat", "fold1/dog", "fold2/cat", "fold2/dog"),
        "classes 'fold1' and 'fold2' hold the same folders (cat, dog) and no images of their own: if",
    ),
    "splits in the classes": (
        ("cat/train", "cat/test", "dog/train"),
        "holds folders named like splits (test, tra",
    ),
    "splits in the class names": (
        ("cat_train", "cat_test"),
        "classes 'cat_test' and 'cat_train' differ in the",
    ),
    "twins": (("cat", "dog", "Cat"), "classes 'Cat' and 'cat' are named nearly the same"),
    "a space": (("cat", "dog", "cat "), "classes 'cat' and 'cat ' are named nearly the same"),
    "a hyphen": (("great-owl", "great_owl"), "classes 'great-owl' and 'great_owl' are named nearly the same"),
    "a word for no label": (("None", "cat"), "class 'None' is named like a missing label: rename it, or"),
    "one class": (("cat",), "class 'cat' is the only one: add others, or type --keep-class cat"),
    "a missing label": (("-1", "1"), "class '-1' is named like a missing label: rename it, or"),
    "zeros": (("07", "7", "8"), "classes '07' and '7' are named nearly the same"),
}


@pytest.mark.parametrize("name", spread(3, STRUCTURES))
@pytest.mark.parametrize("packed", [False, *slow(True)])
def test_shards__folders_in_doubt_stop_and_what_it_says_to_type_is_enough(
    vitctl: Vitctl, tmp_path: Path, name: str, packed: bool
) -> None:
    folders, doubt = STRUCTURES[name]
    plant(tmp_path / "photos", folders, per_class=2)
    source = "photos.tar" if packed else "photos"
    if packed:
        with tarfile.open(tmp_path / source, "w") as tar:
            tar.add(tmp_path / "photos", ".")
    said = vitctl("data", "shards", source, "out")
    assert said.code == 2 and doubt in said.out and find_splits(tmp_path / "out") == {}
    command = shlex.split(said.err.partition("or type: ")[2])
    assert vitctl(*command[1:]).code == 0
    names = sorted({one.split("/")[0] for one in folders})
    assert open_shards(tmp_path / "out/train").class_names == tuple(names)


@pytest.mark.slow
def test_shards__numbers_from_one_or_with_gaps_stop(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path, ("cat", "dog"), per_class=4)
    for numbers, doubt, classes in (
        ((1, 2), "1 class of 3 without an image ('0'): class numbers count from 0; add some, or", ("1", "2")),
        ((0, 3), "2 classes of 4 without an image ('1', '2'); add some, or type --drop-class 1", ("0", "3")),
        ((0, 40), "39 classes of 41 without an image ('1', '2', '3' ...); add some, or type --keep", None),
        ((-1, 1), "1 class of 2 without an image ('0')", ("1",)),
    ):
        rows = [f"{name}/{n}.jpg,{numbers[name == 'dog']}" for name in ("cat", "dog") for n in range(4)]
        (tmp_path / "a.csv").write_text("\n".join(["path,label", *rows]))
        said = vitctl("data", "shards", "a.csv", f"out{numbers[1]}{numbers[0]}")
        assert said.code == 2 and doubt in said.out
        command = shlex.split(said.err.partition("or type: ")[2])
        assert vitctl(*command[1:]).code == 0
        found = open_shards(tmp_path / command[4] / "train")
        assert found.class_names == (classes or tuple(map(str, range(41))))
    assert found.labels().tolist().count(-1) == 4
    assert "train: 4 of 8 images have no label (-1)" in vitctl(*command[1:]).out


LABELS = {
    "R": (("cat", "NA", "dog"), "class 'NA' is named like a missing label: rename it, or"),
    "pandas": (("cat", "<NA>", "dog"), "class '<NA>' is named like a missing label"),
    "numbers": (("0", "?", "1"), "class '?' is named like a missing label"),
    "commas": (("cat,wild", "dog,wild", "cat"), "class 'cat,wild' looks like several labels"),
    "bars": (("cat|wild", "dog", "cat"), "class 'cat|wild' looks like several labels"),
    "none": (("-1", "-1", "-1"), "no image has a label, so that nothing can be learned: add some; if so,"),
}


@pytest.mark.parametrize("name", spread(2, LABELS))
def test_shards__labels_of_a_table_in_doubt_stop_and_what_it_says_to_type_is_enough(
    vitctl: Vitctl, tmp_path: Path, name: str
) -> None:
    labels, doubt = LABELS[name]
    plant(tmp_path, ("x",), per_class=3)
    rows = [(f"x/{n}.jpg", label) for n, label in enumerate(labels)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("Path", " Label"), *rows])
    said = vitctl("data", "shards", "a.csv", "out")
    assert said.code == 2 and doubt in said.out and find_splits(tmp_path / "out") == {}
    assert vitctl(*shlex.split(said.err.partition("or type: ")[2])[1:]).code == 0
    assert len(open_shards(tmp_path / "out/train")) == 3


def test_shards__commas_of_names_alone_are_no_doubt(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path, ("x",), per_class=2)
    (tmp_path / "a.csv").write_text('path,label\nx/0.jpg,"tench, Tinca tinca"\nx/1.jpg,"crane, bird"\n')
    assert vitctl("data", "shards", "a.csv", "out").code == 0


@pytest.mark.slow
def test_shards__what_other_commands_propose_works_as_typed(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos", per_class=2)
    (tmp_path / "tars").mkdir()
    for name in ("cat", "dog"):
        with tarfile.open(tmp_path / f"tars/{name}.tar", "w") as tar:
            tar.add(tmp_path / "photos" / name, ".")
    with tarfile.open(tmp_path / "packed.tar", "w:gz") as packed:
        packed.add(tmp_path / "photos", ".")
    rows = [f"photos/{name}/{n}.jpg,{name}" for name in ("cat", "dog") for n in range(2)]
    (tmp_path / "a.csv").write_text("\n".join(["path,label", *rows]))
    for line in (("pretrain", "--recipe", "smoke", "--data"), ("predict",), ("data", "shards")):
        said = vitctl(*line, "packed.tar", *(["out"] if line[0] == "data" else []))
        assert said.code == 2 and "unpack" in said.err and "data shards" not in said.err, said.err
    for source in ("tars",):
        said = vitctl("predict", source)
        assert said.code == 2
        packs, _, command = said.err.rpartition("`")[0].rpartition("`")[2].rpartition("vitctl ")
        if packs:
            subprocess.run(shlex.split(packs.removesuffix(" && ")), check=True, cwd=tmp_path)
        assert vitctl(*shlex.split(command)).code == 0, said.err
        (index,) = find_splits(tmp_path / f"{source.removesuffix('.csv')}-shards").values()
        assert open_shards(index).class_names == ("cat", "dog")
    with tarfile.open(tmp_path / "tars/cat.tar", "w") as tar:
        for name, data in (("1.jpg", picture(1)), ("1.cls", b"?")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert "--columns label=FIELD" in vitctl("predict", "tars/cat.tar").err


@pytest.mark.slow
def test_shards__of_one_class_are_not_proposed_for_training(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos", ("cat",))
    said = vitctl("data", "shards", "photos", "out", "--keep-class", "cat")
    assert said.code == 0 and "of one class" in said.out and "train on them" not in said.out
    said = vitctl("pretrain", "--recipe", "smoke", "--data", "photos")
    assert said.code == 2 and "correct the files; to learn anything takes two classes" in said.err, said.err


@pytest.mark.slow
def test_foreign_shards__with_labels_from_one_say_so_at_every_door(vitctl: Vitctl, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "theirs.tar", "w") as tar:
        for n in range(6):
            for name, data in ((f"{n}.jpg", picture(n)), (f"{n}.cls", str(1 + n % 2).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    (tmp_path / "P").mkdir()
    (tmp_path / "theirs.tar").rename(tmp_path / "P/0.tar")
    text = "no image has the label 0, so that class 0 is empty"
    said = [vitctl("data", "index", "P").out, vitctl("data", "check", "P").out]
    assert all(text in one for one in said), said
    command = shlex.split(said[0].partition("or type `")[2].partition("`")[0])
    assert vitctl(*command[1:]).code == 0
    assert open_shards(tmp_path / "P-from-0/P").class_names == ("1", "2")
    (tmp_path / "Q").mkdir()
    shutil.copy(tmp_path / "P/0.tar", tmp_path / "Q/0.tar")
    assert vitctl("data", "shards", "Q", "own").code == 0
    assert open_shards(tmp_path / "own/Q").class_names == ("0", "1", "2")
    assert text not in vitctl("data", "check", "P-from-0").out


@pytest.mark.slow
def test_shards__links_and_empty_folders_of_a_tar_are_not_lost(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos", per_class=2)
    (tmp_path / "photos/owl").mkdir()
    (tmp_path / "photos/wolf").symlink_to("dog")
    (tmp_path / "photos/cat/gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "photos/cat/hard.jpg").hardlink_to(tmp_path / "photos/cat/0.jpg")
    (tmp_path / "photos/dog/link.jpg").symlink_to("../cat/1.jpg")
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(tmp_path / "photos", ".")
    said = vitctl("data", "shards", "photos.tar", "out")
    assert said.code == 2
    assert "cat/gone.jpg: unreadable: photos.tar: a link to a file that is not in the archive" in said.out
    assert "class 'owl' has no image" in said.out and "class 'wolf' has no image" in said.out
    assert "wolf: a link to a folder, which is not followed" in said.out
    command = shlex.split(said.err.partition("or type: ")[2])
    assert vitctl(*command[1:]).code == 0
    wanted = {f"{name}/{n}.jpg" for name in ("cat", "dog") for n in range(2)}
    assert keys(tmp_path / "out/train") == {*wanted, "cat/hard.jpg", "dog/link.jpg"}


@pytest.mark.slow
def test_shards__what_it_says_to_type_is_enough_for_several_labels(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos", ("cat",))
    rows = [f"photos/cat/{n}.jpg,cat;dog,train" for n in range(5)] + ["photos/cat/6.jpg,Dog;owl,test"]
    (tmp_path / "a.csv").write_text("\n".join(["path,labels,split", *rows]))
    said = vitctl("data", "shards", "a.csv", "out")
    assert said.code == 2 and vitctl(*shlex.split(said.err.partition("or type: ")[2])[1:]).code == 0
