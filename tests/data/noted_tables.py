"""Indexes whose tables were changed by somebody who wrote the change down."""

import json
from pathlib import Path

import numpy as np

from vitctl.data.shards.index import table_sha256, wrong_labels


def note_tables(folder: Path) -> None:
    """Write down the digests of the tables as they are now, and count the labels again."""
    fields = json.loads((folder / "index.json").read_text())
    for name, table in fields["tables"].items():
        table |= {"num_bytes": (folder / name).stat().st_size, "sha256": table_sha256(folder / name)}
    labels = np.load(folder / "samples.npy")["label"]
    missing, outside = wrong_labels(labels, len(fields["class_names"]))
    fields["labels"] = {"missing": int(missing.sum()), "outside": int(outside.sum())}
    (folder / "index.json").write_text(json.dumps(fields))
