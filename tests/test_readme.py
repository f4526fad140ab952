"""README.md and CONTRIBUTING.md promise only what is there: commands, their options, files and folders."""

import re
import tomllib

import pytest
import typer

from tests.conftest import CONTRIBUTING, README, ROOT, shell_lines
from vitctl.cli.app import app


def test_commands__the_table_has_every_command() -> None:
    table = README.split("## Commands")[1].split("\n## ")[0]
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert re.search(rf"`(vitctl )?{name}[ `]", table), name
        for child in getattr(command, "commands", {}) if name in ("data", "recipes") else ():
            assert re.search(rf"`(vitctl {name} )?{child}`", table), f"{name} {child}"


def test_architecture__every_package_is_there_and_every_path_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = re.findall(r"^vitctl/(\w+)/", page.split("```")[1], re.M)
    assert sorted(packages) == sorted(
        path.name for path in (ROOT / "vitctl").iterdir() if path.is_dir() and not path.name.startswith("_")
    )
    named = re.findall(r"`([a-z]+/[\w/]+(?:\.py|/))`", page)
    assert len(named) > 20
    assert [name for name in named if not ((ROOT / name).exists() or (ROOT / "vitctl" / name).exists())] == []


def test_where_to_add_things__names_what_exists() -> None:
    table = CONTRIBUTING.split("## Where things go")[1]
    paths = re.findall(r"`((?:vitctl|recipes)/[^`]*)`", table)
    assert len(paths) >= 8
    assert [path for path in paths if not (ROOT / path).exists()] == []


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
    assert len(linked) >= 4 and len(named) >= 15
    assert [path for path in linked if not (ROOT / path).exists()] == []
    missing = [
        name for name in named if not (ROOT / name).exists() and not any((ROOT / "vitctl").rglob(name))
    ]
    assert [name for name in missing if not any((ROOT / "tests").rglob(name))] == []
