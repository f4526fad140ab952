"""Representations of whole splits from a model that is not trained."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.loader.batches import eval_batches
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source
from vitctl.engine.computation import kernels_used
from vitctl.engine.evaluation import cached_features, representations
from vitctl.engine.journal import Journal
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Runtime
from vitctl.jobs.record.data_verified import check_whole
from vitctl.models.build import Model
from vitctl.models.weights.weights_file import weights_digest

FORMAT = "vitctl-features/2"  # 1 could be of images that were changed on the way from a server


T = TypeVar("T")


@dataclass(frozen=True)
class ImagePass:
    """How images are shown to a network. `mean` and `std` are of the weights; `batch_size` is of one process.

    `whole_batches`: no batch depends on the number of processes, as `eval_batches` says. `shards`: every
    shard that is decoded is verified by it.
    """

    runtime: Runtime
    journal: Journal
    transform: EvalTransform
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int
    workers: int
    stop: StopFlag
    shards: Verification
    whole_batches: bool = False

    def __call__(self, model: Model, source: Source) -> Tensor:
        """The input of the classification layer, [N, R] float32 on the CPU, in the split's order, the same on
        every process.
        """
        return self.through(representations, "features", model, source)

    def through(self, function: Callable[..., T], what: str, model: Model, source: Source, **more: Any) -> T:
        """Apply a function of `vitctl.engine.evaluation` to a split; `what` names it on the screen.

        Raises:
            DataError: not every byte of its shards could be verified.
        """
        runtime = self.runtime
        self.shards.add(source)
        batches = eval_batches(
            source,
            self.transform,
            batch_size=self.batch_size,
            rank=runtime.rank,
            num_processes=runtime.num_processes,
            num_workers=self.workers,
            whole_batches=self.whole_batches,
            pinned=runtime.device.type == "cuda",
        )
        batches = self.journal.watch(batches, what, len(source), runtime.num_processes)
        normalise = runtime.normaliser(self.mean, self.std)
        found = function(
            runtime, model, batches, num_images=len(source), normalise=normalise, stop=self.stop, **more
        )
        check_whole(self.shards, runtime, source)
        return found

    def key(self, weights_sha256: str, config: Any, source: Source) -> dict[str, Any]:
        """Everything that the representations of a split depend on: the key of the cache."""
        return {
            "format": FORMAT,
            "weights_sha256": weights_sha256,
            "config": repr(config),
            "data_sha256": source.digest,
            "transform": asdict(self.transform),
            "mean": list(self.mean),
            "std": list(self.std),
            "precision": self.runtime.precision,
            "device": self.runtime.device.type,
            **kernels_used(),
        }


def cached_pass(
    one: ImagePass,
    model: Model,
    config: Any,
    folder: Path,
    *,
    limit_bytes: int,
    note: Callable[[str], None] = lambda _: None,
) -> Callable[[Source], tuple[Tensor | None, bool]]:
    """A feature pass with a cache folder: see `cached_features`."""
    digest = weights_digest(model.state_dict())

    def features(source: Source) -> tuple[Tensor | None, bool]:
        return cached_features(
            one.runtime,
            folder,
            one.key(digest, config, source),
            lambda: one(model, source),
            num_images=len(source),
            limit_bytes=limit_bytes,
            note=note,
        )

    return features
