"""What other processes append to a log is handed on once, whatever the file and the clocks do."""

import json
import time
from pathlib import Path
from typing import Any

from vitctl.engine.journal import append_record, cut_after
from vitctl.launch.launcher import Follower


def test_follower__reports_each_whole_new_record_once(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    seen: list[dict[str, Any]] = []
    append_record(path, {"step": 1, "time": 5})
    follower = Follower(path, seen.append)
    follower.poll()
    assert seen == []
    append_record(path, {"step": 2, "time": time.time() + 1})
    with path.open("a") as file:
        file.write('{"step": 3, "ti')
    follower.poll()
    follower.poll()
    assert [r["step"] for r in seen] == [2]
    with path.open("a") as file:
        file.write(f'me": {time.time() + 1}}}\nnot a record\n')
    follower.poll()
    assert [r["step"] for r in seen] == [2, 3]
    aside = tmp_path / "new"
    append_record(aside, {"step": 4, "time": time.time() + 1})
    aside.replace(path)
    follower.poll()
    assert [r["step"] for r in seen] == [2, 3, 4]


def test_follower__of_a_clock_that_is_set_back(tmp_path: Path) -> None:
    path, now, seen = tmp_path / "log.jsonl", tmp_path / "now.json", list[dict[str, Any]]()
    append_record(path, {"step": 1, "time": 9e9})
    follower = Follower(path, seen.append, now)
    append_record(path, {"step": 2, "time": 5.0})
    for when in (9e9, 5.0):
        now.write_text(json.dumps({"kind": "now", "time": when}))
        follower.poll()
    cut_after(path, 1)
    append_record(path, {"step": 2, "time": 6.0})
    follower.poll()
    assert [(r.get("step"), r["time"]) for r in seen] == [(2, 5.0), (None, 9e9), (None, 5.0), (2, 6.0)]


def test_follower__hands_on_what_is_under_way_once(tmp_path: Path) -> None:
    now, seen = tmp_path / "now.json", list[dict[str, Any]]()
    follower = Follower(tmp_path / "log.jsonl", seen.append, now)
    follower.poll()
    for when in (1.0, 2.0):
        now.write_text(json.dumps({"kind": "now", "step": 7, "time": when}))
        follower.poll()
        follower.poll()
    now.write_text('{"kind": "no')
    follower.poll()
    assert [record["time"] for record in seen] == [1.0, 2.0]
