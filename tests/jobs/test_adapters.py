"""finetune with [lora]: the same bytes however it is run, plain weights for everyone, adapters for peft."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import TINY, checkpoint, stored
from tests.trained import CPU, SMALL, Job, crash_after, do, finetuned, made_once, result_of
from vitctl import load_model
from vitctl.errors import CheckpointError, RecipeError
from vitctl.launch.worker import work
from vitctl.models.weights.meta import distinct
from vitctl.models.weights.weights_file import read_weights, weights_digest
from vitctl.recipe.load import load_recipe
from vitctl.verify.run_check import verify

LORA: dict[str, Any] = {
    **CPU,
    **SMALL,
    "machine.precision": "float32",
    "optimizer.lr": 0.1,
    "lora.rank": 3,
    "lora.alpha": 6.0,
    "lora.dropout": 0.2,
    "lora.targets": ("q", "v", "fc2"),
    "averaging.decay": 0.5,
    "checkpoint.every_steps": 2,
    "evaluation.every_steps": 3,
}
IN_SEVERAL = {**LORA, "lora.targets": '["q", "v", "fc2"]'}  # on the command line
LANES = {"schedule.lanes": 4, "schedule.leaf_images": 2}


@pytest.fixture(scope="session")
def body(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-training without a pre-logits layer, which transformers' classifier has no place for."""
    values = {"data.path": str(tiny_data), "model.pre_logits": False, "averaging.decay": 0.0}
    return made_once(tmp_path_factory, "body", lambda folder: do(TINY, folder, **values))


