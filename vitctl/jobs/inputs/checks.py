"""Fit a recipe to the user's data and check everything that can be checked before the first process starts.

The data may be folders of photographs, or have other splits than the recipe names.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vitctl.data.datasets.catalog import (
    find_data_set,
    is_photographs,
    missing_shards,
    original_splits,
)
from vitctl.data.datasets.converted import made_of
from vitctl.data.datasets.readers.imagenet import is_part_of_imagenet
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.source.locate import locate_splits, no_index, with_split
from vitctl.data.source.splits import (
    NOT_TRAINED,
    ROLES,
    TEST,
    TRAIN,
    VALIDATION,
    DefaultSplits,
    default_splits,
    is_test,
)
from vitctl.data.source.views import label_shape
from vitctl.engine.journal import CHECKPOINTS, MODEL, RECIPE, RUN_FILES, run_of, step_folders, tensor_files
from vitctl.engine.schedule import (
    TASK_IMAGES,
    batch_too_large,
    check_falls,
    checked_steps,
    fit_schedule,
    lanes_of,
    needs_num_images,
)
from vitctl.errors import CheckpointError, DataError, RecipeError, VitctlError, refuse
from vitctl.jobs.inputs.data import (
    SPLITS,
    Inputs,
    at_size,
    check_order,
    chosen_tasks,
    corrected,
    default_lanes,
    open_inputs,
    open_scored,
    scored_place,
)
from vitctl.jobs.record.result import choose_weights, newest_run, set_of, start_weights, weights_place
from vitctl.jobs.record.start_folder import at_start
from vitctl.models.variants import Config, check_lora, downstream, variant, with_classifier
from vitctl.models.weights.download import CONFIG, Fetch, cached, fetch, locate
from vitctl.models.weights.header import check_named, own_header
from vitctl.models.weights.meta import activation_of, distinct, no_head
from vitctl.models.weights.network import read_network
from vitctl.recipe.images import Place
from vitctl.recipe.load import Loaded, Override, load_recipe, recipe_names, with_overrides
from vitctl.recipe.neutral_keys import idle_keys
from vitctl.recipe.schema import (
    Evaluate,
    ExportRecipe,
    Finetune,
    FrozenRecipe,
    Pretrain,
    Recipe,
    Vtab,
    WeightsRecipe,
    frozen_places,
    lora_of,
    rates_of,
)
from vitctl.recipe.write import toml_value, written_name
from vitctl.system.files import check_free
from vitctl.system.remote import GaveUpError, is_remote
from vitctl.system.text import count_text, typed, typed_command

_MOST_EXPLAINED = 3  # data sets whose missing files are listed one by one


_ASKED_FOR = "train+test+validation+val"  # an address cannot be listed
_CALIBRATION = "data.calibration_split"
_FLAG = "the splits of --data"
HELD_OUT = (
    "if there are none, train with --set data.train_split='train[:80%]' --set data.eval_split='train[90%:]', "
    "and name --split 'train[80%:90%]'"
)


_TAKES = "--data takes a folder of class folders or of shards, a table or an archive"
Fitted = tuple[dict[str, Any], str]  # values to be set in a recipe, by key, and a line that says why


def fit_splits(loaded: Loaded, *, chooses: bool = False) -> tuple[Loaded, str]:
    """Replace a recipe's default splits by the splits that data.path has. Splits that the user named stay.

    The result is written into the run's recipe, which tells later jobs what was trained on.

    Args:
        chooses: whether the score of a training chooses among runs; evaluation.select_best chooses, too.

    Returns:
        the recipe, and a line that explains the change; "" if nothing changed.

    Raises:
        DataError: data.path cannot be read. For an address, raised only if its server fails every attempt.
    """
    recipe = loaded.recipe
    data = getattr(recipe, "data", None)
    if not isinstance(data, Place) or getattr(data, "synthetic", False) or getattr(data, "mixture", None):
        return loaded, ""
    if not data.path and data.dataset and isinstance(recipe, Pretrain | Finetune):
        chooses, found = chooses or recipe.evaluation.select_best, [*find_data_set(data.dataset).sizes]
        fitting = default_splits(found) if chooses and is_test(data.eval_split) else None
        values, note = _both(loaded, "", data.eval_split, found, fitting, chooses) if fitting else ({}, "")
        values |= _tested(loaded, values, found, fitting) if fitting else {}
        return with_overrides(loaded, [Override(*one, _FLAG) for one in values.items()]), note
    if not data.path and not data.dataset and isinstance(recipe, Evaluate):
        values, note = _of_run(loaded, recipe)
        return with_overrides(loaded, [Override(*one, _FLAG) for one in values.items()]), note
    if not data.path:
        return loaded, ""
    source = recipe.weights.source if isinstance(recipe, Evaluate | FrozenRecipe | ExportRecipe) else ""
    if source and not data.columns and (columns := columns_of(source, data.path)):
        loaded = with_overrides(loaded, [Override("data.columns", columns, _FLAG)])
        recipe, data = loaded.recipe, data.model_copy(update={"columns": columns})
    try:
        if is_photographs(data.path):
            found = list(original_splits(data.path, data.columns))
        else:
            found = list(locate_splits(data.path, _ASKED_FOR, columns=data.columns))
    except DataError as error:
        if isinstance(error, GaveUpError) or not is_remote(data.path):
            raise
        return loaded, ""  # opening the data later raises the error
    if not found and (parted := with_split(data.path)):
        flag = "--check-data" if isinstance(recipe, ExportRecipe) else "--data"
        by = " --set data.train_split=" if hasattr(data, "train_split") else " --split "
        given = "" if parted[1] == "train" and "train_split" in by else f"{by}{typed(parted[1])}"
        raise DataError(data.path, "no such folder", f"give {flag} {typed(parted[0])}{given}")
    if not (found or is_remote(data.path) or Path(data.path).exists() or no_index(data.path).fix):
        weights = getattr(recipe, "weights", None)
        if weights is not None and weights.source == "newest":
            check_not_missing(recipe)
        is_known = isinstance(recipe, Pretrain) and data.dataset
        planned = f"; without --data, --dry-run plans for {data.dataset}" if is_known else ""
        raise no_index(data.path, fix=f"{_TAKES}{planned}")
    fitting, values, note = default_splits(found), dict[str, str](), ""
    if fitting is None:
        return loaded, ""
    if isinstance(recipe, Evaluate | ExportRecipe):
        values, note = _scored(loaded, data.eval_split, found, fitting)
        if isinstance(recipe, ExportRecipe) and values and not _is_from_flag(loaded, _CALIBRATION):
            values[_CALIBRATION] = fitting.train
    elif isinstance(recipe, FrozenRecipe) and not (recipe.data.datasets or Path(data.path).name in SPLITS):
        train, scored = recipe.data.train_split or TRAIN, data.eval_split or TEST
        values, note = _both(loaded, train, scored, found, fitting)
    elif isinstance(recipe, Pretrain | Finetune) and data.eval_split:
        chooses = chooses or recipe.evaluation.select_best
        values, note = _both(loaded, recipe.data.train_split, data.eval_split, found, fitting, chooses)
        values |= _tested(loaded, values, found, fitting) if chooses else {}
    overrides = [Override(key, value, _FLAG) for key, value in values.items()]
    return (with_overrides(loaded, overrides) if overrides else loaded), note


def training_of(source: str) -> tuple[Path, Pretrain | Finetune | None]:
    """Return the run of some weights, and what it trained; None if it is none of a training."""
    if source == "newest":
        with suppress(CheckpointError):  # the job says that there is none
            source = str(newest_run("evaluate")[0])
    run = run_of(Path(source))
    trained = at_start(load_recipe(str(run / RECIPE)).recipe, run) if (run / RECIPE).is_file() else None
    return run, trained if isinstance(trained, Pretrain | Finetune) else None


def columns_of(source: str, path: str) -> str:
    """Return what --columns said of this data when the weights were trained on it; "" for other data."""
    data = trained.data if (trained := training_of(source)[1]) else None
    is_same = data is not None and data.columns and Path(data.path).resolve() == Path(path).resolve()
    return data.columns if data is not None and is_same else ""


def was_trained_on(source: str, path: str) -> bool:
    """Whether the run of some weights trained on this data, or on shards of it."""
    place = trained.data.path if (trained := training_of(source)[1]) else ""
    return bool(place) and Path(made_of(place)).resolve() == Path(path).resolve()


def _of_run(loaded: Loaded, recipe: Evaluate) -> Fitted:
    """Take the images that the run of the weights scored: those of its test, or of its scores."""
    run, trained = training_of(recipe.weights.source)
    if trained is None or trained.data.synthetic:
        return {}, ""
    values = scored_place(trained.data) | {
        "data.eval_split": trained.data.test_split or trained.data.eval_split
    }
    split = recipe.data.eval_split if _is_from_flag(loaded, "data.eval_split") else values["data.eval_split"]
    note = f"no --data: '{split}' of {values['data.path'] or values['data.dataset']}, the data of {run}"
    return {key: value for key, value in values.items() if not _is_from_flag(loaded, key)}, note


def _both(
    loaded: Loaded,
    train: str,
    scored: str,
    found: list[str],
    fitting: DefaultSplits,
    chooses: bool = False,
) -> Fitted:
    keys, note = ("data.train_split", "data.eval_split"), fitting.note
    if any(_is_from_flag(loaded, key) for key in keys):
        return {}, ""
    if _has(found, train) and _has(found, scored) and not (chooses and is_test(scored)):
        values = _sweep(loaded, found, fitting)
        return values, note if values else ""
    if len(found) == 1 and found[0] in NOT_TRAINED:
        name = found[0]
        raise DataError(
            f"the data holds '{name}' only, and no split to train on",
            fix=(
                "if the shards are incomplete, run `vitctl data shards` again; to train on a part of "
                f"it: --set data.train_split='{name}[:80%]' --set data.eval_split='{name}[80%:]'"
            ),
        )
    pair = fitting.train, fitting.scored
    if chooses and ROLES.get(fitting.scored) != VALIDATION:
        pair = fitting.lr_train, fitting.lr_validation
        note = f"'{pair[0]}' is trained on, '{pair[1]}' chooses; test images choose nothing"
    return dict(zip(keys, pair, strict=True)) | _sweep(loaded, found, fitting), note


def _tested(
    loaded: Loaded, values: Mapping[str, str], found: list[str], fitting: DefaultSplits
) -> dict[str, str]:
    """Choose the split to score once, where other images choose and none is named."""
    data, test = getattr(loaded.recipe, "data", None), fitting.scored
    used = [values.get(f"data.{name}", getattr(data, name)) for name in ("train_split", "eval_split")]
    names = {part.partition("[")[0].strip() for one in used for part in one.split("+")}
    is_spare = (is_test(test) and test not in names) or (len(found) == 1 and "data.eval_split" in values)
    is_free = loaded.origin("data.test_split") == "default"
    return {"data.test_split": test} if is_spare and is_free else {}


def _sweep(loaded: Loaded, found: list[str], fitting: DefaultSplits) -> dict[str, str]:
    """Choose the sweep's splits: validation or training images, never the test images."""
    keys, recipe = ("sweep.train_split", "sweep.eval_split"), loaded.recipe
    if not isinstance(recipe, Finetune) or any(_is_from_flag(loaded, key) for key in keys):
        return {}
    takes_validation = (
        recipe.sweep.lrs
        and fitting.lr_validation in found
        and all(loaded.origin(key) == "default" for key in keys)
    )
    if len(found) > 1 and _has(found, recipe.sweep.train_split) and not takes_validation:
        return {}
    return dict(zip(keys, (fitting.lr_train, fitting.lr_validation), strict=True))


