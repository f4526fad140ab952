"""Which test files import a file: for `pytest --changed`, and for benchmarks/planted_faults.py."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

EVERYWHERE = {
    Path("tests/conftest.py"),
    Path("tests/trained.py"),
}  # all tests have them, and all that they need


def _imported(root: Path, file: Path) -> Iterator[Path]:
    """Yield the files of the checkout that a test imports anywhere, or any other file at its start."""
    tree = ast.parse((root / file).read_text())
    for node in ast.walk(tree) if file.parts[0] == "tests" else tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for path in (Path(*name.split(".")) for name in names):
            ways = path.with_suffix(".py"), path / "__init__.py"
            yield from (one for one in ways if (root / one).is_file())


@cache
def import_map(root: Path) -> dict[Path, frozenset[Path]]:
    """File -> the files that it imports, of the package, the tests and the benchmarks."""
    paths = [path for top in ("vitctl", "tests", "benchmarks") for path in sorted((root / top).rglob("*.py"))]
    return {file: frozenset(_imported(root, file)) for file in (path.relative_to(root) for path in paths)}


def tests_of(root: Path, changed: set[Path]) -> set[Path]:
    """The test files among some files, and those that import one, directly or through others and fixtures."""
    known, found = import_map(root), set[Path]()
    for test in (file for file in known if file.name.startswith("test_")):
        seen, left = set[Path](), {test, *(folder / "conftest.py" for folder in test.parents)}
        while left and not changed & left:
            seen |= left
            left = {one for file in left - EVERYWHERE for one in known.get(file, ())} - seen
        found |= {test} if left else set()
    return found


@cache
def changed_tests(root: Path, revision: str) -> set[Path]:
    """The test files of what differs from a revision of git, new files too."""
    diff = ("diff", "--name-only", "--relative", revision)
    lines = [
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout
        for words in (diff, ("ls-files", "--others", "--exclude-standard"))
    ]
    return tests_of(root, {Path(name) for name in "".join(lines).splitlines()})