@pytest.fixture(scope="session")
def tuned(body: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with adapters, uninterrupted."""
    values = {**LORA, **LANES, "data.path": str(tiny_data), "weights.source": str(body)}
    return made_once(tmp_path_factory, "lora", lambda folder: do("finetune", folder, **values))


@pytest.mark.slow
def test_lora__weights_are_those_of_a_plain_network(tuned: Path, body: Path) -> None:
    used = result_of(tuned)["provenance"]
    folder = tuned / "checkpoints" / "step_00000006"
    weights = read_weights(folder / "ema.safetensors")
    start = read_weights(body / "checkpoints" / "step_00000020")  # in float64
    assert used["weights_sha256"] == weights_digest(weights.state)
    changed = {
        name for name, tensor in weights.state.items() if not torch.equal(tensor, start.state[name].float())
    }
    assert changed == {"head.weight", "head.bias"} | {
        f"blocks.{i}.{layer}.weight" for i in (0, 1) for layer in ("attention.qkv", "mlp.fc2")
    }
    # Rank 3 and width 24, MLP 48; a head of six classes.
    trained = 2 * (2 * 3 * (24 + 24) + 3 * (48 + 24)) + 6 * 24 + 6
    optimizer = load_file(folder / "optimizer.safetensors")
    assert sum(t.numel() for name, t in optimizer.items() if "momentum" in name) == trained
    assert used["trained_parameters"] == trained
    assert used["lora"] == {
        **{"rank": 3, "alpha": 6.0, "dropout": 0.2, "targets": ["q", "v", "fc2"], "blocks": []},
        "from_sha256": start.digest,
        "from_image_size": 16,
    }


@pytest.mark.slow
def test_lora__the_scored_network_is_the_stored_one(tuned: Path, tiny_data: Path, job: Job) -> None:
    """`evaluate`, which knows no adapters, counts the same; `verify` computes all steps and scores again."""
    here = job(
        "evaluate",
        "score",
        **{"weights.source": str(tuned), "machine.precision": "float32", "data.path": str(tiny_data)},
    )
    before = result_of(tuned)
    assert here["provenance"]["weights_sha256"] == before["provenance"]["weights_sha256"]
    assert (here["metrics"]["correct"], here["metrics"]["total"]) == (before["metrics"]["correct"], 23)
    findings = [one for _, one in verify(tuned, steps="all", scores=True)]
    assert {one.state for one in findings if one.what in ("replay", "score", "weights")} == {"ok"}
    assert "steps 1 to 6: equal, bit for bit" in {one.text for one in findings}


@pytest.mark.slow
def test_lora__verify_needs_the_start_weights_for_a_score(job: Job, body: Path, tmp_path: Path) -> None:
    shutil.copytree(body, tmp_path / "start")
    job("finetune", **{**LORA, "weights.source": str(tmp_path / "start")})
    shutil.move(tmp_path / "start", tmp_path / "moved")
    [found] = [one for _, one in verify(tmp_path / "run", scores=True) if one.what == "score"]
    assert (found.state, found.text.endswith("; --from START names another place")) == ("not proven", True)


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_lanes__any_number_of_processes_gives_the_same_bytes(
    tuned: Path, body: Path, tiny_data: Path, tmp_path: Path, num_processes: int
) -> None:
    finetuned(num_processes, tmp_path / "several", body, tiny_data, **IN_SEVERAL, **LANES)
    assert checkpoint(tmp_path / "several", 6) == checkpoint(tuned, 6)
    assert {"lora.safetensors", "lora_ema.safetensors"} < set(checkpoint(tuned, 6))
    assert result_of(tmp_path / "several")["metrics"] == result_of(tuned)["metrics"]


@pytest.mark.slow
def test_sharded__merges_and_trains_the_same_weights(
    body: Path, tiny_data: Path, job: Job, tmp_path: Path
) -> None:
    job("finetune", "one", **{**LORA, "weights.source": str(body), "lora.dropout": 0.0})
    values = {**IN_SEVERAL, "lora.dropout": 0.0, "machine.sharding": "fsdp"}
    finetuned(2, tmp_path / "two", body, tiny_data, **values)
    torch.testing.assert_close(stored(tmp_path / "two", 6), stored(tmp_path / "one", 6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("more", [{}, pytest.param(LANES, marks=pytest.mark.slow)], ids=["", "lanes"])
def test_resume__gives_the_same_bytes(job: Job, body: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    values = {**LORA, **more, "weights.source": str(body)}
    job("finetune", "whole", **values)
    with crash_after(3):
        job("finetune", **values)
    assert (tmp_path / "run" / "checkpoints" / "step_00000002" / "lora.safetensors").exists()
    work(tmp_path / "run")
    assert checkpoint(tmp_path / "run", 6) == checkpoint(tmp_path / "whole", 6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_export__peft_on_transformers_start_weights_gives_our_logits(
    tuned: Path, body: Path, job: Job, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    job("export", "base", **{"weights.source": str(body), "export.to": "hf"})
    job("export", "adapters", **{"weights.source": str(tuned), "export.to": "peft"})
    config = transformers.AutoConfig.from_pretrained(tmp_path / "adapters" / "peft")
    base = transformers.ViTForImageClassification.from_pretrained(
        tmp_path / "base" / "hf", config=config, ignore_mismatched_sizes=True
    )
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapters" / "peft").double().eval()
    ours, meta = load_model(tuned, dtype=torch.float64)
    images = torch.from_numpy(np.random.default_rng(0).uniform(-1, 1, (5, 3, 16, 16)))
    with torch.inference_mode():
        wanted = ours(images)
        assert float(wanted.std()) > 0.01
        torch.testing.assert_close(theirs(images).logits, wanted, rtol=1e-6, atol=1e-6 * float(wanted.std()))
    assert meta["lora"]["rank"] == 3
    # peft said no class, and its user stated their number and the activation.
    assert [theirs.config.id2label[n] for n in range(6)] == list(distinct(meta["class_names"]))
    assert theirs.config.problem_type == "single_label_classification"
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "adapters" / "peft")
    assert list(processor.image_mean) == pytest.approx(meta["mean"])


def test_export__peft_refuses_what_it_cannot_hold(body: Path, job: Job, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no adapters beside it, which a run of"):
        job("export", "none", **{"weights.source": str(body), "export.to": "peft"})
    job("finetune", "large", **{**LORA, "weights.source": str(body), "data.image_size": 24})
    with pytest.raises(CheckpointError, match="positions were resized from 16 to 24 pixels"):
        job("export", "resized", **{"weights.source": str(tmp_path / "large"), "export.to": "peft"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lora.rank": 0}, r"\[lora\] does nothing without lora\.rank"),
        ({"lora.targets": ("q", "w")}, "targets names 'w'; choose from q, k, v, out, fc1, fc2"),
        ({"lora.targets": ()}, r"targets = \[\] should name each layer once"),
        ({"lora.blocks": (1, 1)}, r"blocks = \[1, 1\] should be distinct numbers, 0 or more"),
        ({"weights.initialise": "random"}, "leaves nothing worth freezing"),
        (
            {"machine.sharding": "fsdp", "machine.sharding_dtype": "bf16", "machine.precision": "bf16"},
            "adapters are merged into",
        ),
        ({"lora.blocks": (2,)}, r"lora\.blocks names 2, the network has the blocks 0 to 1"),
    ],
)
def test_lora__refused_before_anything_is_written(
    job: Job, tmp_path: Path, values: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError, match=said):
        job("finetune", **{**LORA, **values})
    assert not (tmp_path / "run").exists()


def test_lora__off_is_no_key_of_a_digest_and_trains_every_weight(job: Job, tmp_path: Path) -> None:
    assert load_recipe("finetune").recipe.lora.rank == 0
    job("finetune")
    assert set(checkpoint(tmp_path / "run", 6)) == {"model.safetensors", "optimizer.safetensors"}