def _scored(loaded: Loaded, scored: str, found: list[str], fitting: DefaultSplits) -> Fitted:
    """Choose the split to score if the data has only one, and a validation split to fit a temperature."""
    recipe, validation = loaded.recipe, next((name for name in found if ROLES.get(name) == VALIDATION), "")
    if _is_from_flag(loaded, "data.eval_split"):
        return {}, ""
    if validation and isinstance(recipe, Evaluate) and recipe.evaluation.fit_temperature:
        note = f"'{validation}' chooses the temperature; test images choose nothing"
        return {"data.eval_split": validation}, note
    if _has(found, scored):
        return {}, ""
    value, note = fitting.scored, f"'{fitting.scored}' is scored"
    if len(found) == 1 and not found[0].startswith(TRAIN):
        value, note = found[0], f"'{found[0]}', the only split, is scored"
    elif len(found) == 1:
        note = (
            f"no test split: scoring the held-out '{value}'; --split {found[0]} also scores the training "
            "images"
        )
    return {"data.eval_split": value}, note


def _has(found: list[str], expression: str) -> bool:
    return all(part.partition("[")[0].strip() in found for part in expression.split("+"))


def _is_from_flag(loaded: Loaded, key: str) -> bool:
    return loaded.origin(key).startswith("--")


