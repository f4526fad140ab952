"""`vitctl compare`: the numbers of results side by side, and whether they may be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitctl.data.images.decode import open_picture
from vitctl.engine.journal import RECIPE
from vitctl.engine.metrics import interval_text, mcnemar
from vitctl.errors import CheckpointError, VitctlError
from vitctl.jobs.inputs.data import open_recipe_split
from vitctl.jobs.record.answer_table import answers_digest, is_right, read_answers
from vitctl.jobs.record.result import RunResult, read_result, unverified_bytes
from vitctl.jobs.record.start_folder import at_start
from vitctl.recipe.images import Place
from vitctl.recipe.load import leaves, load_recipe
from vitctl.recipe.neutral_keys import RESULT_NEUTRAL, deciding_values, with_added
from vitctl.recipe.write import toml_value
from vitctl.report.result_tables import is_digest

NOT_RECORDED = "not recorded"
_CLASSIFIER, _FEWSHOT, _PROBE, _VTAB = "classifier", "fewshot", "probe", "vtab"
_ALL = (_CLASSIFIER, _FEWSHOT, _PROBE, _VTAB)


@dataclass(frozen=True)
class Fact:
    """A provenance key that a number depends on.

    Args:
        rule: "agree": numbers must not be compared if it differs; "show": they may, and the difference is
            shown, because it is what is compared, or changes a number only by rounding.
        reason: for "agree", what a difference means; for "show", why it is allowed.
        jobs: kinds of results that record it.
    """

    key: str
    rule: Literal["agree", "show"]
    reason: str
    jobs: tuple[str, ...] = _ALL


FACTS = (
    # What is measured.
    Fact("suite", "agree", "other tasks", (_VTAB,)),
    Fact("protocol", "agree", "the protocols differ", (_VTAB,)),
    Fact("split", "agree", "another split", (_CLASSIFIER, _FEWSHOT, _PROBE)),
    Fact("num_images", "agree", "another number of images", (_CLASSIFIER, _FEWSHOT, _PROBE)),
    Fact(
        "data_sha256",
        "agree",
        "other images, or their shards were written again",
        (_CLASSIFIER, _FEWSHOT, _PROBE),
    ),
    Fact("data_digest", "agree", "an earlier digest covered index.json only, not labels; score it again"),
    Fact(
        "data_source",
        "agree",
        "its images are from another source, or are a part or a copy",
        (_CLASSIFIER, _FEWSHOT, _PROBE),
    ),
    Fact("labels", "agree", "other labels", (_CLASSIFIER,)),
    Fact("train_sha256", "agree", "other training images", (_FEWSHOT, _PROBE)),
    Fact("choose_l2", "agree", "the regulariser is chosen by another rule", (_FEWSHOT,)),
    Fact("l2", "agree", "another regulariser, or another grid of them", (_FEWSHOT,)),
    Fact(
        "float64", "agree", "solved in another precision: small regularisers give other answers", (_FEWSHOT,)
    ),
    Fact("method", "agree", "another classifier on the representations", (_PROBE,)),
    # How it is measured. Each changes which images the same network gets right.
    Fact(
        "precision",
        "agree",
        "the same network scores differently in another precision; score both in one (--precision)",
    ),
    Fact("resample", "agree", "the same network scores differently when images are resized by another rule"),
    Fact("flip_average", "agree", "one averages over mirror images (--flip-average), the other does not"),
    Fact(
        "eval_method",
        "agree",
        "the same network scores differently when it is shown another part of the image",
    ),
    Fact(
        "eval_share",
        "agree",
        "the same network scores differently when it is shown another part of the image",
    ),
    Fact(
        "exif_orientation",
        "agree",
        "the same network scores differently when photographs are not rotated upright",
    ),
    # What is compared: the network, its training, and its image size.
    Fact(
        "image_size",
        "show",
        "part of the network: results at 224 and 384 pixels stand side by side in the paper",
    ),
    Fact("weights_sha256", "show", "other weights are what is compared", (_CLASSIFIER,)),
    Fact(
        "weights_chosen",
        "show",
        "the last or the best checkpoint: of the training, not of the measurement",
        (_CLASSIFIER,),
    ),
    Fact("weights_step", "show", "as weights_chosen", (_CLASSIFIER,)),
    Fact(
        "weights_averaged",
        "show",
        "the Polyak average: of the training, not of the measurement",
        (_CLASSIFIER,),
    ),
    Fact("from_sha256", "show", "other pre-training is what is compared", (_FEWSHOT, _PROBE, _VTAB)),
    Fact("from_chosen", "show", "as weights_chosen", (_FEWSHOT, _PROBE, _VTAB)),
    Fact("from_step", "show", "as weights_chosen", (_FEWSHOT, _PROBE, _VTAB)),
    Fact("from_averaged", "show", "as weights_averaged", (_FEWSHOT, _PROBE, _VTAB)),
    Fact("assumed", "show", "guessed, not recorded with the weights: other weights may be at a disadvantage"),
    Fact("temperature", "show", "divides the logits before the softmax: no answer changes", (_CLASSIFIER,)),
    Fact("licence", "show", "of the weights, no part of the measurement"),
    Fact("augment", "show", "belongs to the training", (_VTAB,)),
    Fact("seeds", "show", "other draws estimate the same mean", (_FEWSHOT, _VTAB)),
    # How it is computed. Only the order of sums differs: at most tied predictions change.
    Fact("device", "show", "sums in another order, the same precision"),
    Fact("device_name", "show", "as device"),
    Fact("hardware", "show", "as device: instructions of the processor; driver and libraries of a GPU"),
    Fact("processes", "show", "as device"),
    Fact("sharding", "show", "as device"),
    Fact("versions", "show", "another release may sum in another order; decoders agree to one step of 255"),
    Fact(
        "recipe_sha256",
        "show",
        "a digest of everything that was set; the values that differ are shown instead",
    ),
)
# Keys that only some devices or methods record.
_SOMETIMES = (
    Fact("threads", "show", "as device"),
    Fact("tf32", "agree", "float32 products have 10 mantissa bits in the one, 23 in the other"),
    Fact("k", "show", "each number of neighbours has its own accuracy", (_PROBE,)),
    Fact("temperature", "agree", "neighbours vote with other weights", (_PROBE,)),
    Fact("float64", "agree", "computed in another precision", (_PROBE,)),
    Fact("c", "agree", "another grid of regularisers", (_PROBE,)),
    Fact("hold_out", "agree", "chosen on another share of the training images", (_PROBE,)),
    Fact("refitted", "agree", "one layer was trained without the held-out images", (_PROBE,)),
    Fact("hold_out_seed", "show", "other held-out images and batches estimate the same", (_PROBE,)),
    *(
        Fact(key, "agree", "trained otherwise", (_PROBE,))
        for key in ("lrs", "steps", "batch_size", "momentum")
    ),
)
# The data of each task in a table of tasks.
_TASK_KEYS = ("split", "data_sha256", "data_source", "train_split", "train_sha256")
# What a missing entry of a table means.
_MISSING = {"versions": NOT_RECORDED, "hardware": NOT_RECORDED, "assumed": "not assumed"}
_QUIET = {"from", "weights", "tasks", "eval_resize", "answers_sha256", "temperature_sha256"}
_OF_SEEDS = {"seed", "seeds", "weights_sha256", "weights_step", "hold_out_seed"}
_SETTINGS = {"c", "l2", "loss", "lr"}  # chosen settings, not shares
_INTEGERS = {"correct", "total", "top5_correct", "step"}
_CALIBRATION = {"ece", "nll", "brier"}
_SHOWN = 12
_LOOKED_AT = 10_000  # images at most whose orientation is read
_CROP_TOLERANCE = 0.01  # 224 of 256 and 384 of 438 count as the same crop


@dataclass(frozen=True)
class Comparison:
    """Numbers side by side.

    Args:
        numbers: every metric's name, and its value in each result, None if missing.
        reasons: why the numbers must not be compared; empty if they may be.
        differences: other differences: provenance key and its value in each result.
        notes: lines: what is left out, and tests of a result against the first, if both wrote answers.
        unrecorded: keys that must agree and that no result records, as in results of earlier versions.
    """

    numbers: list[tuple[str, list[Any]]]
    reasons: list[str]
    differences: list[tuple[str, list[Any]]]
    notes: list[str]
    unrecorded: list[str]

    @property
    def are_seeds(self) -> bool:
        """Return whether three or more results are comparable and differ in the seed alone."""
        is_many = len(self.numbers[0][1]) > 2 if self.numbers else False
        keys = {key for key, _ in self.differences}
        return is_many and not self.reasons and "seed" in keys and keys <= _OF_SEEDS


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Put the results of runs side by side, and compare each with the first. Raises CheckpointError."""
    results = []
    for folder in folders:
        result = read_result(folder)
        if result is None:
            raise CheckpointError(folder, "has no result.json", "give the folder of a finished run")
        results.append(result)
    flat = [_flat(result.metrics) for result in results]
    fitted = [r.provenance.get("temperature_sha256", "") == r.provenance.get("data_sha256") for r in results]
    for numbers in (one for one, is_fitted in zip(flat, fitted, strict=True) if is_fitted):
        for name in [name for name in numbers if name.split(" ")[-1] in _CALIBRATION]:
            del numbers[name]  # too low: fitted to the scored images
    names = dict.fromkeys(name for numbers in flat for name in numbers)
    reasons = [
        *(
            f"{folder}: {reason}"
            for folder, result in zip(folders[1:], results[1:], strict=True)
            for reason in _reasons(folders[0], results[0], result)
            if "failed" not in (result.status, results[0].status)
        ),
        *(
            f"{folder}: {unverified}"
            for folder, r in zip(folders, results, strict=True)
            if r.status == "done" and (unverified := unverified_bytes(r))
        ),
        *(
            f"{folder}: was resumed with a change "
            f"({'; '.join(map(str, changed)) if isinstance(changed, list) else 'resume --allow'})"
            for folder, r in zip(folders, results, strict=True)
            if (changed := r.provenance.get("changed_on_purpose"))
        ),
        *(
            f"{folder}: is {r.status}, not done{': ' + r.error if r.error else ''}"
            for folder, r in zip(folders, results, strict=True)
            if r.status != "done"
        ),
    ]
    recorded = [_recorded(result) for result in results]
    return Comparison(
        [(name, [numbers.get(name) for numbers in flat]) for name in names],
        reasons,
        _differences(results, recorded, folders),
        [
            f"{folder}: its temperature was fitted to these images, so its calibration is left out; score "
            "images that it was not fitted to"
            for folder, is_fitted in zip(folders, fitted, strict=True)
            if is_fitted
        ]
        + [
            _tested(folders[0], results[0], folder, result)
            for folder, result in zip(folders[1:], results[1:], strict=True)
            if all("answers" in one.files for one in (results[0], result))
        ],
        [
            fact.key
            for fact in _facts(results[0])
            if fact.rule == "agree" and not any(fact.key in one for one in recorded)
        ],
    )


