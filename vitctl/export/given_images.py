"""The images that the user gives an export: a file is scored on some of them, and int8 is calibrated on
others.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitctl.data.images.decode import open_picture
from vitctl.data.images.transforms import EvalTransform
from vitctl.data.loader.batches import eval_batches
from vitctl.data.source.verification import Verification
from vitctl.data.source.views import Source, random_subset
from vitctl.engine.preemption import StopFlag, Stopped
from vitctl.errors import CheckpointError, DataError
from vitctl.jobs.inputs.data import open_images, open_scored
from vitctl.jobs.inputs.labels import check_head_classes
from vitctl.jobs.inputs.weights import FoundWeights
from vitctl.jobs.record.data_verified import not_whole
from vitctl.jobs.resizing import own_transform
from vitctl.recipe.schema import ExportRecipe

_BATCH = 16


class GivenImages:
    """The images of data.path or data.dataset.

    Args:
        recipe: of the export.
        found: the weights, for classes and pre-processing.
        run_dir: where data sets that come with vitctl are made.
        stop: set by signals.

    Raises:
        DataError: there are no such images.
        CheckpointError: the classifier has other classes.
    """

    def __init__(self, recipe: ExportRecipe, found: FoundWeights, run_dir: Path, stop: StopFlag) -> None:
        data = recipe.data
        self._recipe, self._run_dir, self._stop = recipe, run_dir, stop
        self.source = open_scored(data, data.eval_split, run_dir)
        self._shards = Verification([self.source], run_dir)
        if not found.weights.has_head:
            raise CheckpointError(
                f"{found.path}: has no trained head, so that no image can be scored; fine-tune it first"
            )
        check_head_classes(found, self.source.class_names)
        self.where = f"{data.eval_split} of {data.path or data.dataset}"
        self.calibration_split = data.calibration_split
        self.transform = own_transform(found.weights.meta)

    @cached_property
    def labels(self) -> np.ndarray:
        """int64 [N], or [N, L] where images may have several."""
        return self.source.labels()

    def check_whole(self) -> None:
        """Refuse a score of these images unless every byte behind it is verified; call it after they were
        decoded.

        Raises:
            DataError: a shard does not match its index, changed while it was read, or could not be verified.
        """
        self._shards.wait(self.source)
        self._shards.complete(self.source)
        if problem := not_whole(self._shards.found(self.source)):
            raise DataError(problem)

    @cached_property
    def calibration(self) -> Source:
        """The images that int8 is calibrated on, none of them scored.

        Raises DataError where there are none.
        """
        split, count = self.calibration_split, self._recipe.export.calibration_images
        try:
            source = open_images(self._recipe.data, split, self._run_dir)
        except DataError as error:
            raise DataError(
                f"{error}; data.calibration_split = '{split}' should name images that are not scored, e.g. "
                "--split 'test[20%:]' --set data.calibration_split='test[:20%]'"
            ) from None
        return random_subset(source, min(count, len(source)), 0)

    def squares(self, source: Source) -> Iterator[Tensor]:
        """Batches as vitctl prepares them, uint8 [B, 3, S, S]."""
        for batch in eval_batches(
            source, self.transform, batch_size=_BATCH, rank=0, num_processes=1, num_workers=0
        ):
            if self._stop.raised:
                raise Stopped
            yield batch.images[batch.weights > 0]

    def photographs(self, source: Source) -> Iterator[Tensor]:
        """Each image decoded and upright, uint8 [1, H, W, 3]."""
        for number in range(len(source)):
            if self._stop.raised:
                raise Stopped
            yield torch.from_numpy(_decoded(source.read(number), self.transform))[None]


def _decoded(data: bytes, transform: EvalTransform) -> np.ndarray:
    picture = open_picture(data, exif_orientation=transform.exif_orientation, truncated=transform.truncated)
    return np.ascontiguousarray(picture.region(0, 0, picture.height, picture.width))