class StoredNetwork(NamedTuple):
    """The network of stored weights; `taken` names the run if weights.source was "newest"."""

    path: str
    config: Config
    taken: str = ""
    meta: Mapping[str, Any] = MappingProxyType({})


def network_of(recipe: WeightsRecipe, fetch: Fetch = cached) -> StoredNetwork:
    """Find the network that a recipe's [weights] means, see `find_network`."""
    wanted = recipe.weights
    return find_network(
        wanted.source,
        which=wanted.which,
        pinned=wanted.pinned,
        model=wanted.model,
        job=recipe.job,
        classifier=wanted.classifier,
        fetch=fetch,
    )


def find_network(
    source: str,
    *,
    which: str = "",
    pinned: str = "",
    model: str = "",
    job: str = "finetune",
    classifier: str = "",
    fetch: Fetch = cached,
) -> StoredNetwork:
    """Find the network that weights.source means; no tensor is read.

    Args:
        source, which, pinned, model, job: see `find_weights`.
        classifier: weights.classifier.
        fetch: downloads the file at an address; by default only the cache is used.

    Raises CheckpointError if there are no weights, or they are at an address, not cached, and no model is
    named.
    """
    place, taken = weights_place(source, which, job)
    if isinstance(place, Path):
        # All checkpoints of a run have the same network: the newest file tells it.
        files = (tensor_files(step).get(MODEL) for step in step_folders(place / CHECKPOINTS))
        path = None if which or pinned else max(filter(None, files), default=None)
        if path is None:
            path, _ = choose_weights(place, which, by_size=True, pinned=pinned)
        path = locate(path, cached)
        config, meta = read_network(path, model=model, which=set_of(which))
        return StoredNetwork(str(path), with_classifier(config, classifier), taken, meta)
    try:
        path = locate(place, fetch)
    except CheckpointError:
        if fetch is not cached:
            raise
        if named := _named_network(place):
            check_named(named, model)
            said = f"{place}, not downloaded yet: its size is that of its name"
            return StoredNetwork(said, with_classifier(named, classifier))
        if model:
            return StoredNetwork(f"{place}, not downloaded yet: assumed to be a {model}", variant(model))
        raise CheckpointError(
            place,
            "not downloaded yet, and --dry-run downloads nothing",
            f"name their model, too, e.g. --model {_model_in(place)}",
        ) from None
    config, meta = read_network(path, model=model, which=set_of(which))
    return StoredNetwork(place, with_classifier(config, classifier), meta=meta)


