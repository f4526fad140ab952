"""The head that fine-tuning starts from: the few-shot solution, or the stored one."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import checkpoint, records, started, worker
from tests.matrix import slow
from tests.trained import CPU, SMALL, Job, do
from tests.verify.conftest import said
from vitctl.data.datasets.catalog import open_split
from vitctl.data.images.decode import decode
from vitctl.data.images.transforms import EvalTransform
from vitctl.engine.update import TrainStep
from vitctl.errors import VitctlError
from vitctl.jobs import start_head as heads
from vitctl.jobs.inputs.weights import find_weights, loaded_model
from vitctl.launch.prepare_run import prepare_run
from vitctl.models.weights.weights_file import read_weights
from vitctl.recipe.load import Override, load_recipe

FEWSHOT: dict[str, Any] = {"finetune.head": "fewshot", "finetune.head_l2": 8.0}
LANES: dict[str, Any] = {
    "machine.precision": "float32",
    "schedule.lanes": 4,
    "schedule.leaf_images": 2,
    "schedule.batch_size": 10,
    "optimizer.lr": 0.01,
}


def started_with(folder: Path) -> dict[str, torch.Tensor]:
    """The weights after the first step, whose learning rate is 0."""
    return read_weights(folder / "checkpoints" / "step_00000001").state


def test_fewshot__is_the_solution_of_the_training_images(job: Job, tiny_data: Path, tmp_path: Path) -> None:
    """Solved here in NumPy, and scaled to the least loss of leave-one-out scores by a search."""
    result = job("finetune", **FEWSHOT, **{"checkpoint.every_steps": 1, "checkpoint.keep_last": 9})
    begun = find_weights(str(tmp_path / "run"), which="1")  # the learning rate of the first step is 0
    model, _ = loaded_model(begun, 0, torch.float64)
    transform, source = EvalTransform(16, method="square", resize=0), open_split("train", path=tiny_data)
    images = torch.stack([transform(decode(source.read(n))) for n in range(len(source))])
    with torch.inference_mode():
        x = model.eval().features((images.double() / 255 - 0.5) / 0.5).float().double().numpy()
    mean, std = x.mean(axis=0), x.std(axis=0) + 1e-5
    z = np.concatenate([(x - mean) / std, np.full((len(x), 1), 100.0)], axis=1)
    labels = source.labels()
    y = 2 * np.eye(6)[labels] - 1

    def solved(kept: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.linalg.solve(
            z[kept].T @ z[kept] + 8.0 * np.eye(z.shape[1]), z[kept].T @ y[kept]
        )
        return found

    everyone = np.arange(len(x))
    unseen = torch.from_numpy(np.stack([z[n] @ solved(everyone != n) for n in everyone]))
    blank = 1 / (len(x) + 1)
    targets = (1 - blank) * np.eye(6)[labels] + blank / 6
    grid = np.geomspace(0.05, 200, 3001)
    losses = [-(targets * torch.log_softmax(s * unseen, 1).numpy()).sum(axis=1).mean() for s in grid]
    used = result["provenance"]["head_solved"]
    assert used["scale"] == pytest.approx(grid[int(np.argmin(losses))], rel=0.003)
    assert used["left_out"] == pytest.approx((unseen.numpy().argmax(axis=1) == labels).mean())
    scores = used["scale"] * (z @ solved(everyone >= 0))
    assert used["accuracy"] == pytest.approx((scores.argmax(axis=1) == labels).mean())
    state = started_with(tmp_path / "run")
    ours = x @ state["head.weight"].double().numpy().T + state["head.bias"].double().numpy()
    np.testing.assert_allclose(ours, scores, atol=1e-8)
    (record,) = records(tmp_path / "run", "head")
    assert record["text"].startswith("from the few-shot solution of 70 images times ")
    assert result["provenance"]["head"] == "fewshot"


@pytest.mark.parametrize("loss", [*slow("softmax"), "sigmoid"])
def test_fewshot__the_first_loss_is_below_that_of_the_zero_head(job: Job, tmp_path: Path, loss: str) -> None:
    values = {"log.every_steps": 1, "schedule.batch_size": 70, "loss.name": loss}
    first = {}
    for head in ("zero", "fewshot"):
        job("finetune", head, **values, **{"finetune.head": head})
        first[head] = records(tmp_path / head, "train")[0]["loss"]
    assert first["fewshot"] < 0.97 * first["zero"]


@pytest.mark.slow
def test_fewshot__stopped_it_goes_on_with_the_same_bits(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint the head is solved again; after it, it is not."""
    values = {**FEWSHOT, "checkpoint.every_steps": 3}
    job("finetune", "whole", **values)
    solve, update, times = heads.decompose, TrainStep.update, list[int]()
    stop_at = 0

    def counted(*args: Any, **more: Any) -> Any:
        times.append(stop_at)
        return solve(*args, **more)

    def stopping(self: TrainStep, step: int, *args: Any) -> Any:
        if step == stop_at:
            raise OSError("pulled")
        return update(self, step, *args)

    monkeypatch.setattr(heads, "decompose", counted)
    monkeypatch.setattr(TrainStep, "update", stopping)
    for stop_at in (2, 5, 99):
        with suppress(VitctlError, OSError):
            job("finetune", "parts", **values)
        if stop_at == 2:  # as if it had been killed before its first checkpoint
            shutil.rmtree(tmp_path / "parts" / "checkpoints")
    assert checkpoint(tmp_path / "parts", 6) == checkpoint(tmp_path / "whole", 6)
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("parts", "whole")]
    assert results[0]["provenance"]["head_solved"] == results[1]["provenance"]["head_solved"]
    assert times == [2, 5]


