"""The site that MkDocs makes of the pages, and the workflows that build and check everything."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.docs.conftest import DOCS

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def pages(entry: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]


def test_navigation__has_every_page_once() -> None:
    listed = pages(CONFIG["nav"])
    outside = [name for name in listed if not (DOCS / name).exists()]
    assert sorted({*listed} - {*outside}) == sorted(path.name for path in DOCS.glob("*.md"))
    assert len(listed) == len({*listed})
    assert [name for name in outside if not (ROOT / name).is_file()] == []


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra [docs]")
def test_site__builds_without_a_warning(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        tmp_path / "site",
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    assert "CHANGELOG.html" in (tmp_path / "site" / "index.html").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows__only_read_and_pin_their_actions(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"].values()
    assert not [job for job in jobs if "permissions" in job or "timeout-minutes" not in job]
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@v\d+", name) for name in used)
    assert "secrets." not in path.read_text()


def test_ci__runs_the_checks_on_every_python_from_the_oldest() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    checks = workflow["jobs"]["checks"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = checks["strategy"]["matrix"]["python"]
    promised = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert {*promised} <= {*tested}
    assert project["requires-python"] == f">={tested[0]}"
    assert ".ci/run" in [step.get("run") for step in checks["steps"]]
    docs = [step.get("run", "") for step in workflow["jobs"]["docs"]["steps"]]
    assert "mkdocs build --strict" in docs
