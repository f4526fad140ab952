"""README.md and CONTRIBUTING.md promise only what is there: commands, their options, files and folders."""

import re
import tomllib

import pytest
import typer

from tests.conftest import CONTRIBUTING, README, ROOT, shell_lines
from vitctl.cli.app import app


def test_commands__the_table_has_every_command() -> None:
    table = (ROOT / "docs" / "README.md").read_text().split("## Commands")[1].split("\n## ")[0]
    assert "(docs/README.md#commands)" in README
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert re.search(rf"`(vitctl )?{name}[ `]", table), name
        for child in getattr(command, "commands", {}) if name in ("data", "recipes") else ():
            assert re.search(rf"`(vitctl {name} )?{child}`", table), f"{name} {child}"


def test_compared__the_page_has_a_source_for_every_tool_and_row() -> None:
    """The table says when it was read; the page of sources names the same tools, and the version of each."""
    section = README.split("## Compared with other tools")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "|" in line]
    assert len({len(row) for row in rows}) == 1
    page = (ROOT / "docs" / "compared.md").read_text()
    (date,) = re.findall(r"As of (\d{4}-\d\d-\d\d)", section)
    assert f"read on {date}" in page
    for tool in ("timm", "lightly-train", "Hugging Face", "ultralytics", "big_vision"):
        assert re.search(rf"^\| {tool}.* \| .*(version|commit|transformers) [\w.]*\d", page, re.M), tool
        assert len(re.findall(rf"\b{tool}\b", page)) >= 5, tool


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_architecture__every_package_is_there_and_every_path_exists() -> None:
    packages = re.findall(r"^vitctl/(\w+)/", ARCHITECTURE.split("```")[1], re.M)
    assert sorted(packages) == sorted(
        path.name for path in (ROOT / "vitctl").iterdir() if path.is_dir() and not path.name.startswith("_")
    )
    named = re.findall(r"`([a-z]+/[\w/]*(?:\.py|/)?)`", ARCHITECTURE)
    assert len(named) > 40
    assert [name for name in named if not ((ROOT / name).exists() or (ROOT / "vitctl" / name).exists())] == []


def test_architecture__the_tables_to_edit_are_where_it_says() -> None:
    table = ARCHITECTURE.split("## Where additions go")[1]
    places = re.findall(r"`(\w+)` (?:of|in) `(vitctl/[\w/]+\.py)`", table)
    assert len(places) >= 8
    assert [
        place for place in places if not re.search(rf"\b{place[0]}\b", (ROOT / place[1]).read_text())
    ] == []


# What CONTRIBUTING.md may tell to type, besides pytest, whose options are held against pytest itself.
SET_UP = {
    "python3 -m venv .venv",
    "source .venv/bin/activate",
    "pip install -e .[test]",
    "pip install pre-commit",
    "pre-commit install",
}
MAY_FOLLOW = {"git diff tests/golden"}


def checks_of_ci() -> list[str]:
    """The command lines of .ci/run after the installation."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    installs = next(number for number, line in enumerate(lines) if line.startswith("pip install"))
    assert lines[installs].endswith("-e '.[test]'")
    return lines[installs + 1 :]


def test_contributing__its_checks_are_those_of_ci() -> None:
    told = [" ".join(words) for words in shell_lines(CONTRIBUTING)]
    checks = checks_of_ci()
    assert checks == ["ruff check .", "ruff format --check .", "mypy", "pytest"]
    start = told.index(checks[0])
    assert told[start : start + len(checks)] == checks
    others = {line for line in told if not line.startswith("pytest")} - {*checks}
    assert others == SET_UP | MAY_FOLLOW


def test_contributing__its_pytest_lines_are_understood(pytestconfig: pytest.Config) -> None:
    lines = [words[1:] for words in shell_lines(CONTRIBUTING) if words[0] == "pytest"]
    assert len(lines) >= 5
    told: set[str] = set()
    for words in lines:
        found, unknown = pytestconfig._parser.parse_known_and_unknown_args(words)
        assert unknown == [], words
        assert [name for name in found.file_or_dir if not (ROOT / name).exists()] == []
        told |= {found.markexpr} - {""} if "-m" in words else set()
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    assert told == {line.partition(":")[0] for line in own}
    assert any("--update-golden" in words for words in lines)


def test_contributing__the_files_that_it_names_exist() -> None:
    linked = [path.partition("#")[0] for path in re.findall(r"\]\(([^)]*)\)", CONTRIBUTING)]
    named = re.findall(
        r"`((?:vitctl|recipes|tests|docs|benchmarks)/[^`\s]*|\.[\w-]+\.yaml|\w+\.py)`", CONTRIBUTING
    )
    assert len(linked) >= 4 and len(named) >= 8
    assert [path for path in linked if not (ROOT / path).exists()] == []
    missing = [
        name for name in named if not (ROOT / name).exists() and not any((ROOT / "vitctl").rglob(name))
    ]
    assert [name for name in missing if not any((ROOT / "tests").rglob(name))] == []
