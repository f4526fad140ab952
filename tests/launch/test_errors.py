"""Who failed first is told, and who need not be started again."""

import json
from pathlib import Path
from typing import Any

from vitctl.launch.errors import LOGS, first_error, is_cause, is_final, note_killed


def test_first_error__is_the_earliest(tmp_path: Path) -> None:
    assert first_error(tmp_path) is None
    (tmp_path / "logs").mkdir()
    for rank, when in ((0, 7.0), (1, 5.0)):
        (tmp_path / "logs" / f"error_{rank:02d}.json").write_text(
            json.dumps({"rank": rank, "time": when, "mendable": False})
        )
    assert first_error(tmp_path) == {"rank": 1, "time": 5.0, "mendable": False}


def test_is_final__what_a_person_has_to_mend_and_no_process_that_was_lost(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()

    def note(**values: Any) -> tuple[bool, bool]:
        content = {"rank": 0, "time": 1.0, "mendable": True, "lost_peer": False, **values}
        (tmp_path / LOGS / "error_00.json").write_text(json.dumps(content))
        return is_cause(first_error(tmp_path)), is_final(first_error(tmp_path))

    assert note() == (True, True)
    assert note(lost_peer=True) == (False, False)
    assert note(mendable=False) == (True, False)
    note_killed(tmp_path, 0, "SIGKILL")
    assert (is_cause(first_error(tmp_path)), is_final(first_error(tmp_path))) == (True, False)
