"""Find the weights that a job starts from or scores, and load them into a model."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from vitctl.data.images.transforms import EvalTransform, fill_colour
from vitctl.data.source.views import Source
from vitctl.engine.agreement import check_inputs
from vitctl.engine.journal import RECIPE, Journal
from vitctl.engine.runtime import Runtime, raised_on_all
from vitctl.errors import CheckpointError, RecipeError, explaining
from vitctl.jobs.record.result import RUNS, ChosenWeights, choose_weights, set_of, weights_place
from vitctl.models.build import Model, build, load_state, resized, transfer, transferred
from vitctl.models.variants import Config, downstream, with_classifier, with_fresh_norm
from vitctl.models.weights.licence import USUALLY_DINOV3, licence_sentence
from vitctl.models.weights.meta import (
    COLOURS,
    HALF,
    KEYS,
    assumed_line,
    assumed_values,
    require_meta,
    stored_temperature,
)
from vitctl.models.weights.weights_file import Weights, check_numbers, read_weights
from vitctl.recipe.images import OBJECTNET_RESIZE, OBJECTNET_SIZE, StoredTransform, check_letterbox
from vitctl.recipe.schema import Evaluate, WeightsRecipe
from vitctl.recipe.sections import StartWeights

OBJECTNET, RESTRICTED = "objectnet", "objectnet_restricted"
_REPLACING = ("mean", "std", "gelu", "norm_eps", "position_resize")
OF_OBJECTNET = (OBJECTNET, RESTRICTED)


@dataclass(frozen=True)
class FoundWeights:
    """Weights, and how they were found.

    Args:
        path: a path, or an address as given.
        assumed: recipe key -> value that is not stored with the weights.
        replaced: which recorded values [weights] overrides.
    """

    path: str
    weights: Weights
    chosen: ChosenWeights = field(default_factory=ChosenWeights)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    replaced: str = ""

    def log(self, journal: Journal, *said: str) -> None:
        licence = self.weights.meta.get("licence", "")
        said = (self.chosen.text, *said, f"licence: {licence}" if licence else "")
        journal.write("weights", step=0, path=self.path, text="; ".join(filter(None, said)))
        journal.say("warning", *self.warnings)

    @property
    def warnings(self) -> list[str]:
        """Return what to know about the weights, see `remarks`."""
        said = remarks(self.weights.meta, assumed_line(self.assumed))
        return [*said, *filter(None, [self.replaced])]


def remarks(meta: Mapping[str, Any], assumed: str) -> list[str]:
    """Return what users of weights are told, one line each: licence, the reader's notes, assumed values."""
    licence = meta.get("licence", "")
    known = [text for text in meta.get("remarks") or () if not (licence and text == USUALLY_DINOV3)]
    return [*filter(None, (licence and licence_sentence(licence), *known, assumed))]


def find_weights(
    source: str,
    runs: Path = RUNS,
    *,
    which: str = "",
    pinned: str = "",
    model: str = "",
    job: str = "",
    given: Mapping[str, Any] = MappingProxyType({}),
    later: bool = False,
) -> FoundWeights:
    """Find the weights that a recipe's [weights] means.

    Args:
        source: a weights file of any known format, a checkpoint folder, a run folder, an address, or
            "newest".
        runs: where "newest" looks for the newest finished run.
        which, pinned: which weights of a run or a checkpoint, see `choose_weights`.
        model: model name, for what a foreign file's shapes cannot tell.
        job: decides what "newest" is, see `newest_run`.
        given: values that replace recorded or assumed ones, by the names of `assumed.KEYS`.
        later: see `read_weights`.

    Raises CheckpointError if there are none; the message says where vitctl looked.
    """
    place, _ = weights_place(source, which, job, runs)
    path, chosen = place, ChosenWeights()
    if isinstance(place, Path):
        path, chosen = choose_weights(place, which, pinned=pinned)
    weights = read_weights(str(path), model=model or None, later=later, which=set_of(which))
    if weights.meta.pop("averaged", False):
        chosen = replace(chosen, averaged=True)
    return _given(FoundWeights(str(path), weights, chosen), given, job)


