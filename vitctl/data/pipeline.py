"""The sample order of vitctl's loader as a webdataset pipeline, for other training loops."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import webdataset
from torch.utils.data import get_worker_info

from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.decode import BadSample
from vitctl.data.images.image_types import image_extension
from vitctl.data.source.order import Order, SampleOrder, share
from vitctl.data.source.views import Source, sample_key
from vitctl.data.writer.shard_writer import label_text
from vitctl.errors import DataError, explaining, refuse


@explaining()
def as_webdataset(
    data: Source | Path | str,
    *,
    split: str = "train",
    seed: int = 0,
    batch_size: int,
    first_step: int = 0,
    num_steps: int | None = None,
    rank: int | None = None,
    num_processes: int | None = None,
    order: SampleOrder | None = None,
) -> webdataset.DataPipeline:
    """Return the samples that vitctl would train on, in its order, the same for any processes and workers.

    Each is a dictionary as from `webdataset.WebDataset`, undecoded: `__key__`, `__url__`, the image under
    `jpg`, `png` ..., the label under `cls`, or under `json` as `{"labels": [...]}` if images may have
    several; and `__epoch__`, from 0. Add stages with `compose`. A loader worker reads complete steps, so
    batches of `len(share(batch_size, num_processes, rank))` samples, made by the pipeline or by the loader,
    come in the order of the steps.

    Example:
        from vitctl import as_webdataset

        for sample in as_webdataset("data/mine", split="train", seed=0, batch_size=8, first_step=100,
        num_steps=3):
            sample["__key__"], sample["cls"]

    Args:
        data: shards, as for `--data`, or an opened source.
        split: expression of the split; ignored for an opened source.
        seed: of the order, any integer.
        batch_size: samples of a global batch, at least `num_processes`; step s starts at position
            `s * batch_size`.
        first_step: finished steps; starting late costs nothing. The step number is all the state of a loop.
        num_steps: number of steps; None: without end.
        rank: of this process; None: webdataset's, from RANK and WORLD_SIZE or from torch.distributed.
        num_processes: that share the global batch; None: as webdataset finds it.
        order: replaces the exact shuffle of `seed`; over as many samples as there are.

    Raises:
        DataError: there is no such split, the numbers do not fit, or, during iteration, a sample cannot be
            read.
    """
    source = open_split(split, path=str(data)) if isinstance(data, Path | str) else data
    found_rank, found_processes, *_ = webdataset.utils.pytorch_worker_info()
    rank = found_rank if rank is None else rank
    num_processes = found_processes if num_processes is None else num_processes
    order = order or Order(len(source), seed)
    end = first_step + (num_steps or 0) + 1
    refuse(
        DataError,
        (
            not 0 <= rank < num_processes <= batch_size or order.num_samples != len(source),
            f"process {rank} of {num_processes}, batch_size {batch_size}, an order of {order.num_samples} "
            f"for {len(source)} samples: every process needs a sample of each batch, and the order as many "
            "samples as there are",
        ),
        (
            first_step < 0 or (num_steps or 0) < 0 or end * batch_size >= 2**63,
            f"first_step {first_step}, num_steps {num_steps}, batch_size {batch_size}: steps should be 0 or "
            "more, and positions, step * batch_size, below 2**63",
        ),
    )
    own = share(batch_size, num_processes, rank)
    return webdataset.DataPipeline(_Steps(source, order, batch_size, own, first_step, num_steps))


@dataclass(frozen=True)
class _Steps:
    """The samples of one process in every step; a loader worker takes every `num_workers`-th step."""

    source: Source
    order: SampleOrder
    batch_size: int
    own: range
    first_step: int
    num_steps: int | None

    def __call__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        steps = (
            count(self.first_step)
            if self.num_steps is None
            else range(self.first_step, self.first_step + self.num_steps)
        )
        for step in islice(steps, first, None, stride):
            epochs, samples = self.order.at(step * self.batch_size + np.array(self.own))
            labels = self.source.labels(samples)
            for row in zip(samples.tolist(), labels.tolist(), epochs.tolist(), strict=True):
                yield _members(self.source, *row)


def _members(source: Source, sample: int, label: int | list[int], epoch: int) -> dict[str, Any]:
    try:
        image = source.read(sample)
    except BadSample as error:
        raise DataError(
            source.location(sample), f"sample {sample_key(source, sample)} cannot be read ({error})"
        ) from None
    name, text = label_text(label if isinstance(label, int) else tuple(one for one in label if one >= 0))
    about = {"__key__": source.key(sample), "__url__": source.location(sample), "__epoch__": epoch}
    return {**about, image_extension(image) or "jpg": image, name: text}
