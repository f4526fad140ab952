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
_SPEC = importlib.util.spec_from_file_location("pages", ROOT / ".ci" / "pages.py")
assert _SPEC is not None and _SPEC.loader is not None
site = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(site)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def pages(entry: Any) -> list[str]:
    """Return the pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages(part)]


def test_navigation__has_every_page_once_in_the_order_of_the_list() -> None:
    listed = pages(CONFIG["nav"])
    outside = [name for name in listed if not (DOCS / name).exists()]
    assert sorted({*listed} - {*outside}) == sorted(
        path.name for path in DOCS.glob("*.md") if path.stem != "README"
    )
    assert len(listed) == len({*listed})
    assert [name for name in outside if not (ROOT / name).is_file()] == [site.HOME]
    table = re.findall(r"^\| \[.*?\]\((.*?)\)", (DOCS / "README.md").read_text(), re.M)
    assert [name for name in listed if name in table] == table


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as the site has them."""
    out = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "OUT", out)
        site.write()
    return out


def test_pages__no_shell_line_is_wider_than_a_block(written: Path) -> None:
    wide = [
        f"{path.name}: {line}"
        for path in written.rglob("*.md")
        for block in re.findall(r"(?ms)^```sh\n(.*?)^```", path.read_text())
        for line in block.splitlines()
        if len(line) > site.WIDEST and " --" in line[4:]
    ]
    assert wide == []
    given = "vitctl predict " + "x" * 70 + " --top 3  # classes\n"
    assert site.narrow(given) == f"# classes\nvitctl predict {'x' * 70} \\\n  --top 3\n"
    assert site.narrow("vitctl runs   # all\n") == "vitctl runs   # all\n"


def test_pages__home_is_the_first_screen_and_history_is_not_searched(written: Path) -> None:
    home = (written / site.HOME).read_text()
    assert home.startswith("# vitctl\n") and "pip install" in home and "](own-data.md)" in home
    hidden = [path for path in written.rglob("*.md") if path.read_text().startswith(site.UNSEARCHED)]
    benchmarks = [*(written / "benchmarks").rglob("*.md")]
    assert sorted(hidden) == sorted([written / "CHANGELOG.md", *benchmarks]) and len(benchmarks) > 10
    for path in written.rglob("*.md"):
        text = re.sub(r"(?ms)^```.*?^```|`[^`]*`", "", path.read_text())
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert ":" in target or (path.parent / target).exists(), f"{path.name}: {target}"


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs the extra [docs]")
def test_site__builds_without_a_warning(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ".ci/pages.py"], cwd=ROOT, check=True)
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
    assert docs[-2:] == ["python .ci/pages.py", "mkdocs build --strict"]
