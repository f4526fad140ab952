"""Open and check the images that a recipe names, once, for the checks before a run and for the job."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from vitctl.data.datasets.catalog import find_data_set, open_split, synthetic
from vitctl.data.datasets.vtab import SUITES, VtabTask
from vitctl.data.datasets.vtab_images import TaskData, open_task
from vitctl.data.images.transforms import EvalTransform, TrainTransform, fill_colour
from vitctl.data.source.order import (
    BalancedOrder,
    LaneOrder,
    MixtureOrder,
    Order,
    RepeatedOrder,
    SampleOrder,
    WindowedOrder,
    lanes_read,
    quotas,
)
from vitctl.data.source.splits import group_names
from vitctl.data.source.uneven import Correction, correction
from vitctl.data.source.views import (
    Source,
    View,
    check_labels,
    class_zero_note,
    concat,
    is_remote,
    num_repeated,
    of_classes,
    random_subset,
    shared_samples,
    source_text,
    split_sources,
)
from vitctl.errors import DataError, RecipeError, refuse
from vitctl.jobs.record.result import data_used
from vitctl.models.weights.meta import HALF
from vitctl.recipe.images import FewshotImages, Place, ProbeImages, TrainImages
from vitctl.recipe.schema import Evaluate, Finetune, FrozenRecipe, Pretrain, Probe, Recipe, Vtab
from vitctl.recipe.sections import Schedule
from vitctl.system.text import count_text, did_you_mean, nearest

_PROBED_IMAGES, _LEAST_CHUNKS, _LEAST_CHUNK = 1024, 8, 16
_LEAST_ENTROPY = 0.8  # relative to a random draw; shuffled shards stay within a few hundredths of 1
_GIB = 2**30


def open_recipe_split(
    place: Place, split: str, scratch: Path | None, *, counted_only: bool = False
) -> Source:
    """Open a split of a recipe's [data], with its choice of classes.

    Args:
        scratch: where data sets that come with vitctl are generated if missing; None: they are not.
        counted_only: for a plan, see `select`.
    """
    source = open_split(
        split,
        path=place.path,
        dataset=place.dataset,
        root=place.root,
        scratch=scratch,
        cache_bytes=int(place.cache_gib * _GIB),
        group_by=place.group_by,
        columns=place.columns,
        counted_only=counted_only,
    )
    return of_classes(source, place.classes) if place.classes else source


def open_train(data: TrainImages, scratch: Path | None, *, counted_only: bool = False) -> Source:
    """Open data.train_split from each source of a mixture, cut to the subset of [data]. Raises DataError."""
    places = [data.model_copy(update={"path": part.path, "dataset": ""}) for part in data.mixture] or [data]
    split = data.train_split
    sources = []
    for place in places:
        source = open_recipe_split(place, split, scratch, counted_only=counted_only)
        size = subset_size(data, len(source))
        sources.append(source if size == len(source) else random_subset(source, size, data.subset_seed))
    return concat(sources) if data.mixture else sources[0]


def subset_size(data: TrainImages, num_images: int) -> int:
    return data.subset_images or max(1, round(data.subset_fraction * num_images))


def training_order(data: TrainImages, source: Source, seed: int, schedule: Schedule) -> SampleOrder:
    """Return the order of data.order over the images of `open_train`, one for each source of a mixture.

    With lanes, see `num_lanes`, each lane walks through its part of a windowed order. The exact order needs
    no lanes: every sample is equally likely in every lane.
    """
    order: SampleOrder
    if data.sampling == "balanced":
        order = BalancedOrder.of(source.labels(), len(source.class_names), seed)
    elif not data.mixture:
        order = _walk(data, source, seed)
    else:
        assert isinstance(source, View)
        walks = tuple(_walk(data, part, seed + number) for number, part in enumerate(source.parts))
        order = MixtureOrder(walks, quotas([part.weight for part in data.mixture]), seed)
    if data.repeats > 1:
        return RepeatedOrder(order, data.repeats, schedule.batch_size)
    lanes = num_lanes(data, schedule)
    return LaneOrder(order, schedule.batch_size, lanes) if order.window_size and lanes else order


def num_lanes(data: TrainImages, schedule: Schedule) -> int:
    """Return how many parts of the global batch read separate shards; 0: all read the same."""
    return schedule.lanes or data.lanes


def default_lanes(data: TrainImages, source: Source, schedule: Schedule, nodes: int) -> int:
    """Return data.lanes of a new run on several nodes: the number of nodes, rounded up to a power of two.

    At most as many lanes as leave each two windows of shards and two images of each batch.
    """
    parts = source.parts if data.mixture and isinstance(source, View) else (source,)
    shards = min(map(num_shards, parts))
    most = min(shards // (2 * data.order_window_shards), schedule.batch_size // 2)
    return min(1 << (nodes - 1).bit_length(), 1 << max(1, most).bit_length() - 1)


def _walk(data: TrainImages, source: Source, seed: int) -> SampleOrder:
    if data.order == "exact":
        return Order(len(source), seed)
    return WindowedOrder(len(source), seed, -(-len(source) // num_shards(source)), data.order_window_shards)


def num_shards(source: Source) -> int:
    """Return the number of shards of a source; 1 if it is not stored in shards."""
    return sum(len(split.index.shards) for split in split_sources(source)) or 1


def check_order(data: TrainImages, source: Source, seed: int, schedule: Schedule, nodes: int = 1) -> None:
    """Refuse an order that would train badly, or read the same shards again and again on one node."""
    refuse(
        RecipeError,
        (
            data.repeats > 1 and schedule.batch_size < 2 * data.repeats,
            "",
            f"data.repeats = {data.repeats} needs two images in a batch, and schedule.batch_size "
            f"is {schedule.batch_size}",
            f"set it to at least {2 * data.repeats}",
        ),
        (
            2 * data.lanes > schedule.batch_size and data.lanes > 1,
            "",
            f"data.lanes = {data.lanes} needs two images in each lane, and schedule.batch_size is "
            f"{schedule.batch_size}",
            f"set data.lanes to at most {schedule.batch_size // 2}",
        ),
    )
    parts = source.parts if data.mixture and isinstance(source, View) else (source,)
    num_walks = max(1, num_lanes(data, schedule))
    for part in parts:
        if data.order == "windowed":
            _check_window(data, part, num_walks)
        _check_cache(data, part, max(lanes_read(num_walks, nodes)))
    if data.order == "windowed":
        _check_entropy(data, source, seed, schedule)


def _check_window(data: TrainImages, source: Source, num_walks: int) -> None:
    shards, window = num_shards(source), data.order_window_shards
    if shards < 2 * window * num_walks:
        each = f" in each of {num_walks} lanes" if num_walks > 1 else ""
        raise RecipeError(
            "data.order = 'windowed'",
            f"{shards} shards are too few for windows of data.order_window_shards = "
            f"{window}{each}, should be {2 * window * num_walks} or more",
            "set data.order = 'exact', a smaller window, or write smaller shards (--max-mib)",
        )


def _check_cache(data: TrainImages, source: Source, num_walks: int) -> None:
    remote = [split.index for split in split_sources(source) if split.index.is_remote]
    if not remote:
        return
    sizes = sorted((shard.num_bytes for index in remote for shard in index.shards), reverse=True)
    bound = data.cache_gib * _GIB
    if data.order == "windowed":
        each = f" for each of {num_walks} lanes of a node" if num_walks > 1 else ""
        needed, what = sum(sizes[: 2 * data.order_window_shards * num_walks]), f"two windows of shards{each}"
    else:
        needed, what = sum(sizes), "all shards, which the exact order visits at random,"
    other = "a smaller data.order_window_shards" if data.order == "windowed" else "data.order = 'windowed'"
    refuse(
        RecipeError,
        (
            data.order == "windowed" and not bound,
            "",
            "data.order = 'windowed' reads whole remote shards, and data.cache_gib = 0 keeps none",
            f"set it to {needed / _GIB:.3g} or more",
        ),
        (
            0 < bound < needed,
            "",
            f"data.cache_gib = {data.cache_gib:g} is too small: {what} need {needed / _GIB:.3g}, "
            "and evicted shards are downloaded again and again",
            f"raise it, set {other}, or data.cache_gib = 0 to read single images",
        ),
    )


def _check_entropy(data: TrainImages, source: Source, seed: int, schedule: Schedule) -> None:
    """Refuse windows over shards that are sorted by class: they would train on a few classes at a time."""
    size = min(max(schedule.batch_size, _LEAST_CHUNK), len(source))
    num_chunks = max(_LEAST_CHUNKS, _PROBED_IMAGES // size)
    order = training_order(data, source, seed, schedule)
    shuffled = training_order(data.model_copy(update={"order": "exact"}), source, seed + 1, schedule)
    found, expected = (_mean_entropy(source, walk, num_chunks, size) for walk in (order, shuffled))
    if found < _LEAST_ENTROPY * expected:
        raise RecipeError(
            f"the labels of the first batches have an entropy of {found:.2f} bits, those of "
            f"random ones {expected:.2f}: the shards are sorted by class",
            fix="write them again shuffled with `vitctl data shards`, or set data.order = 'exact'",
        )


def _mean_entropy(source: Source, order: SampleOrder, num_chunks: int, size: int) -> float:
    """Return the mean entropy of the labels of the first batches, in bits; -1 is padding."""
    labels, entropies = source.labels(order.at(np.arange(num_chunks * size))[1]), []
    for chunk in np.split(labels, num_chunks):
        counts = np.unique(chunk[chunk >= 0], return_counts=True)[1]
        shares = counts / max(1, counts.sum())
        entropies.append(-(shares * np.log2(shares)).sum())
    return float(np.mean(entropies))


def group_notes(data: Place, sides: Mapping[str, Source | None]) -> list[str]:
    """Return how many groups each side of a split has, and on both; empty without data.group_by."""
    if not data.group_by:
        return []
    groups = {split: Counter(group_names(one, data.group_by)) for split, one in sides.items() if one}
    parts = [
        f"{count_text(len(of), 'group')} of up to {count_text(max(of.values()), 'image')} in {split}"
        for split, of in groups.items()
    ]
    num_shared = sum(map(len, groups.values())) - len(set().union(*groups.values()))
    shared = f"; {count_text(num_shared, 'group')} on both sides of the split" if num_shared else ""
    return [f"{', '.join(parts)} (data.group_by = '{data.group_by}'){shared}"]


def sampling_notes(data: TrainImages, source: Source) -> list[str]:
    """Return notes on the data for plan and log: shares of a mixture, subsets, how remote shards are read."""
    notes = []
    if data.mixture and isinstance(source, View):
        counts = quotas([part.weight for part in data.mixture])
        for given, images, count in zip(data.mixture, source.parts, counts, strict=True):
            share, total = count / sum(counts), len(images)
            notes.append(
                f"mixture: {share:.2%} of the images from {given.path} ({total:,} images, "
                f"{share * len(source) / total:.3g} "
                "times as often as by its size)"
            )
    notes += [
        f"'{data.train_split}' takes {count_text(repeated, 'image')} twice"
        for part in (source.parts if data.mixture and isinstance(source, View) else (source,))
        if (repeated := num_repeated(part))
    ]
    notes += filter(None, [class_zero_note(source)])
    some = f"a random subset of {count_text(len(source), 'image')} (data.subset_seed = {data.subset_seed})"
    different = count_text(-(-len(source) // data.repeats), "different image")
    more = (
        (data.subset_images or data.subset_fraction < 1, some),
        (
            data.repeats > 1,
            f"repeated augmentation: each image {data.repeats} times in a batch, so an epoch of "
            f"{len(source):,} has {different}",
        ),
        (is_remote(source), f"remote shards, read {_READING[data.order, data.cache_gib > 0]}"),
    )
    return notes + [text for is_so, text in more if is_so]


_READING = {
    ("windowed", True): "whole and in windows through the cache",
    ("exact", True): "whole, in exact order: the first epoch fetches every shard in no order of its own",
    (
        "exact",
        False,
    ): "image by image, those of a micro-batch at the same time; data.order = 'windowed' reads "
    "each shard once",
    ("windowed", False): "image by image",
}


def corrected(recipe: Pretrain | Finetune, source: Source) -> Correction | None:
    """Return how a recipe corrects for uneven training classes; None if it does not. Raises RecipeError."""
    weights, sampling = recipe.loss.class_weights, recipe.data.sampling
    is_off = weights == "none" and sampling == "shuffle"
    return None if is_off else correction(weights, sampling, source)


def roles_note(recipe: Recipe, num_train: int, num_scored: int) -> str:
    """Return a line that says which images are trained on, choose something, and are scored; 0: unknown."""
    if not isinstance(recipe, Pretrain | Finetune):
        return ""
    data, chosen, asks = recipe.data, list[str](), recipe.evaluation.select_best
    if not data.eval_split or data.synthetic:
        return ""
    if isinstance(recipe, Finetune) and recipe.sweep.lrs:
        chosen.append(f"learning rate chosen on '{recipe.sweep.eval_split}'")
    if asks:
        chosen.append(f"checkpoint chosen on '{data.eval_split}'")
    train = f"'{data.train_split}'" + f" ({count_text(num_train, 'image')})" * bool(num_train)
    scored = f"'{data.eval_split}'" + f" ({count_text(num_scored, 'image')})" * bool(num_scored)
    text = f"trained on {train}, {', '.join(chosen) or 'nothing chosen'}, scored on {scored}"
    if data.test_split:
        return f"{text}; the chosen weights are scored once on '{data.test_split}'"
    return text + "; score test images once, by `vitctl evaluate`" * asks


def training_notes(
    recipe: Pretrain | Finetune, data: TrainImages, train_on: Source, score_on: Source | None
) -> list[str]:
    """Return notes on a training's images for its log; some may be empty."""
    uneven = corrected(recipe, train_on)
    groups = group_notes(data, {data.train_split: train_on, data.eval_split: score_on})
    return [*groups, *sampling_notes(data, train_on), uneven.note if uneven else ""]


