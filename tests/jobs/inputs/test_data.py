"""Where weights are found, and what is said when they are not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitctl.data.images.transforms import EvalTransform, TrainTransform
from vitctl.data.source.stores import SyntheticSource
from vitctl.engine.mixing import Mixing
from vitctl.errors import CheckpointError, DataError, RecipeError
from vitctl.jobs.inputs.data import at_size, eval_transform, open_training_images, train_transform
from vitctl.jobs.inputs.weights import find_weights, loaded_model, transferred_model
from vitctl.jobs.training import images_of
from vitctl.models.variants import variant
from vitctl.models.weights.meta import COLOURS
from vitctl.recipe.images import TrainImages
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import rates_of
from vitctl.recipe.sections import Schedule, StartWeights


def test_find_weights__by_run_by_checkpoint_and_by_file(pretrained: Path) -> None:
    checkpoint = pretrained / "checkpoints" / "step_00000020"
    found = [find_weights(str(path)) for path in (pretrained, checkpoint, checkpoint / "model.safetensors")]
    assert [Path(f.path).name for f in found] == ["ema.safetensors", "ema.safetensors", "model.safetensors"]
    assert {Path(f.path).parent for f in found} == {checkpoint}
    assert find_weights(str(pretrained), which="model").path == str(checkpoint / "model.safetensors")
    assert found[0].weights.meta["class_names"][0] == "circle"


def test_find_weights__refuses(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="nowhere: no such weights; give a run folder, a checkpoint folder or a"
    ):
        find_weights(str(tmp_path / "nowhere"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="run: holds no complete checkpoint"):
        find_weights(str(tmp_path / "run"))


def test_loaded_model__at_another_size_only_the_position_embedding_changes(pretrained: Path) -> None:
    found = find_weights(str(pretrained))
    same, size = loaded_model(found, 0, torch.float64)
    assert size == 16
    larger, size = loaded_model(found, 32, torch.float64)
    assert size == 32
    changed = {
        name
        for (name, a), b in zip(same.state_dict().items(), larger.state_dict().values(), strict=True)
        if a.shape != b.shape or not torch.equal(a, b)
    }
    assert changed == {"position_embedding"}
    assert larger(torch.zeros(1, 3, 32, 32, dtype=torch.float64)).shape == (1, 6)


def test_transferred_model__zero_head_or_fresh_weights(pretrained: Path) -> None:
    weights = find_weights(str(pretrained)).weights
    model, start, lines = transferred_model(
        weights,
        StartWeights(),
        num_classes=4,
        image_size=16,
        dropout=0.1,
        drop_path=0.2,
        seed=0,
        dtype=torch.float64,
    )
    assert not start  # loaded
    assert model.config.representation_size == 0
    assert (model.config.dropout, model.config.drop_path) == (0.1, 0.2)
    state = model.state_dict()
    assert state["head.weight"].abs().max() == 0 == state["head.bias"].abs().max()
    assert torch.equal(model.state_dict()["position_embedding"], weights.state["position_embedding"])
    assert any("head and pre-logits dropped, new zero head with 4 classes" in line for line in lines)
    random, _, lines = transferred_model(
        weights,
        StartWeights(initialise="random"),
        num_classes=4,
        image_size=16,
        dropout=0.0,
        drop_path=0.0,
        seed=0,
        dtype=torch.float64,
    )
    assert random.config.depth == 2
    assert not torch.equal(random.state_dict()["position_embedding"], weights.state["position_embedding"])
    assert lines == ["random weights (seed 0), the architecture alone is taken"]


def test_weights_that_are_loaded__are_not_drawn_first(
    pretrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_weights(str(pretrained))
    monkeypatch.setattr(np.random, "default_rng", None)
    model, _ = loaded_model(found, 0, torch.float64)
    how: dict[str, Any] = {"image_size": 16, "dropout": 0.0, "drop_path": 0.0, "dtype": torch.float64}
    tuned, _, _ = transferred_model(found.weights, StartWeights(), num_classes=4, seed=0, **how)
    for name, tensor in model.state_dict().items():
        own = tuned.state_dict().get(name)
        assert name.startswith(("head.", "pre_logits.")) or (own is not None and torch.equal(own, tensor))
    assert all(tensor.isfinite().all() for tensor in tuned.state_dict().values())


@pytest.mark.parametrize(
    ("dropout", "drop_path", "stored", "rates"),
    [
        ("as_stored", "as_stored", {"dropout": 0.1, "drop_path": 0.3}, (0.1, 0.3)),
        ("as_stored", 0.2, {"dropout": 0.1, "drop_path": 0.3}, (0.1, 0.2)),
        (0.0, "as_stored", {"dropout": 0.1}, (0.0, 0.0)),
        (0, 0, {"dropout": 0.1, "drop_path": 0.3}, (0.0, 0.0)),
        ("as_stored", "as_stored", None, (0.0, 0.0)),
    ],
)
def test_rates_of__are_the_recipes_or_those_stored(
    dropout: Any, drop_path: Any, stored: dict[str, float] | None, rates: tuple[float, float]
) -> None:
    """None: a ResNet, which has neither."""
    config = variant("R50x1") if stored is None else variant("B/16", **stored)
    for name in ("finetune", "vtab"):
        recipe: Any = load_recipe(
            name, [Override("dropout", dropout), Override("drop_path", drop_path)]
        ).recipe
        assert rates_of(recipe, config) == {"dropout": rates[0], "drop_path": rates[1]}


@pytest.mark.parametrize("value", ["stored", 1.0, -0.1, True, [0.1], float("nan")])
def test_rates__are_refused_in_one_line(value: Any) -> None:
    with pytest.raises(
        RecipeError, match=r"^--set: drop_path: .* should be a number from 0 to below 1, or 'as_stored'$"
    ):
        load_recipe("finetune_imagenet", [Override("drop_path", value)])


def test_at_size__fills_in_the_stored_size_and_checks_again() -> None:
    assert at_size(TrainImages(), 48).image_size == 48
    assert at_size(TrainImages(image_size=32), 48).image_size == 32
    with pytest.raises(RecipeError, match=r"^crop = 'random' cuts .*set data.train_resize to at least 48$"):
        at_size(TrainImages(crop="random", train_resize=20), 48)
    with pytest.raises(ValueError, match=r"crop = 'padded' has the same border .*train_resize to 42"):
        TrainImages(crop="padded", train_resize=41, image_size=32)


def mixing_of(data: TrainImages) -> Mixing:
    source, synthetic = SyntheticSource(1, 2, 24), data.model_copy(update={"synthetic": 1})
    return images_of(
        synthetic, source, None, 0, Schedule(batch_size=1, total_steps=1), COLOURS["half"]
    ).mixing


def test_train_transform__takes_the_words_of_the_recipe() -> None:
    data = TrainImages(
        image_size=24, decode="scaled", randaugment_layers=2, randaugment_magnitude=15, mixup_alpha=0.2
    )
    antialias = "bilinear_antialias"
    expected = TrainTransform(
        24, decode="scaled", randaugment_layers=2, randaugment_magnitude=15, resample=antialias
    )
    assert train_transform(data) == expected
    assert (eval_transform(data).decode, eval_transform(data).resample) == ("exact", antialias)
    area = data.model_copy(update={"eval_resample": "area"})
    assert (train_transform(area), eval_transform(area).resample) == (expected, "area")
    assert mixing_of(data) == Mixing(0.2, 0.0)
    new = {"randaugment_rules": "big_vision", "vertical_flip": True, "augment3": True, "crop": "letterbox"}
    today = TrainImages(
        image_size=24,
        randaugment_layers=1,
        color_jitter=0.3,
        random_erasing=0.25,
        eval_method="letterbox",
        **new,
    )
    fill = (124, 116, 104)
    assert train_transform(today, (0.485, 0.456, 0.406)) == TrainTransform(
        24, randaugment_layers=1, color_jitter=(0.3,) * 3, resample=antialias, fill=fill, **new
    )
    rules = {"randaugment_rules": "timm", "randaugment_probability": 0.7, "randaugment_std": 0.5}
    timms = {"randaugment_layers": 2, "randaugment_increasing": True, **rules}
    resized = TrainImages(image_size=24, crop="random_resized", crop_scale=[0.2, 1.0], **timms)
    assert train_transform(resized, (0.485, 0.456, 0.406)) == TrainTransform(
        24,
        "random_resized",
        area_range=(0.2, 1.0),
        aspect_range=(3 / 4, 4 / 3),
        resample=antialias,
        fill=fill,
        **timms,
    )
    assert train_transform(data).area_range == (0.05, 1.0)
    scored = EvalTransform(24, method="letterbox", resample=antialias, fill=fill)
    assert eval_transform(today, (0.485, 0.456, 0.406)) == scored
    assert mixing_of(today) == Mixing(random_erasing=0.25)


def test_open_training_images__splits_of_other_classes(tiny_data: Path, tmp_path: Path) -> None:
    from vitctl.data.datasets.readers import shapes
    from vitctl.data.writer.shard_writer import write_split

    (tmp_path / "train").symlink_to(tiny_data / "train")
    write_split(
        shapes.items("count", "test", 5, 0, 16),
        tmp_path / "test",
        shapes.TASKS["count"].class_names,
        seed=0,
        source_text="x",
    )
    with pytest.raises(
        DataError, match=r"'train' has 6 classes, 'test' 8, and they are not the same: .*; make both with one"
    ):
        open_training_images(TrainImages(path=str(tmp_path), image_size=16), tmp_path)
