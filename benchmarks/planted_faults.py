"""Plant faults in the package, one at a time, and count how many the test suite finds.

    python benchmarks/planted_faults.py draw --seed 0 --count 150 > faults.json
    python benchmarks/planted_faults.py run faults.json --out found.jsonl

A fault is one small change of one expression: a comparison or an operator swapped, a constant off by one, a
condition negated, a statement dropped. `draw` takes them at random from the packages that decide numbers and
keep runs. `run` copies the checkout, plants a fault in the copy and runs the test files that import the
module, those named after it first, until one fails.

found: a test failed. missed: none did. slow: no answer within the limits below. unclear: the test that failed
also fails without the fault. gone: a fault drawn from another version, and its line no longer exists.

planted_faults.json holds the 150 faults drawn with seed 0 from the commit dc696db, before the package was
made smaller, and what was answered there and after it, as far as it was run.
results/planted_faults.json holds 18 of a later draw, with the answers of two commits, and 52 of a third
(seed 8), with that of one: 44 found, 7 missed, 1 slow.
"""

import argparse
import ast
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - loaded once, for all forked processes
import pytest
import torch  # noqa: F401
import torchvision  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.import_map import import_map

PACKAGES = ("engine", "data", "models", "recipe", "launch")
CPU_SECONDS = 60
WALL_SECONDS = 120
_COMPARE = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is not": "is",
    "is": "is not",
}
_COMPARE |= {"not in": "in", "in": "not in"}
_BINARY: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
}


def changes(node: ast.AST, source: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield (node, text that replaces it) for each fault that fits a node."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = text(node.left), text(node.comparators[0])
        between = text(node)[len(left) : len(text(node)) - len(right)].strip(" ()\n")
        if between in _COMPARE:
            yield node, f"({left} {_COMPARE[between]} {right})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        yield node, f"(({text(node.left)}) {_BINARY[type(node.op)][1]} ({text(node.right)}))"
    elif isinstance(node, ast.BoolOp):
        word = " or " if isinstance(node.op, ast.And) else " and "
        yield node, f"({word.join(f'({text(value)})' for value in node.values)})"
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield node, repr(node.value + 1)
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield node, repr(not node.value)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, f"(not ({text(node.test)}))"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "pass"


@cache
def possible(root: Path) -> tuple[dict[str, Any], ...]:
    """Return every fault that can be planted below `root`."""
    return tuple(_possible(root))


def _possible(root: Path) -> Iterator[dict[str, Any]]:
    """Yield every fault that can be planted below `root`."""
    for path in sorted(p for name in PACKAGES for p in (root / "vitctl" / name).rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)):
            for node in (n for statement in function.body for n in ast.walk(statement)):
                for changed, text in changes(node, source):
                    where = ast.get_source_segment(source, changed) or ""
                    lines = source.splitlines()[changed.lineno - 1 : changed.end_lineno]
                    yield {
                        "file": str(path.relative_to(root)),
                        "function": function.name,
                        "line": "\n".join(line.strip() for line in lines),
                        "column": changed.col_offset - (len(lines[0]) - len(lines[0].lstrip())),
                        "before": where,
                        "after": text,
                    }


