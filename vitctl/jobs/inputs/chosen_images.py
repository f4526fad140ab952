"""Some images to look at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vitctl.data.images.decode import BadSample, open_picture
from vitctl.data.images.transforms import EvalTransform
from vitctl.data.inspect.overview import choose
from vitctl.data.source.views import Source
from vitctl.errors import DataError


@dataclass(frozen=True)
class ChosenImages:
    """Images to look at.

    Args:
        names: of files, or keys in their split.
        labels: -1 for none.
        class_names: in label order; empty for files.
        read: give the encoded images.
        text: where they are from, in words.
    """

    names: tuple[str, ...]
    labels: tuple[int, ...]
    class_names: tuple[str, ...]
    read: tuple[Callable[[], bytes], ...]
    text: str

    def __len__(self) -> int:
        return len(self.names)

    def pixels(
        self, transform: EvalTransform, done: Callable[[int, int], None] = lambda _done, _total: None
    ) -> Tensor:
        """The images as a network gets them before the value range.

        Args:
            transform: of the network.
            done: called with images read and their number.

        Returns:
            uint8 `[N, 3, S, S]`.

        Raises:
            DataError: an image cannot be used; it is named.
        """
        found = []
        for name, read in zip(self.names, self.read, strict=True):
            try:
                picture = open_picture(
                    read(), exif_orientation=transform.exif_orientation, truncated=transform.truncated
                )
                found.append(transform(picture))
            except BadSample as error:
                raise DataError(f"{name}: cannot be used ({error}); fix it, or leave it out") from None
            done(len(found), len(self))
        return torch.stack(found)


def choose_images(sources: Sequence[Source], num_images: int, seed: int, text: str) -> ChosenImages:
    """Images of some sources, chosen at random where there are more; of several labels the first counts.

    Args:
        sources: images that a person named, or an opened split. Labels count where all have the same classes.
        num_images: at most so many.
        seed: of the choice.
        text: what they are, in words.
    """
    firsts = np.cumsum([0, *map(len, sources)])
    chosen = np.array(choose(int(firsts[-1]), num_images, seed), np.int64)
    owners = np.searchsorted(firsts, chosen, side="right") - 1
    places = [
        (sources[owner], number)
        for owner, number in zip(owners, (chosen - firsts[owners]).tolist(), strict=True)
    ]
    (class_names, *others) = dict.fromkeys(tuple(source.class_names) for source in sources)
    labels = [
        -1 if others else int(source.labels(np.array([number])).reshape(-1)[0]) for source, number in places
    ]
    return ChosenImages(
        tuple(source.key(number) for source, number in places),
        tuple(labels),
        () if others else class_names,
        tuple(partial(source.read, number) for source, number in places),
        text,
    )