def scored_place(data: TrainImages) -> dict[str, Any]:
    """Return where the images are that a training scores, by recipe key of `evaluate`."""
    names = "dataset path root classes columns cache_gib eval_split group_by exif_orientation truncated"
    values = {f"data.{name}": getattr(data, name) for name in names.split()}
    if not (data.path or data.dataset) and data.mixture:
        values["data.path"] = data.mixture[0].path
    return values


def open_whole(place: Place, split: str, run_dir: Path) -> Source:
    """Open a split behind a score; remote shards always pass through the cache, which verifies them."""
    limit = place.cache_gib or Place.model_fields["cache_gib"].default
    return open_recipe_split(place.model_copy(update={"cache_gib": limit}), split, run_dir / "data")


def open_scored(place: Place, split: str, run_dir: Path) -> Source:
    """Open the images of a score: each has a label and occurs once. Raises DataError."""
    source = open_whole(place, split, run_dir)
    check_scored(source, split)
    return source


def check_scored(source: Source, split: str) -> None:
    """Raise DataError unless each image to score has a valid label and occurs once."""
    check_labels(source, split, "scoring")
    check_once(source, split)


def check_once(source: Source, split: str) -> None:
    """Raise DataError if a split expression takes an image twice: it cannot be scored."""
    if repeated := num_repeated(source):
        raise DataError(
            f"'{split}' takes {count_text(repeated, 'image')} twice, but a score counts every image once",
            fix="choose parts that do not overlap",
        )


