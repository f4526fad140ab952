"""`vitctl data`: from a folder of pictures to checked shards."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from tests.cli.conftest import Vitctl
from tests.conftest import TINY
from tests.data.server import Faults, serving
from tests.matrix import slow
from vitctl.data.datasets.catalog import open_split
from vitctl.data.source.splits import open_shards, select
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split


def plant(root: Path) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(("cat [b16]", "dog")):
            for image in range(3):
                path = root / split / name / f"{image}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (number * 200, image * 50, 0)).save(path)


def test_shards_check_index(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    said = vitctl("data", "shards", "photos", "out [x]")
    assert (said.code, said.err) == (0, "")
    assert "train: 6 images of 2 classes in 1 shard" in said.out
    assert "ready in out [x]; train on them with --data out [x]" in said.out

    said = vitctl("data", "check", "out [x]")
    assert (said.code, said.err) == (0, "")
    assert "cat [b16]" in said.out
    # train and test share images, and those of each are flat
    assert "nothing is damaged or missing; 3 notes, see above" in said.out

    [shard] = (tmp_path / "out [x]" / "train").glob("*.tar")
    content = bytearray(shard.read_bytes())
    content[700] ^= 255
    shard.write_bytes(bytes(content))
    said = vitctl("data", "check", "out [x]")
    assert said.code == 2
    assert said.err.startswith("vitctl: out [x]: ")
    assert "listed above" in said.err
    assert str(shard.name) in said.out


def test_outputs__are_not_written_into_the_images_or_over_a_photograph(
    vitctl: Vitctl, tmp_path: Path
) -> None:
    plant(tmp_path / "photos")
    vitctl("data", "shards", "photos", "out")
    photo = "photos/train/dog/0.png"
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words in (
        ("shards", "photos", "photos"),
        ("shards", "photos", "photos/train/dog"),
        ("shards", "photos/../photos", "photos/new/folder"),
        ("dedup", "out", "--report", "out/train/index.json"),
        ("dedup", "out", "--report", "out/train/new", "--against", "out/test"),
        ("show", "out", photo),
    ):
        said = vitctl("data", *words)
        assert (said.code, said.err.count("\n")) == (2, 1), words
        assert "give another name" in said.err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for _ in range(2):  # its own page is replaced
        assert vitctl("data", "show", "out", "page.png").code == 0


def many(root: Path, number: int = 1200, bad: int = -1) -> Path:
    """A split of tiny pictures, of which one, that the quick look passes over, cannot be decoded."""
    picture, file = Image.new("RGB", (4, 4)), io.BytesIO()
    picture.save(file, "PNG")
    torn = file.getvalue()[:45]
    items = [
        Item(f"k{n}", n % 2, partial(bytes, torn if n == bad else file.getvalue())) for n in range(number)
    ]
    write_split(items, root / "train", ("a", "b"), seed=0, source_text="", max_samples=500)
    return root / "train"


@pytest.mark.slow
def test_check__decodes_every_image_and_quick_says_that_it_does_not(vitctl: Vitctl, tmp_path: Path) -> None:
    many(tmp_path / "out")
    said = vitctl("data", "check", "out", "--accept-labels", "--workers", 0)  # one picture in both classes
    assert (said.code, "1,200 decoded, 0 problems" in said.out, "nothing is damaged" in said.out) == (
        0,
        True,
        True,
    )
    many(tmp_path / "bad", bad=7)
    found = vitctl("data", "check", "bad", "--workers", 0)
    assert (found.code, "k7" in found.out) == (2, True)
    said = vitctl("data", "check", "out", "--quick")
    assert said.code == 0
    assert "no problem found in 1,200 of 1,200 images; without --quick every byte is read" in said.out
    assert "all is well" not in said.out
    content = bytearray((tmp_path / "out/train/shard-000000.tar").read_bytes())
    content[-600] ^= 1  # behind the last sample, where only the digest sees it
    (tmp_path / "out/train/shard-000000.tar").write_bytes(bytes(content))
    assert vitctl("data", "check", "out", "--quick").code == 0
    said = vitctl("data", "check", "out", "--workers", 0)
    assert (said.code, "checksum mismatch" in said.out) == (2, True)


def test_check__names_what_is_missing_and_what_is_left_over(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    assert vitctl("data", "shards", "photos", "out").code == 0
    out = tmp_path / "out"
    (out / "train/index.json").rename(tmp_path / "kept.json")
    said = vitctl("data", "check", "out")
    assert said.code == 2 and "all is well" not in said.out
    assert "out/train: 1 shard and no index.json; write it with `vitctl data index out/train`" in said.out
    said = vitctl("data", "check", "out/train")
    assert (said.code, "train: 6 images, 6 decoded, 0 problems" in said.out) == (
        0,
        True,
    )  # indexed in the cache

    (tmp_path / "kept.json").rename(out / "train/index.json")
    (out / "train/shard-000009.tar").write_bytes((out / "train/shard-000000.tar").read_bytes())
    (out / ".test.partial").mkdir()
    (out / "notes.txt").write_text("of mine")
    (out / "test/.samples.npy.partial").write_bytes(b"")
    said = vitctl("data", "check", "out")
    assert said.code == 2
    assert "out/train: shard-000009.tar: not in the index, so they are not read" in said.out
    assert "out/.test.partial: writing of 'test' was not finished" in said.out
    assert "out/notes.txt: left over, of no split" in said.out
    assert "out/test/.samples.npy.partial: left over, of no split" in said.out
    assert "out: 2 problems listed above" in said.err

    (out / "train/shard-000009.tar").unlink()
    (out / ".test.partial").rmdir()
    (out / "train/index.json").write_text("{")
    said = vitctl("data", "check", "out")
    assert said.code == 2 and "out/train/index.json: not JSON" in said.out and "test: 6 images" in said.out
    shutil.rmtree(out / "train")
    said = vitctl("data", "check", "out")
    assert said.code == 0 and "out: has no split 'train'; found: test" in said.out


@pytest.mark.slow
def test_check__a_known_set_lacks_a_split_or_images(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    assert vitctl("data", "shards", "photos", "data/pets").code == 0
    shutil.rmtree(tmp_path / "data/pets/test")
    said = vitctl("data", "check", "imagenet_v2")
    assert said.code == 2
    shutil.copytree(tmp_path / "data/pets", tmp_path / "data/digits")
    said = vitctl("data", "check", "digits")
    assert said.code == 2
    assert "digits: split 'test' is missing" in said.out
    assert "digits: 'train' has 6 images of 2 classes, should have 1,437 of 10" in said.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", *slow("memory")])
def test_check_stats_show__of_addresses_and_patterns(
    vitctl: Vitctl, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    plant(tmp_path / "photos")
    assert vitctl("data", "shards", "photos", "out").code == 0
    with place_of(kind, tmp_path / "out", monkeypatch) as (url, put):
        said = vitctl("data", "check", url)
        assert (said.code, said.err) == (0, "")
        assert "train: 6 images, 6 decoded, 0 problems" in said.out and "test: 6 images" in said.out
        assert json.loads(vitctl("data", "stats", url, "--json").out)["test"]["num_sampled"] == 6
        assert vitctl("data", "show", f"{url}/test", "page.png").out == "6 images in page.png\n"
        content = bytearray((tmp_path / "out/train/shard-000000.tar").read_bytes())
        content[700] ^= 1
        put("train/shard-000000.tar", bytes(content))
        said = vitctl("data", "check", url)
        assert said.code == 2 and f"{url}/train/shard-000000.tar: checksum mismatch" in said.out
        # Made anew: the index that was kept is not what is there now.
        index = json.loads((tmp_path / "out/test/index.json").read_text()) | {"class_names": ["new", "names"]}
        put("test/index.json", json.dumps(index).encode())
        assert "names" in vitctl("data", "check", f"{url}/test").out
        said = vitctl("data", "check", f"{url}/nothing")
        assert said.code == 2 and f"{url}/nothing: no index.json there, nor in train, validation" in said.err
    assert "is an address" in vitctl("data", "dedup", "s3://bucket/set", "--against", "out/test").err


@contextmanager
def place_of(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Callable[[str, bytes], object]]]:
    """The address of a copy of a folder on a server or in a bucket, and a way to change its files."""
    if kind == "http":
        far = folder.with_name("far")
        shutil.copytree(folder, far)
        with serving(far, Faults()) as url:
            yield url, lambda name, data: (far / name).write_bytes(data)
        return
    import fsspec
    import fsspec.core

    files = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"/bucket/set/{path.relative_to(folder)}", path.read_bytes())
    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **_: (files, url.removeprefix("s3:/")))
    yield "s3://bucket/set", lambda name, data: files.pipe_file(f"/bucket/set/{name}", data)


def test_shards__smaller_photographs(vitctl: Vitctl, tmp_path: Path) -> None:
    (tmp_path / "photos/cat").mkdir(parents=True)
    Image.new("RGB", (90, 40), (30, 9, 9)).save(tmp_path / "photos/cat/0.jpg")
    _save(tmp_path / "photos/cat/1.png", 1, 90)
    said = vitctl(
        "data", "shards", "photos", "small", "--max-side", 45, "--quality", 80, "--keep-class", "cat"
    )
    assert said.code == 0
    out = " ".join(said.out.split())
    assert "JPEG longer than 45 pixels shrunk to that, quality 80" in out
    assert ": 1 of 2 images changed; the others are as they were" in out
    assert vitctl("data", "shards", "photos", "none", "--max-side", 0).code == 2
    assert sorted(
        Image.open(io.BytesIO(open_shards(tmp_path / "small/train").read(n))).size for n in range(2)
    ) == [(45, 20), (90, 90)]


def test_stats__table_and_json(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    vitctl("data", "shards", "photos", "out")
    said = vitctl("data", "stats", "out")
    assert (said.code, said.err) == (0, "")
    assert "images per class: min, median, max" in said.out and "png 100 %" in said.out
    found = json.loads(vitctl("data", "stats", "out", "--json").out)
    assert set(found) == {"train", "test"}
    assert found["train"]["images_per_class"] == [3, 3]
    assert found["train"]["widths"] == [8] * 5


def test_show__writes_a_page(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    vitctl("data", "shards", "photos", "out")
    said = vitctl("data", "show", "out", "page.png", "--split", "test", "--num-images", 4)
    assert (said.code, said.out) == (0, "4 images in page.png\n")
    with Image.open(tmp_path / "page.png") as page:
        assert page.format == "PNG"
    augmented = ("data", "show", "out", "more.png", "--augmented", "--res", 16)
    seen = set[bytes]()
    for recipe in ((), ("-r", "deit3_b16"), ("--set", "data.color_jitter=0.9")):  # its own augmentation
        said = vitctl(*augmented, *recipe)
        hidden = "MixUp, CutMix" if "deit3_b16" in recipe else ""
        assert (said.code, said.out.splitlines()[0]) == (0, "6 images in more.png")
        assert said.out.rpartition("whole batches: ")[2] == (f"{hidden}\n" if hidden else said.out)
        seen.add((tmp_path / "more.png").read_bytes())
    assert len(seen) == 3
    assert vitctl(*augmented[:-2]).code == 0  # `finetune` takes the size of its weights
    said = vitctl(*augmented, "-r", "fewshot")
    assert (said.code, said.err.count("\n")) == (2, 1) and "fewshot" in said.err
    assert (
        vitctl("data", "show", "out", "page.jpg").err
        == "vitctl: page.jpg: should be the name of a .png file\n"
    )
    assert (
        vitctl("data", "show", "out", "x.png", "--split", "val").err
        == "vitctl: out: has no split 'val'; found: train, test\n"
    )


@pytest.mark.slow
def test_dedup__shows_then_leaves_out(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    (tmp_path / "photos/test/dog/1.png").unlink()
    vitctl("data", "shards", "photos", "out")
    line = ("data", "dedup", "out", "--against", "out/test", "--report", "report")
    said = vitctl(*line)
    assert (said.code, said.err) == (0, "")
    assert "5 of 6 images of out/train are in a test set; report: report" in said.out
    assert "nothing was excluded; check the pairs" in said.out
    assert (tmp_path / "report/matches.csv").exists() and (tmp_path / "report/pairs_000.png").exists()
    assert len(open_shards(tmp_path / "out/train")) == 6
    said = vitctl(*line, "--apply")
    assert "excluded from now on: 5 images; to include them again, remove out/train/excluded.json" in said.out
    assert "report: report-2" in said.out and (tmp_path / "report-2/matches.csv").exists()
    source = open_shards(tmp_path / "out/train")
    assert [source.key(n) for n in range(len(source))] == ["dog/1.png"]
    said = vitctl("data", "check", "out")
    assert said.code == 0 and "train and test" not in said.out
    listed = tmp_path / "out/train/excluded.json"
    content = listed.read_text()
    listed.write_text("{}")
    said = vitctl("data", "check", "out")
    assert said.code == 2 and "share 5 images" in said.out and "excluded.json: format is None" in said.out
    listed.write_text(content)
    said = vitctl("data", "dedup", "out", "--against", "out/train")
    assert (
        said.err == "vitctl: --against out/train: is the split itself; leave --against out to look for "
        "duplicates in it\n"
    )


@pytest.mark.slow
def test_index__out_is_honoured_and_class_names_stay(vitctl: Vitctl, tmp_path: Path) -> None:
    plant(tmp_path / "photos")
    vitctl("data", "shards", "photos", "out", "--max-samples", 2)
    before = (tmp_path / "out/train/index.json").read_bytes()
    said = vitctl("data", "index", "out/train", "--out", "elsewhere/set")
    assert (said.code, said.err) == (0, "")
    assert (tmp_path / "out/train/index.json").read_bytes() == before
    linked, original = open_shards(tmp_path / "elsewhere/set"), open_shards(tmp_path / "out/train")
    assert linked.class_names == original.class_names == ("cat [b16]", "dog")
    assert [linked.read(n) for n in range(6)] == [original.read(n) for n in range(6)]
    assert vitctl("data", "index", "out/test", "--out", "elsewhere/set").code == 2
    (tmp_path / "out/train/index.json").unlink()
    assert vitctl("data", "index", "out/train").code == 0
    assert open_shards(tmp_path / "out/train").class_names == ("cat [b16]", "dog")


@pytest.mark.slow
def test_check__class_names_that_training_would_refuse_are_a_problem(vitctl: Vitctl, tmp_path: Path) -> None:
    """Reversed in one index: other than in its shards, and than in the other split."""
    for split in ("train", "test"):
        items = [Item(f"{n}", n % 2, partial(png, n)) for n in range(4)]
        write_split(items, tmp_path / "set" / split, ("cat", "dog"), seed=0, source_text="noise")
    assert vitctl("data", "check", "set").code == 0
    path = tmp_path / "set" / "train" / "index.json"
    fields = json.loads(path.read_text())
    fields["class_names"].reverse()
    path.write_text(json.dumps(fields))
    said = vitctl("data", "check", "set")
    assert said.code == 2
    assert "tells other class names than the index" in said.out
    assert "'test' has other class names, or in another order, than 'train'" in said.out


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
def test_shards__into_a_folder_with_another_train_writes_no_test_beside_it(
    vitctl: Vitctl, tmp_path: Path
) -> None:
    for seed, name in enumerate(("a/cat/0", "a/dog/0", "b/train/cat/0", "b/train/dog/0", "b/test/cat/0")):
        _save(tmp_path / f"{name}.png", seed)
    assert vitctl("data", "shards", "a", "out").code == 0
    said = vitctl("data", "shards", "b", "out")
    assert (said.code, "train: exists already with other images" in said.err) == (2, True)
    assert not (tmp_path / "out" / "test").exists()


def _save(path: Path, seed: int, size: int = 64) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise).resize((64, 64), Image.Resampling.BICUBIC).resize((size, size)).save(path)


def test_check__the_same_image_in_two_classes_is_refused_unless_accepted(
    vitctl: Vitctl, tmp_path: Path
) -> None:
    for seed, name in enumerate(
        ("train/cat/a", "train/cat/b", "train/dog/c", "train/dog/d", "test/cat/t", "test/dog/u")
    ):
        _save(tmp_path / f"photos/{name}.png", seed)
    for copy, of in (
        ("train/dog/a2", "train/cat/a"),
        ("test/dog/b2", "train/cat/b"),
        ("train/dog/d2", "train/dog/d"),
    ):
        shutil.copy(tmp_path / f"photos/{of}.png", tmp_path / f"photos/{copy}.png")
    vitctl("data", "shards", "photos", "out")
    said = vitctl("data", "check", "out")
    assert said.code == 2 and said.err.count("\n") == 1 and "--accept-labels" in said.err
    lines = [set(line.split()) for line in said.out.splitlines() if line.startswith("the same image")]
    assert len(lines) == 2 and "all is well" not in said.out
    within, across = lines if "train/dog/a2.png" in lines[0] else lines[::-1]
    assert {"train/cat/a.png", "train/dog/a2.png"} <= within
    assert {"train/cat/b.png", "test/dog/b2.png"} <= across
    assert all({"'cat',", "'dog'"} <= line or {"'dog',", "'cat'"} <= line for line in lines)
    assert vitctl("data", "check", "out", "--accept-labels").code == 0


@pytest.mark.slow
def test_dedup__within_a_set_and_across_its_automatic_split(vitctl: Vitctl, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        for number in range(10):
            _save(tmp_path / f"photos/{name}/{number}.png", 100 * len(name) + number + 50 * (name == "dog"))
    vitctl("data", "shards", "photos", "clean")
    _save(tmp_path / "photos/dog/small.png", 300, 48)  # cat/0, smaller
    vitctl("data", "shards", "photos", "out")
    said = vitctl("data", "dedup", "clean")
    assert (said.code, said.err) == (0, "") and "0 pairs, 0 shown" in said.out
    said = vitctl("data", "dedup", "out")
    assert (said.code, said.err) == (0, "") and "1 pair, 1 shown; report: out-dedup" in said.out
    sources = {"train": open_shards(tmp_path / "out/train")}
    sides = [select(spec, sources) for spec in ("train[:80% of each class]", "train[80%: of each class]")]
    keys = [{side.key(n) for n in range(len(side))} for side in sides]
    differ = not any({"cat/0.png", "dog/small.png"} <= side for side in keys)
    [line] = [line for line in said.out.splitlines() if "bits apart" in line]
    assert "cat/0.png (cat)" in line and "dog/small.png (dog)" in line and "different labels" in line
    assert ("on different sides of the split" in line) == differ
    said = vitctl("data", "dedup", "out", "--apply")
    assert said.code == 2 and "would change which fifth of them is held out" in said.err
    (tmp_path / "out/train").rename(tmp_path / "out/test")
    vitctl("data", "shards", "photos", "again")
    (tmp_path / "again/train").rename(tmp_path / "out/train")
    assert (
        vitctl("data", "dedup", "out", "--apply").err
        == "vitctl: --apply: give the test set: --against out/test\n"
    )


def test_index__says_that_no_image_has_a_label(vitctl: Vitctl, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with webdataset.ShardWriter(f"{tmp_path}/train/theirs-%d.tar", verbose=0) as writer:
        for number in range(2):
            writer.write({"__key__": f"k{number}", "png": np.zeros((8, 8, 3), np.uint8), "cls": -1})
    said = vitctl("data", "index", "train").out
    assert "no image has a label: all 2 are -1; the first is k0 of " in said and "from 0 to 0" not in said


def test_index__names_the_samples_without_a_class(vitctl: Vitctl, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    with webdataset.ShardWriter(f"{tmp_path}/train/theirs-%d.tar", verbose=0) as writer:
        for number, label in enumerate((0, -1, 1, -1)):
            writer.write({"__key__": f"k{number}", "png": np.zeros((8, 8, 3), np.uint8), "cls": label})
    note = "2 of 4 images have no label (-1); the first is k1 of "
    assert note in vitctl("data", "index", "train").out
    checked = vitctl("data", "check", "train", "--accept-labels").out
    assert note in checked and "missing, but 'train' cannot be trained on or scored; " in checked
    (tmp_path / "train" / "index.json").unlink()
    said = vitctl("pretrain", "-r", TINY, "--data", "train", "--set", "data.eval_split=''")
    assert "4 images of 2 classes, 2 without a label" in said.err
    assert said.err.count(note) == 1
    plan = vitctl("pretrain", "-r", TINY, "--data", "train", "--set", "data.eval_split=''", "--dry-run")
    assert plan.code == 2 and note in plan.err


@pytest.mark.slow
def test_check__near_duplicates_across_the_automatic_split_with_both_labels(
    vitctl: Vitctl, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    for number in range(30):
        folder = tmp_path / "photos" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        noise = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        noise.resize((80, 60), Image.Resampling.BICUBIC).save(folder / f"{number:02d}.png")
    assert vitctl("data", "shards", "photos", "plain").code == 0
    assert "all is well" in vitctl("data", "check", "plain").out
    sides = [
        open_split(f"train{part}", path="plain") for part in ("[:80% of each class]", "[80%: of each class]")
    ]
    trained, held_out = (
        next(filter(lambda key: key[:3] == c, map(s.key, range(len(s)))))
        for s, c in zip(sides, ("cat", "dog"), strict=True)
    )
    with Image.open(tmp_path / "photos" / trained) as image:
        image.resize((96, 72)).save(tmp_path / "photos" / held_out)
    assert vitctl("data", "shards", "photos", "leaky").code == 0
    said = vitctl("data", "check", "leaky")
    assert said.code == 0  # near-duplicates may be right: they are a note
    (line,) = [line for line in said.out.splitlines() if "near-duplicate" in line]
    assert line.startswith("train[:80% of each class] and train[80%: of each class]: 0 identical and 1 near-")
    assert f"{trained} (cat) and {held_out} (dog)" in line
    assert "near-duplicate" not in vitctl("data", "check", "leaky", "--quick").out