def _tested(name: Path, first: RunResult, folder: Path, other: RunResult) -> str:
    """Return McNemar's test of two results on the same images in a line, or why there is none."""
    try:
        tables = [_answered(*pair) for pair in ((name, first), (folder, other))]
    except VitctlError as error:
        return f"no McNemar's test: {error}"
    if tables[0].keys() != tables[1].keys() or first.provenance.get("labels") != other.provenance.get(
        "labels"
    ):
        return "no McNemar's test: other images or labels"
    one, two = (
        sum(right and not against[path] for path, right in table.items())
        for table, against in (tables, tables[::-1])
    )
    return (
        f"only {name} is right on {one:,} images, only {folder} on {two:,}: McNemar's exact test, "
        f"p = {mcnemar(one, two):.2g}"
    )


def _answered(folder: Path, result: RunResult) -> dict[str, bool]:
    """Return which images a result gets right, by path. Raises VitctlError if its answers are unusable."""
    place = Path(result.files["answers"])
    if result.provenance.get("answers_sha256") not in (None, answers_digest(place)):
        raise CheckpointError(
            place, f"no longer has the answers of {folder}", "evaluate again with another --answers"
        )
    rows = read_answers(place)
    found = {row["path"]: is_right(row) for row in rows}
    correct = sum(found.values())
    if (correct, len(found)) != (result.metrics.get("correct"), len(rows)):
        raise CheckpointError(
            place, f"holds {correct:,} right answers to {len(found):,} images, not the result's"
        )
    return found


