"""Plan the cost of a run without a GPU and without data."""

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vitctl.data.datasets.catalog import find_data_set, is_photographs, known_size, no_data
from vitctl.data.source.locate import locate_splits, no_index
from vitctl.data.source.views import Source, check_labels
from vitctl.engine.journal import LINE_BYTES, MARKS_BYTES
from vitctl.engine.schedule import (
    batch_too_large,
    checked_steps,
    fit_schedule,
    fitted_recipe,
    lanes_note,
    lanes_of,
    learning_rate,
    needs_num_images,
    warmup_of,
)
from vitctl.errors import DataError, RecipeError, refuse
from vitctl.jobs.inputs.checks import (
    StoredNetwork,
    check_heads,
    check_scored_head,
    network_of,
)
from vitctl.jobs.inputs.data import (
    FewshotSet,
    at_size,
    check_neighbours,
    check_scored,
    check_set,
    chosen_tasks,
    corrected,
    fewshot_places,
    group_notes,
    open_recipe_split,
    open_train,
    roles_note,
    sampling_notes,
    subset_size,
)
from vitctl.jobs.resources import (
    GPU,
    MFU,
    RUNTIME_BYTES,
    Memory,
    busiest,
    computed_again,
    expected,
    image_bytes,
    nodes_of_a_shard,
    number_bytes,
    precision_of,
    trained_parameters,
    usable_flops,
)
from vitctl.models.flops import (
    NO_BF16,
    compile_rule,
    computed_flops,
    count_macs,
    count_parameters,
    training_flops,
)
from vitctl.models.roofline import Estimate
from vitctl.models.variants import Config, downstream, unseen_pixels, with_blocks
from vitctl.recipe.images import OBJECTNET_SIZE, Place, TrainImages, crop_problem
from vitctl.recipe.load import Loaded
from vitctl.recipe.schema import (
    Evaluate,
    Finetune,
    FrozenRecipe,
    Pretrain,
    Probe,
    Vtab,
    WeightsRecipe,
    frozen_places,
    lora_of,
    rates_in_words,
    rates_of,
)
from vitctl.recipe.sections import OPTIMIZERS
from vitctl.system.remote import is_remote

CURVE_POINTS = 9
LOOKUP_SECONDS = 2.0  # timeout of each of a plan's two requests: the list of splits, and their sizes
ASSUMED_CLASSES = 1000

T = TypeVar("T")