def open_training_images(
    data: TrainImages, run_dir: Path, *, needs_labels: bool = True
) -> tuple[Source, Source | None]:
    """Open the training split and the split to score on; None if the recipe names none. Raises DataError.

    Args:
        needs_labels: False for masked patch prediction, which uses pixels only.
    """
    if data.synthetic:
        return synthetic(data.synthetic, dataset=data.dataset, image_size=data.image_size), None
    train = open_train(data, run_dir / "data")
    scored = (
        data
        if data.path or data.dataset or not data.mixture
        else data.model_copy(update={"path": data.mixture[0].path})
    )
    check_labels(train, data.train_split, "training" if needs_labels else "pixels")
    test = None
    if data.eval_split and needs_labels:
        test = open_scored(scored, data.eval_split, run_dir)
    elif data.eval_split:
        test = open_recipe_split(scored, data.eval_split, run_dir / "data")
        check_labels(test, data.eval_split, "pixels")
    if test is not None and test.class_names != train.class_names:
        odd = sorted(set(train.class_names) ^ set(test.class_names))[:3]
        raise DataError(
            f"'{data.train_split}' has {len(train.class_names)} classes, '{data.eval_split}' "
            f"{len(test.class_names)}, and they are not the "
            f"same{': ' + ', '.join(odd) if odd else ' in order'}",
            fix="make both with one class list",
        )
    return train, test


