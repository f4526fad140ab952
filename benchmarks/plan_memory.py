"""The memory that a plan tells, against the peak of process 0: python benchmarks/plan_memory.py

Six runs of three steps on the CPU: other models, batches, precisions, processes and sharding. Memory that is
freed goes back to the system at once (MALLOC_MMAP_THRESHOLD_), or fragments of it would be measured too.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vitctl.jobs.plan import plan_loaded
from vitctl.launch.cluster import WORKER
from vitctl.launch.prepare_run import launch_line, prepare_run
from vitctl.launch.run_folder import LOGS
from vitctl.recipe.load import Override, load_recipe
from vitctl.system.text import bytes_text

_SHORT: dict[str, Any] = {
    "data.synthetic": 4096,
    "data.eval_split": "",
    "schedule.total_steps": 3,
    "schedule.warmup_steps": 1,
    "evaluation.every_steps": 0,
    "checkpoint.every_steps": 1,
    "machine.device": "cpu",
    "machine.precision": "float32",
    "machine.workers": 1,
}


def _vit(letter: str, width: int, heads: int, image_size: int, batch: int, **more: Any) -> dict[str, Any]:
    model = {"name": f"{letter}/16", "depth": 12, "hidden_size": width, "mlp_size": 4 * width}
    values = {f"model.{key}": value for key, value in {**model, "num_heads": heads}.items()}
    values |= {"data.image_size": image_size, "schedule.batch_size": batch}
    return {**values, **{key.replace("__", "."): value for key, value in more.items()}}


RUNS = {
    "B/16, 1 process": _vit("B", 768, 12, 64, 32),
    "B/16, bf16, averages": _vit("B", 768, 12, 64, 16, machine__precision="bf16", averaging__decay=0.999),
    "Ti/16, 224 pixels, large batch": _vit("Ti", 192, 3, 224, 32),
    "S/16, recomputed blocks": _vit("S", 384, 6, 128, 64, machine__checkpoint_blocks=True),
    "B/16, 2 processes": _vit("B", 768, 12, 64, 32, machine__processes=2),
    "B/16, 2 processes, FSDP": _vit("B", 768, 12, 64, 32, machine__processes=2, machine__sharding="fsdp"),
}


def measure(name: str, folder: Path) -> tuple[int, int]:
    """Return the bytes of process 0, as planned and as measured."""
    given = {**_SHORT, **RUNS[name]}
    loaded = load_recipe("smoke", [Override(key, value) for key, value in given.items()])
    planned = plan_loaded(loaded)[1].resident_bytes
    prepare_run(loaded, folder)
    line = launch_line(folder, loaded.recipe).replace(WORKER, "benchmarks.peak_worker")
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    done = subprocess.run(line, shell=True, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return planned, int((folder / LOGS / "peak_0.txt").read_text())


def main() -> None:
    """Print a table."""
    for name in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            planned, peak = measure(name, Path(folder) / "run")
        print(f"{name:32} {bytes_text(planned):>9} planned {bytes_text(peak):>9} used {planned / peak:6.3f}")


if __name__ == "__main__":
    main()
