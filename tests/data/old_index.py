"""Indexes of earlier releases."""

import json
from pathlib import Path


def forget_tables(folder: Path) -> None:
    """An index of before it noted digests of its tables and counts of labels: changes are found otherwise."""
    fields = json.loads((folder / "index.json").read_text())
    for name in ("tables", "labels"):
        fields.pop(name, None)
    (folder / "index.json").write_text(json.dumps(fields))