def _model_in(address: str) -> str:
    from vitctl.models.weights.names import model_in

    return model_in(address)


def _named_network(address: str) -> Config | None:
    from vitctl.models.weights.names import named_network

    return named_network(address)


def start_recipe(
    source: str, *, which: str = "", model: str = "", download: Callable[[str], None] = lambda _: None
) -> tuple[str, str]:
    """Return the recipe that suits start weights, and a line that says so.

    Args:
        source, which, model: as `find_weights` takes them.
        download: gets the weights of an address whose name does not tell their family.

    Returns:
        its name, "" for the paper's; and "" in place of the line where the weights are vitctl's own, and were
        trained by the paper's recipes.
    """
    from vitctl.models.weights.containers import read_json
    from vitctl.models.weights.names import FAMILIES, family_of, full_address, stored_family

    source, folder = full_address(source), Path(source)
    key, config = None, None
    if source == "newest" or (folder / RECIPE).is_file():
        name = written_name(folder / RECIPE) if source != "newest" else ""
        key = family_of(name) if name in recipe_names() else ""
        if not key:
            return "", ""
    elif "://" in source:
        key, config = family_of(source.removeprefix("hf://timm/")), _named_network(source)
    if key is None or (key and config is None):
        try:
            if "://" in source:
                download(source)
            found = find_network(source, which=which, model=model)
            path = locate(source if "://" in source else found.path, cached)
            if key is None and own_header(path):
                return "", ""
            config = found.config
            if key is None:
                told = read_json(path.parent / CONFIG)  # what its program says that the weights are
                timms = told.get("pretrained_cfg")
                tag = timms.get("tag", "") if isinstance(timms, dict) else ""
                timms = f"{told.get('architecture', '')}.{tag}"
                theirs = str(told.get("model_type", "")).replace("_", "-")
                key = stored_family(config, found.meta.get("format") or "", path.name, timms, theirs)
        except VitctlError:
            if key is None and "://" not in source:
                return "", ""  # the job says what is wrong with them
    if key is None:
        return "", f"recipe finetune, the paper's: nothing tells the family of {source}"
    family, width = FAMILIES[key], getattr(config, "hidden_size", 0)
    if not key:
        return "", f"recipe finetune, the paper's: no other is for {source}"
    recipe = family.recipes[max(size for size in family.recipes if size <= width)]
    return recipe, f"recipe {recipe}, for weights of {family.title}; --recipe finetune is the paper's"