def at_size(data: TrainImages, stored: int) -> TrainImages:
    """Return [data] with its image size, or `stored` for 0. Raises RecipeError if the crop has no room."""
    try:
        return data if data.image_size else TrainImages(**{**data.model_dump(), "image_size": stored})
    except ValidationError as error:
        raise RecipeError("; ".join(str(detail["ctx"]["error"]) for detail in error.errors())) from None


def train_transform(data: TrainImages, mean: Sequence[float] = HALF) -> TrainTransform:
    """Return the augmentation of [data]; `mean` is the weights' mean colour."""
    is_resized = data.crop == "random_resized"
    return TrainTransform(
        data.image_size,
        crop=data.crop,
        flip=data.flip,
        resample=data.resample,
        resize=data.train_resize,
        decode=data.decode,
        randaugment_layers=data.randaugment_layers,
        randaugment_magnitude=data.randaugment_magnitude,
        exif_orientation=data.turns_upright,
        truncated=data.truncated,
        randaugment_rules=data.randaugment_rules,
        vertical_flip=data.vertical_flip,
        augment3=data.augment3,
        color_jitter=data.color_jitter,
        fill=fill_colour(mean),
        randaugment_probability=data.randaugment_probability,
        randaugment_std=data.randaugment_std,
        randaugment_increasing=data.randaugment_increasing,
        auto_augment=data.auto_augment,
        area_range=data.crop_scale if is_resized else TrainTransform.area_range,
        aspect_range=data.crop_ratio if is_resized else TrainTransform.aspect_range,
    )


