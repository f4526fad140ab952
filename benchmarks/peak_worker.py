"""`python -m benchmarks.peak_worker RUN`: a worker that notes its peak memory in RUN/logs/peak_RANK.txt."""

import os
import sys
from pathlib import Path

from vitctl.launch.worker import main

if __name__ == "__main__":
    try:
        main()
    finally:
        # Not ru_maxrss, which begins at the memory of the process that started this one.
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        Path(sys.argv[1], "logs", f"peak_{os.environ.get('RANK', '0')}.txt").write_text(str(peak))
