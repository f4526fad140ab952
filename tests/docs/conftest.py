"""README and the pages under docs/, and a folder in which the names that their commands use exist."""

import io
import re
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

from tests.cli.conftest import vitctl  # noqa: F401
from tests.conftest import ROOT, TINY, shell_lines
from tests.trained import CPU, do
from vitctl.cli.app import app
from vitctl.launch.prepare_run import prepare_run
from vitctl.recipe.load import Override, load_recipe

DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
}


def commands(page: str) -> list[list[str]]:
    """Words after `vitctl` of every command line of a page."""
    return [words[1:] for words in shell_lines(PAGES[page]) if words[0] == "vitctl"]


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that words name, and its arguments.

    Raises:
        KeyError: there is no such command.
    """
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def anchors(text: str) -> set[str]:
    """What `#...` may name on a page, as GitHub makes it of the headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def photo(name: str, number: int, size: int = 24) -> bytes:
    """A JPEG: each class has a colour of its own, each image its own noise."""
    pixels = np.random.default_rng([*name.encode(), number]).integers(0, 90, (size, size, 3))
    pixels[..., sum(name.encode()) % 3] += 120
    out = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(out, "JPEG", quality=90)
    return out.getvalue()


def write_photos(folder: Path, names: tuple[str, ...], count: int) -> None:
    """A folder for each class, with `count` photographs in it."""
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"IMG_{number:04d}.jpg").write_bytes(photo(name, number))


def write_foreign_shard(folder: Path) -> None:
    """A WebDataset shard as another program writes it: samples of `jpg` and `cls`, no index."""
    folder.mkdir()
    with tarfile.open(folder / "train-000.tar", "w") as shard:
        for number in range(6):
            members = {"jpg": photo("cat" if number % 2 else "dog", number), "cls": str(number % 2).encode()}
            for extension, content in members.items():
                member = tarfile.TarInfo(f"{number:04d}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="session")
def furnished(pretrained: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages call PHOTOS, NEW_PHOTOS, RUN, START, data/mine, runs/NAME, ..."""
    home = tmp_path_factory.mktemp("furnished")
    write_photos(home / "PHOTOS", ("cat", "dog", "owl"), 16)
    write_photos(home / "NEW_PHOTOS", ("new",), 3)
    for kind in ("tar", "zip"):
        shutil.make_archive(str(home / "photos"), kind, home / "PHOTOS")
    write_photos(home / "labelled", ("cat", "dog"), 8)
    rows = [
        f"labelled/{name}/IMG_{number:04d}.jpg,{name},{number // 2}"
        for name in ("cat", "dog")
        for number in range(8)
    ]
    for name, header in (("labels.csv", "path,label,group"), ("list.csv", "FILE,CLASS,group")):
        (home / name).write_text("\n".join([header, *rows]) + "\n")
    shutil.copytree(tiny_data, home / "data" / "mine")
    write_foreign_shard(home / "shards")
    (home / "classes.txt").write_text("cat\ndog\n")
    for name in ("RUN", "START", "quickstart/pretrain", "runs/NAME"):
        shutil.copytree(pretrained, home / name)
    for name in ("a", "b"):
        do(
            "evaluate",
            home / "runs" / name,
            **CPU,
            **{"data.path": str(tiny_data), "weights.source": str(pretrained)},
        )
    (home / "mine.toml").write_text('extends = "jft_b16"\n\n[optimizer]\nlr = 6e-4\n')
    return home


@pytest.fixture
def home(furnished: Path, tmp_path: Path) -> Path:
    """A copy of the folder; with the fixture `vitctl`, commands run in it."""
    shutil.copytree(furnished, tmp_path, dirs_exist_ok=True)
    return tmp_path


def prepared(folder: Path, data: Path, **values: Any) -> Path:
    """A run of the tiny recipe that has not begun."""
    given = {"data.path": str(data), **values}
    prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in given.items()]), folder)
    return folder