def eval_transform(data: TrainImages, mean: Sequence[float] = HALF) -> EvalTransform:
    """Return the evaluation pre-processing of [data]; `mean` is the weights' mean colour."""
    return EvalTransform(
        data.image_size,
        method=data.eval_method,
        resize=data.eval_resize,
        resample=data.eval_resample or data.resample,
        exif_orientation=data.turns_upright,
        truncated=data.truncated,
        fill=fill_colour(mean),
    )


# Data sets for which the authors' evaluators use other splits than train and test.
SPLITS = {
    "colorectal": ("train[:2000]", "train[2000:]"),
    "imagenet": ("train[:65000]", "validation"),
    "uc_merced": ("train[:1000]", "train[1000:]"),
}


@dataclass(frozen=True)
class FewshotSet:
    """A data set, with the split that shots are drawn from and the split that is scored."""

    name: str
    train_split: str
    eval_split: str
    train: Source
    test: Source

    @property
    def num_classes(self) -> int:
        return len(self.train.class_names)

    @property
    def used(self) -> dict[str, Any]:
        """Return the provenance of its numbers."""
        own = {
            "train_split": self.train_split,
            "train_sha256": self.train.digest,
            "train_source": source_text(self.train),
            "num_train": len(self.train),
        }
        return own | data_used(self.test, self.eval_split)