def check_choices(loaded: Loaded, before: Recipe | None = None) -> None:
    """Refuse to choose a checkpoint, a learning rate or a temperature by test images, a rate that rises, and
    keys that do nothing.

    A run of an earlier release may go on with what it had.

    Args:
        loaded: the recipe.
        before: that the run started with; None: it is new.

    A resumed run may keep the values it started with (`before`; None for a new run). Raises RecipeError.
    """
    recipe = loaded.recipe
    for key, why in idle_keys(recipe).items():
        if before is None or key not in idle_keys(before):
            table, _, name = key.partition(".")
            unset = toml_value(type(getattr(recipe, table)).model_fields[name].default)
            fix = f"leave it out, or undo it with --set {key}={unset}"
            raise RecipeError(loaded.origin(key), f"{key} does nothing {why}", fix)
    if isinstance(recipe, Pretrain | Finetune) and (
        recipe.checkpoint.keep_best or recipe.evaluation.select_best
    ):
        _check_best(recipe)
    is_same_job = isinstance(before, Pretrain | Finetune) and before.job == recipe.job
    if is_same_job and _choices(before) == _choices(recipe):
        return
    if isinstance(recipe, Evaluate) and recipe.evaluation.fit_temperature:
        origin, split = loaded.origin("data.eval_split"), recipe.data.eval_split
        is_chosen = origin == _FLAG and ROLES.get(split) != VALIDATION
        if is_chosen or origin == "default" or origin.startswith("evaluate.toml:") or is_test(split):
            raise RecipeError(
                "evaluation.fit_temperature (of a softmax): images that choose a temperature "
                "test it no longer",
                fix=f"name with --split images that were held out of both; {HELD_OUT}",
            )
    if not isinstance(recipe, Pretrain | Finetune):
        return
    fix = "hold some training images out for it, such as"
    tried = recipe.sweep if isinstance(recipe, Finetune) and recipe.sweep.lrs else None
    check_falls(recipe)
    refuse(
        RecipeError,
        (
            recipe.evaluation.select_best and is_test(recipe.data.eval_split),
            "evaluation.select_best",
            f"'{recipe.data.eval_split}' images that choose a checkpoint test it no longer",
            f"{fix} --set data.train_split='train[:90%]' --set data.eval_split='train[90%:]'",
        ),
        (
            tried and is_test(tried.eval_split),
            "sweep.lrs",
            f"'{tried and tried.eval_split}' images that choose a rate test it no longer",
            f"{fix} --set sweep.train_split='train[:90%]' --set sweep.eval_split='train[90%:]'",
        ),
    )


def _choices(recipe: Recipe | None) -> tuple[object, ...]:
    assert isinstance(recipe, Pretrain | Finetune)
    chosen = recipe.evaluation.select_best, recipe.data.eval_split, getattr(recipe, "sweep", None)
    return *chosen, recipe.optimizer.lr, recipe.schedule.end_lr, recipe.schedule.decay


def fit_to_data(loaded: Loaded, run_dir: Path, before: Recipe | None = None) -> tuple[Loaded, Inputs | None]:
    """Run `check_choices`, and fill in the batch size, length and warm-up that the number of images decides.

    Returns the recipe, and its images if they had to be opened.
    """
    recipe = loaded.recipe
    check_choices(loaded, before)
    if isinstance(recipe, Pretrain | Finetune) and needs_num_images(recipe):
        inputs = open_inputs(recipe, run_dir)
        assert inputs.train is not None
        return fit_schedule(loaded, len(inputs.train)), inputs
    return (fit_schedule(loaded, TASK_IMAGES) if isinstance(recipe, Vtab) else loaded), None


