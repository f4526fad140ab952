"""The same photographs by every door of --data: folders, tables as other programs write them, archives."""

import io
import os
import pickle
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Vitctl, vitctl  # noqa: F401
from tests.data.datasets.conftest import tar_of
from tests.docs.conftest import photo
from tests.matrix import few, slow, spread
from tests.trained import CPU, SMALL
from vitctl.cli.data_commands import shards_of
from vitctl.cli.run_job import with_shards
from vitctl.cli.show.measurements import BenchOptions, chosen_recipe
from vitctl.data.datasets.catalog import is_photographs, open_originals, open_split
from vitctl.data.datasets.converted import LOOKED, RECORD, fingerprint, list_converted, shards_folder
from vitctl.data.inspect.check_shards import verify_index
from vitctl.data.source.stores import ShardSource
from vitctl.data.source.views import Source
from vitctl.data.writer.intake import check_image
from vitctl.errors import DataError
from vitctl.jobs.inputs.checks import fit_splits
from vitctl.jobs.inputs.given_images import find_images, place_of
from vitctl.jobs.predict import known_classes
from vitctl.launch.prepare_run import prepare_run
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Evaluate
from vitctl.system.files import lock

CLASSES, COUNT = ("cat", "dog", "elk"), 4
Place = Callable[[Path], Path]
ROWS = [(name, number) for name in CLASSES for number in range(COUNT)]


def folders(place: Path) -> Path:
    for name, number in ROWS:
        file = place / "photos" / name / f"{name}{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(photo(name, number))
    return place / "photos"


def flat(place: Path, inside: str = "") -> Path:
    folder = place / "photos" / inside
    folder.mkdir(parents=True)
    for name, number in ROWS:
        (folder / f"{name}{number}.jpg").write_bytes(photo(name, number))
    return place / "photos"