@dataclass(frozen=True)
class TrainingPlan:
    """The cost of a training run. Sizes are in bytes.

    Args:
        recipe: with its length and batch size.
        config: the network at the training's image size; `teacher` is the distillation teacher's.
        data: where the images are; `num_images` is 0 if they could not be looked up.
        micro_batch: maximum number of images in a forward pass.
        most: images per step in the process with the most.
        memory: of a process, by kind, without its runtime.
        read: bytes that a node reads per step; 0 if the shards are unknown.
        device: the GPU of each process; "" is a CPU, where everything fits and no time is known.
        expected: rate of a GPU, or why there is none and `MFU` is assumed.
        fitting_micro_batch: the largest that fits 90 % of the GPU's memory, 0 if none does; `largest_batch`
            is the same for a step of more images.
        ways: settings that would make a run fit, each with its memory per process.
    """

    recipe: Pretrain | Finetune
    config: Config
    teacher: Config | None
    data: str
    num_images: int
    num_classes: int
    steps: int
    micro_batch: int
    most: int
    memory: Mapping[str, int]
    read: float
    device: str
    expected: Estimate | str
    fitting_micro_batch: int
    largest_batch: int
    notes: tuple[str, ...]
    ways: tuple[tuple[str, int], ...]

    @property
    def epochs(self) -> float:
        """Return the passes over the images; 0 if their number is unknown."""
        return self.seen / self.num_images if self.num_images else 0.0

    @property
    def seen(self) -> int:
        return self.steps * self.recipe.schedule.batch_size

    @property
    def trainings(self) -> int:
        """Return the number of trainings: learning rates tried, and seeds."""
        if isinstance(self.recipe, Pretrain):
            return 1
        return len(self.recipe.sweep.lrs) + max(1, len(self.recipe.finetune.seeds))

    @property
    def parameters(self) -> int:
        return count_parameters(self.config)

    @property
    def trained_parameters(self) -> int:
        return trained_parameters(self.recipe, self.config)

    @property
    def training_flops(self) -> int:
        """Return the FLOPs as the paper counts them: every token in every block."""
        flops = training_flops(self.config, self.seen, self._frozen, adapters=self._adapters)
        return flops + (2 * count_macs(self.teacher) * self.seen if self.teacher else 0)

    @property
    def computed_flops(self) -> int:
        return self.seen * self._image_flops

    @property
    def _image_flops(self) -> int:
        return computed_flops(self.config, self._frozen, adapters=self._adapters, teacher=self.teacher)

    @property
    def _frozen(self) -> int:
        return frozen_places(self.recipe, self.config)

    @property
    def _adapters(self) -> bool:
        return lora_of(self.recipe).rank > 0

    @property
    def memory_bytes(self) -> int:
        """Return the memory of a process, without its runtime."""
        return sum(self.memory.values())

    @property
    def checkpoint_bytes(self) -> int:
        """Return the size of a checkpoint: weights, their average, and optimizer state."""
        recipe, trained = self.recipe, self.trained_parameters
        averages = recipe.averaging.decay > 0
        kept = OPTIMIZERS[recipe.optimizer.name].slots + self._adapters * (1 + averages)
        return number_bytes(recipe.machine) * (self.parameters * (1 + averages) + trained * kept)

    @property
    def disk_bytes(self) -> int:
        kept = self.recipe.checkpoint
        return self.checkpoint_bytes * (kept.keep_last + kept.keep_best + 1)

    @property
    def record_bytes(self) -> int:
        """Return about the size of steps.jsonl and trace.bin; a block has about 16 tensors."""
        marks = 2 * (self.recipe.schedule.batch_size + 16 * getattr(self.config, "depth", 0))
        return (self.steps * LINE_BYTES + min(MARKS_BYTES, self.steps * marks)) * self.recipe.log.trace

    @property
    def copy_bytes(self) -> int:
        """Return the host memory for a checkpoint copy: in process 0, or in each one of a sharded model."""
        m = self.recipe.machine
        return self.checkpoint_bytes // m.shards(m.processes) if self.recipe.checkpoint.background else 0

    @property
    def resident_bytes(self) -> int:
        """Return the memory of process 0 on a CPU, where one memory holds everything."""
        return RUNTIME_BYTES + self.memory_bytes + self.copy_bytes

    @property
    def mfu(self) -> float:
        if isinstance(self.expected, Estimate):
            return self.expected.mfu
        return MFU / (1 + computed_again(self.config, self.recipe))

    @property
    def step_seconds(self) -> float:
        """Return the computing time of the process with the most images, the slowest; 0 without a device."""
        machine = self.recipe.machine
        if not self.device:
            return 0.0
        flops = self.most * self._image_flops * machine.processes
        return flops / usable_flops(machine, self.device, self.mfu)

    @property
    def run_seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def curve(self) -> tuple[tuple[int, float], ...]:
        last, rate = self.steps - 1, learning_rate(self.recipe, self.steps, self.num_images)
        points = {round(i * last / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)}
        points.add(min(warmup_of(self.recipe.schedule, self.num_images), last))
        return tuple((point, rate(point)) for point in sorted(points))


def plan_loaded(
    loaded: Loaded, nodes: int = 1, device: str | None = None, multiple: int = 1
) -> tuple[Loaded, TrainingPlan]:
    """Return a training recipe with the values that depend on the number of images, and its plan."""
    assert isinstance(loaded.recipe, Pretrain | Finetune)
    size = _size(loaded.recipe)
    loaded = fit_schedule(loaded, size.num_images) if needs_num_images(loaded.recipe) else loaded
    assert isinstance(loaded.recipe, Pretrain | Finetune)
    return loaded, plan_training(loaded.recipe, size, nodes, device, multiple)


