"""Symbolic links to shards, for an index in another folder."""

from collections.abc import Sequence
from pathlib import Path

from vitctl.data.shards.index_fields import INDEX_FILE
from vitctl.errors import DataError
from vitctl.system.bounds import INDEX
from vitctl.system.files import read_json
from vitctl.system.text import one_line


def check_same_shards(out: Path, names: Sequence[str]) -> None:
    """Check that writing an index does not replace the index of other shards.

    Args:
        out: folder of the new index.
        names: of the shards in the new index.

    Raises:
        DataError: the folder holds an index that lists other shards.
    """
    path = out / INDEX_FILE
    if not path.exists():
        return
    fields = read_json(path, INDEX.limit, error=DataError)
    listed = fields.get("shards") if isinstance(fields, dict) else None
    others = (
        {str(one.get("name")) for one in listed if isinstance(one, dict)}
        if isinstance(listed, list)
        else set()
    )
    if others - set(names):
        raise DataError(
            f"{path}: is the index of other shards ({one_line(min(others - set(names)))}) and would be "
            f"replaced; choose another folder "
            "with --out"
        )


def link_shards(paths: Sequence[Path], out: Path) -> list[Path]:
    """Create symbolic links to shards in a folder, for an index that is not stored beside them.

    Raises:
        DataError: two shards have the same name, or another file of that name exists.
    """
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(
            f"{len(paths)} shards, two of them called {twice}; give those of one split, each with its "
            f"own name"
        )
    links = [out / name for name in names]
    for path, link in zip(paths, links, strict=True):
        if (link.exists() or link.is_symlink()) and not (link.exists() and link.samefile(path)):
            raise DataError(f"{link}: exists already and is not {path}; choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    for path, link in zip(paths, links, strict=True):
        if not link.exists():
            link.symlink_to(path.resolve())
    return links
