"""docs/bounds.md has the limits of the code, and each of them is checked somewhere."""

import re
from pathlib import Path

from vitctl.system import limits

ROOT = Path(__file__).resolve().parents[2]
LIMITS = {name: value for name, value in vars(limits).items() if name.isupper() and name[0] != "_"}
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def test_docs__have_the_limits_of_the_code() -> None:
    text = (ROOT / "docs" / "bounds.md").read_text()
    rows = re.findall(r"^\| `([A-Z_]+)` \| .+ \| ([\d,]+) (\S+) \|$", text, re.M)
    assert {name: int(number.replace(",", "")) * UNITS.get(unit, 1) for name, number, unit in rows} == LIMITS


def test_limits__each_is_checked() -> None:
    source = "".join(path.read_text() for path in (ROOT / "vitctl").rglob("*.py"))
    assert [name for name in LIMITS if not re.search(rf"\blimits\.{name}\b", source)] == []