def _given(found: FoundWeights, given: Mapping[str, Any], job: str) -> FoundWeights:
    """Return the weights with the given values, and what is still assumed. Raises CheckpointError."""
    weights = found.weights
    in_config = {name: given[name] for name in given if name in ("gelu", "norm_eps")}
    if odd := [name for name in in_config if not hasattr(weights.config, name)]:
        raise CheckpointError(found.path, f"weights.{odd[0]} is for Vision Transformers", "leave it out")
    meta = weights.meta | {name: given[name] for name in given if name not in (*in_config, "classifier")}
    recorded = {name: weights.meta.get(name, getattr(weights.config, name, None)) for name in _REPLACING}
    others = [
        f"{KEYS[name]} = {given[name]} (recorded: {recorded[name]})"
        for name in _REPLACING
        if given.get(name) not in (None, recorded[name])
        and recorded[name] is not None
        and name not in (weights.meta.get("assumed") or ())
    ]
    replaced = f"{', '.join(others)}: other than the weights record" if others else ""
    if replaced and weights.meta.keys() & {"mean", "std"} & given.keys():
        replaced += "; a temperature that was fitted before is for the recorded values"
    scoring = job in ("evaluate", "export")
    if (reason := meta.pop("unsupported", "")) and scoring and "eval_method" not in meta:
        raise CheckpointError(found.path, reason)
    if "eval_resize" in given:
        meta.pop("eval_share", None)
    if given.get("licence", meta.get("licence")) != weights.meta.get("licence"):
        meta.pop("licence_link", None)  # the link was for the recorded licence
    if left := [name for name in meta.pop("assumed", ()) if name not in given]:
        meta["assumed"] = left
    config = replace(weights.config, **in_config)
    try:
        config = with_classifier(config, given.get("classifier", ""))
    except RecipeError as error:
        raise CheckpointError(found.path, error) from None
    state = weights.state
    if config.num_classes < weights.config.num_classes:  # the head was trained for another classifier
        parts = ("head.", "pre_logits.", "pool.")
        state = {name: tensor for name, tensor in state.items() if not name.startswith(parts)}
    assumed = assumed_values(meta, config, scoring=scoring)
    described = Weights(config, state, meta)
    return _check_meta(replace(found, weights=described, assumed=assumed, replaced=replaced))


def run_of(path: str) -> Path | None:
    """Return the run folder that contains a weights file; None if there is none, or for an address."""
    folders = () if "://" in path else Path(path).parents
    return next((folder for folder in folders if (folder / RECIPE).is_file()), None)


def _check_meta(found: FoundWeights, names: tuple[str, ...] = ("mean", "std")) -> FoundWeights:
    """Return the weights if the metadata that a job needs is stored with them. Raises CheckpointError."""
    try:
        require_meta(found.weights.meta, names)
    except CheckpointError as error:
        raise CheckpointError(found.path, error) from None
    return found


def scored_weights(recipe: Evaluate, found: FoundWeights | None = None) -> FoundWeights:
    """Return `found`, or the recipe's weights, if the pre-processing that a score needs is stored."""
    return _check_meta(found or weights_of(recipe), ("image_size", "eval_method", "eval_resize", "resample"))


def weights_of(recipe: WeightsRecipe, *, later: bool = False) -> FoundWeights:
    wanted = recipe.weights
    found = find_weights(
        wanted.source,
        which=wanted.which,
        pinned=wanted.pinned,
        model=wanted.model,
        job=recipe.job,
        given=_given_values(recipe),
        later=later,
    )
    if recipe.job not in ("evaluate", "export"):
        return found
    temperature = stored_temperature(found.path, lambda: found.weights.digest)
    if temperature is not None:
        meta = {"temperature": temperature.temperature, "temperature_sha256": temperature.data_sha256}
        found = replace(found, weights=replace(found.weights, meta=found.weights.meta | meta))
    return found