def open_sets(data: FewshotImages, shots: int, fix: str, run_dir: Path) -> list[FewshotSet]:
    """Open the data sets of [data] and run `check_set` on each."""
    sets = []
    for name, place, train_split, eval_split in fewshot_places(data):
        train, test = (open_whole(place, split, run_dir) for split in (train_split, eval_split))
        one = FewshotSet(name, train_split, eval_split, train, test)
        check_set(one, shots, fix)
        sets.append(one)
    return sets


def fewshot_places(data: FewshotImages) -> list[tuple[str, FewshotImages, str, str]]:
    """Return each data set's name, its place, its split for shots and its split to score."""
    places = [data.model_copy(update={"dataset": name, "path": ""}) for name in data.datasets] or [data]
    rows = []
    for place in places:
        name = (
            find_data_set(place.dataset).name if place.dataset and not place.path else Path(place.path).name
        )
        train, test = SPLITS.get(name, ("train", "test"))
        if isinstance(data, ProbeImages) and name == "imagenet":
            train = "train"
        rows.append((name, place, place.train_split or train, place.eval_split or test))
    return rows


def check_set(one: FewshotSet, shots: int, fix: str) -> None:
    """Check that both splits have the same classes and valid labels, and enough images for the shots.

    `fix` tells what to do about too few images. Raises DataError.
    """
    from vitctl.engine.fewshot_ridge import choose_shots

    if one.train.class_names != one.test.class_names:
        raise DataError(
            f"'{one.train_split}' and '{one.eval_split}' do not have the same classes in the same order"
        )
    check_labels(one.train, one.train_split, "draws", single=True)
    check_labels(one.test, one.eval_split, "scoring", single=True)
    for source, split in ((one.train, one.train_split), (one.test, one.eval_split)):
        check_once(source, split)
    labels, names = one.train.labels(), one.train.class_names
    choose_shots(labels, shots, num_classes=one.num_classes, seed=0, class_names=names, fix=fix)


def check_neighbours(recipe: FrozenRecipe, name: str, num_images: int) -> None:
    """Check that a data set has as many training images as a probe has neighbours. Raises DataError."""
    if (
        isinstance(recipe, Probe)
        and recipe.probe.method == "knn"
        and num_images < (most := max(recipe.probe.k))
    ):
        fitting = [k for k in recipe.probe.k if k <= num_images] or sorted({1, min(5, num_images)})
        raise DataError(
            name,
            f"{count_text(num_images, 'training image')}, but {most:,} neighbours",
            f"use fewer: --set probe.k={','.join(map(str, fitting))}",
        )


@dataclass(frozen=True)
class Inputs:
    """The images that a job reads; which fields are set depends on the job.

    Args:
        train, scored: images to train on, and to score on (pretrain, finetune, evaluate).
        tested: images of data.test_split.
        probed: of [fewshot_probe].
        tried: images that the learning-rate sweep trains on, and scores on.
        sets: of `fewshot` and `probe`.
        tasks: of `vtab`, by name.
    """

    train: Source | None = None
    scored: Source | None = None
    tested: Source | None = None
    probed: FewshotSet | None = None
    tried: tuple[Source, Source] | None = None
    sets: list[FewshotSet] = field(default_factory=list)
    tasks: Mapping[str, TaskData] = field(default_factory=dict)


