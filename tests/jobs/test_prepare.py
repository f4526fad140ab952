"""Original files, fetched or given, become shards that `--dataset NAME` finds; copies and parts say what they
are.
"""

import hashlib
import io
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.data.datasets.conftest import plant
from vitctl.data.datasets.catalog import open_split
from vitctl.data.datasets.inventory import check_task, list_inventory
from vitctl.data.datasets.known_sets import DATA_SETS
from vitctl.data.datasets.readers.original_files import Archive, class_list
from vitctl.data.datasets.vtab import VTAB
from vitctl.data.shards.index import find_splits, read_index
from vitctl.data.source.views import source_texts
from vitctl.errors import CheckpointError, DataError
from vitctl.jobs.prepare import is_present, prepare_data_set, prepare_real

BY_NAME = {task.name: task for task in VTAB}


def merced(folder: Path) -> Path:
    """All 2,100 images of UC Merced, hard links to one."""
    plant(folder / "one.tif", form="TIFF")
    for name in class_list("uc_merced"):
        place = folder / "UCMerced_LandUse/Images" / name
        place.mkdir(parents=True)
        for number in range(100):
            (place / f"{name}{number:02d}.tif").hardlink_to(folder / "one.tif")
    return folder


def no_web(*_: object, **__: object) -> Path:
    raise AssertionError("nothing should be fetched")


def test_prepare__a_set_that_comes_with_vitctl(tmp_path: Path) -> None:
    assert prepare_data_set("digits", tmp_path, get=no_web) == {"train": 1437, "test": 360}
    assert len(open_split("test", dataset="digits", root=str(tmp_path))) == 360


def test_prepare__from_given_files_once(tmp_path: Path) -> None:
    files = merced(tmp_path / "files")
    assert prepare_data_set("UC_Merced", tmp_path, source=files, get=no_web) == {"train": 2100}
    source = open_split("train[:1000]", dataset="uc_merced", root=str(tmp_path))
    assert (len(source), source_texts(source)) == (1000, ("UC Merced",))
    shutil.rmtree(files)
    assert prepare_data_set("uc_merced", tmp_path, source=files, get=no_web) == {"train": 2100}


@pytest.fixture
def tiny_eurosat(tmp_path: Path) -> Path:
    for number, name in enumerate(class_list("eurosat")):
        plant(tmp_path / f"files/2750/{name}/{name}_1.jpg", number)
    return tmp_path / "files"


def test_prepare__a_part_is_refused_or_labelled(tmp_path: Path, tiny_eurosat: Path) -> None:
    with pytest.raises(DataError, match=r"eurosat is incomplete: train has 10 images, should have 27,000$"):
        prepare_data_set("eurosat", tmp_path, source=tiny_eurosat)
    prepare_data_set("eurosat", tmp_path, source=tiny_eurosat, allow_partial=True)
    index = read_index(find_splits(tmp_path / "eurosat")["train"])
    assert index.source == "EuroSAT RGB (partial: 10 of 27,000 images)"
    [held] = [holding for holding in list_inventory(tmp_path) if holding.name == "eurosat"]
    assert held.state == index.source
    assert source_texts(open_split("train", path=str(tmp_path / "eurosat"))) == (index.source,)
    with pytest.raises(DataError, match="10 images of 10 classes, eurosat has 27,000 of 10"):
        open_split("train", dataset="eurosat", root=str(tmp_path))


def zipped(folder: Path) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        for path in sorted(folder.rglob("*.jpg")):
            packed.write(path, path.relative_to(folder))
    return file.getvalue()


def web(data: bytes) -> Callable[..., Path]:
    """A stand-in for the web, where one file lies."""

    def get(_url: str, *, cache: Path, progress: Callable[[int, int], None]) -> Path:
        cache.mkdir(parents=True, exist_ok=True)
        progress(len(data), 0)
        (cache / "file").write_bytes(data)
        return cache / "file"

    return get


