"""Fine-tuning: what it starts from, what it keeps, what it says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trained import CPU, SMALL, Job, do
from vitctl.engine.assemble import RunContext
from vitctl.engine.preemption import Stopped
from vitctl.errors import RecipeError, VitctlError
from vitctl.jobs import finetune as finetuning
from vitctl.models.weights.weights_file import read_weights, weights_digest
from vitctl.report.compare import compare_runs


def test_finetune__result_belongs_to_its_data_and_weights(job: Job, pretrained: Path, tmp_path: Path) -> None:
    result = job("finetune")
    assert (result["job"], result["status"]) == ("finetune", "done")
    assert result["metrics"]["total"] == 23
    assert result["metrics"]["accuracy"] == result["metrics"]["correct"] / 23
    source = read_weights(pretrained / "checkpoints" / "step_00000020" / "ema.safetensors")
    own = read_weights(tmp_path / "run" / "checkpoints" / "step_00000006")
    p = result["provenance"]
    assert p["from_sha256"] == weights_digest(source.state)
    assert p["weights_sha256"] == weights_digest(own.state)
    assert (p["num_train"], p["train_split"], p["split"], p["initialise"]) == (
        70,
        "train",
        "test",
        "pretrained",
    )
    assert own.config.representation_size == 0
    assert own.meta["class_names"] == source.meta["class_names"]
    assert own.meta["mean"] == source.meta["mean"]


def test_finetune__the_first_loss_is_that_of_the_zero_head(job: Job, tmp_path: Path) -> None:
    job("finetune", **{"log.every_steps": 1})
    records = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    first = next(r for r in records if r["kind"] == "train")
    assert first["loss"] == pytest.approx(torch.log(torch.tensor(6.0, dtype=torch.float64)).item(), rel=1e-12)
    assert first["lr"] == 0.0
    said = next(r for r in records if r["kind"] == "weights")
    assert said["path"].endswith("pretrained/checkpoints/step_00000020/ema.safetensors")


def test_finetune__at_a_higher_resolution(job: Job, tmp_path: Path) -> None:
    length = {"schedule.total_steps": 0, "schedule.total_epochs": 0.7}
    result = job("finetune", **{"data.image_size": 24, **length})
    assert result["provenance"]["total_steps"] == 6
    config = read_weights(tmp_path / "run" / "checkpoints" / "step_00000006").config
    assert (config.image_size, config.grid) == (24, (6, 6))
    assert "position embedding 4x4 -> 6x6" in (tmp_path / "run" / "log.jsonl").read_text()


@pytest.mark.slow
def test_finetune__a_resumed_run_keeps_the_weights_that_were_newest(
    pretrained: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pre-training may finish between the two halves of a run."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/first").symlink_to(pretrained)
    values = {**CPU, **SMALL, "data.path": str(tiny_data)}
    do("finetune", Path("fine"), **values)
    assert 'source = "runs/first"' in Path("fine/recipe.toml").read_text()
    Path("runs/second").mkdir()
    (Path("runs/second") / "result.json").write_text('{"job": "pretrain", "status": "done"}')
    again = do("finetune", Path("fine"), **values)
    assert again["provenance"]["from"].startswith("runs/first/")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"data.crop": "random", "data.image_size": 16}, "set data.train_resize to at least 16"),
        ({"data.crop": "random"}, "set data.train_resize to at least 16"),  # the size of the weights
        (
            {"schedule.total_steps": 0, "schedule.total_epochs": 0.1},
            "end within schedule.warmup_steps = 1",
        ),
        ({"checkpoint.keep_best": 1}, "checkpoint.keep_best: there are no scores"),
        (
            {"schedule.batch_size": 2, "machine.processes": 3},
            "schedule.batch_size = 2 is less than machine.processes = 3",
        ),
        ({"data.train_split": "trian"}, "has no split 'trian'; found: train, test"),
        ({"data.path": "", "data.dataset": "peds"}, "no data set is called 'peds'; did you mean pets"),
        ({"data.path": "", "data.dataset": ""}, "no data was given; use --data FOLDER"),
    ],
)
def test_finetune__refuses_before_it_writes_anything(
    job: Job, tmp_path: Path, values: dict[str, object], said: str
) -> None:
    with pytest.raises(VitctlError) as caught:
        job("finetune", **values)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_finetune__rates_come_with_the_weights_where_the_recipe_says_so(
    job: Job, regularised: Path, tmp_path: Path
) -> None:
    """What they stood for is in the checkpoint, on the screen, in provenance, in the digest and in
    `compare_runs`.
    """
    stored = {"dropout": "as_stored", "drop_path": "as_stored"}
    source = {"weights.source": str(regularised)}
    results = {
        "stored": job("finetune", "stored", **source, **stored),
        "given": job("finetune", "given", **source, dropout=0.1, drop_path=0.2),
        "none": job("finetune", "none", **source),
    }
    used = {name: result["provenance"] for name, result in results.items()}
    for name, rates in {"stored": (0.1, 0.2), "given": (0.1, 0.2), "none": (0.0, 0.0)}.items():
        config = read_weights(tmp_path / name / "checkpoints" / "step_00000006").config
        assert (config.dropout, config.drop_path) == rates == (used[name]["dropout"], used[name]["drop_path"])
    for key in ("recipe_sha256", "weights_sha256"):
        assert used["stored"][key] == used["given"][key] != used["none"][key], key
    assert "dropout 0.1 as stored, drop_path 0.2 as stored" in (tmp_path / "stored" / "log.jsonl").read_text()
    assert "dropout 0.1, drop_path 0.2" in (tmp_path / "given" / "log.jsonl").read_text()
    seen = dict(compare_runs([tmp_path / "stored", tmp_path / "none"]).differences)
    assert (seen["dropout"], seen["drop_path"]) == (["0.1", "0"], ["0.2", "0"])


@pytest.mark.slow
def test_finetune__a_tried_rate_belongs_to_the_dropout_it_was_tried_with(job: Job, regularised: Path) -> None:
    swept = {"sweep.lrs": [0.01], "sweep.train_split": "train[:60]", "sweep.eval_split": "train[60:]"}
    result = job("finetune", **swept, **{"weights.source": str(regularised), "dropout": "as_stored"})
    tried = json.loads((Path(result["files"]["model"]).parents[2] / "sweep/lr_0.01/result.json").read_text())
    assert (tried["provenance"]["dropout"], tried["provenance"]["drop_path"]) == (0.1, 0.0)


SEEDS = (0, 4, 2**32 - 1)


def test_finetune__several_seeds_are_runs_of_their_own(job: Job, tmp_path: Path) -> None:
    """The mean of three runs, each of which is what `seed` gives alone; one sweep of rates for all."""
    rates = {"sweep.lrs": (0.003, 0.03)}
    result = job("finetune", **rates, **{"finetune.seeds": SEEDS})
    lr = result["provenance"]["lr"]
    alone = {seed: job("finetune", f"alone_{seed}", seed=seed, **{"optimizer.lr": lr}) for seed in SEEDS}
    accuracies = [one["metrics"]["accuracy"] for one in alone.values()]
    metrics = result["metrics"]
    assert {seed: one["accuracy"] for seed, one in metrics["by_seed"].items()} == dict(
        zip(map(str, SEEDS), accuracies, strict=True)
    )
    assert metrics["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-12)
    assert metrics["std"] == pytest.approx(np.std(accuracies), abs=1e-12)
    assert (metrics["total"], sorted(metrics["sweep"])) == (23, ["0.003", "0.03"])
    assert result["provenance"]["seeds"] == list(SEEDS)
    assert alone[4]["provenance"]["seeds"] == [4]
    assert result["provenance"]["weights_sha256"] == alone[0]["provenance"]["weights_sha256"]
    folders = sorted(path.name for path in (tmp_path / "run" / "seeds").iterdir())
    assert folders == ["seed_4", "seed_4294967295"]
    assert not list((tmp_path / "run" / "seeds").rglob("*.safetensors"))


@pytest.mark.slow
def test_finetune__several_seeds_go_on_where_they_stopped(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after the second of three: the finished ones are read, the third starts, and the result is the
    same.
    """
    values = {"finetune.seeds": (0, 1, 2)}
    whole = job("finetune", "whole", **values)
    train, folders = finetuning.train, []

    def counted(recipe: Any, work: RunContext, *args: Any, **more: Any) -> Any:
        folders.append(work.folder.name)
        if stop_at == work.folder.name:
            raise Stopped
        return train(recipe, work, *args, **more)

    monkeypatch.setattr(finetuning, "train", counted)
    stop_at = "seed_2"
    stopped = job("finetune", **values)
    assert stopped["status"] == "stopped"
    stop_at, folders = "", []
    again = job("finetune", **values)
    assert folders == ["run", "seed_2"]
    assert again["metrics"] == whole["metrics"]
    log = (tmp_path / "run" / "log.jsonl").read_text()
    assert log.count('"kind": "train"') == (tmp_path / "whole" / "log.jsonl").read_text().count(
        '"kind": "train"'
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"finetune.seeds": (1, 1)}, r"seeds = \[1, 1\] should be distinct numbers, 0 or more"),
        ({"finetune.seeds": (1, 2), "data.eval_split": ""}, "there is nothing to score; set data.eval_split"),
    ],
)
def test_finetune__refuses_seeds(job: Job, values: dict[str, object], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        job("finetune", **values)