@pytest.mark.slow
def test_fewshot__is_replayed_bit_for_bit(job: Job, tmp_path: Path) -> None:
    job("finetune", **FEWSHOT, **{"checkpoint.every_steps": 4})
    assert said(tmp_path / "run", "replay", steps="all") == [("ok", "steps 1 to 6: equal, bit for bit")]


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_fewshot__of_lanes_is_the_same_on_any_number_of_processes(
    pretrained: Path, tiny_data: Path, tmp_path: Path, count: int
) -> None:
    """And whatever the batch of scoring."""
    given = {
        **CPU,
        **SMALL,
        **FEWSHOT,
        **LANES,
        "data.path": str(tiny_data),
        "weights.source": str(pretrained),
    }
    do("finetune", tmp_path / "one", **given)
    values = {**given, "machine.processes": count, "evaluation.batch_size": 7}
    folder = tmp_path / "several"
    prepare_run(load_recipe("finetune", [Override(*each) for each in values.items()]), folder)
    processes = started(worker(folder), tmp_path / "shown.txt", count)
    assert {process.wait(timeout=120) for process in processes} == {0}
    assert checkpoint(folder, 6) == checkpoint(tmp_path / "one", 6)
    assert said(folder, "replay", steps="all") == [("ok", "steps 1 to 6: equal, bit for bit")]


@pytest.mark.slow
def test_fewshot__of_more_images_than_its_limit_takes_a_subset(job: Job) -> None:
    seen = [
        job("finetune", f"seed_{seed}", seed=seed, **FEWSHOT, **{"finetune.head_images": 40})["provenance"]
        for seed in (0, 0, 1)
    ]
    assert [each["head_solved"]["num_images"] for each in seen] == [40, 40, 40]
    assert seen[0]["head_solved"] == seen[1]["head_solved"] != seen[2]["head_solved"]


@pytest.mark.slow
def test_as_stored__keeps_the_head_of_the_same_classes(job: Job, tmp_path: Path) -> None:
    values = {"checkpoint.every_steps": 1, "checkpoint.keep_last": 9, "finetune.head": "as_stored"}
    job("finetune", "first", **{"optimizer.lr": 0.05})
    source = tmp_path / "first"
    result = job("finetune", "second", **values, **{"weights.source": str(source)})
    stored = read_weights(source / "checkpoints" / "step_00000006").state
    state = started_with(tmp_path / "second")
    assert stored["head.weight"].abs().sum() > 0
    assert all(torch.equal(state[name], stored[name]) for name in stored)
    assert result["provenance"]["head"] == "as_stored"
    assert "stored head kept" in (tmp_path / "second" / "log.jsonl").read_text()
    assert said(tmp_path / "second", "replay", steps="all")[0][1].endswith("equal, bit for bit")


