"""The table of journeys in docs/moving.md: each command of ours is run, and counted."""

import io
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.docs.conftest import PAGES, photo, write_photos
from tests.matrix import few

SHORT = "--steps 2 --batch-size 4"
NAMES = ("cat", "dog")


def class_folders(here: Path) -> None:
    write_photos(here / "PHOTOS", NAMES, 8)  # a sweep leaves some of them out


def table(header: str, row: str, name: str, folder: str = "") -> Callable[[Path], None]:
    """A table beside images: `row` has the name of the class and the number of the image."""

    def make(here: Path) -> None:
        (here / folder / "images").mkdir(parents=True)
        rows = [row.format(name, number) for name in NAMES for number in range(5)]
        (here / folder / name).write_text("\n".join([header, *rows]) + "\n")
        for one in NAMES:
            for number in range(5):
                (here / folder / "images" / f"{one}{number}.jpg").write_bytes(photo(one, number))

    return make


def packed(kind: str) -> Callable[[Path], None]:
    def make(here: Path) -> None:
        class_folders(here)
        shutil.make_archive(str(here / "photos"), kind, here / "PHOTOS")
        shutil.rmtree(here / "PHOTOS")

    return make


def img2dataset(here: Path) -> None:
    """A tar of samples with an image, a caption and JSON, as img2dataset writes it; `cls` has the label."""
    (here / "wds").mkdir()
    with tarfile.open(here / "wds" / "00000.tar", "w") as tar:
        for number in range(10):
            parts = {"jpg": photo(NAMES[number % 2], number), "cls": str(number % 2).encode(), "json": b"{}"}
            for kind, content in {**parts, "txt": b"an animal"}.items():
                member = tarfile.TarInfo(f"{number:09d}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def moved(here: Path) -> None:
    class_folders(here)
    (here / "elsewhere").mkdir()
    shutil.move(here / "RUN", here / "elsewhere" / "RUN")


JOURNEYS: dict[str, Callable[[Path], None]] = {
    "class folders": class_folders,
    "CSV": table("path,label", "images/{0}{1}.jpg,{0}", "labels.csv"),
    "Kaggle's table": table("id,breed", "{0}{1},{0}", "labels.csv", "kaggle"),
    "Hugging Face's imagefolder": table("file_name,label", "images/{0}{1}.jpg,{0}", "metadata.csv", "photos"),
    "zip": packed("zip"),
    "tar": packed("tar"),
    "WebDataset of img2dataset": img2dataset,
    "a sweep": class_folders,
    "a moved run": moved,
}


def rows() -> dict[str, list[str]]:
    """The rows of the table: journey -> cells behind it."""
    _, section = PAGES["docs/moving.md"].split("\n## Journeys\n")
    lines = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {first: rest for first, *rest in cells}


@pytest.mark.parametrize("name", few([*JOURNEYS], "Kaggle's table"))
def test_journey__ours_is_run(name: str, tmp_path: Path, pretrained: Path, vitctl: Vitctl) -> None:
    shutil.copytree(pretrained, tmp_path / "RUN")
    JOURNEYS[name](tmp_path)
    for line in re.findall("`vitctl (.*?)`", rows()[name][0]):
        said = vitctl(*shlex.split(line), *(shlex.split(SHORT) if line.startswith("finetune") else []))
        assert said.code == 0, f"{line}\n{said.err}"


def test_journeys__are_those_of_the_page() -> None:
    assert {*JOURNEYS} <= {*rows()}
