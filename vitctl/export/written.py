"""What a writer of a format is given, what it gives back, and how its files become those of the run:
verified, all or none.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitctl.errors import CheckpointError
from vitctl.export.given_images import GivenImages
from vitctl.export.graph import Raw
from vitctl.export.proof import Compared, Run, Score, compare, score
from vitctl.jobs.inputs.weights import FoundWeights
from vitctl.jobs.resizing import Resizing
from vitctl.recipe.sections import Export
from vitctl.system.files import flush


@dataclass(frozen=True)
class Order:
    """What a writer needs.

    Args:
        found: the weights.
        model: what is exported.
        run_dir: gets the files.
        name: of single files, without suffix.
        options: [export].
        resizing: how the other program pre-processes images, where that differs.
        images: that the user gives; None: none.
        own_score: of the float32 model on them.
    """

    found: FoundWeights
    model: Raw
    run_dir: Path
    name: str
    options: Export
    resizing: Resizing | None
    images: GivenImages | None
    own_score: Callable[[], Score]

    @property
    def resizing_note(self) -> tuple[str, ...]:
        """A line for the user, or none."""
        return (self.resizing.note,) if self.resizing else ()

    def scores(self, path: Path, run: Run) -> Compared:
        """A written file beside the float32 model on the images given; empty where there are none.

        Raises:
            CheckpointError: the file loses accuracy.
        """
        if self.images is None:
            return Compared({}, ())
        given = self.images
        feeds = (given.squares if self.model.preprocess is None else given.photographs)(given.source)
        return compare(
            path, score(path, run, feeds, given), self.own_score(), given, self.options.max_accuracy_loss
        )


@dataclass(frozen=True)
class Exported:
    """A verified file.

    Args:
        path: the file.
        difference: the largest, to the model, in standard deviations of the logits.
        notes: what its users should know.
        scores: accuracy on the images given.
        beside: files that belong to it.
    """

    path: Path
    difference: float
    notes: tuple[str, ...]
    scores: dict[str, Any] = field(default_factory=dict)
    beside: tuple[Path, ...] = ()


@contextmanager
def partial_folder(run_dir: Path, name: str, shown: Path | None = None) -> Iterator[Path]:
    """An empty folder in which files are written and verified; it is gone afterwards.

    Args:
        run_dir: of the export.
        name: of the folder.
        shown: where the files go to, which messages name instead; None: the run's folder.
    """
    aside = run_dir / f".{name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
    except CheckpointError as error:
        raise CheckpointError(str(error).replace(str(aside), str(shown or run_dir))) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def kept(aside: Path, exported: Exported) -> Exported:
    """Move verified files into the folder of the exported one, which comes last, because it refers to the
    others.
    """
    path = exported.path
    others = sorted(file for file in aside.iterdir() if file.name != path.name)
    for file in (*others, aside / path.name):
        flush(file)
    path.parent.mkdir(exist_ok=True)
    for file in (*others, aside / path.name):
        file.replace(path.parent / file.name)
    flush(path.parent)
    return replace(exported, beside=tuple(path.parent / file.name for file in others))
