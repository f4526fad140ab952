"""The table of all figures for benchmarks/README.md, from what the scripts wrote: `python
benchmarks/table.py`.

With `--write` it replaces the one that is there, between its two marks.
"""

import json
import sys
from pathlib import Path

from measure import RESULTS, machine_text, table_rows

README = Path(__file__).resolve().parent / "README.md"
NAMES = ("step", "inference", "loader", "end_to_end", "saving", "start", "ridge", "gpu")
FOLDERS = (".", "avx2", "zen4")  # of the results
BEGIN, END = "<!-- table: python benchmarks/table.py --write -->", "<!-- end of the table -->"


def main() -> None:
    """Print the table, or put it into README.md."""
    if sys.argv[1:] == ["--write"]:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
    else:
        print(table())


def table(results: Path = RESULTS) -> str:
    """Return all rows that were measured, and below them the machine and its limits in each run."""
    names = [Path(folder, name) for folder in FOLDERS for name in NAMES]
    paths = {str(name): results / f"{name}.json" for name in names}
    found = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    processors = [one["machine"]["processor"] for one in found.values()]
    rows = sorted(found.values(), key=lambda one: processors.index(one["machine"]["processor"]))
    machines = [line for name, one in found.items() for line in ("", machine_text(name, one))]
    return "\n".join([*table_rows(rows), *machines])


if __name__ == "__main__":
    main()
