"""The table of bounds: in the docs as in the code, and set by the environment."""

import re
from pathlib import Path

import pytest

from vitctl.errors import LaunchError
from vitctl.system.files import BOUNDS, IMAGE_FILE, PIXELS, check_limits, table

ROOT = Path(__file__).resolve().parents[2]


def test_docs__have_the_table_of_the_code() -> None:
    assert table() in (ROOT / "docs" / "bounds.md").read_text()


def test_bounds__each_is_used() -> None:
    source = "".join(path.read_text() for path in (ROOT / "vitctl").rglob("*.py"))
    constants = re.findall(r"^([A-Z_]+) = _bound\(", source, re.M)
    assert len(constants) == len(BOUNDS)
    assert [name for name in constants if f"{name}.limit" not in source] == []


def test_bounds__are_set_in_the_unit_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (IMAGE_FILE.limit, PIXELS.limit) == (64 * 2**20, 89_478_485)
    monkeypatch.setenv("VITCTL_MAX_IMAGE_FILE", "3")
    assert IMAGE_FILE.limit == 3 * 2**20


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "9" * 30, "\u0663"])
def test_bounds__that_are_not_whole_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("VITCTL_MAX_IMAGE_FILE", text)
    with pytest.raises(LaunchError, match=r"VITCTL_MAX_IMAGE_FILE=.*whole number above 0, in MiB"):
        check_limits()
