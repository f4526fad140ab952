"""What devices can do. Imports no torch."""

import importlib.metadata
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

# Dense peak of the matrix units in TFLOP/s, for bf16 summed in float32; a sparse peak is twice that. Of the
# device that torch sees: one of the two halves of an MI250(X). float32 has no entry and no MFU. Each entry
# names where its number is published; not all were held against that page again.
PEAK_TFLOPS = {
    "GB200": 2500.0,  # NVIDIA GB200 NVL72 data sheet, 360 PFLOP/s sparse of 72
    "B200": 2250.0,  # NVIDIA HGX B200 data sheet
    "GH200": 989.0,  # NVIDIA GH200 data sheet, 1,979 sparse
    "H200": 989.0,  # NVIDIA H200 data sheet (SXM), 1,979 sparse
    "H200 NVL": 835.5,  # the same, 1,671 sparse
    "H100": 989.0,  # NVIDIA H100 data sheet (SXM), 1,979 sparse
    "H100 NVL": 835.5,  # the same, 1,671 sparse
    "H100 PCIe": 756.0,  # the same, 1,513 sparse
    "A100": 312.0,  # NVIDIA A100 data sheet, SXM and PCIe
    "A40": 149.7,  # NVIDIA A40 data sheet
    "A30": 165.0,  # NVIDIA A30 data sheet
    "A10": 125.0,  # NVIDIA A10 data sheet; not the A10G of Amazon
    "RTX A6000": 154.8,  # NVIDIA GA102 white paper, appendix A
    "L40S": 362.0,  # NVIDIA L40S data sheet, 733 sparse
    "L40": 181.0,  # NVIDIA L40 data sheet, 362 sparse
    "L4": 121.0,  # NVIDIA L4 data sheet, 242 sparse
    "RTX 6000 Ada Generation": 364.2,  # NVIDIA Ada white paper, appendix A
    "GeForce RTX 5090": 209.5,  # NVIDIA RTX Blackwell white paper, appendix A
    "GeForce RTX 4090": 165.2,  # NVIDIA Ada white paper, appendix A
    "GeForce RTX 3090": 71.2,  # NVIDIA GA102 white paper, appendix A
    "V100": 125.0,  # NVIDIA V100 data sheet, float16: it has no bf16
    "MI325X": 1307.4,  # AMD Instinct MI325X data sheet
    "MI300X": 1307.4,  # AMD Instinct MI300X data sheet
    "MI300A": 980.6,  # AMD Instinct MI300A data sheet
    "MI250X": 191.5,  # AMD Instinct MI250X data sheet, 383.0 for its two halves
    "MI250": 181.0,  # AMD Instinct MI250 data sheet, 362.1 for its two halves
    "MI210": 181.0,  # AMD Instinct MI210 data sheet
}
_NO_BF16 = ("V100",)
# Of the same name, with another rate, or a part of it, as a virtual GPU such as A10-4Q; MI250X/MI250 does not
# say which it is.
_ANOTHER = re.compile(r"\b(Ti|SUPER|D|Laptop|Max-Q|MIG|GRID|VF|HBM2e|64GB|MI250X/MI250)\b|-\d+[A-Z]\b")


def bf16_tflops(device_name: str) -> float:
    """Dense peak in bf16, in TFLOP/s, of the device that torch gives this name; 0 where it is not known or
    has no bf16.

    Args:
        device_name: as of `torch.cuda.get_device_name`, such as "NVIDIA H100 80GB HBM3". The longest name in
            it decides.
    """
    found = [
        name
        for name in PEAK_TFLOPS
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name)
    ]
    if not found or _ANOTHER.search(device_name):
        return 0.0
    name = max(found, key=len)
    return 0.0 if name in _NO_BF16 else PEAK_TFLOPS[name]


def cpu_name() -> str:
    """Return the processor's name as Linux has it."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        if model := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return model[1].strip()
    return platform.processor() or platform.machine()


def installed(names: Iterable[str]) -> dict[str, str]:
    """The version of each package, "not installed" where it is not."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
