"""Where weights come from: a path, an https address, `hf://organisation/name[/file]` or `gs://bucket/path`."""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from vitctl.errors import CheckpointError
from vitctl.models.weights.download import NotOnServerError
from vitctl.system.address import without_queries
from vitctl.system.http import hub_address

Fetch = Callable[[str], Path]
# In the order of preference; the second is a pickle, and read as one: tensors or nothing.
FILE_NAMES = ("model.safetensors", "pytorch_model.bin")
# What the formats of other programs keep beside their weights.
CONFIG, PREPROCESSOR = BESIDE = ("config.json", "preprocessor_config.json")


def locate(source: str | Path, fetch: Fetch) -> Path:
    """Return the local file that `source` means, fetching it and what belongs beside it when it is remote.

    A folder stands for the weights file inside. Raises CheckpointError, saying what would be right.
    """
    (text,) = without_queries(str(source), error=CheckpointError)
    if text.startswith("hf://"):
        return _from_hub(text, fetch)
    if text.startswith("gs://"):
        return fetch(f"https://storage.googleapis.com/{quote(text.removeprefix('gs://'))}")
    if "://" in text:
        return fetch(text)
    path = Path(source).expanduser()
    if not path.is_dir():
        return path
    return next((path / name for name in FILE_NAMES if (path / name).exists()), path / FILE_NAMES[0])


def _from_hub(source: str, fetch: Fetch) -> Path:
    parts = source.removeprefix("hf://").split("/", 2)
    if len(parts) < 2 or not all(parts):
        raise CheckpointError(f"{source}: write hf://organisation/name, or hf://organisation/name/file")
    organisation, name, *file = parts
    repository = f"{organisation}/{name}"
    for beside in BESIDE:
        _try_fetch(hub_address(repository, beside), fetch)
    candidates = file or FILE_NAMES
    found = (_try_fetch(hub_address(repository, candidate), fetch) for candidate in candidates)
    if (path := next(filter(None, found), None)) is None:
        if file:
            raise CheckpointError(f"{source}: no such file in that repository")
        raise CheckpointError(
            f"{source}: holds no {' and no '.join(candidates)}; name the file: {source}/FILE"
        )
    return path


def _try_fetch(url: str, fetch: Fetch) -> Path | None:
    try:
        return fetch(url)
    except NotOnServerError:
        return None
