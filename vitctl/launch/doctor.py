"""Checks of the installation and the machine."""

import importlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path

from vitctl.system.files import can_write_into, free_bytes
from vitctl.system.process import usable_cores
from vitctl.system.text import count_text, one_line

MIN_FREE_GIB = 5
MIN_SHM_MIB = 256
_NEEDED = (
    "accelerate",
    "webdataset",
    "safetensors",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "scikit-learn",
    "pydantic",
)
_MODULES = {"scikit-learn": "sklearn"}  # imported under another name
_EXTRA = re.compile(r"([\w.-]+).*extra == ['\"](?!browser|docs|test)(\w+)")  # extras for users


@dataclass(frozen=True)
class Finding:
    """The result of one check, with the remedy if it failed."""

    ok: bool
    what: str
    said: str


def run_checks() -> Iterator[Finding]:
    """Check what a run needs, the quick checks first. Nothing is changed, nothing is downloaded."""
    for check in (_python, _extras, _data, _disk, _packages, _torch, _precision):
        yield from _guarded(check)


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        yield Finding(False, check.__name__.strip("_"), f"{type(error).__name__}: {error}")


def _python() -> Iterator[Finding]:
    yield Finding(
        sys.version_info >= (3, 11), "python", f"{platform.python_version()} on {platform.platform()}"
    )


def _packages() -> Iterator[Finding]:
    from vitctl.system.process import NOT_INSTALLED, installed

    for name, version in installed(_NEEDED).items():
        if version == NOT_INSTALLED:
            yield Finding(False, name, f"{version}; pip install {name}")
            continue
        try:
            importlib.import_module(_MODULES.get(name, name))
        except Exception as error:  # a damaged package may raise anything
            reason = f"{version} cannot be imported ({one_line(str(error))}); install it again"
            yield Finding(False, name, reason)
        else:
            yield Finding(True, name, version)


def _torch() -> Iterator[Finding]:
    import torch

    from vitctl.engine.computation import processor
    from vitctl.system.process import cpu_name

    yield Finding(True, "torch", torch.__version__)
    try:
        import torchvision

        yield Finding(True, "torchvision", torchvision.__version__)
    except (ImportError, RuntimeError) as error:
        yield Finding(False, "torchvision", f"does not fit torch ({error}); install both from the same index")
    threads = count_text(torch.get_num_threads(), "torch thread")
    yield Finding(True, "cpu", f"{cpu_name()}, {count_text(usable_cores(), 'core')}, {threads}")
    yield Finding(True, "instructions", processor(torch.device("cpu"))["processor"].removeprefix("CPU "))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            yield Finding(True, f"gpu {i}", f"{p.name}, {p.total_memory / 2**30:.0f} GiB")
    else:
        yield Finding(True, "gpu", "none: training runs on the CPU")


def _precision() -> Iterator[Finding]:
    import torch

    from vitctl.engine.computation import attention_kernel
    from vitctl.engine.runtime import Computation, device_and_precision
    from vitctl.models.variants import variant
    from vitctl.recipe.schema import NetworkMachine

    cpu, precision = device_and_precision("auto", "auto")
    computation = Computation(torch.device("cpu" if cpu else "cuda"), precision)
    kernel = attention_kernel(NetworkMachine(), variant("B/16"), computation)
    yield Finding(True, "precision", f"machine.precision = 'auto' takes {precision} here")
    yield Finding(True, "kernels", f"machine.attention = 'auto' takes {kernel} for B/16")


def _extras() -> Iterator[Finding]:
    from vitctl.system.process import NOT_INSTALLED, installed

    try:
        required = importlib.metadata.requires("vitctl") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(True, "extras", "not known, as this copy was not installed")
        return
    needs = [_EXTRA.match(text) for text in required]
    lacking = [one for one in needs if one and NOT_INSTALLED in installed([one[1]]).values()]
    by_extra = {one[2]: ", ".join(two[1] for two in lacking if two[2] == one[2]) for one in lacking}
    missing = "; ".join(f"{extra} ({names})" for extra, names in by_extra.items())
    text = f"without {missing}; pip install 'vitctl[NAME]' adds one" if missing else "all installed"
    yield Finding(True, "extras", text)


def _data() -> Iterator[Finding]:
    from vitctl.data.datasets.known_sets import DATA_SETS
    from vitctl.data.shards.index import find_splits

    present = [name for name in DATA_SETS if find_splits(Path("data") / name)]
    own = [name for name, row in DATA_SETS.items() if row.make is not None]
    yield Finding(
        True, "data", f"under ./data: {', '.join(present) or 'nothing'}; with vitctl: {', '.join(own)}"
    )


def _disk() -> Iterator[Finding]:
    free = free_bytes(".") / 2**30
    yield Finding(
        free >= MIN_FREE_GIB,
        "disk",
        "this disk does not tell its free space"
        if free == inf
        else f"{free:.1f} GiB free here" + ("" if free >= MIN_FREE_GIB else "; runs need more"),
    )
    writable = can_write_into(Path())
    yield Finding(
        writable,
        "folder",
        f"{Path.cwd()} " + ("can be written" if writable else "cannot be written; use --out elsewhere"),
    )
    if Path("/dev/shm").exists():
        shm = free_bytes("/dev/shm") / 2**20
        said = f"{shm:,.0f} MiB of shared memory".replace("inf MiB", "unlimited") + (
            "" if shm >= MIN_SHM_MIB else "; in a container start it with --shm-size=2g"
        )
        yield Finding(shm >= MIN_SHM_MIB, "shm", said)
