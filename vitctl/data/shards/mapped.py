"""The tables of an index, memory-mapped, so that opening them takes the same time for any number of samples."""

import os
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from vitctl.errors import DataError
from vitctl.system.files import open_regular


class _Mapped(np.memmap):
    """A memory-mapped table.

    Reading beyond the end of a truncated file kills the process (SIGBUS), so the size is checked first.
    """

    def __getitem__(self, key: Any) -> Any:
        """As for any array. Raises DataError where the file was truncated."""
        held = getattr(self, "_mmap", None)
        if held is not None and held.size() < len(held):
            raise DataError(
                f"{self.filename}: was truncated from {len(held)} to {held.size()} bytes while in use; index "
                f"the shards again"
            )
        return super().__getitem__(key)


def mapped(path: Path) -> np.ndarray:
    """Memory-map an .npy file. Raises DataError, OSError or ValueError where it is not one."""
    os.stat(path)
    open_regular(path, error=DataError).close()
    try:
        found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (
        SyntaxError,
        TokenError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:  # from NumPy's header parser
        raise ValueError(f"a damaged header: {error}") from None
    return found.view(_Mapped) if isinstance(found, np.memmap) else found
