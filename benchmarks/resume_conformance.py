"""Kill a loader, go on, and count: `python benchmarks/resume_conformance.py --python
datasets=/tmp/venv/bin/python ...`.

Every loader reads the same images on the same schedule: three epochs of 20 global batches, its state saved
every 8 steps, every process killed (SIGKILL) after step 30, the run gone on with from the last state, to the
end. On one process, on two, and from the state of two on one and on three. What the run that went on has read
is compared, by key, with the run of the same loader that was never stopped. The results, and how each loader
is used by which page of its documentation, are in benchmarks/results/resume_conformance.md.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "resume"))

from measure import processor
from suite import LAYOUTS, Finding, Plan, Suite

RESULTS = Path(__file__).resolve().parent / "results" / "resume_conformance.json"

# The peer, and how it is used: PEER or PEER:VARIANT, a module peer_PEER.py of benchmarks/resume.
PEERS = (
    "vitctl",
    "timm:epoch",
    "timm:recovery",
    "webdataset",
    "datasets:shards",
    "datasets:buffer",
    "datasets:interleaved",
    "accelerate:default",
    "accelerate:skip",
    "accelerate:stateful",
    "streaming",
)


def write_data(folder: Path, plan: Plan) -> None:
    """Images of noise, as shards and as files."""
    import io

    import numpy as np
    from PIL import Image

    from vitctl.data.writer.intake import Item
    from vitctl.data.writer.shard_writer import write_split

    photos = folder / "photos" / "any"
    photos.mkdir(parents=True)
    for number in range(plan.num_samples):
        file = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (32, 32, 3), np.uint8)).save(
            file, "JPEG"
        )
        (photos / f"{number:06d}.jpg").write_bytes(file.getvalue())
    reads: list[tuple[str, Callable[[], bytes]]] = [
        (path.stem, path.read_bytes) for path in sorted(photos.iterdir())
    ]
    items = [Item(key, int(key), read) for key, read in reads]
    write_split(
        items,
        folder / "shards",
        [key for key, _ in reads],
        seed=0,
        source_text="noise",
        max_samples=plan.shard_samples,
    )


def table(found: dict[str, dict[str, Finding]]) -> str:
    """Markdown."""
    rows = [
        "| loader | 1 -> 1 | 2 -> 2 | 2 -> 1 | 2 -> 3 | state of 2, bytes |",
        "|---" * 6 + "|",
    ]
    names = [f"{before} -> {after}" for before, after in LAYOUTS]
    for peer, findings in found.items():
        if "" in findings:
            rows.append(f"| {peer} | not run: {findings[''].message} " + "| " * 4 + "|")
            continue
        cells = [findings[name].text if name in findings else "" for name in names]
        state_bytes = findings.get("2 -> 2", Finding("")).state_bytes
        rows.append(f"| {peer} | {' | '.join(cells)} | {state_bytes} |")
    return "\n".join([*rows, "", *reasons(found)])


def reasons(found: dict[str, dict[str, Finding]]) -> list[str]:
    """A line for each message, with the layouts that it is about."""
    layouts: dict[tuple[str, str], list[str]] = {}
    for peer, findings in found.items():
        for name, one in findings.items():
            if name and one.message:
                layouts.setdefault((peer, f"{one.outcome}: {one.message}"), []).append(name)
    return [f"- {peer}, {' and '.join(names)} {why}" for (peer, why), names in layouts.items()]


def main() -> None:
    """Run the peers, print a table, and write the findings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", default=list(PEERS), metavar="PEER", help=", ".join(PEERS))
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH", help="interpreter of a peer"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON of all findings")
    parser.add_argument("--keep", type=Path, help="folder for data, logs and states; else they are removed")
    given, load = parser.parse_args(), os.getloadavg()[0]
    pythons = dict(one.partition("=")[::2] for one in given.python)
    with tempfile.TemporaryDirectory() as scratch:
        suite = Suite(given.keep or Path(scratch), pythons)
        if not (suite.root / "data").exists():
            write_data(suite.root / "data", suite.plan)
        found = {}
        for peer in given.peers:
            print(f"{peer} ...", file=sys.stderr, flush=True)
            found[peer] = suite.run(peer)
    machine = (
        f"{platform.platform()}, {processor()}, {os.cpu_count()} CPUs, "
        f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after, "
    )
    machine += f"Python {platform.python_version()}"
    used = {f"{name} {number}": None for names in suite.versions.values() for name, number in names.items()}
    print(machine, ", ".join(used), "", table(found), sep="\n")
    plain = {peer: {name: asdict(one) for name, one in findings.items()} for peer, findings in found.items()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(
        json.dumps({"machine": machine, "versions": suite.versions, "found": plain}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
