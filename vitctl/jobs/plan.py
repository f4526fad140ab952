"""The cost of a run, planned without a GPU and without data; and the checks before the first step.

Importing this needs no torch; planning needs it only for weights of other programs.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np

from vitctl.data.datasets.catalog import find_data_set, known_size, missing_shards
from vitctl.data.shards.remote import is_remote
from vitctl.data.source.locate import locate_splits, no_index_message
from vitctl.data.source.splits import select
from vitctl.engine.schedule import (
    TASK_IMAGES,
    fit_schedule,
    fitted_recipe,
    lanes_note,
    lanes_of,
    learning_rate,
    needs_num_images,
    total_steps,
)
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs.inputs.data import check_order, open_train, sampling_notes, subset_size
from vitctl.jobs.inputs.network import (
    find_network,
    model_config,
    rates_in_words,
    rates_of,
    unseen_pixels,
)
from vitctl.jobs.inputs.user_data import is_photographs, planned_splits
from vitctl.models.flops import (
    converted_bytes,
    count_macs,
    count_parameters,
    training_flops,
    training_memory_bytes,
)
from vitctl.models.variants import Config, ViTConfig, downstream
from vitctl.recipe.images import Place, TrainImages
from vitctl.recipe.load import Loaded
from vitctl.recipe.schema import Evaluate, ExportRecipe, Fewshot, Finetune, Pretrain, Recipe, Vtab
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system.text import typed, typed_command

if TYPE_CHECKING:
    from vitctl.jobs.inputs.opened import Inputs

CURVE_POINTS = 9
GPU_BYTES = 80 * 2**30
USABLE_SHARE = 0.9  # of a GPU's memory; the rest is for the framework
LOOKUP_SECONDS = 2.0  # timeout of each of a plan's two requests: the list of splits, and their sizes
ASSUMED_CLASSES = 1000
_MOST_EXPLAINED = 3  # data sets whose missing files are named one by one

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingPlan:
    """The cost of a training run. Sizes are in bytes; `curve` is (step, learning rate).

    `num_images` is 0 where the data could not be looked up. `fitting_micro_batch` is the largest micro-batch
    whose estimate stays below nine tenths of an 80 GiB GPU, 0 when none does. `ways` are settings that make
    the run fit where it does not, each with its memory per process.
    """

    config: Config
    data: str
    num_images: int
    num_classes: int
    steps: int
    epochs: float
    parameters: int
    tokens: int
    macs_per_image: int
    training_flops: int
    micro_batch: int
    memory_bytes: int
    fitting_micro_batch: int
    checkpoint_bytes: int
    disk_bytes: int
    curve: tuple[tuple[int, float], ...]
    notes: tuple[str, ...] = field(default=())
    ways: tuple[tuple[str, int], ...] = field(default=())


@dataclass(frozen=True)
class _Memory:
    """Memory of a process in bytes.

    Args:
        weights: and everything of their size that is sharded with them.
        converted, sharded_converted: copies of weights that are not, with one shard and with several.
        image: for each image.
    """

    weights: int
    converted: int
    sharded_converted: int
    image: int

    @classmethod
    def of(cls, config: Config, recipe: Pretrain | Finetune, *, checkpoint_blocks: bool) -> "_Memory":
        slots, averaging = OPTIMIZERS[recipe.optimizer.name].slots, recipe.averaging.decay > 0
        precision: Literal["float32", "tf32", "bf16", "float64"] = (
            "bf16" if recipe.machine.precision == "auto" else recipe.machine.precision
        )
        weights, one = (
            training_memory_bytes(config, images, precision, slots, averaging, checkpoint_blocks)
            for images in (0, 1)
        )
        converted, gathered = (
            converted_bytes(config, precision, checkpoint_blocks, gathers_bf16=in_bf16)
            for in_bf16 in (False, recipe.machine.sharding_dtype == "bf16")
        )
        sharded = weights - converted + 4 * count_parameters(config) * _held_sums(recipe)
        return cls(sharded, converted, gathered, one - weights)

    def at(self, micro_batch: int, shards: int = 1) -> int:
        """With `micro_batch` images in a forward pass, the weights sharded over `shards` processes."""
        converted = self.converted if shards == 1 else self.sharded_converted
        return -(-self.weights // shards) + converted + micro_batch * self.image

    def fitting(self, shards: int = 1) -> int:
        """The largest micro-batch that fits, 0 when none does."""
        return max(0, int((USABLE_SHARE * GPU_BYTES - self.at(0, shards)) // self.image))


def plan_loaded(loaded: Loaded) -> tuple[Loaded, TrainingPlan]:
    """A recipe that trains, with the values that depend on the number of images, and its cost from
    `plan_training`.
    """
    assert isinstance(loaded.recipe, Pretrain | Finetune)
    size = _size(loaded.recipe)
    loaded = fit_schedule(loaded, size.num_images) if needs_num_images(loaded.recipe) else loaded
    assert isinstance(loaded.recipe, Pretrain | Finetune)
    return loaded, plan_training(loaded.recipe, size)


def plan_training(recipe: Pretrain | Finetune, size: "_Size | None" = None) -> TrainingPlan:
    """The cost of `recipe`, from the data if it is there, else from the known size of the data set.

    Nothing is downloaded; a remote index has a timeout of a few seconds.

    Raises:
        RecipeError: the length depends on data that cannot be read.
        CheckpointError: the weights are not here, and their model is not named.
    """
    num_images, num_classes, data, size_notes = size or _size(recipe)
    notes = list(size_notes)
    recipe = fitted_recipe(recipe, num_images)
    config: Config
    if isinstance(recipe, Pretrain):
        config = model_config(recipe, num_classes)
    else:
        found = find_network(recipe.weights.source, which=recipe.weights.which, model=recipe.weights.model)
        notes += [found.taken] if found.taken else []
        notes.append(f"weights from {found.path}")
        if recipe.sweep.lrs:
            notes.append(
                f"{len(recipe.sweep.lrs)} learning rates are tried first, each for the number of steps "
                f"planned here"
            )
        side = recipe.data.image_size or found.config.image_size
        rates = rates_of(recipe, found.config)
        notes.append(rates_in_words(recipe, rates))
        config = downstream(found.config, num_classes=num_classes, image_size=side, **rates)
    o, s, m = recipe.optimizer, recipe.schedule, recipe.machine
    steps = total_steps(num_images, s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
    share = -(-s.batch_size // m.processes)
    slots, averaging = OPTIMIZERS[o.name].slots, recipe.averaging.decay > 0
    if m.precision == "auto":
        notes.append(
            "memory is estimated for bf16, which machine.precision = 'auto' uses where the device supports it"
        )
    memory, shards = _Memory.of(config, recipe, checkpoint_blocks=m.checkpoint_blocks), _shards(recipe)
    fitting = memory.fitting(shards)
    micro_batch = min(max(1, fitting) if m.micro_batch == -1 else m.micro_batch or share, share)
    if lanes := lanes_of(recipe, m.processes):
        micro_batch, notes = lanes.largest_leaf, [*notes, lanes_note(lanes)]
    parameters = count_parameters(config)
    checkpoint = 4 * parameters * (1 + slots + averaging)
    kept = recipe.checkpoint.keep_last + recipe.checkpoint.keep_best + 1
    points = sorted(
        {round(i * (steps - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)}
        | {min(s.warmup_steps, steps - 1)}
    )
    rate = learning_rate(recipe, steps)
    notes += unseen_pixels(config)
    return TrainingPlan(
        config=config,
        data=data,
        num_images=num_images,
        num_classes=num_classes,
        steps=steps,
        epochs=steps * s.batch_size / num_images if num_images else 0.0,
        parameters=parameters,
        tokens=config.num_tokens if isinstance(config, ViTConfig) else 0,
        macs_per_image=count_macs(config),
        training_flops=training_flops(config, steps * s.batch_size),
        micro_batch=micro_batch,
        memory_bytes=memory.at(micro_batch, shards),
        fitting_micro_batch=min(fitting, share),
        checkpoint_bytes=checkpoint,
        disk_bytes=checkpoint * kept,
        curve=tuple((point, rate(point)) for point in points),
        notes=tuple(notes),
        ways=tuple(_ways(config, recipe, memory)) if micro_batch > fitting else (),
    )


def _held_sums(recipe: Pretrain | Finetune) -> int:
    """Gradients that a process keeps at most beside that of the current pass: with lanes those of finished
    subtrees of its leaves.
    """
    lanes, processes = lanes_of(recipe, recipe.machine.processes), recipe.machine.processes
    return max(lanes.most_held(rank, processes) for rank in range(processes)) if lanes else 0


def _shards(recipe: Pretrain | Finetune) -> int:
    return recipe.machine.shards(recipe.machine.processes)


def _ways(config: Config, recipe: Pretrain | Finetune, memory: _Memory) -> list[tuple[str, int]]:
    """Settings that make a run fit GPUs of 80 GiB, the least change first, and the memory of a process then."""
    batch, m = recipe.schedule.batch_size, recipe.machine
    ways: list[tuple[str, int]] = []
    if recipe.schedule.lanes:
        fitting = memory.fitting()
        return [(f"--set schedule.leaf_images={fitting}", memory.at(fitting))] if fitting else []
    if fitting := memory.fitting(_shards(recipe)):
        ways.append((f"--set machine.micro_batch={fitting}", memory.at(fitting, _shards(recipe))))
        processes = -(-batch // fitting)
        if not m.micro_batch and processes <= batch:
            shards = processes if _shards(recipe) > 1 else 1
            ways.append((f"--processes {processes}", memory.at(-(-batch // processes), shards)))
        return ways
    thin = _Memory.of(config, recipe, checkpoint_blocks=True)
    for used, extra in ((memory, ""), (thin, " --set machine.checkpoint_blocks=true")):
        room = USABLE_SHARE * GPU_BYTES - used.image - used.sharded_converted
        if extra and (fitting := used.fitting(_shards(recipe))):
            ways.append((f"--set machine.micro_batch={fitting}{extra}", used.at(fitting, _shards(recipe))))
        elif room > 0:
            processes = max(m.processes, int(-(-used.weights // room)))
            words = f"--processes {processes} --set machine.sharding=fsdp --set machine.micro_batch=1{extra}"
            ways.append((words, used.at(1, processes)))
    return ways


class _Size(NamedTuple):
    """Numbers of images and classes, their source, and notes; 0 images where the number is unknown."""

    num_images: int
    num_classes: int
    place: str
    notes: list[str]


def _size(recipe: Pretrain | Finetune) -> _Size:
    """The size of the training split, which must be known where the length of the run follows from it."""
    data = recipe.data
    if not any(is_remote(place) for place in (data.path, *(part.path for part in data.mixture))):
        return _counted(data)
    answer = call_with_timeout(LOOKUP_SECONDS, lambda: _counted(data))
    if not isinstance(answer, str):
        return answer
    place = data.path or "data.mixture"
    if not recipe.schedule.total_steps or needs_num_images(recipe):
        raise RecipeError(
            f"{place}: could not be looked up: {answer}; the plan needs the number of images for the length "
            f"of the run: give "
            "--steps, a warm-up and a batch size, or --synthetic"
        )
    note = f"{place} could not be looked up: {answer}; {ASSUMED_CLASSES:,} classes are assumed"
    return _Size(0, ASSUMED_CLASSES, place, [note])


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T | str:
    """The result of `call`, or the reason as text if it failed or timed out; a call that hangs is abandoned."""
    answers: list[T | str] = []

    def ask() -> None:
        try:
            answers.append(call())
        except Exception as error:  # network and file system libraries raise errors of their own
            answers.append(str(error))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:g} s"


def _counted(data: TrainImages) -> _Size:
    if data.synthetic:
        classes = find_data_set(data.dataset).num_classes if data.dataset else ASSUMED_CLASSES
        return _Size(data.synthetic, classes, "synthetic images", [])
    if is_photographs(data.path):
        source = select(data.train_split, planned_splits(data.path))
        return _Size(subset_size(data, len(source)), len(source.class_names), f"{data.path}, photographs", [])
    place = data.path or (str(Path(data.root) / find_data_set(data.dataset).name) if data.dataset else "")
    if data.mixture or (place and locate_splits(place, data.train_split, makes_index=bool(data.path))):
        source = open_train(data, None)
        shown = f"a mixture of {len(data.mixture)} sources" if data.mixture else place
        return _Size(len(source), len(source.class_names), shown, sampling_notes(data, source))
    known = (
        known_size(data.dataset, data.train_split)
        if data.dataset and not (data.path or data.classes)
        else None
    )
    if known is None and data.path:
        raise DataError(no_index_message(data.path, data.train_split))
    if known is None:
        raise RecipeError(
            f"the plan needs the number of images of {data.path or 'the data'}: no shards are there; "
            f"give shards with --data, a known set with --dataset, or --synthetic"
        )
    num_images, num_classes = known
    return _Size(subset_size(data, num_images), num_classes, f"{data.dataset}, as known by name", [])


def fit_to_data(loaded: Loaded, run_dir: Path) -> "tuple[Loaded, Inputs | None]":
    """Fill in the batch size, length and warm-up that depend on the number of training images.

    Returns:
        the recipe, and its images where they were opened for that.
    """
    from vitctl.jobs.inputs.opened import open_inputs

    recipe = loaded.recipe
    if isinstance(recipe, Pretrain | Finetune) and needs_num_images(recipe):
        inputs = open_inputs(recipe, run_dir)
        assert inputs.train is not None
        return fit_schedule(loaded, len(inputs.train)), inputs
    return (fit_schedule(loaded, TASK_IMAGES) if isinstance(recipe, Vtab) else loaded), None


def check_not_missing(recipe: Recipe) -> None:
    """Name everything at once that a job without --from lacks: weights, and shards of known data sets.

    Raises:
        CheckpointError: there are no weights; the message ends with the lines to type next.
    """
    from vitctl.jobs.inputs.opened import chosen_tasks
    from vitctl.jobs.record.runs import newest_run, start_weights

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
    own = f"--data {typed(data.path)}" if data.path else " ".join(f"--dataset {row.name}" for row in rows)
    if recipe.job == "evaluate" and own not in (
        "",
        "--dataset imagenet",
    ):  # the heads of published weights are ImageNet's
        steps += [f"vitctl finetune {own} --from {start_weights('finetune')}", command]
    else:
        steps.append(f"{command} --from {start_weights(recipe.job)}")
    lines = ", then ".join(f"`{step}`" for step in steps)
    raise CheckpointError(f"{'; '.join(lacking)}. Type next: {lines}")


def check_recipe(recipe: Recipe, run_dir: Path, inputs: "Inputs | None" = None) -> "Inputs":
    """Check everything that can be checked before the first process starts, and return the opened images.

    Data sets that come with vitctl are generated once. `inputs` are the images, if they are open already.

    Raises:
        VitctlError: data or weights are missing or invalid, or the model or the schedule is impossible.
    """
    from vitctl.jobs.inputs.data import at_size, open_scored
    from vitctl.jobs.inputs.opened import open_inputs
    from vitctl.models.weights.download import fetch

    if isinstance(recipe, Finetune | Fewshot | Vtab | Evaluate | ExportRecipe):
        chosen = recipe.weights
        found = find_network(
            chosen.source, which=chosen.which, model=chosen.model, job=recipe.job, fetch=fetch
        )
        if isinstance(recipe, Finetune):
            at_size(recipe.data, found.config.image_size)
        if isinstance(recipe, Finetune | Vtab):
            stored = found.config
            downstream(stored, num_classes=1, image_size=stored.image_size, **rates_of(recipe, stored))
    if isinstance(recipe, Vtab):
        lanes_of(recipe, recipe.machine.processes)
    inputs = inputs or open_inputs(recipe, run_dir)
    if isinstance(recipe, Pretrain | Finetune):
        _check_training(recipe, inputs)
    elif isinstance(recipe, ExportRecipe) and (recipe.data.path or recipe.data.dataset):
        open_scored(recipe.data, recipe.data.eval_split, run_dir)
    return inputs


def _check_training(recipe: Pretrain | Finetune, inputs: "Inputs") -> None:
    train, test, s = inputs.train, inputs.scored, recipe.schedule
    assert train is not None
    steps = total_steps(len(train), s.batch_size, steps=s.total_steps, epochs=s.total_epochs)
    if steps <= s.warmup_steps:
        raise RecipeError(
            f"{steps} steps ({s.total_epochs:g} epochs of {len(train):,} images in batches of "
            f"{s.batch_size}) leave nothing "
            f"after schedule.warmup_steps = {s.warmup_steps}; lower it, or train longer"
        )
    lanes_of(recipe, recipe.machine.processes)
    _shards(recipe)  # raises where the processes cannot be divided so
    if s.batch_size < recipe.machine.processes:
        raise RecipeError(
            f"schedule.batch_size = {s.batch_size} is less than machine.processes = "
            f"{recipe.machine.processes}"
        )
    if recipe.checkpoint.keep_best and not (recipe.evaluation.every_steps and test is not None):
        raise RecipeError(
            "checkpoint.keep_best needs evaluation.every_steps and a data.eval_split to tell which is best"
        )
    if recipe.evaluation.select_best:
        _check_select_best(recipe)
    if train.labels(np.zeros(0, np.int64)).ndim > 1 and recipe.loss.name == "softmax":
        raise RecipeError(
            f"loss.name = 'softmax' needs one label per image, those of '{recipe.data.train_split}' may have "
            f"several; "
            "set loss.name = 'sigmoid'"
        )
    if not recipe.data.synthetic:
        check_order(recipe.data, train, recipe.seed, s)
    if isinstance(recipe, Pretrain):
        model_config(recipe, len(train.class_names))


def _check_select_best(recipe: Pretrain | Finetune) -> None:
    """The best checkpoint must be one that is kept, and that was probed where there are few-shot probes."""
    every, saved = recipe.evaluation.every_steps, recipe.checkpoint.every_steps
    if not recipe.checkpoint.keep_best:
        raise RecipeError("evaluation.select_best takes the best checkpoint: set checkpoint.keep_best = 1")
    if not saved or every % saved:
        raise RecipeError(
            f"evaluation.select_best needs a checkpoint at every score: checkpoint.every_steps = {saved} "
            f"should divide "
            f"evaluation.every_steps = {every}"
        )
    probed = recipe.fewshot_probe.every_steps if isinstance(recipe, Pretrain) else 0
    if probed and every % probed:
        raise RecipeError(
            f"evaluation.select_best reports the few-shot probe of the best checkpoint: "
            f"fewshot_probe.every_steps = {probed} "
            f"should divide evaluation.every_steps = {every}"
        )