def fit_lanes(
    loaded: Loaded, before: Recipe | None, inputs: Inputs | None, run_dir: Path, nodes: int
) -> tuple[Loaded, Inputs | None]:
    """Fill in data.lanes for a new run on several nodes; a resumed run keeps its lanes.

    Args:
        before: the recipe that the run started with; None for a new run.
        inputs: the images, if they are already open.

    Returns the recipe, and its images if they had to be opened.
    """
    recipe = loaded.recipe
    if not isinstance(recipe, Pretrain | Finetune) or recipe.data.order == "exact" or recipe.data.synthetic:
        return loaded, inputs
    lanes, origin = 0, "when the run started"
    if isinstance(before, Pretrain | Finetune):
        lanes = before.data.lanes
    elif nodes > 1 and not recipe.schedule.lanes:
        inputs = inputs or open_inputs(recipe, run_dir)
        assert inputs.train is not None
        lanes = default_lanes(recipe.data, inputs.train, recipe.schedule, nodes)
        origin = f"for {nodes} nodes"
    is_open = lanes and not recipe.data.lanes
    return with_overrides(loaded, [Override("data.lanes", lanes, origin)]) if is_open else loaded, inputs


def check_not_missing(recipe: Recipe) -> None:
    """Report all that a job without --from lacks: weights, and shards of known data sets.

    Raises CheckpointError if there are no weights; its message ends with the commands to type next.
    """

    try:
        newest_run(recipe.job)
        return
    except CheckpointError as error:
        lacking, steps = [str(error).partition("; give")[0]], list[str]()
    data: Any = getattr(recipe, "data", Place())
    if isinstance(recipe, Vtab):
        names, split = [task.data_set for task in chosen_tasks(recipe)], "train"
    else:
        names = list(getattr(data, "datasets", ())) or [data.dataset]
        split = getattr(data, "train_split", "") or data.eval_split or "train"
    rows = [] if data.path else [find_data_set(name) for name in dict.fromkeys(filter(None, names))]
    missing = {
        row.name: text for row in rows if row.make is None and (text := missing_shards(row, data.root, split))
    }
    if len(missing) > _MOST_EXPLAINED:
        lacking.append(f"no shards under {data.root} of {', '.join(missing)}")
        steps.append(f"vitctl data prepare NAME --root {typed(data.root)}")
    else:
        lacking += [text.rstrip(".") for text in missing.values()]
        steps += [found[1] for text in missing.values() if (found := re.search("`(.+?)`", text))]
    command = typed_command(f"vitctl {recipe.job}")
    if data.path and not locate_splits(data.path, split, makes_index=False) and not Path(data.path).exists():
        lacking.append(str(no_index(data.path, split)))
    own = f"--data {typed(data.path)}" if data.path else " ".join(f"--dataset {row.name}" for row in rows)
    if recipe.job == "evaluate" and own not in (
        "",
        "--dataset imagenet",
    ):  # the heads of published weights are ImageNet's
        steps += [f"vitctl finetune {own} --from {start_weights('finetune')}", command]
    else:
        steps.append(f"{command} --from {start_weights(recipe.job)}")
    lines = ", then ".join(f"`{step}`" for step in steps)
    text = "; ".join(lacking)
    raise CheckpointError(f"{text}{'' if text.endswith('?') else '.'} Type next", lines)


def check_recipe(recipe: Recipe, run_dir: Path, inputs: Inputs | None = None, nodes: int = 1) -> Inputs:
    """Check everything that can be checked before the first process starts, and return the opened images.

    Data sets that come with vitctl are generated once.

    Args:
        inputs: the images, if they are already open.
        nodes: number of machines.

    Raises VitctlError if data or weights are missing or invalid, or the model or the schedule is impossible.
    """
    found = check_weights(recipe)
    taken = [run_dir / name for name in RUN_FILES]
    if isinstance(recipe, ExportRecipe) and recipe.export.file:
        file, read = Path(recipe.export.file), [Path(found.path)] if found else []
        check_free("--out", file, [*taken, file.with_suffix(".py"), *read])
    if isinstance(recipe, Evaluate) and recipe.evaluation.answers:
        check_free("--answers", Path(recipe.evaluation.answers), taken)
    inputs = inputs or open_inputs(recipe, run_dir)
    if isinstance(recipe, Evaluate) and found is not None and inputs.scored is not None:
        check_scored_head(recipe, found, inputs.scored.class_names)
    if isinstance(recipe, Finetune) and found is not None and inputs.train is not None:
        check_heads(recipe, found, inputs.train.class_names, fetch)
    if isinstance(recipe, Pretrain | Finetune):
        size = len(inputs.train) if inputs.train is not None else 0
        if 0 < size < recipe.schedule.batch_size and not (run_dir / CHECKPOINTS).exists():
            raise batch_too_large(size, recipe.schedule)
        _check_training(recipe, inputs, nodes)
    elif isinstance(recipe, ExportRecipe) and (recipe.data.path or recipe.data.dataset):
        open_scored(recipe.data, recipe.data.eval_split, run_dir)
    return inputs


