"""Fine-tuning with frozen layers and rates by layer: the same bytes on any number of processes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import checkpoint
from tests.models.tiny_models import TINY
from tests.trained import SMALL, Job, finetuned, result_of
from vitctl.engine.checkpoint import read_checkpoint
from vitctl.errors import RecipeError, VitctlError
from vitctl.jobs.inputs.weights import find_weights, transferred_model
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import frozen_places
from vitctl.recipe.sections import StartWeights
from vitctl.verify.run_check import verify

RATES: dict[str, Any] = {
    "finetune.freeze": "1 blocks",
    "optimizer.name": "lamb",
    "optimizer.weight_decay": 0.1,
    "optimizer.layer_decay": 0.5,
    "optimizer.layer_decay_numbering": "mae",
    "optimizer.head_lr_multiplier": 3.0,
    "optimizer.decay_on": "matrices",
    "optimizer.lr": 0.01,
    "averaging.decay": 0.9,
    "sweep.lrs": [],
}
EQUAL = [("ok", "steps 1 to 6: equal, bit for bit")]
LANES = {"schedule.lanes": 4, "schedule.leaf_images": 2, "checkpoint.every_steps": 3}


def tuned(processes: int, folder: Path, pretrained: Path, data: Path, **values: Any) -> Path:
    given = {**SMALL, "machine.device": "cpu", "machine.workers": 0, "machine.precision": "float32"}
    finetuned(processes, folder, pretrained, data, **{**given, "dropout": 0.1, **RATES, **values})
    return folder


def replayed(folder: Path) -> list[tuple[str, str]]:
    return [(one.state, one.text) for _, one in verify(folder, steps="all") if one.what == "replay"]


@pytest.mark.slow
def test_freeze__lanes_give_the_same_bytes_also_after_a_resume(
    pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    one, two = (
        tuned(count, tmp_path / f"on_{count}", pretrained, tiny_data, **LANES, **{"data.eval_split": ""})
        for count in (1, 2)
    )
    before = checkpoint(one, 6)
    assert checkpoint(two, 6) == before
    shutil.rmtree(two / "checkpoints" / "step_00000006")
    (two / "result.json").unlink()
    tuned(3, two, pretrained, tiny_data, **LANES, **{"data.eval_split": ""})
    assert checkpoint(two, 6) == before
    assert replayed(two) == EQUAL


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["embedding", "backbone"])
def test_freeze__what_is_frozen_keeps_its_bits(
    job: Job, pretrained: Path, tmp_path: Path, freeze: str
) -> None:
    values = {"finetune.freeze": freeze, "machine.checkpoint_blocks": True, "machine.micro_batch": 3}
    result = job("finetune", **values, **{"averaging.decay": 0.9, "dropout": 0.1})
    start = read_checkpoint(pretrained / "checkpoints" / "step_00000020").tensors("ema")
    saved = read_checkpoint(tmp_path / "run" / "checkpoints" / "step_00000006")
    model, average, state = (saved.tensors(name) for name in ("model", "ema", "optimizer"))
    is_kept = {
        name: not name.startswith("head.")
        and (freeze == "backbone" or not name.startswith(("blocks.", "norm.")))
        for name in model
    }
    for name, kept in is_kept.items():
        assert (name in start and bool((model[name] == start[name]).all())) == kept, name
        assert bool((average[name] == model[name]).all()) == kept, name
    trained = {name for name, kept in is_kept.items() if not kept}
    assert {key.split("/")[1] for key in state} == trained
    assert result["provenance"]["trained_parameters"] == sum(model[name].numel() for name in trained)
    assert replayed(tmp_path / "run") == EQUAL


@pytest.mark.slow
def test_freeze__a_sharded_model_starts_from_the_bits_of_a_whole_one(
    pretrained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """Each process reads its rows alone, and the table of positions to resize it. The frozen body is saved as
    it was read."""
    values = {"finetune.freeze": "backbone", "machine.sharding": "fsdp", "data.image_size": 24}
    values |= {
        "schedule.total_steps": 2,
        "optimizer.layer_decay": 1.0,
        "optimizer.layer_decay_numbering": "timm",
    }
    both = tuned(2, tmp_path / "both", pretrained, tiny_data, **values)
    found = find_weights(str(pretrained))
    whole = transferred_model(
        found.weights, StartWeights(), num_classes=10, image_size=24, dropout=0.1, drop_path=0.0, seed=0,
        dtype=torch.float32,
    )[0].state_dict()  # fmt: skip
    saved = read_checkpoint(both / "checkpoints" / "step_00000002").tensors("model")
    assert saved.keys() == whole.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, whole[name]) != name.startswith("head."), name
    used = result_of(both)["provenance"]
    assert used["from_sha256"] == found.weights.digest
    assert used["weights_sha256"] == weights_digest(
        read_checkpoint(both / "checkpoints" / "step_00000002").tensors("ema")
    )


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_freeze__several_processes_without_lanes_train_alike(
    pretrained: Path, tiny_data: Path, tmp_path: Path, sharding: str
) -> None:
    """LAMB's norms are of whole tensors: the shards of two processes are trained as by one."""
    exact = {"machine.precision": "float64", "dropout": 0.0}
    alone = tuned(1, tmp_path / "alone", pretrained, tiny_data, **exact)
    both = tuned(2, tmp_path / "both", pretrained, tiny_data, **exact, **{"machine.sharding": sharding})
    for part in ("model", "ema", "optimizer"):
        one, two = (
            read_checkpoint(folder / "checkpoints" / "step_00000006").tensors(part)
            for folder in (alone, both)
        )
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            assert two[name].numpy() == pytest.approx(tensor.numpy(), rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"finetune.freeze": "9 blocks"}, r"the network has \d blocks; freeze so many or fewer"),
        ({"finetune.freeze": "0 blocks"}, "finetune.freeze"),
        ({"finetune.freeze": "backbone", "optimizer.layer_decay": 0.5}, "does nothing for the head"),
        (
            {"finetune.freeze": "embedding", "weights.initialise": "random"},
            "'embedding' would keep random weights",
        ),
        ({"optimizer.layer_decay_numbering": "mae"}, "does nothing without optimizer.layer_decay"),
        ({"optimizer.decay_on": "matrices"}, "decay_on does nothing without optimizer.weight_decay"),
    ],
    ids=str,
)
def test_freeze__what_makes_no_sense_is_refused(job: Job, values: dict[str, Any], said: str) -> None:
    with pytest.raises(VitctlError, match=said):
        job("finetune", **values)


def test_freeze__a_resnet_has_no_blocks() -> None:

    for values, said in (
        ({"finetune.freeze": "2 blocks"}, "set finetune.freeze = 'backbone'"),
        ({"optimizer.layer_decay": 0.5}, "a ResNet has none"),
    ):
        recipe: Any = load_recipe("finetune", [Override(*one) for one in values.items()]).recipe
        with pytest.raises(RecipeError, match=said):
            frozen_places(recipe, TINY["resnet v2"])
        assert frozen_places(recipe, TINY["vit"]) in (-1, 2)
