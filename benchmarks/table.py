"""The table of all figures for benchmarks/README.md, from what the scripts wrote: `python
benchmarks/table.py`.

With `--write` it replaces the one that is there, between its two marks.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
NAMES = (
    "step",
    "inference",
    "loader",
    "end_to_end",
    "waiting",
    "saving",
    "start",
    "ridge",
)  # in the order of the table
UNITS = {
    "cpu": " CPU s",
    "wall": " s",
    "stall": " s",
    "whole": " s",
    "seconds to accuracy": " s",
    "seconds per step": " s",
    "peak_mib": " MiB",
    "per CPU second": " images",
}
BEGIN, END = "<!-- table: python benchmarks/table.py --write -->", "<!-- end of the table -->"


def main() -> None:
    """Print the table, or put it into README.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="into benchmarks/README.md")
    if parser.parse_args().write:
        before, _, rest = README.read_text().partition(BEGIN)
        README.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
    else:
        print(table())


def table(results: Path = HERE / "results") -> str:
    """All rows that were measured, and below them the machine and its limits in each run."""
    lines, machines, processor = list[str](), list[str](), ""
    for name in NAMES:
        path = results / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            if found["machine"]["processor"] != processor:
                processor = found["machine"]["processor"]
                head = f"| figure, on {processor} | ours | theirs | times as good | goal |"
                lines += [*([""] if lines else []), head, "|---|---|---|---|---|"]
            lines += [row(one) for one in found["rows"]]
            machines += ["", *machine(name, found)]
    return "\n".join(lines + machines)


def row(one: Mapping[str, Any]) -> str:
    """A line of the table: medians of both sides with their settings, and the ratio in the rounds."""
    unit = UNITS.get(one["number"], "")
    sides = [
        f"{one[side]['median'][one['number']]:.4g}{unit}: {one[side]['settings']}"
        for side in ("ours", "theirs")
    ]
    ratio, goal = one["ratio"], "-"
    if one["goal"] is not None:
        goal = f"{one['goal']:.2f} {'reached' if one['reached'] else '**missed**'}"
    spread = f"**{ratio['median']:.2f}** ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"| {one['figure']}, {one['number']} | {' | '.join(sides)} | {spread} | {goal} |"


def machine(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Where and with what the rows of a script were measured."""
    own, limits = found["machine"], ", ".join(f"{key} {value:.4g}" for key, value in found["limits"].items())
    versions = ", ".join(f"{key} {value}" for key, value in own["versions"].items())
    rounds = len(found["rows"][0]["ours"]["rounds"])
    yield (
        f"- `{found['command']}`, {found['date']}, {rounds} rounds: {own['processor']}, {own['cores']} "
        f"cores, {own['device']}, load "
        f"{own['load'][0]:.1f} to {own['load'][1]:.1f}, {own['cores_busy_with_other_work']} cores busy with "
        f"other work, OMP_NUM_THREADS "
        f"{own['threads']}; {versions}. Limits in the same run: {limits}. All numbers: "
        f"[results/{name}.json](results/{name}.json)"
    )


if __name__ == "__main__":
    main()