def _recorded(result: RunResult) -> dict[str, Any]:
    """Return the provenance, with the share of the image side that the crop keeps.

    In a table of tasks, the keys that each task records count as recorded.
    """
    usual: dict[str, Any] = {"flip_average": False, "sharding": "none"} | (
        {} if result.job == "probe" else {"temperature": 1.0}
    )
    recorded = usual | dict(result.provenance)
    size, resize = recorded.get("image_size"), recorded.get("eval_resize")
    if size and resize is not None:
        recorded["eval_share"] = size / (resize or size)
    if "tasks" in recorded:
        recorded |= {key: recorded.get(key, "see tasks") for key in ("num_images", *_TASK_KEYS)}
    return recorded


def _facts(result: RunResult, facts: Sequence[Fact] = FACTS) -> list[Fact]:
    """Return the facts that a result of this kind should record."""
    return [fact for fact in facts if _kind(result) in fact.jobs]


def _reasons(name: Path, first: RunResult, other: RunResult) -> list[str]:
    """Return why a result must not be compared with the first one, whose folder is `name`."""
    kinds = [
        "scores a classifier" if _kind(result) == _CLASSIFIER else f"is of the job {result.job}"
        for result in (first, other)
    ]
    reasons = [] if kinds[0] == kinds[1] else [f"{kinds[1]}, but {name} {kinds[0]}"]
    one, two = _recorded(first), _recorded(other)
    some = [fact for fact in _facts(first, _SOMETIMES) if fact.key in one and fact.key in two]
    for fact in (*_facts(first), *some):
        values = [recorded.get(fact.key, NOT_RECORDED) for recorded in (two, one)]
        is_same_data = one.get("data_sha256") == two.get("data_sha256") is not None
        if fact.key == "data_source" and is_same_data:
            continue  # the same bytes, whatever the source
        if (
            fact.key == "exif_orientation"
            and is_same_data
            and values[0] != values[1]
            and _turns_none(name, one)
        ):
            continue  # the same pixels
        if fact.rule == "agree" and not _agree(fact.key, *values):
            shown = [_short(value) for value in values]
            reasons.append(f"{fact.key} is {shown[0]}, but {shown[1]} in {name}: {fact.reason}")
    tasks = one.get("tasks") or {}, two.get("tasks") or {}
    odd = [
        name
        for name in sorted({*tasks[0], *tasks[1]})
        if any(tasks[0].get(name, {}).get(key) != tasks[1].get(name, {}).get(key) for key in _TASK_KEYS)
    ]
    if odd:
        reasons.append(f"other data or splits in the tasks {', '.join(odd)}")
    return reasons