def plan_training(
    recipe: Pretrain | Finetune,
    size: "_Size | None" = None,
    nodes: int = 1,
    device: str | None = None,
    multiple: int = 1,
) -> TrainingPlan:
    """Return the cost of `recipe`, from the data if it is present, else from the known size of the data set.

    Nothing is downloaded; a remote index has a timeout of a few seconds.

    Args:
        recipe: that trains.
        size: of its training split; None: it is looked up.
        nodes: machines that the processes are spread over.
        device: the GPU of each process, a row of `roofline.GPUS`; "": a CPU; None: `GPU`, or a CPU with
            machine.device = 'cpu'.
        multiple: the number of processes can only be a multiple of this.

    Raises:
        RecipeError: the length depends on data that cannot be read.
        CheckpointError: the weights are not here, and their model is not named.
    """
    size = size or _size(recipe)
    recipe = fitted_recipe(recipe, size.num_images)
    config, teacher, notes = _networks(recipe, size)
    m = recipe.machine
    if device is None:
        device = "" if m.device == "cpu" else GPU
    if 0 < size.num_images < recipe.schedule.batch_size:
        raise batch_too_large(size.num_images, recipe.schedule)
    steps = checked_steps(size.num_images, recipe.schedule, m.processes)
    if device in NO_BF16 and precision_of(m) in ("bf16", "tf32"):
        raise RecipeError(
            f"the {device} has no {precision_of(m)}", fix="add --precision float32, as 'auto' chooses on it"
        )
    if m.precision == "auto" and device:
        notes.append(
            "memory is estimated for bf16, which machine.precision = 'auto' uses where the device supports it"
        )
    memory = Memory.of(config, recipe, teacher, device)
    fitting = memory.fitting()
    given = max(1, fitting) if m.micro_batch == -1 else m.micro_batch
    micro_batch = min(given or memory.share, memory.share)
    if lanes := lanes_of(recipe, m.processes):
        micro_batch = lanes.largest_leaf
        notes.append(lanes_note(lanes))
    most = busiest(recipe, micro_batch)
    flops = steps * recipe.schedule.batch_size / m.processes * computed_flops(config)
    compiles = bool(device) and m.checkpoint_blocks != "attention" and compile_rule(device, flops)
    settled = recipe if m.compile != "auto" else _with(recipe, compile=compiles)
    return TrainingPlan(
        recipe=recipe,
        config=config,
        teacher=teacher,
        data=size.place,
        num_images=size.num_images,
        num_classes=size.num_classes,
        steps=steps,
        micro_batch=micro_batch,
        most=most[0],
        memory=memory.kinds(micro_batch),
        read=recipe.schedule.batch_size / nodes * size.image_bytes * nodes_of_a_shard(recipe, nodes),
        device=device,
        expected=expected(config, settled, teacher, device, min(micro_batch, fitting), most),
        fitting_micro_batch=min(fitting, memory.share),
        largest_batch=memory.largest(),
        notes=(*unseen_pixels(config), *notes),
        ways=tuple(_ways(config, recipe, teacher, device, multiple)) if micro_batch > fitting else (),
    )


def _networks(recipe: Pretrain | Finetune, size: "_Size") -> tuple[Config, Config | None, list[str]]:
    notes = [*filter(None, [roles_note(recipe, size.num_images, _num_scored(recipe.data))]), *size.notes]
    if size.source is not None and (uneven := corrected(recipe, size.source)):
        notes.append(uneven.note)
    if isinstance(recipe, Pretrain):
        return recipe.network(size.num_classes), None, notes
    found = network_of(recipe)
    place, *warnings = _of_weights(recipe, found)
    notes += [*filter(None, [found.taken]), f"weights from {place}", *warnings]
    if recipe.sweep.lrs:
        notes.append(
            f"{len(recipe.sweep.lrs)} learning rates are tried first, each for the number of steps planned "
            f"here"
        )
    side = at_size(recipe.data, found.config.image_size).image_size  # refuses a crop without room
    rates = rates_of(recipe, found.config)
    notes.append(rates_in_words(recipe, rates))
    config = downstream(found.config, num_classes=size.num_classes, image_size=side, **rates)
    classes = size.num_classes if size.source is None else size.source.class_names
    taught = check_heads(recipe, found, classes)
    if taught is None:
        return config, None, notes
    teacher = replace(taught.config, image_size=side)
    notes.append(
        f"teacher {taught.path}: {count_parameters(teacher):,} parameters, "
        f"{count_macs(teacher) / 1e9:.4g} GMACs more for each image"
    )
    return config, teacher, notes