def table(
    header: str, row: str, *, inside: str = "", name: str = "labels.csv", gives_folder: bool = False
) -> Place:
    """A table of flat images: its header, and a row with {0} for the class and {1} for the number."""

    def make(place: Path) -> Path:
        folder = flat(place, inside)
        lines = [*filter(None, [header]), *(row.format(*one) for one in ROWS)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
        return folder if gives_folder else folder / name

    return make


def packed(kind: str, inner: Place = folders, *, top: bool = True) -> Place:
    def make(place: Path) -> Path:
        found = inner(place / "inner")
        folder = found if found.is_dir() else found.parent
        file = place / f"photos.{kind}"
        if kind == "zip":
            with zipfile.ZipFile(file, "w") as archive:
                for one in sorted(folder.rglob("*")):
                    archive.write(one, one.relative_to(folder.parent if top else folder))
        else:
            with tarfile.open(
                file, f"w:{'gz' if kind == 'tgz' else kind.partition('tar')[2].removeprefix('.')}"
            ) as tar:
                tar.add(folder, folder.name if top else ".")
        shutil.rmtree(place / "inner")
        return file

    return make


DOORS: dict[str, Place] = {
    "folders": folders,
    "path,label": table("path,label", "{0}{1}.jpg,{0}"),
    "a semicolon, more columns": table("id;file_name;class", "7;{0}{1}.jpg;{0}"),
    "imagefolder": table("file_name,label", "{0}{1}.jpg,{0}", name="metadata.csv", gives_folder=True),
    "Kaggle: images in a folder": table("id,breed", "{0}{1},{0}", inside="train", name="labels.csv"),
    "Kaggle: ids without ending": table("id,breed", "{0}{1},{0}", name="labels.csv"),
    "TSV": table("image\tcategory", "{0}{1}.jpg\t{0}", name="list.tsv"),
    "JSON lines": table(
        "",
        '{{"file_name": "{0}{1}.jpg", "label": "{0}"}}',
        name="metadata.jsonl",
        gives_folder=True,
    ),
    "numbers and names": table("path,label,class_name", "{0}{1}.jpg,{0}!,{0}"),
    "tgz of JSON lines": packed(
        "tgz", table("", '{{"image": "{0}{1}.jpg", "class": "{0}"}}', name="a.jsonl")
    ),
    "zip": packed("zip"),
    "zip without a top folder": packed("zip", top=False),
    "zip of a table": packed("zip", table("filename,target", "{0}{1}.jpg,{0}", name="train.csv")),
    "tar": packed("tar"),
    "tar of a table": packed("tar", table("filename,target", "{0}{1}.jpg,{0}")),
    "tar.gz": packed("tar.gz"),
    "tar.xz without a top folder": packed("tar.xz", top=False),
}


def held(folder: Path) -> dict[Path, int]:
    found = [path for path in folder.rglob("*") if "cache" not in path.parts]
    return {path: path.stat().st_mtime_ns for path in found}


def read_all(*sources: Source, class_names: tuple[str, ...] = CLASSES) -> list[tuple[str, bytes]]:
    """The class and the bytes of each image, as predictions compare them with the answers."""
    return sorted(
        (class_names[label], source.read(number))
        for source in sources
        for number, (label, *_) in enumerate(known_classes(source, class_names).tolist())
    )


@pytest.mark.parametrize("door", DOORS)
def test_door__has_the_same_images_and_classes_in_commands_and_in_python(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`predict` and `inspect` take images; `inspect --data`, plans and Python a split."""
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    source = DOORS[door](tmp_path)
    before, wanted = held(source.parent), sorted((name, photo(name, number)) for name, number in ROWS)
    assert is_photographs(str(source))
    split = open_split("train", path=source)
    assert split.class_names == CLASSES and read_all(pickle.loads(pickle.dumps(split))) == wanted
    place = load_recipe("evaluate").recipe.data  # type: ignore[union-attr]
    assert read_all(*find_images([str(source)], place, stdin=io.BytesIO(), note=print)) == wanted
    assert read_all(*find_images([f"{source}:train"], place, stdin=io.BytesIO(), note=print)) == wanted
    assert held(source.parent) == before


@pytest.mark.slow
@pytest.mark.parametrize("door", few(DOORS.keys(), "folders"))
def test_door__of_jobs_and_bench_is_the_same_shards(
    door: str, tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    source = DOORS[door](tmp_path / "given")
    before, wanted = held(source.parent), sorted((name, photo(name, number)) for name, number in ROWS)
    given = [Override("data.path", str(source)), Override("weights.source", str(pretrained))]
    options = BenchOptions((), "smoke", 1.0, None, ())
    recipes = [chosen_recipe(options, {"--data": ("data.path", str(source))})[0]]
    for job, overrides in (("smoke", given[:1]), ("finetune", given), ("export", given)):
        recipes.append(with_shards(load_recipe(job, overrides), Path("runs"), is_alone=True).recipe)
    (shards,) = {recipe.data.path for recipe in recipes}
    assert read_all(open_split("train", path=shards)) == wanted
    assert held(source.parent) == before
    (made,) = [one for one in list_converted(Path("runs")) if one.folder == Path(shards)]
    assert made.made_of == str(source)


def test_photographs__are_seen_to_change_and_are_converted_again_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    source, runs = folders(tmp_path), tmp_path / "runs"
    first, file = shards_of(str(source), runs), source / "cat/cat0.jpg"
    about, content = file.stat(), file.read_bytes()
    file.write_bytes(content)  # the same again
    assert shards_of(str(source), runs) == first
    shutil.copytree(source, tmp_path / "elsewhere/photos")
    assert shards_of(str(tmp_path / "elsewhere/photos"), runs) == first
    file.write_bytes(content[:-1] + b"\0")
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)
    assert shards_of(str(source), runs) != first


def bytes_of(shards: Path) -> dict[str, bytes]:
    files = [path for path in shards.rglob("*") if path.is_file() and path.name != RECORD]
    return {str(path.relative_to(shards)): path.read_bytes() for path in files}


@pytest.mark.parametrize("door", few(["folders", "imagefolder", "zip"], "folders"))
def test_photographs__of_which_some_changed_are_not_all_decoded_and_the_shards_are_as_if_they_were(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    source, runs = DOORS[door](tmp_path), tmp_path / "runs"
    first = shards_of(str(source), runs)
    if door == "zip":
        with zipfile.ZipFile(source, "a") as archive:
            archive.writestr("photos/cat/new.jpg", photo("cat", 77))
    else:
        next(source.rglob("dog1.jpg")).write_bytes(photo("cat", 77))

    def check(data: bytes) -> tuple[str, bytes]:
        assert data == photo("cat", 77), "decoded again"
        return check_image(data)

    with monkeypatch.context() as patch:
        patch.setattr("vitctl.data.writer.intake.check_image", check)
        second = shards_of(str(source), runs)
    assert (
        f"shards to {second}; {len(ROWS) + (door == 'zip')} images, 1 of them new" in capfd.readouterr().out
    )
    assert first != second and bytes_of(second) == bytes_of(shards_of(str(source), tmp_path / "fresh"))


def test_photographs__that_another_command_converts_are_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A lock on the folder of the shards, which ends with its process, and leaves no file."""
    source, runs = folders(tmp_path), tmp_path / "runs"
    out, _ = shards_folder(str(source), runs, open_originals(str(source)))
    out.mkdir(parents=True)
    descriptor = os.open(out, os.O_RDONLY)
    assert lock(descriptor)
    timer = threading.Timer(0.3, os.close, [descriptor])
    timer.start()
    assert shards_of(str(source), runs) == out
    assert "waiting for another command, which writes" in capfd.readouterr().out
    assert {path.name for path in out.iterdir()} == {"train", RECORD, LOOKED}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (table("img,image,label", "{0}{1},{0}{1}.jpg,{0}"), "the columns image and img may be the path"),
        (table("path,class,target", "{0}{1}.jpg,{0},7"), "the columns class and target may be the label"),
        (table("path,label,class", "{0}{1}.jpg,{0},7"), "the columns label and class may be the label"),
        (
            table("path,label,is_valid", "{0}{1}.jpg,{0},True"),
            "has a column 'is_valid'; make it a column split",
        ),
        (table("path,label,splt", "{0}{1}.jpg,{0},train"), "has a column 'splt'; rename it, to split if"),
        (table("path,label,class_name", "{0}{1}.jpg,{1},{0}"), "columns of class names and of labels do not"),
        (table("path,Label, label", "{0}{1}.jpg,{0},{0}"), "two columns have the same name"),
        (table("name,value", "{0}{1}.jpg,{0}"), "columns are name,value, should be path,label"),
    ],
)
def test_table__what_is_ambiguous_is_refused(make: Place, said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_originals(str(make(tmp_path)))
    assert said in str(caught.value)


def test_folder__of_classes_beside_a_table_of_other_columns_is_refused(tmp_path: Path) -> None:
    folder = folders(tmp_path)
    (folder / "list.csv").write_text("bild,art\ncat/cat0.jpg,dog\n")
    with pytest.raises(DataError, match="beside class folders; move it away to use the folders, or name its"):
        open_originals(str(folder))
    (folder / "list.csv").write_text("class,count\ncat,7\n")  # lists no image: it says nothing of them
    assert len(open_originals(str(folder))) == 1


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_arrays__are_images_and_their_classes(kind: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
    labels = np.arange(6)[:, None] % 2
    source = tmp_path / f"images.{kind}"
    if kind == "npy":
        np.save(source, pixels), np.save(tmp_path / "labels.npy", labels)
    else:
        np.savez(source, train_images=pixels, train_labels=labels, x_val=pixels[:2], y_val=labels[:2], z=[0])
    found = pickle.loads(pickle.dumps(open_split("train", path=source)))
    assert (found.class_names, found.labels().tolist()) == (("0", "1"), [0, 1] * 3)
    decoded = [np.array(Image.open(io.BytesIO(found.read(number)))) for number in range(6)]
    assert np.array_equal(decoded, pixels)
    assert kind == "npy" or len(open_split("validation", path=source)) == 2


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (np.zeros((2, 4, 4, 3), np.float32), [0, 1], "images float32 [2, 4, 4, 3]"),
        (np.zeros((2, 3, 4, 4), np.uint8), [0, 1], "should have images and labels of each split"),
        (np.zeros((3, 4, 4), np.uint8), [0, 1], "labels int64 [2]"),
        (np.zeros((2, 4, 4), np.uint8), [0, -2], "out of range"),
        (np.array([{}, {}]), [0, 1], "not readable as arrays"),
    ],
)
def test_arrays__of_another_kind_are_refused(
    images: object, labels: object, said: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    with pytest.raises(DataError) as caught:
        open_originals(str(tmp_path / "a.npz"))
    assert said in str(caught.value)


def test_arrays__of_a_split_twice_are_refused(tmp_path: Path) -> None:
    pixels, labels = np.zeros((2, 4, 4), np.uint8), [0, 1]
    np.savez(tmp_path / "a.npz", images=pixels, labels=labels, train_images=pixels, train_labels=labels)
    with pytest.raises(DataError, match="has images of a split twice, one of them as train_images"):
        open_originals(str(tmp_path / "a.npz"))


def test_tar__with_a_name_twice_is_refused(tmp_path: Path) -> None:
    source = folders(tmp_path / "in")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(source, "photos")
        tar.add(next(source.rglob("*.jpg")), "photos/cat/cat0.jpg")
    with pytest.raises(DataError, match=r"has photos/cat/cat0\.jpg twice"):
        open_originals(str(tmp_path / "a.tar.gz"))


def test_zip__is_unpacked_again_where_files_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    shutil.make_archive(str(tmp_path / "photos"), "zip", folders(tmp_path / "in"))
    before = len(open_originals(str(tmp_path / "photos.zip"))["train"].items)
    next((tmp_path / "cache").rglob("*.jpg")).unlink()
    assert len(open_originals(str(tmp_path / "photos.zip"))["train"].items) == before


NAMED = table("label;bild;art;split", "7;{0}{1}.jpg;{0};x", gives_folder=True)
COLUMNS = "image=bild,label=art"


@pytest.mark.parametrize("make", [NAMED, packed("zip", NAMED)])
def test_columns__that_are_named_are_those_of_every_door(
    make: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    source, wanted = make(tmp_path), sorted((name, photo(name, number)) for name, number in ROWS)
    with pytest.raises(DataError):
        open_split("x", path=source)
    assert read_all(open_split("x", path=source, columns=COLUMNS)) == wanted
    given = [Override("data.path", str(source)), Override("data.columns", COLUMNS)]
    data = load_recipe("evaluate", given).recipe.data  # type: ignore[union-attr]
    assert read_all(*find_images([str(source)], data, stdin=io.BytesIO(), note=print)) == wanted
    made = with_shards(load_recipe("smoke", given), Path("runs"), is_alone=True).recipe.data  # type: ignore[union-attr]
    assert read_all(open_split("x", path=made.path)) == wanted and made.columns == ""
    for columns, said in (
        ("image=bild,label=klasse", "has no column 'klasse', which --columns names; it has label, bild, art"),
        ("bild=image", "should be image=COLUMN,label=COLUMN"),
        ("image=bild,path=bild", "should be image=COLUMN,label=COLUMN"),
    ):
        with pytest.raises(DataError, match=said):
            open_split("x", path=next(tmp_path.rglob("labels.csv")), columns=columns)


def test_columns__of_parquet_are_paths_or_images_and_of_what_has_none_are_refused(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    folder = flat(tmp_path)
    names, labels = [f"{name}{number}.jpg" for name, number in ROWS], [name for name, _ in ROWS]
    for column in (names, [(folder / name).read_bytes() for name in names]):
        pq.write_table(pyarrow_table(bild=column, art=labels, label=labels), folder / "a.parquet")
        opened = open_split("train", path=folder / "a.parquet", columns=COLUMNS)
        assert read_all(opened) == sorted((name, photo(name, number)) for name, number in ROWS)
    (folder / "a.parquet").unlink()
    for place in (DOORS["tar"](tmp_path / "b"), folders(tmp_path / "c")):
        with pytest.raises(DataError, match="has no table; leave it out"):
            open_split("train", path=place, columns=COLUMNS)


def pyarrow_table(**columns: list[object]) -> object:
    return pytest.importorskip("pyarrow").table(columns)


def kaggle(place: Path) -> Path:
    """Kaggle's layout: train.csv with classes, test images, and a sample of a submission."""
    folder = table("id,breed", "{0}{1},{0}", inside="train", name="train.csv", gives_folder=True)(place)
    (folder / "test").mkdir()
    (folder / "test/a.jpg").write_bytes(photo("elk", 99))
    (folder / "sample_submission.csv").write_text("id,breed\na,cat\n")
    (folder / "test.csv").write_text("id\na\n")
    return folder


def cassava(place: Path) -> Path:
    """Another: the sample's ids are files of test_images/."""
    folder = table("image_id,label", "{0}{1}.jpg,{0}", inside="train_images", name="train.csv")(place).parent
    (folder / "test_images").mkdir()
    (folder / "test_images/a.jpg").write_bytes(photo("elk", 99))
    (folder / "sample_submission.csv").write_text("image_id,label\na.jpg,cat\n")
    return folder


@pytest.mark.parametrize("make", [kaggle, packed("zip", kaggle), cassava])
def test_kaggle__a_table_that_lists_none_of_the_images_is_left_out_and_said(
    make: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    wanted = sorted((name, photo(name, number)) for name, number in ROWS)
    source = make(tmp_path)
    assert read_all(open_split("train", path=source)) == wanted
    said = f"{source}/train.csv: taken; sample_submission.csv lists none of the images"
    assert said in capfd.readouterr().err
    with pytest.raises(DataError, match="files are missing") as caught:
        open_split("train", path=f"{source}/sample_submission.csv")
    assert caught.value.where == f"{source}/sample_submission.csv"


def test_archive__of_a_table_and_of_classes_or_of_two_tables_names_paths_that_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))

    def make(place: Path, *names: str) -> Path:
        folder = folders(place)
        for name in names:
            (folder / name).write_text("path,label\ncat/cat0.jpg,x\ndog/dog0.jpg,y\n")
        return folder

    for names, what in (
        (["a.csv"], "the table a.csv and folders such as cat"),
        (["a.csv", "b.csv"], "tables"),
        (["a.csv", "sample.csv", "Test.csv"], "tables"),
    ):
        archive = packed("tgz", lambda place, names=names: make(place, *names))(tmp_path / str(len(names)))  # type: ignore[misc]
        with pytest.raises(DataError) as caught:
            open_originals(str(archive))
        assert (caught.value.where, what in caught.value.what) == (str(archive), True)
        assert f"{archive}/a.csv" in caught.value.fix and "cache" not in str(caught.value)
        opened = open_split("train", path=f"{archive}/a.csv")
        assert (len(opened), opened.class_names) == (2, ("x", "y"))
        assert fingerprint(f"{archive}/a.csv") == fingerprint(f"{archive}/a.csv")


def shard(place: Path, **members: str) -> Path:
    """Samples as webdataset writes them: each extension with its text, {0} for the class, {1} the number."""
    found: dict[str, bytes] = {}
    for name, number in ROWS:
        texts = {one: text.replace("{0}", name).replace("{1}", str(number)) for one, text in members.items()}
        found[f"{name}{number}.jpg"] = photo(name, number)
        found |= {f"{name}{number}.{one}": text.encode() for one, text in texts.items()}
    place.mkdir(exist_ok=True)
    (place / "s-0.tar").write_bytes(tar_of(found))
    return place


WORDS = {
    "json": {"json": '{"label": "{0}", "url": "u"}'},
    "class in json": {"json": '{"class": "{0}", "width": 7}'},
    "cls": {"cls": "{0}"},
    "cls.txt": {"cls.txt": " {0}\n"},
    "img2dataset": {"txt": "{0}", "json": '{"caption": "{0}", "key": "{1}"}'},
}


@pytest.mark.parametrize("kind", spread(2, WORDS))
def test_webdataset__texts_are_classes_in_the_order_of_folders(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    place = shard(tmp_path / "train", **WORDS[kind])
    shutil.copy(place / "s-0.tar", place / "s-1.tar")
    opened = open_split("train", path=tmp_path)
    assert opened.class_names == CLASSES
    assert read_all(opened) == sorted(2 * [(name, photo(name, number)) for name, number in ROWS])
    assert isinstance(opened, ShardSource)
    assert all(not report.problems for report in [verify_index(opened.index)])


@pytest.mark.slow
def test_webdataset__several_texts_captions_and_numbers_beside_texts_are_refused_with_what_settles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    place = shard(tmp_path / "train", json='{"caption": "a {0}, {1}", "class": "{0}"}', txt="{0} {1}")
    with pytest.raises(DataError, match="several texts: class 'cat', caption 'a cat, 0', txt 'cat 0'; name"):
        open_split("train", path=tmp_path)
    for columns, classes in (("label=class", 3), ("label=txt", 12), ("label=json:caption", 12)):
        assert len(open_split("train", path=tmp_path, columns=columns).class_names) == classes
    shard(place, txt="the {0} no. {1}")
    monkeypatch.setattr("vitctl.data.shards.indexing._FEW", 5)
    with pytest.raises(DataError, match="for 12 images: captions rather than classes; name the label"):
        open_split("train", path=tmp_path)
    with pytest.raises(DataError, match="an image and a label, and no split; name image= and label= alone"):
        open_split("train", path=tmp_path, columns="label=txt,split=split")
    shutil.copy(shard(tmp_path / "other", cls="{1}") / "s-0.tar", place / "s-1.tar")
    with pytest.raises(DataError, match=r"s-1\.tar has numbers as labels, other shards texts"):
        open_split("train", path=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("door", few(DOORS.keys(), "zip"))
def test_data_check_stats_and_show__take_what_jobs_take(
    door: str,
    tmp_path: Path,
    vitctl: Vitctl,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    source = DOORS[door](tmp_path)
    said = vitctl("data", "stats", source, "--workers", 0)
    assert said.code == 0 and "12" in said.out
    assert not (tmp_path / "runs").exists()
    assert vitctl("data", "show", source, "sheet.png").code == 0
    said = vitctl("data", "check", source, "--workers", 0)
    assert said.code == 0 and "train: 12 images, 12 decoded, 0 problems" in said.out


def splits(place: Path, *, per_folder: bool) -> Path:
    """Hugging Face's imagefolder with splits: a metadata.csv in each folder, or one for both."""
    for split in ("train", "test"):
        lines = []
        for name, number in ROWS:
            (place / "set" / split).mkdir(parents=True, exist_ok=True)
            (place / "set" / split / f"{name}{number}.jpg").write_bytes(
                photo(name, number + 10 * (split == "test"))
            )
            lines.append(f"{'' if per_folder else split + '/'}{name}{number}.jpg,{name}")
        table = place / "set" / (split if per_folder else ".") / "metadata.csv"
        old = table.read_text().splitlines() if table.exists() else ["file_name,label"]
        table.write_text("\n".join([*old, *lines]) + "\n")
    return place / "set"


@pytest.mark.parametrize("per_folder", [True, False])
def test_imagefolder__keeps_its_splits(per_folder: bool, tmp_path: Path) -> None:
    found = open_originals(str(splits(tmp_path, per_folder=per_folder)))
    assert {split: len(originals.items) for split, originals in found.items()} == {"train": 12, "test": 12}
    for split, originals in found.items():
        held = sorted((originals.class_names[item.label], item.read()) for item in originals.items)  # type: ignore[index]
        assert held == sorted((name, photo(name, number + 10 * (split == "test"))) for name, number in ROWS)


def test_table__each_row_finds_its_file_by_its_own_ending_and_folder(tmp_path: Path) -> None:
    folder = flat(tmp_path, "images")
    (folder / "images/cat0.jpg").rename(folder / "images/cat0.png")
    (folder / "images/cat1.jpg").rename(folder / "cat1.jpg")
    lines = ["id,label", *(f"{name}{number},{name}" for name, number in ROWS)]
    (folder / "list.csv").write_text("\n".join(lines))
    (split,) = open_originals(str(folder)).values()
    assert sorted(item.key for item in split.items)[:3] == ["cat1.jpg", "images/cat0.png", "images/cat2.jpg"]


def test_table__a_name_that_may_be_two_files_is_refused(tmp_path: Path) -> None:
    source = DOORS["Kaggle: ids without ending"](tmp_path)
    (source.parent / "cat0.png").write_bytes(photo("dog", 0))
    with pytest.raises(DataError, match=r"cat0 may be cat0\.jpg or cat0\.png"):
        open_originals(str(source))


def test_fingerprint__of_a_table_is_of_what_it_lists(tmp_path: Path) -> None:
    """Runs are written below the folder from which a command is typed."""
    source = DOORS["path,label"](tmp_path)
    before = fingerprint(str(source)), fingerprint(str(source.parent))
    (source.parent / "runs").mkdir()
    (source.parent / "runs/notes.txt").write_text("more")
    assert (fingerprint(str(source)), fingerprint(str(source.parent))) == before


def test_archive__whose_table_lists_what_is_outside_or_a_name_twice_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "secret.jpg").write_bytes(photo("cat", 0))
    for name, listed in (("up", "../../../secret.jpg"), ("absolute", str(tmp_path / "secret.jpg"))):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            archive.writestr("labels.csv", f"path,label\n{listed},cat\n1.jpg,dog\n")
            archive.writestr("1.jpg", photo("dog", 1))
        with pytest.raises(DataError, match=r"outside the archive|files are missing"):
            open_originals(str(tmp_path / f"{name}.zip"))
    with zipfile.ZipFile(tmp_path / "twice.zip", "w") as archive:
        for name, number in (("cat/0.jpg", 0), ("./cat/0.jpg", 1), ("dog/0.jpg", 2)):
            archive.writestr(name, photo("cat", number))
    with pytest.raises(DataError, match=r"has cat/0\.jpg twice"):
        open_originals(str(tmp_path / "twice.zip"))


def test_folder__with_a_table_that_is_none_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    folder = flat(tmp_path, "images")
    (folder / "labels.csv").write_text("bild,art\n0.jpg,cat\n")
    with pytest.raises(DataError, match=r"labels\.csv: columns are bild,art, should be path,label"):
        open_originals(str(folder))


def test_fingerprint__of_a_table_and_of_an_archive_changes_with_them(tmp_path: Path) -> None:
    source = DOORS["path,label"](tmp_path / "a")
    before = fingerprint(str(source))
    (source.parent / "cat0.jpg").write_bytes(photo("dog", 0))
    assert fingerprint(str(source)) != before
    archive = DOORS["zip"](tmp_path / "b")
    before = fingerprint(str(archive))
    archive.write_bytes(archive.read_bytes() + b"x")
    assert fingerprint(str(archive)) != before


@pytest.mark.slow
@pytest.mark.parametrize("door", ["zip", *slow("imagefolder")])
def test_command__trains_on_a_door_and_scores_it(
    door: str,
    tmp_path: Path,
    pretrained: Path,
    vitctl: Vitctl,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    source = DOORS[door](tmp_path)
    line = f"--from {pretrained} --data {source} --res 16".split()
    assert vitctl("finetune", *line, "--dry-run").code == 0
    said = vitctl("finetune", *line, "--steps", 2, "--batch-size", 4, "--lr", 0.01, "--out", "runs/a")
    assert said.code == 0, said.err
    again = vitctl("evaluate", "--from", "runs/a", "--data", source, "--out", "runs/b")
    assert again.code == 0, again.err
    assert "unchanged; using the shards" in again.out + again.err


def test_columns__of_a_run_hold_for_its_own_data_alone(
    tmp_path: Path, pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        shard(tmp_path / name / "train", json='{"class": "{0}"}', cls="{1}")
    keys = {**CPU, **SMALL, "data.path": str(tmp_path / "mine"), "data.columns": "label=class"}
    keys |= {"weights.source": str(pretrained), "data.eval_split": "train"}
    run = tmp_path / "run"
    prepare_run(load_recipe("finetune", [Override(*one) for one in keys.items()]), run)
    for name, columns in (("", "label=class"), ("mine", "label=class"), ("other", "")):
        data = [Override("data.path", str(tmp_path / name))] if name else []
        loaded, _ = fit_splits(load_recipe("evaluate", [Override("weights.source", str(run)), *data]))
        assert loaded.recipe.data.columns == columns
        assert isinstance(loaded.recipe, Evaluate)
        recipe = load_recipe("evaluate", [Override("weights.source", str(run))]).recipe
        assert isinstance(recipe, Evaluate)
        assert not name or place_of(recipe, [f"{tmp_path / name}:train"]).columns == columns