@pytest.mark.slow
def test_as_stored__refuses_other_classes(job: Job, tiny_data: Path, tmp_path: Path) -> None:
    job("finetune", "first")
    shifted = tmp_path / "shifted"
    shutil.copytree(tiny_data, shifted)
    for split in ("train", "test"):
        file = shifted / split / "index.json"
        fields = json.loads(file.read_text())
        names = fields["class_names"]
        fields["class_names"] = [*names[:4], names[5], names[4]]
        file.write_text(json.dumps(fields))
    asked = {"finetune.head": "as_stored", "weights.source": str(tmp_path / "first")}
    for values in ({"data.path": str(shifted)}, {"data.path": "", "data.dataset": "digits"}):
        with pytest.raises(
            VitctlError, match=r"its head has 6 classes .* the data has (6|10) .* cannot keep it"
        ):
            job("finetune", "second", **asked, **values)
        assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"finetune.head": "as_stored"}, "has a hidden layer before its head, which fine-tuning drops"),
        ({**FEWSHOT, "weights.initialise": "random"}, "'fewshot' needs trained features"),
        ({"finetune.head": "as_stored", "weights.initialise": "random"}, "needs trained features"),
        ({**FEWSHOT, "data.path": "", "data.synthetic": 64}, "data.synthetic has no labels to solve a head"),
        ({"finetune.head_l2": 1.0}, "head_l2 and head_images do nothing for head = 'zero'"),
    ],
)
def test_head__refuses_before_it_writes_anything(
    job: Job, tmp_path: Path, values: dict[str, Any], text: str
) -> None:
    with pytest.raises(VitctlError, match=text):
        job("finetune", **values)
    assert not (tmp_path / "run").exists()


def test_fewshot__refuses_an_image_that_cannot_be_decoded(job: Job, tiny_data: Path, tmp_path: Path) -> None:
    """A training may leave a few out; the solution is of all of its images."""
    damaged = Path(shutil.copytree(tiny_data, tmp_path / "damaged"))
    shard = min((damaged / "train").glob("*.tar"))
    stored = shard.read_bytes()
    shard.write_bytes(stored.replace(b"\x89PNG", b"none", 1))
    with pytest.raises(VitctlError, match=r"damaged/train/\S+") as error:
        job("finetune", **FEWSHOT, **{"data.path": str(damaged), "data.max_bad_fraction": 0.5})
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_random__is_normal_drawn_by_the_seed_and_best_by_loss_is_kept(job: Job, tmp_path: Path) -> None:
    """With MAE's deviation and its new norm, which are trained on; the score that decides is the loss."""
    keys = {"finetune.head": "random", "finetune.head_std": 2e-5, "finetune.fresh_norm": True}
    scored = {"evaluation.every_steps": 1, "evaluation.select_best": True, "evaluation.metric": "loss"}
    kept = {"checkpoint.every_steps": 1, "checkpoint.keep_best": 1, "checkpoint.keep_last": 9}
    split = {"data.train_split": "train[:80%]", "data.eval_split": "train[80%:]"}
    result = job(
        "finetune", **keys, **scored, **kept, **split, **{"weights.classifier": "patches", "seed": 3}
    )
    begun = started_with(tmp_path / "run")
    drawn = np.random.default_rng((3, heads._HEAD_STREAM)).normal(0, 2e-5, begun["head.weight"].shape)
    np.testing.assert_array_equal(begun["head.weight"].numpy(), drawn.astype(np.float32))
    assert not begun["head.bias"].any() and (begun["norm.weight"] == 1).all()
    losses = {one["step"]: one["loss"] for one in records(tmp_path / "run", "evaluate")}
    chosen = result["provenance"]["weights_step"]
    assert len(losses) > 1 and losses[chosen] == min(losses.values()) == result["metrics"]["loss"]
    assert result["provenance"]["head"] == "random"