def test_prepare__fetches_checks_unpacks_and_writes(
    tmp_path: Path, tiny_eurosat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = zipped(tiny_eurosat)
    archive = Archive("https://there.org/EuroSAT.zip", f"md5:{hashlib.md5(data).hexdigest()}", len(data))
    monkeypatch.setitem(DATA_SETS, "eurosat", replace(DATA_SETS["eurosat"], downloads=(archive,)))
    seen: list[tuple[Any, ...]] = []
    sizes = prepare_data_set(
        "eurosat", tmp_path, allow_partial=True, get=web(data), progress=lambda *told: seen.append(told)
    )
    assert sizes == {"train": 10}
    assert seen[0] == ("downloading EuroSAT.zip", len(data), len(data))
    assert seen[1][0] == "unpacking EuroSAT.zip"
    assert seen[-1] == ("writing eurosat/train", 10, 10)
    shutil.rmtree(tmp_path / "eurosat")
    assert prepare_data_set("eurosat", tmp_path, allow_partial=True, get=no_web) == {"train": 10}


def test_prepare__the_web_is_away_or_not_wanted(tmp_path: Path) -> None:
    def away(url: str, **_: object) -> Path:
        raise CheckpointError(f"{url}: no such file on the server")

    with pytest.raises(
        DataError,
        match=(
            r"no such file on the server; or download and unpack EuroSAT.zip yourself, "
            r"then add --from FOLDER$"
        ),
    ):
        prepare_data_set("eurosat", tmp_path, get=away)
    with pytest.raises(
        DataError, match=r"originals/eurosat: EuroSAT_RGB or 2750 is missing; unpack here: EuroSAT_RGB.zip"
    ):
        prepare_data_set("eurosat", tmp_path, download=False, get=no_web)


@pytest.mark.parametrize("name", ["resisc45", "imagenet"])
def test_prepare__what_cannot_be_fetched_is_told_step_by_step(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        DataError, match=rf"(unpack|put) here: .*put the files into {tmp_path}/originals/{name}$"
    ) as caught:
        prepare_data_set(name, tmp_path, get=no_web)
    assert "\n" not in str(caught.value)


def community(folder: Path) -> Path:
    """KITTI in the community's layout."""
    for split, size in {"train800": 800, "val200": 200, "train800val200": 1000, "test": 711}.items():
        place = folder / "kitti/images" / split
        plant(place / "one.jpg")
        for number in range(size):
            (place / f"{number:06d}.jpg").hardlink_to(place / "one.jpg")
        lines = [f"images/{split}/{number:06d}.jpg {number % 4}\n" for number in range(size)]
        (folder / f"kitti/{split}.txt").write_text("".join(lines))
    return folder


@pytest.mark.slow
def test_prepare__a_community_copy_serves_the_task_and_is_labelled(tmp_path: Path) -> None:
    copy, task = community(tmp_path / "vtab-1k"), BY_NAME["kitti-dist"]
    assert is_present(task, tmp_path, copy)
    assert not is_present(BY_NAME["dtd"], tmp_path, copy)
    sizes = prepare_data_set("kitti-dist", tmp_path, source=copy, get=no_web)
    assert sizes == {"train800": 800, "val200": 200, "test": 711}
    train = open_split(task.train, dataset="kitti-dist", root=str(tmp_path))
    assert len(train) == 1000
    assert source_texts(train) == ("VTAB-1k, community copy (JPEG again, not the original bytes)",)
    found = check_task(task, tmp_path)
    assert not found.is_wrong
    assert found.verdict == f"a copy without the original names: {source_texts(train)[0]}"


def test_prepare__parquet_by_the_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    picture = plant(tmp_path / "one.jpg")
    rows = [{"image": {"bytes": picture, "path": None}, "label": number % 10} for number in range(20)]
    (tmp_path / "hf").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "hf/train-00000-of-00001.parquet")
    with pytest.raises(
        DataError, match="not eurosat in parquet: train has 20 images of 10 classes, should have 27,000 of 10"
    ):
        prepare_data_set("eurosat", tmp_path, source=tmp_path / "hf")
    prepare_data_set("eurosat", tmp_path, source=tmp_path / "hf", allow_partial=True)
    told = source_texts(open_split("train", path=str(tmp_path / "eurosat")))
    assert told == ("eurosat, Hugging Face parquet copy (partial: 20 of 27,000 images)",)
    with pytest.raises(
        DataError, match="not pets in parquet: train has 20 images of 10 classes, should have 3,680 of 37"
    ):
        prepare_data_set("pets", tmp_path, source=tmp_path / "hf", allow_partial=True)


def test_prepare_real__holds_the_file_against_its_digest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"real.json: its sha256 is .* should be d83e9bff374c631a"):
        prepare_real(tmp_path, lambda *_: None, web(b"[]"))
    assert not (tmp_path / "imagenet_real/real.json").exists()
