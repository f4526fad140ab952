"""Shards in a second folder, without a second copy."""

from collections.abc import Sequence
from pathlib import Path

from vitctl.errors import DataError
from vitctl.system.bounds import INDEX
from vitctl.system.files import read_json
from vitctl.system.text import one_line


def check_own(out: Path, names: Sequence[str]) -> None:
    """Raises DataError where a folder holds the index of other shards than those of these names, which a new one would replace."""
    path = out / "index.json"
    if not path.exists():
        return
    fields = read_json(path, INDEX.limit, error=DataError)
    listed = fields.get("shards") if isinstance(fields, dict) else None
    others = {str(one.get("name")) for one in listed if isinstance(one, dict)} if isinstance(listed, list) else set()
    if others - set(names):
        raise DataError(
            f"{path}: is the index of other shards ({one_line(min(others - set(names)))}), and would be replaced; choose another folder "
            "with --out"
        )


def link_shards(paths: Sequence[Path], out: Path) -> list[Path]:
    """Links to shards in a folder of their own, for an index that is not to lie beside them.

    Raises:
        DataError: two shards have one name, or another file has it there.
    """
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"{len(paths)} shards, two of them called {twice}; give those of one split, each with its own name"
        )
    links = [out / name for name in names]
    for path, link in zip(paths, links, strict=True):
        if (link.exists() or link.is_symlink()) and not (link.exists() and link.samefile(path)):
            raise DataError(f"{link}: is there already and is not {path}; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    for path, link in zip(paths, links, strict=True):
        if not link.exists():
            link.symlink_to(path.resolve())
    return links