def checked_by_one(found: FoundWeights, runtime: Runtime) -> FoundWeights:
    """Return weights with their digest; the main process alone checks tensors that are read later.

    Raises CheckpointError, the same on every process, if a tensor is not finite.
    """
    if not found.weights.is_later:
        return found
    digest = ""
    with raised_on_all():
        try:
            if runtime.is_main:
                check_numbers(found.weights.state)
                digest = found.weights.digest
        except CheckpointError as error:
            raise CheckpointError(found.path, error) from error
    return replace(found, weights=replace(found.weights, sha256=runtime.broadcast(digest)))


def planned_weights(
    recipe: WeightsRecipe, path: str, config: Config, meta: Mapping[str, Any]
) -> FoundWeights:
    """Return the weights of a recipe as far as their header tells: without tensors."""
    return _given(FoundWeights(path, Weights(config, {}, dict(meta))), _given_values(recipe), recipe.job)


def _given_values(recipe: WeightsRecipe) -> dict[str, Any]:
    """Return what a recipe states about its weights, by the names of `meta.KEYS`."""
    wanted, data = recipe.weights, recipe.data
    given: dict[str, Any] = {
        "gelu": wanted.gelu,
        "norm_eps": wanted.norm_eps,
        "position_resize": wanted.position_resize,
        "licence": wanted.licence,
        "classifier": wanted.classifier,
    }
    colours = COLOURS.get(wanted.preprocess, {"mean": wanted.mean, "std": wanted.std})
    given |= {name: value and list(value) for name, value in colours.items()}
    if isinstance(data, StoredTransform):
        given |= {
            "eval_method": data.eval_method,
            "eval_resize": data.eval_resize,
            "resample": data.eval_resample,
        }
    return {name: value for name, value in given.items() if value}


def stored_eval_transform(recipe: Evaluate, meta: Mapping[str, Any]) -> EvalTransform:
    """Return the pre-processing of [data]; unset values are those stored with the weights.

    ObjectNet's labels take BiT's. At another image size the centre crop keeps its share: 224 out of 256
    becomes 336 out of 384.

    Raises:
        RecipeError: there is no room for the crop.

    Paper: BiT, Appendix B (ObjectNet)
    """
    data = recipe.data
    size, method, resize = meta["image_size"], meta["eval_method"], meta["eval_resize"]
    if recipe.evaluation.labels in OF_OBJECTNET:
        size, method, resize = OBJECTNET_SIZE, "shorter_side", OBJECTNET_RESIZE
    method = data.eval_method or method
    image_size = data.image_size or size
    share = meta.get("eval_share")
    if method == "letterbox":
        try:
            check_letterbox(method, image_size, data.eval_resize)
        except ValueError as error:
            raise RecipeError(str(error)) from None
        resize = image_size
    elif data.eval_resize:
        resize = data.eval_resize
    elif share and resize and size == meta["image_size"]:
        resize = math.floor(image_size / share)  # timm's rule
    else:
        resize = round(resize * image_size / size)
    if 0 < resize < image_size:
        raise RecipeError(
            f"data.eval_resize = {resize} is smaller than the crop of {image_size} pixels",
            fix=f"set it to at least {image_size}",
        )
    upright = (
        meta.get("exif_orientation", data.turns_upright)
        if data.exif_orientation == "auto"
        else data.turns_upright
    )
    return EvalTransform(
        image_size,
        method=method,
        resize=resize,
        resample=data.eval_resample or meta["resample"],
        exif_orientation=upright,
        truncated=data.truncated,
        fill=fill_colour(meta.get("mean") or HALF),
    )


