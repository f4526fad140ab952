"""The scripts of benchmarks/ as modules."""

import sys
from types import ModuleType

import pytest

from tests.conftest import ROOT


@pytest.fixture(scope="session", autouse=True)
def _folder() -> None:
    """Scripts import their neighbours by name, as Python lets them when one of them is started."""
    sys.path.insert(0, str(ROOT / "benchmarks"))


def script(name: str) -> ModuleType:
    """A script, as a module."""
    return __import__(name)