def open_inputs(recipe: Recipe, run_dir: Path) -> Inputs:
    """Open the images of a recipe; vitctl's data sets are generated once, in RUN/data. Raises DataError."""
    if isinstance(recipe, Pretrain | Finetune):
        train, scored = open_training_images(recipe.data, run_dir, needs_labels=recipe.needs_labels)
        probed, tried = None, None
        if isinstance(recipe, Pretrain) and recipe.fewshot_probe.every_steps:
            p = recipe.fewshot_probe
            names = ["dataset", "path", "root", "train_split", "eval_split", "columns"]
            probing = FewshotImages(**{name: getattr(p, name) for name in names})
            fix = "set fewshot_probe.shots to fewer"
            probed = open_sets(probing, max(p.shots), fix, run_dir)[0]
        elif isinstance(recipe, Finetune) and recipe.sweep.lrs:
            splits = {"train_split": recipe.sweep.train_split, "eval_split": recipe.sweep.eval_split}
            trained, chosen_by = open_training_images(recipe.data.model_copy(update=splits), run_dir)
            assert chosen_by is not None
            tried = trained, chosen_by
        tests = recipe.data.test_split and recipe.needs_labels
        tested = _open_tested(recipe, train, scored, run_dir) if tests else None
        return Inputs(train, scored, tested, probed, tried)
    if isinstance(recipe, FrozenRecipe):
        sets = open_sets(recipe.data, recipe.classifier.most_shots, recipe.classifier.with_fewer, run_dir)
        for one in sets:
            check_neighbours(recipe, one.name, len(one.train))
        return Inputs(sets=sets)
    if isinstance(recipe, Vtab):
        return Inputs(tasks=open_tasks(recipe, chosen_tasks(recipe), run_dir))
    if isinstance(recipe, Evaluate):
        return Inputs(scored=open_scored(recipe.data, recipe.data.eval_split, run_dir))
    return Inputs()


def _open_tested(
    recipe: Pretrain | Finetune, train: Source, scored: Source | None, run_dir: Path
) -> Source | None:
    """Open data.test_split. Raises DataError if its images are used before."""
    split = recipe.data.test_split
    _, tested = open_training_images(recipe.data.model_copy(update={"eval_split": split}), run_dir)
    for source, does in ((train, "trained on"), (scored, f"in '{recipe.data.eval_split}', which chooses")):
        if tested and source and (count := shared_samples(source, tested)):
            raise DataError(
                f"data.test_split = '{split}'",
                f"{count:,} of its {len(tested):,} images are {does}",
                "name images that neither train nor choose, or leave it out",
            )
    return tested


def chosen_tasks(recipe: Vtab) -> list[VtabTask]:
    """Return the tasks of vtab.suite that vtab.tasks names, or all. Raises RecipeError on an unknown name."""
    by_name = {task.name: task for task in SUITES[recipe.vtab.suite]}
    unknown = [name for name in recipe.vtab.tasks if name not in by_name]
    if unknown:
        hint = did_you_mean(nearest(unknown[0], by_name))
        raise RecipeError(
            "vtab.tasks",
            f"{', '.join(unknown)} not in suite '{recipe.vtab.suite}'; "
            f"{hint or 'it has ' + ', '.join(by_name)}",
        )
    return [task for name, task in by_name.items() if name in (recipe.vtab.tasks or by_name)]


def open_tasks(recipe: Vtab, tasks: Sequence[VtabTask], run_dir: Path) -> dict[str, TaskData]:
    """Open the images of every task. Raises one DataError that names all tasks whose images are missing."""
    opened, problems = {}, []
    root = Path(recipe.data.path or recipe.data.root)
    for task in tasks:
        try:
            opened[task.name] = open_task(
                task, root, scratch=run_dir / "data", allow_partial=recipe.data.allow_partial
            )
        except DataError as error:
            problems.append((task.name, error))
    if problems:
        missing = ", ".join(name for name, _ in problems)
        mini = "" if recipe.vtab.suite == "mini" else ", --suite mini needs no data"
        reason = f" ({problems[0][1]})" if len(problems) == 1 else ""
        raise DataError(
            f"{len(problems)} of {len(tasks)} tasks have no usable shards under {root}: "
            f"{missing}{reason}; each needs a folder {root}/NAME made by `vitctl data shards`",
            fix=f"select available tasks with --task{mini}",
        )
    return opened
