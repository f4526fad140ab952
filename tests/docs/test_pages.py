"""README.md and docs/: every link leads somewhere, every page can be found, pictures are small."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import torch

from tests.conftest import ROOT, shell_lines
from tests.docs.conftest import DOCS, PAGES, anchors
from tests.matrix import each
from vitctl.launch.cluster import Job
from vitctl.models import kernels
from vitctl.recipe.load import every_key, load_recipe
from vitctl.recipe.schema import JOBS
from vitctl.recipe.synonyms import SYNONYMS

OTHERS = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")


@each("page", [*PAGES, *OTHERS])
def test_links__lead_to_files_and_headings_that_exist(page: str) -> None:
    for link in LINK.findall((ROOT / page).read_text()):
        if page == "CHANGELOG.md" and link.startswith("https://"):
            continue
        assert not re.match(r"[a-z]+:", link), (
            f"{link}: an address; pages link to files alone, which a test can follow"
        )
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_file(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_readme__is_short_and_begins_with_a_picture_the_set_up_and_the_way_to_predictions() -> None:
    first, *_ = PAGES["README.md"].split("\n## ")
    assert "\n![" in first
    lines = shell_lines(first)
    assert [words[0] for words in lines] == ["python3", "python3", *["vitctl"] * 4]
    assert [words[1] for words in lines[2:]] == ["finetune", "predict", "export", "report"]
    assert len(PAGES["README.md"].splitlines()) <= 130


def test_readme__has_the_three_lines_of_the_paper() -> None:
    typed = {" ".join(words) for words in shell_lines(PAGES["README.md"])}
    three = ("pretrain --recipe jft_h14", "finetune --dataset pets --res 384", "fewshot --shots 5")
    assert {f"vitctl {line}" for line in three} <= typed


def test_index__lists_every_page_and_readme_leads_to_it() -> None:
    listed = LINK.findall(PAGES["docs/README.md"].partition("## Commands")[0])
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= {*listed}
    assert len(listed) == len({*listed})
    assert "(docs/README.md)" in PAGES["README.md"]


@each("page", [*PAGES, "CONTRIBUTING.md", "SECURITY.md"])
def test_pages__name_files_of_the_repository_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:vitctl|recipes|tests|benchmarks|docs|\.github)/[\w./-]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


@each("page", PAGES)
def test_pages__name_extras_that_can_be_installed(page: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"vitctl\[(\w+)\]", PAGES[page])) <= {*extras}


@each("page", PAGES)
def test_pages__have_one_title_and_short_lines(page: str) -> None:
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.S)
    assert len(re.findall(r"^# ", text, re.M)) == 1
    prose = [line for line in text.splitlines() if not line.startswith(("|", "!["))]
    assert [line for line in prose if len(line) > 150] == []


def test_pictures__are_shown_on_a_page_and_small() -> None:
    shown = {
        ((ROOT / page).parent / link).resolve()
        for page, text in PAGES.items()
        for link in re.findall(r"!\[[^\]]+\]\(([^)\s]+)\)", text)
    }
    pictures = {path.resolve() for path in (DOCS / "images").iterdir()}
    assert pictures == shown
    assert sum(path.stat().st_size for path in pictures) < 900_000


def test_speed__says_where_the_rule_takes_plain_products() -> None:
    said = " ".join(PAGES["docs/speed.md"].split())
    assert [*kernels._PLAIN_UP_TO] == [("cpu", torch.bfloat16)]
    assert f"| CPU, bf16 | `math` up to {kernels._PLAIN_UP_TO['cpu', torch.bfloat16]:,} tokens" in said


def test_clusters__lists_the_keys_of_a_slurm_job() -> None:
    _, section = PAGES["docs/clusters.md"].split("\n## Slurm\n")
    rows = [line for line in section.split("\n## ")[0].splitlines() if line.startswith("| `")]
    keys = [key for row in rows for key in re.findall("`([a-z]+)`", row.split("|")[1])]
    assert sorted(keys) == sorted(one.name for one in fields(Job))


def test_moving__its_recipes_load_and_its_keys_exist(tmp_path: Path) -> None:
    text = PAGES["docs/moving.md"]
    blocks = re.findall(r"```toml\n(.*?)```", text, re.S)
    for block in blocks:
        file = tmp_path / "r.toml"
        file.write_text(block)
        assert load_recipe(file).recipe.optimizer.decay_on == "matrices"
    assert len(blocks) == 3
    keys = {key for schema in JOBS.values() for key in every_key(schema)}
    tables = {key.partition(".")[0] for key in keys}
    named = [key for key in re.findall(r"`(\w+\.\w+)", text) if key.partition(".")[0] in tables]
    assert named and [key for key in named if key not in keys] == []
    assert f"{round(len(SYNONYMS), -1)} words" in text
