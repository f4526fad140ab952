"""Keys of a recipe that do not affect results, for resuming, digests, and matching a run with its recipe."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from vitctl.errors import RecipeError
from vitctl.models.variants import LATER_FIELDS
from vitctl.recipe.images import TrainImages
from vitctl.recipe.load import load_recipe, recipe_names
from vitctl.recipe.schema import RENAMED, FrozenRecipe, Probe, Probing, Recipe, TrainRecipe
from vitctl.recipe.write import flat, toml_value, written_name

# Dotted keys, or tables. They change results by rounding at most; precision changes more and is not listed.
# With dropout, processes, micro_batch and compile change the random draws; a result then records them
# (`dropout_draws`).
RESULT_NEUTRAL = (
    "note",
    "log.",
    "known.",
    "machine.processes",
    "machine.workers",
    "machine.device",
    "machine.start_timeout",
    "machine.group_timeout",
    "machine.attention",
    "machine.checkpoint_blocks",
    "machine.compile",
    "machine.deterministic",
    "machine.micro_batch",
    "machine.sharding",
    "evaluation.batch_size",
    "evaluation.answers",
    "checkpoint.",
    "optimizer.lr_batch",  # the recipe of a run has the rate itself
    "weights.pinned",  # results record the digest of the weights themselves
    "data.root",
    "data.cache_gib",
    "data.patience",
    "data.test_split",  # results record the split and its digest beside its score
    "fewshot_probe.root",
    "fewshot_probe.cache_gib",
    "fewshot_probe.patience",
    "fewshot.cache",
    "probe.cache",
    "vtab.keep_checkpoints",
    "export.file",
    "export.push",
    "export.public",
    "export.web",
)

# Keys that are younger than the first runs, with their neutral values. A recipe that keeps these has the same
# digest as before the keys existed: earlier runs resume, verify and compare as before.
_ADDED: dict[str, Any] = {
    "export.opset": 20,
    "weights.licence": "",
    # `token_blocks` belongs to a probe's classifier, not to a recipe.
    **{f"model.{name}": None for name in {*LATER_FIELDS, "gelu", "norm_eps"} - {"token_blocks"}},
    "weights.preprocess": "",
    "weights.classifier": "",
    "rotary_rescale": 1.0,
    "finetune.freeze": "none",
    "optimizer.layer_decay": 1.0,
    "optimizer.layer_decay_numbering": "timm",
    "optimizer.head_lr_multiplier": 1.0,
    "optimizer.decay_on": "all",
    "optimizer.nesterov": False,
    "optimizer.clip_value": 0.0,
    "loss.class_weights": "none",
    "data.sampling": "shuffle",
    "evaluation.metric": "accuracy",
    "evaluation.patience": 0,
    "evaluation.answers": "",
    "evaluation.fit_temperature": False,
    "evaluation.thresholds": "",
    "finetune.head": "zero",
    "finetune.head_std": 0.02,
    "finetune.fresh_norm": False,
    "finetune.head_l2": 1024.0,
    "finetune.head_images": 50_000,
    "lora.rank": 0,
    "lora.alpha": 0.0,
    "lora.dropout": 0.0,
    "lora.targets": ("q", "v"),
    "lora.blocks": (),
    "distillation.teacher": "",
    "distillation.kind": "soft",
    "distillation.weight": 0.5,
    "distillation.temperature": 1.0,
    "data.test_split": "",
    "data.randaugment_rules": "torchvision",
    "data.randaugment_probability": 0.5,
    "data.randaugment_std": 0.0,
    "data.randaugment_increasing": False,
    "data.auto_augment": "",
    "data.crop_scale": (0.08, 1.0),
    "data.crop_ratio": (3 / 4, 4 / 3),
    "schedule.warmup_epochs": 0.0,
    "schedule.warmup_lr": 0.0,
    "data.vertical_flip": False,
    "data.augment3": False,
    "data.color_jitter": (),
    "data.random_erasing": 0.0,
    "data.erasing_mode": "pixel",
    "data.erasing_count": 1,
    "data.mixup_probability": 1.0,
    "data.cutmix_share": 0.5,
    "data.mixup_off_epoch": 0.0,
    "data.repeats": 1,
    "data.lanes": 0,
    "data.group_by": "",
    "fewshot_probe.group_by": "",
    "data.columns": "",
    "fewshot_probe.columns": "",
    "evaluation.flip_average": False,
    "export.flip_average": False,
    **{
        f"probe.{name}": Probing.model_fields[name].default
        for name in ("lrs", "steps", "batch_size", "momentum")
    },
}
# The same for jobs on frozen representations; jobs that train always had these keys.
_ADDED_FROZEN = {"data.eval_method": "square", "data.eval_resample": ""}


def idle_keys(recipe: Recipe) -> dict[str, str]:
    """Return keys that are set and do nothing, and why. Only those that earlier releases took: a run that
    has one goes on. The schema refuses the others.
    """
    found: dict[str, tuple[object, str]] = {}
    if isinstance(recipe, TrainRecipe):
        s = recipe.schedule
        for name in ("leaf_images", "threads"):
            is_set = getattr(s, name) != type(s).model_fields[name].default
            found[f"schedule.{name}"] = not s.lanes and is_set, "without schedule.lanes"
        falls = s.decay in ("linear", "cosine")
        found["schedule.end_lr"] = s.end_lr and not falls, f"for schedule.decay = '{s.decay}'"
    if isinstance(data := getattr(recipe, "data", None), TrainImages):
        is_part = data.subset_images or data.subset_fraction < 1
        found |= {
            "data.train_resize": (
                data.train_resize and data.crop not in ("random", "padded"),
                f"for crop = '{data.crop}'",
            ),
            "data.test_split": (data.test_split and data.synthetic, "for synthetic images"),
            "data.subset_seed": (data.subset_seed and not is_part, "without a subset"),
        }
    if isinstance(recipe, Probe):
        for name, methods in _OF_METHODS.items():
            is_set = getattr(recipe.probe, name) != Probing.model_fields[name].default
            why = f"for probe.method = '{recipe.probe.method}'"
            found[f"probe.{name}"] = is_set and recipe.probe.method not in methods, why
    idle = {}
    for key, (is_idle, why) in found.items():
        if is_idle:
            idle[key] = why
    return idle


# Keys of [probe] that some methods read.
_OF_METHODS = {
    "k": ("knn",),
    "temperature": ("knn",),
    "float64": ("knn", "linear"),
    "hold_out": ("logistic", "linear"),
    **dict.fromkeys(("blocks", "lrs", "steps", "batch_size", "momentum"), ("linear",)),
}


# What may change when a run is resumed. Tasks and seeds of a VTAB table select its runs, and change none of
# their numbers.
FREE_TO_CHANGE = (*RESULT_NEUTRAL, "vtab.tasks", "vtab.seeds")


# Locations of inputs, whose identity is known by their digests.
PLACES = ("data.path", "weights.source", "distillation.teacher")


def deciding_values(recipe: Recipe, free: tuple[str, ...] = FREE_TO_CHANGE) -> dict[str, str]:
    """Return the values that a run's numbers depend on, as TOML by dotted key, without keys in `free`."""
    names = dict(zip(RENAMED.values(), RENAMED, strict=True))
    added = _ADDED | (_ADDED_FROZEN if isinstance(recipe, FrozenRecipe) else {})
    values = {}
    for key, value in flat(recipe).items():
        if not key.startswith(free) and not (key in added and value == added[key]):
            values[names.get(key, key)] = toml_value(value)
    if values.get("data.eval_resize") == "":  # unset: earlier releases wrote 0
        values["data.eval_resize"] = "0"
    # SGD's decay was decoupled once: the same number is then another training, and must not resume as this
    # one.
    if values.get("optimizer.name") == '"sgd"' and float(values["optimizer.weight_decay"]):
        values["optimizer.weight_decay"] += " (coupled)"
    # A cosine ended at 0 once, whatever end_lr was.
    if values.get("schedule.decay") == '"cosine"' and float(values["schedule.end_lr"]):
        values["schedule.end_lr"] += " (of the cosine)"
    if recipe.job == "vtab" and not "vtab.light".startswith(free):
        values["vtab.light"] = "false"  # a key once; digests keep it
    return values


def with_added(values: Mapping[str, str]) -> dict[str, str]:
    """Add the younger keys that `deciding_values` leaves out, for a comparison key by key."""
    return {key: toml_value(value) for key, value in (_ADDED | _ADDED_FROZEN).items()} | dict(values)


def unlike_known(file: Path) -> str:
    """Return a sentence on how a run's recipe.toml differs from the recipe with its [known]; "" if equal.

    Keys that change no result, the seed and the start weights are ignored, and so is a recipe that is gone.
    """
    free, keys = (*RESULT_NEUTRAL, "seed", "weights.source"), []
    with suppress(RecipeError):
        named, run = load_recipe(written_name(file)), load_recipe(file)
        home = named.origin("known.points").partition(".toml:")[0]  # that recipe, or one that it extends
        known = load_recipe(home).recipe if home in recipe_names() else named.recipe
        one, two = deciding_values(known, free), deciding_values(run.recipe, free)
        keys = [key for key in sorted(one | two) if one.get(key) != two.get(key)] if home != "default" else []
    return f"[known] is of another recipe: this run differs in {', '.join(keys)}" if keys else ""