def check_weights(recipe: Recipe) -> StoredNetwork | None:
    """Check that a recipe's weights exist and their network suits the job; return it, if any."""
    found = None
    if isinstance(recipe, Evaluate):
        refuse(
            RecipeError,
            (
                recipe.weights.source.endswith(".onnx"),
                recipe.weights.source,
                "evaluate takes no ONNX file",
                f"`vitctl predict SHARDS:SPLIT --from {recipe.weights.source}` prints its accuracy",
            ),
        )
    if isinstance(recipe, WeightsRecipe):
        found = network_of(recipe, fetch)
        if isinstance(recipe, Finetune):
            at_size(recipe.data, found.config.image_size)
        if isinstance(recipe, Finetune | Vtab):
            stored = found.config
            config = downstream(
                stored, num_classes=1, image_size=stored.image_size, **rates_of(recipe, stored)
            )
            if lora_of(recipe).rank:
                check_lora(config, lora_of(recipe).blocks)
            frozen_places(recipe, stored)
    if isinstance(recipe, Vtab):
        lanes_of(recipe, recipe.machine.processes)
    return found


def check_scored_head(recipe: Evaluate, found: StoredNetwork, classes: Sequence[str] | int) -> None:
    """Check that there is a head for `evaluate` to score, and its classes. Raises CheckpointError."""
    if not found.config.num_classes:
        raise no_head(found.path)
    labels, names = recipe.evaluation.labels, () if isinstance(classes, int) else classes
    in_part = not labels and names and is_part_of_imagenet(names, found.config.num_classes)
    if labels.startswith("objectnet") or in_part:
        classes = class_list("imagenet")
    stored = found.meta.get("class_names") or []
    check_head_classes(found.path, found.config, stored, classes, is_scored=True)


def check_heads(
    recipe: Finetune, found: StoredNetwork, classes: Sequence[str] | int, fetch: Fetch = cached
) -> StoredNetwork | None:
    """Check that the kept head and the teacher fit the data. Return the teacher's network, if any.

    `classes` are the data's class names, or their number.
    """
    if recipe.finetune.head == "as_stored":
        config, fix = found.config, "finetune.head = 'zero' starts a new one"
        if not config.num_classes or getattr(config, "representation_size", False):
            why = "hidden layer before its head, which fine-tuning drops" if config.num_classes else "head"
            raise CheckpointError(found.path, f"has {'a' if config.num_classes else 'no'} {why}", fix)
        fix = f"finetune.head = 'as_stored' cannot keep it; {fix}"
        check_head_classes(found.path, config, found.meta.get("class_names") or [], classes, fix)
    if not recipe.distillation.teacher:
        return None
    try:
        teacher = find_network(recipe.distillation.teacher, fetch=fetch)
    except CheckpointError as error:
        raise CheckpointError(f"the teacher {error}".replace("--from", "--teacher")) from None
    check_teacher(recipe, found.config, teacher.path, teacher.config, teacher.meta, classes)
    return teacher


def check_teacher(
    recipe: Finetune,
    start: Config,
    path: str,
    config: Config,
    meta: Mapping[str, Any],
    classes: Sequence[str] | int,
) -> None:
    """Check that the student can learn from the teacher as [distillation] says.

    Args:
        start: network of the student's start weights.
        path, config, meta: of the teacher.
        classes: the data's class names, or their number.
    """
    kind = recipe.distillation.kind
    if kind == "features":
        width = downstream(
            start, num_classes=1, image_size=start.image_size, **rates_of(recipe, start)
        ).feature_size
        if width != config.feature_size:
            raise CheckpointError(
                path,
                f"the teacher's representation has {config.feature_size} numbers, the student's "
                f"{width}: distillation.kind = 'features' compares equal widths",
                "choose 'soft' or 'hard'",
            )
        return
    fix = "fine-tune the teacher on this data first, or set distillation.kind = 'features'"
    check_head_classes(path, config, meta.get("class_names") or [], classes, fix)
    if kind == "soft" and activation_of(meta, config.num_classes) == "sigmoid":
        raise CheckpointError(
            path,
            "its probabilities are sigmoids, which do not sum to 1, as those of "
            "distillation.kind = 'soft' do",
            "choose 'hard' or 'features'",
        )