def _turns_none(folder: Path, recorded: Mapping[str, Any]) -> bool:
    """Return whether the images that a run scored are here, not many, and none has an EXIF orientation."""
    try:
        data = getattr(at_start(load_recipe(str(folder / RECIPE)).recipe, folder), "data", None)
        if not isinstance(data, Place) or "://" in data.path:
            return False
        made = folder / "data"
        source = open_recipe_split(data, str(recorded.get("split")), made if made.is_dir() else None)
        if source.digest != recorded["data_sha256"] or len(source) > _LOOKED_AT:
            return False
        return not any(open_picture(source.read(number)).is_turned for number in range(len(source)))
    except (VitctlError, OSError):
        return False


def _agree(key: str, one: Any, other: Any) -> bool:
    if key == "eval_share" and NOT_RECORDED not in (one, other):
        return bool(abs(one - other) < _CROP_TOLERANCE)
    return bool(one == other)


def _kind(result: RunResult) -> str:
    """Return the kind of a result; classifiers are comparable however they were trained."""
    return _CLASSIFIER if result.job in ("evaluate", "finetune", "pretrain") else result.job


def _differences(
    results: Sequence[RunResult], recorded: Sequence[Mapping[str, Any]], folders: Sequence[Path]
) -> list[tuple[str, list[Any]]]:
    """Return facts that differ or are partly missing, common keys that differ, and recipe values."""
    expected = {fact.key: fact.rule for fact in _facts(results[0], (*FACTS, *_SOMETIMES))}
    shown = [key for key, rule in expected.items() if rule == "show" and any(key in one for one in recorded)]
    others = [
        key
        for key in recorded[0]
        if all(key in one for one in recorded) and key not in expected.keys() | _QUIET
    ]
    rows: list[tuple[str, list[Any]]] = []
    table = {key: [one.get(key, NOT_RECORDED) for one in recorded] for key in (*shown, *others)}
    table = {key: values for key, values in table.items() if any(value != values[0] for value in values)}
    for key, values in table.items():
        if key == "recipe_sha256":  # without values whose resolved value is shown
            of_recipe = _recipe_rows(folders, list(map(_short, values)))
            rows += [row for row in of_recipe if row[0].rpartition(".")[2] not in table]
        else:
            rows += _entry_rows(key, values) if key in _MISSING else [(key, list(map(_short, values)))]
    return rows


