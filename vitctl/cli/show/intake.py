"""What `vitctl data shards` reports before it writes: files that are not images, damaged images, doubtful
classes.
"""

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vitctl.errors import DataError

if TYPE_CHECKING:
    from vitctl.data.writer.intake import Intake
    from vitctl.data.writer.items import LeftOut, Originals

_LEAST_LINES = 10


def show_intake(intake: "Intake", source: str, out: Path, *, stops: bool, command: Sequence[str]) -> None:
    """Print what is left out, at most a screenful, and write the whole list to OUT/intake.csv.

    Args:
        intake: of the source.
        source: as typed.
        out: folder for the list.
        stops: whether a bad image stops the command.
        command: the words of the `vitctl data shards` command, which the error completes.

    Raises:
        DataError: the user has to decide something first; only the list was written.
    """
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.images.image_types import SYSTEM_FILE
    from vitctl.data.writer.intake import REPORT

    def say(line: str) -> None:
        CONSOLE.print(line, markup=False, highlight=False, soft_wrap=True)

    listed = [one for one in intake.left_out if one.reason != SYSTEM_FILE] + list(intake.bad if stops else ())
    if intake.left_out or intake.bad or intake.converted:
        intake.write(out / REPORT)
    if intake.left_out:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in intake.counts())
        say(f"files left out: {len(intake.left_out):,} ({kinds})")
    if stops and intake.bad:
        say(f"images that cannot be used: {len(intake.bad):,}")
    _say_files(listed, out / REPORT)
    if intake.converted:
        from vitctl.data.images.convert import CONVERSION

        say(f"{len(intake.converted):,} {CONVERSION}")
    problems, options = list[str](), list[str]()
    if stops and intake.bad:
        problems, options = [f"{len(intake.bad)} image(s) cannot be used"], ["--bad", "skip"]
    if intake.doubts:
        problems.append(f"{len(intake.doubts)} doubt(s) about classes")
    for doubt in intake.doubts:
        say(doubt.text)
        options += doubt.options
    if problems:
        raise DataError(
            f"{source}: {' and '.join(problems)}, listed above; nothing was written; correct the files, "
            f"or type: "
            f"{shlex.join(['vitctl', *command, *options])}"
        )
    if not intake.splits:
        raise DataError(f"{source}: no image is left to write")


def _say_files(listed: "list[LeftOut]", report: Path) -> None:
    from vitctl.cli.show.render import CONSOLE

    room = max(_LEAST_LINES, shutil.get_terminal_size().lines - 8)
    for one in listed[:room]:
        CONSOLE.print(f"  {one.name}: {one.reason}", markup=False, highlight=False, soft_wrap=True)
    if len(listed) > room:
        CONSOLE.print(f"  and {len(listed) - room:,} more; all: {report}", markup=False, soft_wrap=True)


def say_splits(splits: "Mapping[str, Originals]") -> None:
    """Print what a source without a test split, or with a single class, means for later commands."""
    from vitctl.cli.show.render import CONSOLE
    from vitctl.data.source.splits import default_splits

    def say(line: str) -> None:
        CONSOLE.print(line, markup=False, highlight=False, soft_wrap=True)

    first = next(iter(splits.values()))
    if first.is_user_data and len(first.class_names) == 1:
        say(
            f"only one class, {first.class_names[0]!r}: if the classes are folders inside of it, give "
            f"that folder"
        )
    found = default_splits(list(splits))
    if found is not None and found.note:
        say(found.note)
