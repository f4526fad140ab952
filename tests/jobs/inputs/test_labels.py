"""ImageNet's ways of scoring, on a classifier of 1,000 classes that answers nearly always wrong."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.conftest import TINY, two_processes, worker
from tests.trained import CPU, do
from vitctl.data.datasets.readers.arrays import encode_png
from vitctl.data.datasets.readers.imagenet import CORRUPTIONS
from vitctl.data.datasets.readers.original_files import class_list
from vitctl.data.source.stores import SyntheticSource
from vitctl.data.source.views import concat
from vitctl.data.writer.intake import Item
from vitctl.data.writer.shard_writer import write_split
from vitctl.errors import DataError, RecipeError
from vitctl.jobs.evaluate import corruption_errors
from vitctl.jobs.predict import load_classifier
from vitctl.launch.prepare_run import prepare_run
from vitctl.recipe.load import Override, load_recipe

WNIDS = class_list("imagenet")
NUM_IMAGES = 40

AS_STORED = {"data.image_size": 16, "data.eval_method": "square", "data.eval_resize": 16}

Score = Callable[..., dict[str, Any]]


def picture(number: int) -> bytes:
    return encode_png(np.random.default_rng(number).integers(0, 256, (16, 16, 3), np.uint8))


def label(number: int) -> int:
    """A class of its own for each image."""
    return 23 * number


def shards(out: Path, names: tuple[str, ...], labels: list[int]) -> Path:
    items = [
        Item(
            f"{WNIDS[own % 1000]}/ILSVRC2012_val_{number + 1:08d}.JPEG",
            own,
            lambda number=number: picture(number),
        )
        for number, own in enumerate(labels)
    ]
    write_split(items, out / "test", names, seed=3, source_text="noise", max_samples=7)
    return out


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(tmp_path_factory.mktemp("imagenet"), WNIDS, [label(number) for number in range(NUM_IMAGES)])


@pytest.fixture(scope="module")
def classifier(imagenet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("classifier") / "run", imagenet)


@pytest.fixture(scope="module")
def coarse(imagenet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its patches are so large that images of 480 pixels are quickly classified."""
    return trained(tmp_path_factory.mktemp("coarse") / "run", imagenet, **{"model.patch_size": 16})


def trained(folder: Path, imagenet: Path, **values: Any) -> Path:
    few = {
        "schedule.total_steps": 2,
        "schedule.warmup_steps": 1,
        "averaging.decay": 0.0,
        "evaluation.every_steps": 0,
    }
    do(
        TINY,
        folder,
        **{"data.path": str(imagenet), "data.train_split": "test", "data.eval_split": "", **few, **values},
    )
    return folder


@pytest.fixture
def score(classifier: Path, imagenet: Path, tmp_path: Path) -> Score:
    def run(labels: str = "", name: str = "run", data: Path = imagenet, **values: Any) -> dict[str, Any]:
        given = {"weights.source": str(classifier), "data.path": str(data), "evaluation.labels": labels}
        return do("evaluate", tmp_path / name, **CPU, **{**given, **values})

    return run


