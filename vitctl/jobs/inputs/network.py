"""The network of a recipe: from its [model], or from the header of the weights it starts from.

Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from vitctl.engine.journal import CHECKPOINTS, MODEL, step_folders, tensors_file
from vitctl.errors import CheckpointError, RecipeError
from vitctl.models.variants import Config, MaskedPatchConfig, ViTConfig, variant
from vitctl.models.weights.download import Fetch, cached, locate
from vitctl.models.weights.weights_file import read_config
from vitctl.recipe.schema import Finetune, Pretrain, Vtab
from vitctl.system.address import without_queries


class StoredNetwork(NamedTuple):
    """The network of stored weights, their path or address, and a line that names the run where none was
    given.
    """

    path: str
    config: Config
    taken: str = ""


def find_network(
    source: str, *, which: str = "", model: str = "", job: str = "finetune", fetch: Fetch = cached
) -> StoredNetwork:
    """The network of the weights that weights.source means; no tensor is read.

    Args:
        source, which, model, job: as `find_weights` takes them.
        fetch: downloads the file of an address; by default only the cache is used.

    Raises:
        CheckpointError: there are none, or they are at an address and not in the cache, and no model is
            named.
    """
    taken, (source,) = "", without_queries(source, error=CheckpointError)
    if "://" not in source:
        place = Path(source)
        if source == "newest":
            from vitctl.jobs.record.runs import newest_run

            place, taken = newest_run(job)
        path = None if which else _newest_file(place)
        if path is None:
            from vitctl.jobs.record.runs import choose_weights

            path, _ = choose_weights(place, which, by_size=True)
        path = locate(path, cached)
        source = str(path)
    else:
        if which:
            raise CheckpointError(
                f"{source}: --weights {which}: this is one set of weights; leave --weights out"
            )
        try:
            path = locate(source, fetch)
        except CheckpointError:
            if fetch is not cached:
                raise
            if model:
                return StoredNetwork(f"{source}, not downloaded yet: assumed to be a {model}", variant(model))
            raise CheckpointError(
                f"{source}: not downloaded yet, and --dry-run downloads nothing; name the model instead, "
                f"e.g. --model B/16"
            ) from None
    return StoredNetwork(source, read_config(path, model=model), taken)


def _newest_file(folder: Path) -> Path | None:
    """The weights of a run folder's newest checkpoint: all checkpoints of a run have the same network."""
    files = (step / tensors_file(MODEL) for step in step_folders(folder / CHECKPOINTS))
    return max(filter(Path.exists, files), default=None)


def model_config(recipe: Pretrain, num_classes: int) -> Config:
    """The network of a recipe's [model] for this many classes; masked patch prediction has none: the target
    sets the size of the output.

    Raises:
        RecipeError: the named row's family lacks a field that is set.
    """
    fields = {
        key: value
        for key, value in recipe.model.model_dump(exclude={"name", "pre_logits"}).items()
        if value is not None
    }
    masked = not needs_labels(recipe)
    config = variant(
        recipe.model.name,
        image_size=recipe.data.image_size,
        num_classes=0 if masked else num_classes,
        **fields,
    )
    if not masked and not recipe.model.pre_logits:
        return config
    if not isinstance(config, ViTConfig):
        raise RecipeError(
            f"model.name = '{recipe.model.name}': only a ViT has pre-logits or predicts masked patches"
        )
    if not masked:
        return replace(config, representation_size=config.hidden_size)
    if (recipe.data.mean, recipe.data.std) != ((0.5,) * 3, (0.5,) * 3):
        raise RecipeError(
            "loss.name = 'masked_patch': its targets need pixels in the range -1..1; leave data.mean and "
            "data.std at 0.5"
        )
    if type(config) is not ViTConfig:
        raise RecipeError(
            f"model.name = '{recipe.model.name}': masked patches are predicted by a plain ViT, e.g. B/16"
        )
    return MaskedPatchConfig(**vars(config), target=recipe.masked_patch.target)


def needs_labels(recipe: Pretrain | Finetune) -> bool:
    """Whether a training uses labels: masked patch prediction does not. Paper: Section 4.6"""
    return recipe.loss.name != "masked_patch"


def rates_of(recipe: Finetune | Vtab, stored: Config) -> dict[str, float]:
    """dropout and drop_path of a fine-tuning run: the recipe's, or those stored with the weights; 0 where
    nothing is stored.
    """
    wanted = {"dropout": recipe.dropout, "drop_path": recipe.drop_path}
    return {
        name: float(getattr(stored, name, 0.0) if rate == "as_stored" else rate)
        for name, rate in wanted.items()
    }


def rates_in_words(recipe: Finetune | Vtab, rates: Mapping[str, float]) -> str:
    """The rates as text, with a mark for those stored with the weights."""
    stored = {"dropout": recipe.dropout == "as_stored", "drop_path": recipe.drop_path == "as_stored"}
    return ", ".join(f"{name} {rate:g}{' as stored' if stored[name] else ''}" for name, rate in rates.items())


def unseen_pixels(config: Config, image_size: int = 0) -> list[str]:
    """A warning where the image size is not a multiple of the patch size, as in the paper's H/14 at 384."""
    if not isinstance(config, ViTConfig) or config.map_channels != 3:
        return []
    size, patch = image_size or config.image_size, config.patch_size
    seen = size - size % patch
    if seen == size:
        return []
    return [
        f"image size {size} is not a multiple of the patch size {patch}: the last {size - seen} rows and "
        f"columns of pixels are "
        f"not used; {seen} or {seen + patch} would use all"
    ]
