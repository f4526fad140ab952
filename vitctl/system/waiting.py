"""Where the main thread of this process is, for the threads and processes that watch it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Place:
    """Where the main thread is.

    Args:
        arrivals: operations with the other processes that it has entered: all processes enter the same ones
            in the same order.
        step: finished training steps.
        images_since: `time.monotonic()` when it began to wait for images; None while it does not.
        loaders: ids of the loader processes that it waits for.
    """

    arrivals: int = 0
    step: int = 0
    images_since: float | None = None
    loaders: Sequence[int] = ()

    def arrive(self) -> None:
        """Count an operation that waits for the other processes, right before it."""
        self.arrivals += 1

    @contextmanager
    def waiting_for_images(self, loaders: Sequence[int]) -> Iterator[None]:
        """Within the block the main thread waits for images of these processes."""
        self.images_since, self.loaders = time.monotonic(), loaders
        try:
            yield
        finally:
            self.images_since = None


HERE = Place()