@explaining()
def load_model(
    source: str | Path,
    *,
    weights: str = "",
    model: str = "",
    image_size: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Model, dict[str, Any]]:
    """Load a network with its trained weights, in evaluation mode on the CPU, and its stored metadata.

    Example:
        from vitctl import load_model

        model, meta = load_model("runs/mine")
        size = meta["image_size"]
        images = torch.rand(2, 3, size, size)  # colours between 0 and 1
        mean, std = (torch.tensor(meta[name]).view(3, 1, 1) for name in ("mean", "std"))
        logits = model((images - mean) / std)

    Args:
        source: a run, a checkpoint or a weights file of any known program, or an `https://`, `hf://` or
            `gs://` address.
        weights: for a run: "last", "best" or a step; "ema" or "model" selects averaged weights or not. ""
            chooses as `vitctl evaluate` does.
        model: model name, e.g. "B/16", for what the shapes in a foreign file cannot tell.
        image_size: width and height in pixels, if not the stored size: the position embedding is resized; 0
            keeps the stored size.
        dtype: of the parameters.

    Returns:
        the network, a `torch.nn.Module`: images `[B, 3, image_size, image_size]`, as (colour - mean) / std,
        to logits `[B, K]`. Its `features(images)` is the representation `[B, R]` before the head.
        A dictionary: `mean` and `std` of three colours between 0 and 1, `image_size` in pixels, and what else
        is known, such as `class_names` in the order of the logits.

    Raises:
        VitctlError: the weights do not exist, are damaged, or lack mean and std.

    Paper: Section 3.1, Section 3.2
    """
    if not dtype.is_floating_point:
        raise CheckpointError(f"dtype {dtype}", "should be a floating-point type such as torch.bfloat16")
    found = find_weights(str(source), which=weights, model=model)
    network, size = loaded_model(found, image_size, dtype)
    return network.eval(), {**found.weights.meta, "image_size": size}


def loaded_model(found: FoundWeights, image_size: int, dtype: torch.dtype) -> tuple[Model, int]:
    """Return the stored model with its head, and its image size in pixels; 0 keeps the stored size."""
    weights = found.weights
    size = image_size or weights.meta.get("image_size") or weights.config.image_size
    model = build(replace(weights.config, image_size=size), seed=None, dtype=dtype)
    state, _ = resized(model, weights.config, weights.state, weights.meta.get("position_resize", "zoom"))
    load_state(model, state)
    return model, model.config.image_size


def random_in_words(wanted: StartWeights, seed: int) -> str:
    """Return a line that says the weights are random; "" if [weights] asks for the stored ones."""
    is_random = wanted.initialise == "random"
    return f"random weights (seed {seed}), the architecture alone is taken" if is_random else ""


def transferred_model(
    weights: Weights,
    wanted: StartWeights,
    *,
    num_classes: int,
    image_size: int,
    dropout: float,
    drop_path: float,
    rotary_rescale: float = 1.0,
    seed: int,
    dtype: torch.dtype,
    keeps_head: bool = False,
    fresh_norm: bool = False,
) -> tuple[Model, dict[str, Tensor], list[str]]:
    """Return the stored body under a new zero head for `num_classes` (under its own if it `keeps_head`), or
    only its architecture with fresh weights; with a `fresh_norm` between both, see `with_fresh_norm`.

    Returns:
        the model; the tensors to start from, if the weights are read later and the model is on the meta
        device; and lines that say what was done.
    """
    config = with_fresh_norm(weights.config) if fresh_norm else weights.config
    target = downstream(
        config,
        num_classes=num_classes,
        image_size=image_size,
        dropout=dropout,
        drop_path=drop_path,
        rotary_rescale=rotary_rescale,
    )
    text = random_in_words(wanted, seed)
    device = "meta" if weights.is_later else "cpu"
    model = build(target, seed=seed if text else None, dtype=dtype, device=device)
    if text:
        return model, {}, [text]
    given = model, config, weights.state
    how: Any = {"method": weights.meta.get("position_resize", "zoom"), "keeps_head": keeps_head}
    how |= {"fresh_norm": fresh_norm}
    return (model, *transferred(*given, **how)) if weights.is_later else (model, {}, transfer(*given, **how))


def check_found(runtime: Runtime, found: FoundWeights, sources: Iterable[Source]) -> None:
    """Compare this process's weights and images with those of rank 0, see `check_inputs`."""
    check_inputs(runtime, found.weights.state, found.weights.config, found.weights.meta, sources)