def _recipe_rows(folders: Sequence[Path], digests: list[str]) -> list[tuple[str, list[Any]]]:
    """Return a row for each recipe value that affects results and differs, as far as all recipes have it."""
    try:
        recipes = [load_recipe(str(folder / RECIPE)).recipe for folder in folders]
    except VitctlError:
        return [(f"recipe_sha256 (a {RECIPE} is missing or invalid)", digests)]
    tables = [with_added(deciding_values(recipe, RESULT_NEUTRAL)) for recipe in recipes]
    for table in tables:  # an address overrides the data set of the same section
        for key in [key for key in table if key.endswith(".path") and table[key] != toml_value("")]:
            table.pop(key.removesuffix("path") + "dataset", None)
    is_one_job = len({recipe.job for recipe in recipes}) == 1
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "-") for table in tables]) for key in keys if key != "job"]
    return [
        (key, values)
        for key, values in rows
        if len(set(values)) > 1 and (is_one_job or all(key in table for table in tables))
    ]


def _entry_rows(key: str, values: Sequence[Any]) -> list[tuple[str, list[Any]]]:
    tables = [value if isinstance(value, Mapping) else {} for value in values]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(f"{key} {name}", [table.get(name, _MISSING[key]) for table in tables]) for name in names]
    return [(name, entries) for name, entries in rows if any(entry != entries[0] for entry in entries)]


def _flat(metrics: Mapping[str, Any]) -> dict[str, float | str]:
    numbers: dict[str, float | str] = {}
    for path, value in leaves({key: value for key, value in metrics.items() if key != "paper"}):
        name, last = " ".join(path), path[-1]
        if isinstance(value, int | float) and not isinstance(value, bool) and last not in _INTEGERS:
            numbers[name] = _short(value) if last in _SETTINGS else value
        elif interval := interval_text(value):
            numbers[f"{name.replace('_interval', '')}, 95 %"] = interval
    return numbers


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "nothing" if value is None else str(value)
    return text[:_SHOWN] if is_digest(text) else text
