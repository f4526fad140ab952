"""`python -m tests.verify.other_data_worker RUN`: a process of a run whose rank 1 reads another image for one
sample.
"""

import os

from vitctl.data.source.stores import ShardSource

SAMPLE, INSTEAD = 11, 12


def read_another() -> None:
    """From the loader, with the index untouched: no check before the first step sees it."""
    read = ShardSource.read

    def other(source: ShardSource, sample: int) -> bytes:
        return read(source, INSTEAD if sample == SAMPLE and len(source) == 70 else sample)

    ShardSource.read = other


if __name__ == "__main__":
    from vitctl.launch.worker import main

    if os.environ["RANK"] == "1":
        read_another()
    main()
