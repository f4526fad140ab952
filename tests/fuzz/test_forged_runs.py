"""Runs with forged logs and results are listed, shown and reported, or refused in one line."""

import io
import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from vitctl.cli.show.console import PlainConsole
from vitctl.cli.show.render import Screen
from vitctl.cli.show.run_views import show_list, show_run, tail
from vitctl.errors import VitctlError
from vitctl.launch.listing import list_runs
from vitctl.report.html_report import write_report

EVERY = [41, pytest.param(1, marks=pytest.mark.slow)]
ODD = [
    *[
        "1e300",
        "-1e300",
        "1e308",
        '"NaN"',
        '"-Infinity"',
        "NaN",
        "true",
        "null",
        '"x"',
        "[]",
        "{}",
        "-1",
        "1e-320",
        '"<b>"',
    ],
    "1" * 30,
]
WHOLE = {
    "step": 70,
    "total_steps": 80,
    "loss": 1.5,
    "accuracy": 0.5,
    "shots": 5,
    "time": 1.7e9,
    "correct": 3,
    "total": 6,
    "text": "t",
}
FIELDS = (*WHOLE, "lr", "mfu", "num_bad", "num_skipped", "images_per_second", "data_wait", "epoch", "samples")
VALUES: list[Any] = [1e308, -1, "NaN", "<img src=x onerror=alert(1)>", None, [], {}, True, {"a": 1}]
VALUES += [[1], ["x", None], 10**30]


@pytest.fixture
def forged(pretrained: Path, tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "forged"
    shutil.copytree(pretrained, run, ignore=shutil.ignore_patterns("checkpoints"))
    return run


def look(run: Path, page: Path) -> None:
    """Each way to look at a run; errors for the user are one line."""
    ways: tuple[Callable[[], object], ...] = (
        lambda: show_run(run),
        lambda: tail(run),
        lambda: show_list(list_runs(run.parent), run.parent),
        lambda: write_report([run], page, most_images=0),
    )
    said = []
    for way in ways:
        try:
            way()
        except VitctlError as error:
            said.append(str(error))
    assert [text for text in said if "\n" in text] == []


def records() -> Iterator[str]:
    for kind in ("train", "evaluate", "fewshot", "warning"):
        for field in FIELDS:
            own = {name: value for name, value in {"kind": kind, **WHOLE}.items() if name != field}
            yield from (f'{json.dumps(own)[:-1]}, "{field}": {value}}}' for value in ODD)
    yield from ("{}", "[]", "null", '{"kind": 5}', '{"kind": "train"}', '{"kind": "evaluate", "step": 3}')


def paths(value: Any, begin: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*begin, name)
            yield from paths(item, (*begin, name))


@pytest.mark.slow
@pytest.mark.parametrize("every", EVERY)
def test_log__of_any_records(forged: Path, tmp_path: Path, every: int) -> None:
    before = (forged / "log.jsonl").read_text()
    for record in [*records()][::every]:
        (forged / "log.jsonl").write_text(f"{before}{record}\n{record.replace('70', '75')}\n")
        look(forged, tmp_path / "page.html")


_SHOWN: dict[str, dict[str, Any]] = {
    "train": {"task": "t", "what": "w"},
    "progress": {"what": "scoring", "done": 3, "total": 6, "task": "t"},
    "evaluate": {"labels": "real", "top5_accuracy": 0.5, "task": "t"},
    "export": {"path": "p", "difference": 1e-3, "notes": ["n"]},
    "compile": {"seconds": 1.0},
    "setting": {"lr": 0.1},
    "weights": {"path": "p"},
    "now": {"text": "t", "what": "w"},
}


@pytest.mark.parametrize("is_terminal", [False, True])
def test_screen__of_any_fields(tmp_path: Path, is_terminal: bool) -> None:
    console = PlainConsole(highlight=False, file=io.StringIO(), force_terminal=is_terminal)
    screen = Screen(tmp_path, console)
    for kind, fields in _SHOWN.items():
        for field, value in product(fields, [*VALUES, 10**400]):
            screen.report_foreign({"kind": kind, **WHOLE, **fields, field: value})
            console.print(screen.view.get_renderable())


@pytest.mark.parametrize("every", EVERY)
def test_result__of_any_values(forged: Path, tmp_path: Path, every: int) -> None:
    result = json.loads((forged / "result.json").read_text())
    for path, value in [(path, value) for path in paths(result) for value in VALUES][::every]:
        changed = deepcopy(result)
        inner = changed
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        (forged / "result.json").write_text(json.dumps(changed))
        look(forged, tmp_path / "page.html")