def draw(root: Path, seed: int, count: int) -> list[dict[str, Any]]:
    """Draw `count` faults, each from another statement, evenly over the packages."""
    rng = random.Random(seed)
    faults = [
        fault for fault in possible(root) if "raise" not in fault["line"] and "Error(" not in fault["line"]
    ]
    rng.shuffle(faults)
    taken: dict[tuple[str, str], dict[str, Any]] = {}
    for package in PACKAGES:
        of_package = [f for f in faults if f["file"].startswith(f"vitctl/{package}/")]
        share = {(f["file"], f["line"]): f for f in of_package}
        taken |= dict(list(share.items())[: count // len(PACKAGES)])
    return list(taken.values())


def planted(root: Path, fault: dict[str, Any]) -> tuple[Path, str] | None:
    """Return the file and its text with the fault, or None if its line is gone."""
    matching = [
        f
        for f in possible(root)
        if f["before"] == fault["before"]
        and f["line"] == fault["line"]
        and f["column"] == fault["column"]
        and f["after"] == fault["after"]
    ]
    matching.sort(
        key=lambda f: (f["function"] != fault["function"], Path(f["file"]).name != Path(fault["file"]).name)
    )
    if not matching:
        return None
    best = matching[0]
    path = root / best["file"]
    lines = path.read_text().splitlines(keepends=True)
    wanted = best["line"].split("\n")
    for start in range(len(lines)):
        if [line.strip() for line in lines[start : start + len(wanted)]] == wanted:
            block = "".join(lines[start : start + len(wanted)])
            indent = len(lines[start]) - len(lines[start].lstrip())
            at = indent + best["column"]
            if block[at:].startswith(best["before"]):
                changed = block[:at] + best["after"] + block[at + len(best["before"]) :]
                text = "".join([*lines[:start], changed, *lines[start + len(wanted) :]])
                ast.parse(text)
                return path, text
    return None


def first_tests(root: Path, module: Path) -> list[str]:
    """Return the test files that import a module, those named after it first, then those of its folder."""
    imported = {path: names for path, names in import_map(root).items() if path.name.startswith("test_")}
    direct = [path for path, names in imported.items() if module in names]
    mirror = [path for path in imported if path.parent == Path("tests", module.parent.relative_to("vitctl"))]
    ends = [path for path in imported if path.name in ("test_lanes.py", "test_golden.py", "test_resume.py")]
    first = [path for path in mirror if module.stem in path.stem]
    return [str(path) for path in dict.fromkeys([*first, *direct, *mirror, *ends])]


def run(root: Path, faults: list[dict[str, Any]], out: Path, scratch: Path) -> None:
    """Plant each fault that `out` does not list yet, and append what the tests say of it."""
    copy = scratch / "checkout"
    if not copy.exists():
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*cache"))
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {line["number"] for line in lines}
    fail_anyway: list[str] = []  # in this environment: a test must pass without the fault
    share = max(1, len(faults) // len(PACKAGES))
    # One of each package after the other: a run that is cut short is still a fair sample.
    for number in sorted(range(len(faults)), key=lambda number: (number % share, number)):
        if number in done:
            continue
        fault = faults[number]
        change, started, result, test = planted(copy, fault), time.monotonic(), "gone", ""
        if change:
            path, text = change
            original = path.read_text()
            tests = first_tests(copy, path.relative_to(copy))
            for _ in range(3):
                path.write_text(text)
                try:
                    result, test = tried(copy, tests, scratch / str(number), fail_anyway)
                finally:
                    path.write_text(original)
                if result != "found" or tried(copy, [test], scratch / f"{number}_without")[0] == "missed":
                    break
                fail_anyway.append(test)
                result = "unclear"
        record = {"number": number, "result": result, "test": test, "seconds": time.monotonic() - started}
        with out.open("a") as file:
            file.write(json.dumps(record | fault) + "\n")


def tried(copy: Path, tests: list[str], scratch: Path, without: Iterable[str] = ()) -> tuple[str, str]:
    """Run test files, `without` some tests, in a forked process until one fails.

    Returns (found, missed or slow; the test that failed).
    """
    scratch.mkdir(parents=True)
    output = scratch / "output.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(copy)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.path.insert(0, str(copy))
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        options = [f"--deselect={test}" for test in without]
        options += ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "-rfE"]
        code = 1
        try:
            code = int(pytest.main([*options, "--basetemp", str(scratch / "tmp"), *tests]))
        finally:
            sys.stdout.flush()
            os._exit(code)
    end = time.monotonic() + WALL_SECONDS
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status[0] == 0:
        os.waitpid(child, 0)
    text = output.read_text(errors="replace")
    for disk in scratch.glob("tmp/*/disk"):  # of tests of full disks
        subprocess.run(["umount", "-l", disk], check=False, capture_output=True)
    shutil.rmtree(scratch, ignore_errors=True)
    if status[0] == 0 or os.WIFSIGNALED(status[1]):
        return "slow", ""
    if status[1] == 0:
        return "missed", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?: - .*)?$", text, re.M)
    return "found", failed[1] if failed else tests[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("draw", "run"))
    parser.add_argument("faults", nargs="?")
    parser.add_argument("--root", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/planted"))
    given = parser.parse_args()
    if given.what == "draw":
        json.dump(draw(given.root, given.seed, given.count), sys.stdout, indent=1)
    else:
        given.scratch.mkdir(parents=True, exist_ok=True)
        run(given.root.resolve(), json.loads(Path(given.faults).read_text()), given.out, given.scratch)
