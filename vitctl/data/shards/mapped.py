"""The tables beside an index, mapped and not read, so that opening them costs the same for any number of samples."""

import os
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from vitctl.errors import DataError
from vitctl.system.files import open_regular


class _Mapped(np.memmap):
    """A table on disk. Where its file was cut off, reading on would end the process by SIGBUS: it is asked for its size first."""

    def __getitem__(self, key: Any) -> Any:
        """As of any array. Raises DataError where the file has become shorter than it was."""
        held = getattr(self, "_mmap", None)
        if held is not None and held.size() < len(held):
            raise DataError(
                f"{self.filename}: was cut from {len(held)} to {held.size()} bytes while it was in use; index the shards again"
            )
        return super().__getitem__(key)


def mapped(path: Path) -> np.ndarray:
    """A table of NumPy's, mapped. Raises DataError, OSError or ValueError where it is none."""
    os.stat(path)
    open_regular(path, error=DataError).close()
    try:
        found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (SyntaxError, TokenError, TypeError, OverflowError, RecursionError) as error:  # NumPy's parser of headers
        raise ValueError(f"a damaged header: {error}") from None
    return found.view(_Mapped) if isinstance(found, np.memmap) else found
