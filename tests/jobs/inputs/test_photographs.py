"""--data PHOTOS: shards are made once, beside the runs, as `vitctl data shards` makes them."""

import json
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Vitctl
from tests.data.conftest import damage
from tests.docs.conftest import photo
from vitctl.data.datasets.catalog import is_photographs, original_splits
from vitctl.data.datasets.converted import RECORD
from vitctl.data.inspect.check_shards import unused_files
from vitctl.data.source.splits import select

QUICK = ("--steps", 2, "--batch-size", 4, "--set", "machine.device=cpu", "--set", "machine.workers=0")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of five photographs."""
    for name in ("cat", "dog"):
        (tmp_path / "PHOTOS" / name).mkdir(parents=True)
        for number in range(5):
            (tmp_path / "PHOTOS" / name / f"{number}.jpg").write_bytes(photo(name, number))
    return tmp_path / "PHOTOS"


def made(home: Path) -> Path:
    (folder,) = (home / "runs" / "shards").iterdir()
    return folder


def state(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != RECORD}


def provenance(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "result.json").read_text())["provenance"])


@pytest.mark.usefixtures("photos")
def test_finetune__makes_the_shards_once_and_scores_the_part_that_was_held_out(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path
) -> None:
    line = ("finetune", "--from", pretrained, "--data", "PHOTOS", *QUICK, "--out", "runs/a")
    said = vitctl(*line)
    assert (said.code, said.err) == (0, "")
    folder = made(tmp_path)
    first, second, *_ = said.out.splitlines()
    assert re.fullmatch(f"finetune: {re.escape(str(pretrained))}, PHOTOS, CPU, (bf16|float32)", first)
    assert second == f"PHOTOS: writing its photos as shards to {folder.relative_to(tmp_path)}"
    assert unused_files(folder) == ([], [])
    by_hand = vitctl("data", "shards", "PHOTOS", "by-hand")
    assert by_hand.code == 0
    shard = "train/shard-000000.tar"
    assert (folder / shard).read_bytes() == (tmp_path / "by-hand" / shard).read_bytes()

    times = state(folder)
    said = vitctl("evaluate", "--from", "runs/a", "--data", "PHOTOS", "--out", "runs/e")
    assert said.code == 0 and "unchanged; using the shards" in said.out
    assert state(folder) == times
    plan = vitctl("evaluate", "--from", "runs/a", "--data", "PHOTOS", "--dry-run", "--all")
    assert (
        plan.code == 0
        and "unchanged; using the shards" in plan.out
        and f'"{folder.relative_to(tmp_path)}"' in plan.out
    )
    trained, scored = provenance(tmp_path / "runs/a"), provenance(tmp_path / "runs/e")
    assert trained["data_sha256"] == scored["data_sha256"]
    assert (trained["num_train"], trained["num_images"]) == (8, 2)

    assert vitctl(*line).code == 0  # the same command again
    resumed = vitctl("resume", "runs/a")  # its data are the shards; the line names what they were made of
    assert (resumed.code, resumed.out.splitlines()[0]) == (0, first)
    assert state(folder) == times

    assert vitctl("verify", "runs/a", "--data", "PHOTOS").code == 0
    shutil.copytree("PHOTOS", "FEWER", ignore=shutil.ignore_patterns("*0.*"))
    assert "FEWER: not what the run read; it read shards" in vitctl("verify", "runs/a", "--data", "FEWER").err

    # Shards of ./runs, and those beside the run of the weights, are used for a run of another place too.
    assert "unchanged; using" in vitctl("evaluate", "--from", "runs/a", "--data", "PHOTOS", "--out", "e3").out
    Path("runs").rename("mine")
    said = vitctl("evaluate", "--from", "mine/a", "--data", "PHOTOS", "--out", "e4")
    assert said.code == 0 and "unchanged; using the shards of its photos in mine/shards/PHOTOS-" in said.out
    Path("mine").rename("runs")
    assert not Path("shards").exists()

    damage(next(folder.glob("train/*.tar")))
    again = ("evaluate", "--from", "runs/a", "--data", "PHOTOS", "--out", "runs/e2")
    assert f"delete {folder}: the same command makes it again from your images" in vitctl(*again).err
    shutil.rmtree(folder)
    assert vitctl(*again).code == 0


@pytest.mark.slow
def test_finetune__changed_photographs_get_new_shards_and_are_not_scored_by_the_split_of_before(
    vitctl: Vitctl, photos: Path, pretrained: Path, tmp_path: Path
) -> None:
    line = ("finetune", "--from", pretrained, "--data", "PHOTOS", *QUICK)
    assert vitctl(*line, "--out", "runs/a").code == 0
    before = made(tmp_path)
    (photos / "dog" / "5.jpg").write_bytes(photo("dog", 5))
    assert vitctl(*line, "--out", "runs/b").code == 0
    assert before.is_dir() and len(list((tmp_path / "runs/shards").iterdir())) == 2
    said = vitctl("evaluate", "--from", "runs/a", "--data", "PHOTOS")
    assert (
        said.code == 2
        and "may have been trained on some of these" in said.err
        and "--split train" in said.err
    )
    assert vitctl("evaluate", "--from", "runs/b", "--data", "PHOTOS").code == 0
    assert vitctl("resume", "runs/a").code == 0
    assert vitctl(*line, "--out", "runs/a").code == 2


@pytest.mark.slow
def test_finetune__train_and_test_folders(
    vitctl: Vitctl, photos: Path, pretrained: Path, tmp_path: Path
) -> None:
    (tmp_path / "BOTH").mkdir()
    photos.rename(tmp_path / "BOTH" / "train")
    for name in ("cat", "dog"):
        (tmp_path / "BOTH/test" / name).mkdir(parents=True)
        (tmp_path / "BOTH/test" / name / "9.jpg").write_bytes(photo(name, 9))
    said = vitctl("finetune", "--from", pretrained, "--data", "BOTH", *QUICK, "--out", "runs/a")
    assert said.code == 0
    used = provenance(tmp_path / "runs/a")
    assert (used["train_split"], used["split"], used["num_train"], used["num_images"]) == (
        "train",
        "test",
        10,
        2,
    )


@pytest.mark.usefixtures("photos")
def test_finetune__dry_run_writes_nothing(vitctl: Vitctl, pretrained: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    said = vitctl("finetune", "--from", pretrained, "--data", "PHOTOS", "--dry-run")
    assert said.code == 0
    assert "their shards would be written to runs/shards/PHOTOS-" in said.out
    assert "8 images, 2 classes" in said.out
    assert sorted(tmp_path.rglob("*")) == before
    by_class = ("--group-by", "^(...)/[0-3]")
    said = vitctl("finetune", "--from", pretrained, "--data", "PHOTOS", "--dry-run", *by_class)
    sides = ("2 groups of up to 4 images in train[:80%", "2 groups of up to 1 image in train[80%:")
    assert said.code == 0 and all(text in said.out for text in sides)
    said = vitctl("evaluate", "--from", pretrained, "--data", "PHOTOS", "--split", "val", "--dry-run")
    assert (said.code, said.err) == (2, "vitctl: PHOTOS: has no split 'val'; found: train\n")


@pytest.mark.slow
@pytest.mark.usefixtures("photos")
def test_finetune__shards_that_were_not_finished_are_made_again(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("finetune", "--from", pretrained, "--data", "PHOTOS", *QUICK, "--out", "runs/a")

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vitctl.data.writer.shard_writer.write_index", killed)
        assert vitctl(*line).code != 0
    assert not (made(tmp_path) / RECORD).exists() and not (made(tmp_path) / "train").exists()
    said = vitctl(*line)
    assert said.code == 0 and "writing its photos as shards" in said.out
    (made(tmp_path) / RECORD).unlink()  # killed after the last split
    assert vitctl(*line).code == 0
    assert (made(tmp_path) / RECORD).exists()


@pytest.mark.usefixtures("photos")
def test_finetune__several_machines_do_not_make_the_same_shards(vitctl: Vitctl, pretrained: Path) -> None:
    nodes = ("--nodes", "2@127.0.0.1:29400", "--out", "runs/a")
    said = vitctl("finetune", "--from", pretrained, "--data", "PHOTOS", *QUICK, *nodes)
    assert said.code == 2 and "`vitctl data shards PHOTOS FOLDER`" in said.err


def test_planned_splits__parts_of_two_folders_in_one_process(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "OTHER" / "cat").mkdir(parents=True)
    for number in range(2):
        (tmp_path / "OTHER" / "cat" / f"{number}.jpg").write_bytes(photo("cat", number))
    sizes = [
        len(select("train[:50%]", original_splits(str(folder)))) for folder in (photos, tmp_path / "OTHER")
    ]
    assert sizes == [5, 1]
    assert len(select("train[:50% of each class]", original_splits(str(tmp_path / "OTHER")))) == 1


def test_is_photographs__class_folders_and_no_shards(photos: Path, tmp_path: Path) -> None:
    assert is_photographs(str(photos))
    assert not is_photographs("") and not is_photographs(str(tmp_path / "none"))
    assert not is_photographs(str(photos / "cat"))
    (photos / "cat" / "a.tar").write_bytes(b"")
    assert not is_photographs(str(photos))


@pytest.mark.slow
def test_finetune__stops_where_data_shards_does_and_what_it_says_to_type_is_enough(
    vitctl: Vitctl, photos: Path, pretrained: Path, tmp_path: Path
) -> None:
    for folder in ("part1", "part2"):
        shutil.copytree(photos, tmp_path / "parts" / folder)
    shutil.copytree(photos / "cat", tmp_path / "one" / "cat")
    shutil.copytree(photos, tmp_path / "top" / "photos")
    for data in ("parts/", "one", "top"):
        line = ("finetune", "--from", pretrained, "--data", data, *QUICK, "--out", f"runs/{data[:3]}")
        plan, said = vitctl(*line, "--dry-run"), vitctl(*line)
        by_hand = vitctl("data", "shards", data, f"{data.rstrip('/')}-shards")
        assert (plan.code, said.code, by_hand.code) == (2, 2, 2)
        doubts = {text for text in by_hand.out.splitlines() if "--keep-class" in text}
        assert len(doubts) == 1 and all(doubts < set(one.out.splitlines()) for one in (plan, said))
        assert plan.err == said.err
        command, _, then = said.err.strip().partition("or type: ")[2].partition("; then train on them with ")
        if data != "parts/":  # one class can be stored, and scored, but nothing is learned from it
            assert not command and "to learn anything takes two classes" in said.err
            assert vitctl(*shlex.split(by_hand.err.partition("or type: ")[2])[1:]).code == 0
            again = vitctl(*line[:3], "--data", f"{data}-shards", *QUICK)
            assert again.code == 2 and "is its only class, so that nothing can be learned" in again.err
            continue
        assert command == by_hand.err.strip().partition("or type: ")[2]
        assert vitctl(*shlex.split(command)[1:]).code == 0
        again = vitctl(*line[:3], *shlex.split(then), *QUICK, "--out", f"runs/{data[:3]}")
        assert again.code == 0


@pytest.mark.slow
def test_finetune__takes_tables_and_tars_and_says_what_is_none(
    vitctl: Vitctl, photos: Path, pretrained: Path, tmp_path: Path
) -> None:
    rows = [f"PHOTOS/{name}/{n}.jpg,{name}" for name in ("cat", "dog") for n in range(5)]
    (tmp_path / "my list.csv").write_text("\n".join(["path,label", *rows]))
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(photos, ".")
    (tmp_path / "photos.zip").write_bytes(b"PK")
    for data in ("my list.csv", "photos.tar"):
        assert vitctl("finetune", "--from", pretrained, "--data", data, "--dry-run").code == 0
    for data, advice in (("photos.zip", "cannot be unpacked"), ("PHOTOS/cat", "class folders")):
        said = vitctl("finetune", "--from", pretrained, "--data", data, "--dry-run")
        assert said.code == 2 and advice in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.usefixtures("photos")
def test_device__that_is_not_there_is_refused_before_photos_are_converted(
    vitctl: Vitctl, pretrained: Path, tmp_path: Path
) -> None:
    """Also by `sweep`, which converts them for its first run."""
    options = ("--from", pretrained, "--data", "PHOTOS", "--set", "machine.device=cuda", "--out", "runs/a")
    for line in (("finetune",), ("sweep", "finetune", "--lr", "0.1,0.2")):
        said = vitctl(*line, *options)
        assert (said.code, said.err.count("\n")) == (2, 1) and "PyTorch finds no GPU" in said.err
    assert not (tmp_path / "runs").exists()