def _of_weights(recipe: WeightsRecipe, found: StoredNetwork) -> list[str]:
    """Return notes on stored weights: their place with the licence, and what a job will warn about."""
    licence = found.meta.get("licence", "")
    place = found.path + (f"; licence: {licence}" if licence else "")
    told = {"assumed", "licence", "remarks", "unsupported"} & found.meta.keys()
    wanted = recipe.weights
    if not (told or wanted.preprocess or wanted.mean or wanted.std or wanted.gelu or wanted.norm_eps):
        return [place]
    from vitctl.jobs.inputs.weights import planned_weights  # imports torch; so did reading such a file

    return [place, *planned_weights(recipe, *found[:2], found.meta).warnings]


def _with(recipe: Pretrain | Finetune, **values: Any) -> Pretrain | Finetune:
    return recipe.model_copy(update={"machine": recipe.machine.model_copy(update=values)})


def _ways(
    config: Config, recipe: Pretrain | Finetune, teacher: Config | None, device: str, multiple: int
) -> list[tuple[str, int]]:
    """Return settings that make a run fit such GPUs, smallest change first, with the memory per process."""
    batch, m = recipe.schedule.batch_size, recipe.machine
    memory = Memory.of(config, recipe, teacher, device)
    fitting = memory.fitting()
    if recipe.schedule.lanes:
        return [(f"--set schedule.leaf_images={fitting}", memory.at(fitting))] if fitting else []
    if fitting:
        ways = [(f"--set machine.micro_batch={fitting}", memory.at(fitting))]
        processes = next((n for n in _shares(batch, recipe, multiple) if n * fitting >= batch), 0)
        if not m.micro_batch and processes:
            more = Memory.of(config, _with(recipe, processes=processes), teacher, device)
            ways.append((f"--processes {processes}", more.at(-(-batch // processes))))
        return ways
    ways = []
    for again, extra in ((m.checkpoint_blocks, ""), (1, " --set machine.checkpoint_blocks=1")):
        thin = _with(recipe, checkpoint_blocks=again)
        if extra and (fitting := (used := Memory.of(config, thin, teacher, device)).fitting()):
            ways.append((f"--set machine.micro_batch={fitting}{extra}", used.at(fitting)))
            continue
        for processes in _shares(batch, recipe, multiple):
            if processes == 1:
                continue
            cut = _with(thin, processes=processes, sharding="fsdp")
            used = Memory.of(config, cut, teacher, device)
            if used.at(1) <= used.room:
                words = f"--processes {processes} --set machine.sharding=fsdp --set machine.micro_batch=1"
                ways.append((f"{words}{extra}", used.at(1)))
                break
    return ways


def _shares(batch: int, recipe: Pretrain | Finetune, multiple: int) -> list[int]:
    """Return the process counts, multiples from the recipe's up, that divide the batch evenly, or all."""
    step = math.lcm(multiple, recipe.machine.sharding_replicas)
    counts = [n for n in range(step, batch + 1, step) if n >= recipe.machine.processes]
    return [n for n in counts if not batch % n] or counts


class _Size(NamedTuple):
    """The size of a split, 0 images if unknown; `image_bytes` is the mean size of an image in its shard."""

    num_images: int
    num_classes: int
    place: str
    notes: list[str]
    source: Source | None = None
    image_bytes: float = 0.0


def _size(recipe: Pretrain | Finetune) -> _Size:
    """Return the size of the training split, which must be known if the run's length depends on it."""
    s = recipe.schedule
    needed = not s.total_steps or bool(s.warmup_epochs) or needs_num_images(recipe)
    size = _looked_up(recipe.data, recipe.data.train_split, needed=needed)
    if size.source is not None:
        check_labels(size.source, recipe.data.train_split, "training" if recipe.needs_labels else "pixels")
    return size


def _looked_up(data: Place, split: str, *, needed: bool) -> _Size:
    """Return the size of a split. If `needed`, an address that does not answer is an error."""
    parts = data.mixture if isinstance(data, TrainImages) else ()
    if not any(is_remote(place) for place in (data.path, *(part.path for part in parts))):
        return _counted(data, split)
    answer = call_with_timeout(LOOKUP_SECONDS, lambda: _counted(data, split))
    if not isinstance(answer, str):
        return answer._replace(source=None)  # its labels would be read without a time limit
    place = data.path or "data.mixture"
    if needed:
        is_known = data.path and data.dataset and not data.classes and known_size(data.dataset, split)
        raise RecipeError(
            place,
            f"could not be looked up: {answer}; the plan needs the number of images for the run's length",
            f"leave --data out, to plan for {data.dataset}"
            if is_known
            else "give --steps, --batch-size and --set schedule.warmup_steps=500",
        )
    note = f"{place} could not be looked up: {answer}; {ASSUMED_CLASSES:,} classes are assumed"
    return _Size(0, ASSUMED_CLASSES, place, [note])


@dataclass
class ScoringPlan:
    """The cost of a job that scores weights.

    Args:
        images: what passes through the network, and how many images; 0 if unknown.
        drawn: few-shot data sets, and the maximum number of images that a seed draws.
        trainings, steps: number of fine-tunings that come first, and their steps in total, of `batch_size`
            images.
        num_classes: the most classes of a probe's data sets; 0 if unknown.
    """

    weights: str
    config: Config
    notes: list[str]
    images: list[tuple[str, int]] = field(default_factory=list)
    drawn: list[tuple[str, int]] = field(default_factory=list)
    trainings: int = 0
    steps: int = 0
    batch_size: int = 0
    num_classes: int = 0

    @property
    def num_images(self) -> int:
        return sum(number for _, number in self.images)

    @property
    def flops(self) -> int:
        trained = training_flops(self.config, self.steps * self.batch_size)
        return 2 * count_macs(self.config) * self.num_images + trained

    @property
    def feature_bytes(self) -> int:
        """Return the size of all representations in float32."""
        return 4 * self.config.feature_size * self.num_images


def plan_scoring(recipe: FrozenRecipe | Vtab | Evaluate) -> ScoringPlan:
    """Return the cost of `recipe`, from the data if present, else from the data sets' known sizes.

    Nothing is downloaded; a remote index has a timeout of a few seconds. Raises VitctlError.
    """
    found = network_of(recipe)
    weights, *warnings = _of_weights(recipe, found)
    side, config = recipe.data.image_size, found.config
    if isinstance(recipe, FrozenRecipe):
        config = with_blocks(config, recipe.classifier.class_token_blocks)
    elif isinstance(recipe, Evaluate) and recipe.evaluation.labels.startswith("objectnet"):
        side = side or OBJECTNET_SIZE
    config = replace(config, image_size=side or config.image_size)
    if isinstance(recipe, Evaluate):
        is_small, why = crop_problem(config.image_size, recipe.data.eval_resize)
        refuse(RecipeError, (is_small, f"data.{why.partition('; ')[0]}", why.partition("; ")[2]))
    plan = ScoringPlan(weights, config, [*filter(None, [found.taken]), *warnings])
    if isinstance(recipe, Vtab):
        _add_tasks(plan, recipe)
    elif isinstance(recipe, FrozenRecipe):
        _add_few_shot(plan, recipe)
    else:
        _add_scored(plan, recipe, found)
    plan.notes = list(dict.fromkeys([*unseen_pixels(config), *plan.notes]))
    return plan


def _add_tasks(plan: ScoringPlan, recipe: Vtab) -> None:
    tasks = chosen_tasks(recipe)
    if recipe.data.path and not Path(recipe.data.path).is_dir():
        raise DataError(recipe.data.path, "no such folder; it should hold a folder of shards for each task")
    plan.images = [(task.name, (known_size(task.data_set, task.test) or (0, 0))[0]) for task in tasks]
    lengths = recipe.vtab.sweep_steps or (recipe.schedule.total_steps,)
    tried = [length for length in lengths for _ in recipe.vtab.sweep_lrs or (recipe.optimizer.lr,)]
    tried = tried if len(tried) > 1 else []
    seeds = len(recipe.vtab.seeds)
    plan.trainings = len(tasks) * (len(tried) + seeds)
    plan.steps = len(tasks) * (sum(tried) + seeds * max(lengths))
    plan.batch_size = recipe.schedule.batch_size
    if len(set(lengths)) > 1:
        plan.notes.append("the steps are counted as if the sweep chose the longest schedule")


def _add_few_shot(plan: ScoringPlan, recipe: FrozenRecipe) -> None:
    for name, place, trained, scored in fewshot_places(recipe.data):
        train, test = (_looked_up(place, split, needed=False) for split in (trained, scored))
        plan.images += [(f"{name} {trained}", train.num_images), (f"{name} {scored}", test.num_images)]
        plan.notes += train.notes + test.notes
        plan.num_classes = max(plan.num_classes, train.num_classes)
        if train.num_images:
            check_neighbours(recipe, name, train.num_images)
        if not isinstance(recipe, Probe):
            plan.drawn.append((name, recipe.classifier.most_shots * train.num_classes))
        if train.source is not None and test.source is not None:
            one = FewshotSet(name, trained, scored, train.source, test.source)
            check_set(one, recipe.classifier.most_shots, recipe.classifier.with_fewer)


def _add_scored(plan: ScoringPlan, recipe: Evaluate, found: StoredNetwork) -> None:
    split = recipe.data.eval_split
    size = _looked_up(recipe.data, split, needed=False)
    plan.images = [(split, size.num_images)]
    plan.notes += [f"images from {size.place}", *size.notes]
    if size.source is not None:
        check_scored(size.source, split)
    if size.num_images or not found.config.num_classes:
        check_scored_head(recipe, found, size.source.class_names if size.source else size.num_classes)


def call_with_timeout(seconds: float, call: Callable[[], T]) -> T | str:
    """Run `call` with a time limit. Return its result, or the error message if it failed or timed out."""
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


def _num_scored(data: TrainImages) -> int:
    """Return how many images a training scores; 0 where that takes a look at a server or a mixture."""
    if data.synthetic or data.mixture or not data.eval_split or is_remote(data.path):
        return 0
    try:
        return len(open_recipe_split(data, data.eval_split, None))
    except DataError:  # reported by the run; a plan needs no data
        known = known_size(data.dataset, data.eval_split) if data.dataset and not data.path else None
        return known[0] if known else 0


def _group_notes(data: Place, split: str, source: Source) -> list[str]:
    sides = {split: source}
    if data.group_by and isinstance(data, TrainImages) and data.eval_split and not data.mixture:
        sides[data.eval_split] = open_recipe_split(data, data.eval_split, None)
    return group_notes(data, sides)


def _counted(data: Place, split: str) -> _Size:
    trained = data if isinstance(data, TrainImages) else None
    if trained is not None and trained.synthetic:
        classes = find_data_set(data.dataset).num_classes if data.dataset else ASSUMED_CLASSES
        return _Size(trained.synthetic, classes, "synthetic images", [])
    if is_photographs(data.path):
        source = open_recipe_split(data, split, None)
        size = subset_size(trained, len(source)) if trained else len(source)
        notes = _group_notes(data, split, source)
        return _Size(size, len(source.class_names), f"{data.path}, photographs", notes, source)
    place = data.path or (str(Path(data.root) / find_data_set(data.dataset).name) if data.dataset else "")
    parts = trained.mixture if trained else ()
    if parts or (place and locate_splits(place, split, makes_index=bool(data.path), columns=data.columns)):
        # The names of remote images decide what a range holds, but they are in shards that are not read here.
        counted = any(is_remote(at) for at in (place, *(part.path for part in parts)))
        if trained:
            source = open_train(trained, None, counted_only=counted)
        else:
            source = open_recipe_split(data, split, None, counted_only=counted)
        shown = f"a mixture of {len(parts)} sources" if parts else place
        notes = _group_notes(data, split, source)
        notes += sampling_notes(trained, source) if trained else []
        return _Size(len(source), len(source.class_names), shown, notes, source, image_bytes(source))
    known = known_size(data.dataset, split) if data.dataset and not (data.path or data.classes) else None
    if known is None and data.path:
        raise no_index(data.path, split)
    if known is None and not data.dataset:
        raise no_data()
    if known is None:
        raise RecipeError(
            place,
            f"the plan needs the number of images of '{split}', and no shards are there",
            f"make them with `vitctl data prepare {data.dataset}`, or give shards with --data",
        )
    num_images, num_classes = known
    return _Size(
        subset_size(trained, num_images) if trained else num_images,
        num_classes,
        f"{data.dataset}, published size; the data was not read",
        [],
    )