def check_head_classes(
    path: str,
    config: Config,
    stored: Sequence[str],
    classes: Sequence[str] | int,
    fix: str = "the scores would be meaningless; fine-tune on this data first",
    *,
    is_scored: bool = False,
) -> None:
    """Compare the classes of head and data: by name, see `distinct`, or by number if either has no names.

    Args:
        stored: class names stored with the weights.
        classes: the data's class names, or their number.
        fix: end of the message.
        is_scored: allow data that has only some of the head's classes, see `numbered_as`.

    Raises CheckpointError.
    """
    names = () if isinstance(classes, int) else tuple(classes)
    stored = distinct(stored)
    if is_scored and names and {*names} <= {*stored}:
        return
    num_classes, wanted = len(stored) or config.num_classes, len(names) or classes
    if num_classes != wanted or (stored and names and stored != names):
        first = next((n for n, pair in enumerate(zip(stored, names, strict=False)) if len({*pair}) > 1), 0)
        some = slice(first, first + 3)
        head, data = (
            f" ({'... ' if first else ''}{', '.join(each[some])} ...)" if each else ""
            for each in (stored, names)
        )
        if not num_classes:
            raise CheckpointError(path, f"has no head, the data has {wanted} classes: {fix}")
        raise CheckpointError(
            path,
            f"its head has {count_text(num_classes, 'class', 'classes')}{head}, the data has "
            f"{wanted}{data}: {fix}",
        )


def _check_training(recipe: Pretrain | Finetune, inputs: Inputs, nodes: int) -> None:
    train, test, s = inputs.train, inputs.scored, recipe.schedule
    assert train is not None
    checked_steps(len(train), s, recipe.machine.processes)
    lanes_of(recipe, recipe.machine.processes)
    recipe.machine.shards(recipe.machine.processes)  # raises where the processes cannot be divided so
    may_have_several = label_shape(train)
    starts_solved = isinstance(recipe, Finetune) and recipe.finetune.head == "fewshot"
    refuse(
        RecipeError,
        (
            may_have_several and starts_solved,
            "",
            "finetune.head = 'fewshot' needs one label per image, but those of "
            f"'{recipe.data.train_split}' may have several",
            "set finetune.head = 'zero'",
        ),
        (
            may_have_several and recipe.loss.name == "softmax",
            "",
            "loss.name = 'softmax' needs one label per image, but those of "
            f"'{recipe.data.train_split}' may have several",
            "type --set loss.name=sigmoid",
        ),
    )
    for source in (train, *(inputs.tried or ())[:1]):
        corrected(recipe, source)  # raises where these classes cannot be weighted or balanced
    metric = recipe.evaluation.metric
    is_single = metric == "f1" or (metric == "loss" and recipe.loss.name == "softmax")
    if is_single and test is not None and label_shape(test):
        raise RecipeError(
            f"evaluation.metric = '{metric}' needs one label per image, but those of "
            f"'{recipe.data.eval_split}' may have several",
            fix="set evaluation.metric = 'accuracy'",
        )
    if not recipe.data.synthetic:
        check_order(recipe.data, train, recipe.seed, s, nodes)
    if isinstance(recipe, Pretrain):
        recipe.network(len(train.class_names))


def _check_best(recipe: Pretrain | Finetune) -> None:
    """Check that a best checkpoint can be found, is kept, and is probed if there are few-shot probes."""
    every, saved = recipe.evaluation.every_steps, recipe.checkpoint.every_steps
    probed = recipe.fewshot_probe.every_steps if isinstance(recipe, Pretrain) else 0
    selects, scored = recipe.evaluation.select_best, recipe.data.eval_split
    often = every or min(saved or 100, -(-recipe.schedule.total_steps // 10) or 100)
    lacking = {
        "data.train_split='train[:90%]'": not scored,
        "data.eval_split='train[90%:]'": not scored,
        f"evaluation.every_steps={often}": not every,
        "checkpoint.keep_best=1": not recipe.checkpoint.keep_best,
        f"checkpoint.every_steps={often}": selects and (not saved or often % saved),
        f"fewshot_probe.every_steps={often}": selects and probed and often % probed,
    }
    fix = " ".join(f"--set {one}" for one, lacks in lacking.items() if lacks)
    needs = "needs scores, a checkpoint at each" + ", few-shot probes there" * bool(probed)
    key, why = (
        ("evaluation.select_best", f"{needs}, and the best one kept")
        if selects
        else ("checkpoint.keep_best", "there are no scores to find the best by")
    )
    refuse(
        RecipeError,
        (recipe.data.synthetic, key, "synthetic images are not scored", "leave it out"),
        (fix, key, why, f"add {fix}"),
    )
