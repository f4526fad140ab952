"""`python -m benchmarks.peak_worker RUN`: a worker that notes its peak memory in RUN/logs/peak_RANK.txt."""

import os
import resource
import sys
from pathlib import Path

from vitctl.launch.worker import main

if __name__ == "__main__":
    try:
        main()
    finally:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path(sys.argv[1], "logs", f"peak_{os.environ.get('RANK', '0')}.txt").write_text(str(peak))
