"""What this process asks of the C library."""

import ctypes
import subprocess
import sys

import pytest

# Page faults of four tensors of 64 MiB, one after the other, each written to; after ten others, because each
# needs a gap of the heap that is a little larger than itself.
FAULTS = """
import resource, sys
from vitctl.system.process import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
before = faults()
for _ in range(4):
    torch.ones(2**24)
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="a C library without mallopt")
def test_keep_freed_memory__large_tensors_take_no_fresh_pages() -> None:
    found = {}
    for how in ("given back", "kept"):
        line = [sys.executable, "-c", FAULTS, how]
        found[how] = int(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
    assert found["kept"] < 1000
    assert found["given back"] > 4 * found["kept"]