def answers(result: dict[str, Any]) -> dict[int, int]:
    """The answer to each image: every image has a class of its own, so the confusions tell."""
    with Path(result["files"]["confusion"]).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == NUM_IMAGES
    assert all(row["images"] == "1" for row in rows)
    return {WNIDS.index(row["class"]) // 23: WNIDS.index(row["answer"]) for row in rows}


def all_logits(result: dict[str, Any]) -> np.ndarray:
    """The logits of every picture, `[40, 1000]`, by the weights of a result."""
    opened = load_classifier(str(result["provenance"]["weights"]), precision="float64", device="cpu")
    pictures = [Image.open(io.BytesIO(picture(number))) for number in range(NUM_IMAGES)]
    return opened.logits(pictures).numpy()


def test_real__beside_the_original_labels(score: Score, tmp_path: Path) -> None:
    given = answers(score())
    sets: list[list[int]] = [[999] for _ in range(50_000)]
    for number in range(NUM_IMAGES):
        sets[number] = [[given[number], 5], [], [(given[number] + 1) % 1000]][number % 3]
    (tmp_path / "real.json").write_text(json.dumps(sets))
    result = score(str(tmp_path / "real.json"), "real")
    assert result["metrics"]["real"]["correct"] == 14
    assert result["metrics"]["real"]["total"] == 27
    assert result["metrics"]["total"] == NUM_IMAGES
    assert result["provenance"]["labels"] == "original"
    assert result["metrics"]["correct"] == sum(given[number] == label(number) for number in range(NUM_IMAGES))


def test_per_class__sums_to_the_score(score: Score) -> None:
    result = score()
    with Path(result["files"]["per_class"]).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == list(WNIDS)
    for column, metric in (("images", "total"), ("correct", "correct"), ("top5_correct", "top5_correct")):
        assert sum(int(row[column]) for row in rows) == result["metrics"][metric]


def test_part_of_imagenet__other_classes_cannot_win(score: Score, tmp_path: Path) -> None:
    """As ImageNet-A and -R are scored: the best of their classes alone, by the logits of all 1,000."""
    names = tuple(sorted(WNIDS[label(number)] for number in range(NUM_IMAGES)))
    data = shards(tmp_path / "data", names, list(range(NUM_IMAGES)))
    result = score("", "part", data)
    logits = all_logits(result)[:, [WNIDS.index(name) for name in names]]
    assert result["metrics"]["correct"] == (logits.argmax(1) == np.arange(NUM_IMAGES)).sum()
    assert result["metrics"]["total"] == NUM_IMAGES
    assert result["provenance"]["labels"] == "restricted"
    with Path(result["files"]["confusion"]).open() as file:
        assert {row["answer"] for row in csv.DictReader(file)} <= set(names)


def test_corruption_errors__and_their_mean_by_alexnet() -> None:
    """A network as bad as AlexNet on each corruption has an mCE of 1; the numbers are those of the paper."""
    names = [name for name, (_, error) in CORRUPTIONS.items() if error]
    sizes, rng = rng_sizes(len(names)), np.random.default_rng(5)
    right = [rng.random(size) < 0.4 for size in sizes]
    source = concat([SyntheticSource(size, 1000, 8) for size in sizes])
    found = corruption_errors("+".join(names), source, np.concatenate(right))
    errors = [1 - one.mean() for one in right]
    assert list(found["corruption_errors"].values()) == errors
    alexnet = [88.6, 89.4, 92.3, 82.0, 82.6, 78.6, 79.8, 86.7, 82.7, 81.9, 56.5, 85.3, 64.6, 71.8, 60.7]
    expected = np.mean([100 * error / other for error, other in zip(errors, alexnet, strict=True)])
    assert found["mce"] == pytest.approx(expected, rel=1e-3)  # Table 1 of the paper rounds to 0.1
    assert corruption_errors("fog", source.parts[0], right[0]) == {"corruption_errors": {"fog": errors[0]}}
    assert corruption_errors("test", source, np.concatenate(right)) == {}


def rng_sizes(count: int) -> list[int]:
    return [20 + 3 * number for number in range(count)]


def object_names(sets: list[list[int]]) -> tuple[str, ...]:
    return tuple(f"Thing {n} ({' '.join(WNIDS[i] for i in numbers)})" for n, numbers in enumerate(sets))


def objectnet(folder: Path, sets: list[list[int]]) -> Path:
    return shards(folder, object_names(sets), list(range(len(sets))))


@pytest.mark.slow
def test_objectnet__official_and_restricted(score: Score, tmp_path: Path) -> None:
    """Each image is right by the official rule when its class is any of the object's; restricted, others
    cannot win.
    """
    given = answers(score())
    free = [number for number in range(1000) if number not in given.values()]
    sets = [[given[n], free[n]] if n % 4 == 0 else [free[n]] for n in range(NUM_IMAGES)]
    data = objectnet(tmp_path / "objectnet", sets)
    right = [n for n in range(NUM_IMAGES) if given[n] in sets[n]]
    official = score("objectnet", "official", data, **AS_STORED)
    assert official["metrics"]["correct"] == len(right) == 10
    assert official["provenance"]["labels"] == "objectnet"
    restricted = score("objectnet_restricted", "restricted", data, **AS_STORED)
    assert restricted["metrics"]["total"] == NUM_IMAGES
    logits = all_logits(restricted)
    by_object = np.stack([logits[:, numbers].max(axis=1) for numbers in sets], axis=1)
    assert restricted["metrics"]["correct"] == (by_object.argmax(1) == np.arange(NUM_IMAGES)).sum() >= 5
    with Path(restricted["files"]["confusion"]).open() as file:
        assert {row["answer"] for row in csv.DictReader(file)} <= set(object_names(sets))


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["objectnet", "objectnet_restricted"])
def test_objectnet__is_preprocessed_as_in_bit(
    score: Score, coarse: Path, tmp_path: Path, labels: str
) -> None:
    """BiT, Appendix B: the shorter side to 512 and the centre of 480."""
    data = objectnet(tmp_path / "objectnet", [[0], [1]])
    used = score(labels, "run", data, **{"weights.source": str(coarse)})["provenance"]
    assert (used["image_size"], used["eval_method"], used["eval_resize"]) == (480, "shorter_side", 512)
    assert "480 pixels, the centre of shorter side 512" in (tmp_path / "run" / "log.jsonl").read_text()


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (
            "reel",
            RecipeError,
            r"evaluation.labels = 'reel': should be original, real, objectnet, objectnet_restricted",
        ),
        ("real", DataError, r"imagenet_real/real.json: ReaL labels are missing; get them with"),
        ("objectnet", DataError, r"class 'n01440764' names no ImageNet classes"),
    ],
)
def test_labels__refused(score: Score, labels: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        score(labels)


def test_real__refuses_other_classes(job: Any) -> None:
    with pytest.raises(
        DataError, match=r"for ImageNet's 1,000 classes in order, but these images have 6 \(circle, "
    ):
        job("evaluate", **{"evaluation.labels": "real"})


@pytest.mark.slow
def test_two_processes__give_the_same_integers(
    score: Score, classifier: Path, imagenet: Path, tmp_path: Path
) -> None:
    (tmp_path / "real.json").write_text(json.dumps([[label(n % NUM_IMAGES), 7] for n in range(50_000)]))
    one = score(str(tmp_path / "real.json"))
    values = {
        **CPU,
        "weights.source": str(classifier),
        "data.path": str(imagenet),
        "evaluation.labels": str(tmp_path / "real.json"),
        "evaluation.batch_size": 3,
        "machine.processes": 2,
    }
    many = tmp_path / "many"
    prepare_run(load_recipe("evaluate", [Override(key, value) for key, value in values.items()]), many)
    assert two_processes(worker(many), tmp_path / "shown.txt") == (0, 0)
    result = json.loads((many / "result.json").read_text())
    assert result["metrics"] == one["metrics"]
    for name in ("per_class", "confusion"):
        assert Path(result["files"][name]).read_bytes() == Path(one["files"][name]).read_bytes()


def test_several_labels__any_is_right_and_images_without_are_left_out(score: Score, tmp_path: Path) -> None:
    given = answers(score())
    items = [
        Item(f"{n:02d}", [(label(n), given[n]), (), (label(n),)][n % 3], lambda n=n: picture(n))
        for n in range(NUM_IMAGES)
    ]
    write_split(items, tmp_path / "data/several/test", WNIDS, seed=3, source_text="noise")
    result = score(name="several", data=tmp_path / "data/several")
    assert result["metrics"]["total"] == 27
    right = sum(given[n] == label(n) for n in range(2, NUM_IMAGES, 3))
    assert result["metrics"]["correct"] == 14 + right
