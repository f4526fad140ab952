"""Which of our runs stand in a cell of the paper's tables: those of its experiment on all of its images, and
no other.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import finished
from vitctl.data.datasets.catalog import known_size
from vitctl.data.datasets.vtab import VTAB
from vitctl.engine.journal import write_run_json
from vitctl.recipe.paper import RESULTS
from vitctl.report.our_results import OurResults, Pretraining, experiments_for, our_results

REAL_SCORE = {"data.dataset": "imagenet", "data.eval_split": "validation", "evaluation.labels": "real"}
B32 = Pretraining("jft_b32")


def pretrained(runs: Path, recipe: str = "jft_b32", digest: str = "b32", **values: Any) -> Path:
    return finished(runs, f"pre_{digest}", recipe, {"accuracy": 0.4}, values, weights_sha256=digest)


def reasons(ours: OurResults) -> dict[str, str]:
    return {one.run: one.reason for one in ours.left_out}


def test_runs__are_joined_to_their_pretraining_by_digest_with_mean_and_deviation_over_seeds(
    tmp_path: Path,
) -> None:
    pretrained(tmp_path)
    for number, accuracy in enumerate((0.93, 0.95)):
        free = {
            "seed": number,
            "data.root": "elsewhere",
            "machine.workers": 3,
            "weights.source": f"runs/{number}",
        }
        finished(tmp_path, f"pets{number}", "finetune_pets", {"accuracy": accuracy}, free, from_sha256="b32")
    finished(tmp_path, "pets2", "finetune_pets", {"accuracy": 0.99}, {"seed": 1}, from_sha256="b32")
    finished(tmp_path, "other", "finetune_cifar10", {"accuracy": 0.1}, from_sha256="unknown")
    ours = our_results(tmp_path)
    cell = ours.best(B32, ("finetune_pets",))
    assert cell is not None
    assert (cell.mean, cell.std) == (pytest.approx(94.0), pytest.approx(1.0))
    assert ours.best(B32, ("finetune_cifar10",)) is None
    assert ours.best(Pretraining("jft_b16"), ("finetune_pets",)) is None
    assert reasons(ours) == {
        "other": "its weights are of no run here that can be used",
        "pets2": "the same weights and seed as pets1",
    }


@pytest.mark.parametrize(
    ("values", "used", "reason"),
    [
        ({"schedule.total_steps": 300}, {}, "schedule.total_steps is 300, in the recipe 500"),
        ({"data.image_size": 224}, {}, "data.image_size is 224, in the recipe 384"),
        ({"optimizer.clip_norm": 2.0}, {}, "optimizer.clip_norm is 2.0, in the recipe 1.0"),
        ({"data.subset_fraction": 0.5}, {}, "data.subset_fraction is 0.5, in the recipe 1.0"),
        (
            {"data.path": "shards"},
            {},
            "data.path is set: its images cannot be checked against the data set of the recipe",
        ),
        ({}, {"num_train": 3_000}, "3,000 images of train of pets, should be 3,680"),
        ({}, {"num_images": 100}, "100 images of test of pets, should be 3,669"),
        ({}, {"num_train": None}, "its result does not say num_train"),
        ({}, {"data_source": "Pets, partial"}, "its images are Pets, partial"),
        ({}, {"train_source": "a copy of the community"}, "its images are a copy of the community"),
        ({}, {"initialise": "random"}, "it started from random weights"),
        ({}, {"data_verified": "part"}, "only a part of its bytes were verified against their digests"),
        ({}, {"from_sha256": ""}, "its weights are of no run here that can be used"),
    ],
)
def test_runs__of_another_experiment_do_not_count_and_it_is_said(
    tmp_path: Path, values: dict[str, Any], used: dict[str, Any], reason: str
) -> None:
    pretrained(tmp_path)
    finished(tmp_path, "run", "finetune_pets", {"accuracy": 0.9}, values, **{"from_sha256": "b32", **used})
    ours = our_results(tmp_path)
    assert (ours.accuracies, reasons(ours)) == ({}, {"run": reason})


def test_runs__of_a_pretraining_on_a_part_or_for_less_do_not_count(tmp_path: Path) -> None:
    pretrained(tmp_path, digest="short", **{"schedule.total_epochs": 3.0})
    finished(tmp_path, "part", "jft_b32", {}, weights_sha256="part", num_train=9_000_000)
    for digest in ("short", "part"):
        finished(tmp_path, f"pets_{digest}", "finetune_pets", {"accuracy": 0.9}, from_sha256=digest)
    ours = our_results(tmp_path)
    assert ours.accuracies == {}
    assert reasons(ours)["pre_short"] == "schedule.total_epochs is 3.0, in the recipe 7.0"
    assert reasons(ours)["part"] == "9,000,000 images of train of jft300m, should be 303,000,000"


def test_resnets__take_the_better_of_sweep_and_bit_rule_and_vits_the_sweep_alone(tmp_path: Path) -> None:
    pretrained(tmp_path, "jft_r50x1", "r50")
    pretrained(tmp_path)
    assert experiments_for("6", "jft_r50x1", "Pets") == ("finetune_pets", "bit_pets")
    assert (
        experiments_for("6", "jft_b32", "Pets")
        == experiments_for("6", "jft_r50_b32", "Pets")
        == ("finetune_pets",)
    )
    for digest in ("r50", "b32"):
        finished(tmp_path, f"sweep_{digest}", "finetune_pets", {"accuracy": 0.8}, from_sha256=digest)
    ours = our_results(tmp_path)
    one = ours.best(Pretraining("jft_r50x1"), experiments_for("6", "jft_r50x1", "Pets"))
    assert one is not None and (one.mean, one.remark) == (80.0, "bit_pets has not been run")
    for digest in ("r50", "b32"):
        finished(tmp_path, f"bit_{digest}", "bit_pets", {"accuracy": 0.9}, from_sha256=digest)
    ours = our_results(tmp_path)
    one = ours.best(Pretraining("jft_r50x1"), experiments_for("6", "jft_r50x1", "Pets"))
    assert one is not None and (one.mean, one.remark) == (90.0, "bit_pets is the better")
    vit = ours.best(B32, experiments_for("6", "jft_b32", "Pets"))
    assert vit is not None and (vit.mean, vit.remark) == (80.0, "")


def test_table_2__takes_the_resolution_of_each_network() -> None:
    at = {recipe: experiments_for("2", recipe, "ImageNet") for recipe in RESULTS["2"].rows}
    assert at == {
        "jft_h14": ("finetune_imagenet_518",),
        "jft_l16_14ep": ("finetune_imagenet_512",),
        "in21k_l16": ("finetune_imagenet_512",),
        "jft_r152x4": ("bit_imagenet_480",),
    }
    assert experiments_for("5", "jft_h14", "ImageNet") == ("finetune_imagenet",)
    assert experiments_for("2", "jft_r152x4", "Flowers") == ("bit_flowers102_480",)
    assert experiments_for("2", "jft_r152x4", "CIFAR-10") == ("bit_cifar10",)
    assert experiments_for("2", "jft_r152x4", "VTAB") == ()
    assert experiments_for("fig3", "in21k_r152x4", "ImageNet") == ("bit_imagenet_480",)
    assert experiments_for("fig3", "in1k_r50x1", "ImageNet") == ("bit_imagenet",)
    assert experiments_for("fig3", "in1k_b16", "ImageNet") == ("finetune_imagenet",)
    assert experiments_for("fig13", "d6_axial_r50", "5-shot") == ("5-shot",)


def test_real__is_the_score_of_the_fine_tuned_network_at_that_resolution(tmp_path: Path) -> None:
    pretrained(tmp_path)
    finished(
        tmp_path, "in", "finetune_imagenet", {"accuracy": 0.8}, from_sha256="b32", weights_sha256="tuned"
    )
    metrics = {"accuracy": 0.8, "real": {"accuracy": 0.85}}
    finished(tmp_path, "real", "evaluate", metrics, REAL_SCORE, weights_sha256="tuned")
    finished(
        tmp_path, "small", "evaluate", metrics, {**REAL_SCORE, "data.image_size": 224}, weights_sha256="tuned"
    )
    finished(tmp_path, "part", "evaluate", metrics, REAL_SCORE, weights_sha256="tuned", num_images=1_000)
    finished(tmp_path, "plain", "evaluate", metrics, {"data.dataset": "pets"}, weights_sha256="tuned")
    ours = our_results(tmp_path)
    assert ours.accuracies == {
        (B32, "finetune_imagenet"): (80.0,),
        (B32, "real of finetune_imagenet"): (85.0,),
    }
    assert reasons(ours) == {
        "small": "data.image_size is 224, in the recipe 0",
        "part": "1,000 images of validation of imagenet, should be 50,000",
    }
    assert experiments_for("5", "jft_b32", "ReaL") == ("real of finetune_imagenet",)
    assert experiments_for("2", "jft_h14", "ReaL") == ("real of finetune_imagenet_518",)


def test_figure_4__subsets_are_cells_of_their_own_in_a_sweep_too(tmp_path: Path) -> None:
    sweep = tmp_path / "fig4"
    for images in (9_000_000, 0, 5_000_000):
        used = {"num_train": images or 303_000_000, "weights_sha256": f"w{images}"}
        finished(
            sweep, f"b32_{images}", "fig4_b32", {"accuracy": 0.1}, {"data.subset_images": images}, **used
        )
        shots = {"accuracy": {"5": 0.5}, "by_seed": {"5": [0.5 + images / 1e8, 0.5]}}
        used = {"from_sha256": f"w{images}", "num_train": 65_000}
        finished(tmp_path, f"shots_{images}", "fewshot", shots, {"data.dataset": "imagenet"}, **used)
    write_run_json(sweep / "sweep.json", {"runs": []})
    ours = our_results(tmp_path)
    assert ours.accuracies == {
        (Pretraining("fig4_b32", 9_000_000), "5-shot"): (pytest.approx(59.0), 50.0),
        (Pretraining("fig4_b32", 0), "5-shot"): (50.0, 50.0),
    }
    assert reasons(ours)["fig4/b32_5000000"] == "data.subset_images is 5000000, in the recipe 0"


def vtab_metrics(**changes: Any) -> dict[str, Any]:
    tasks = {}
    for place, task in enumerate(VTAB):
        size = known_size(task.data_set, task.test)
        assert size is not None
        tasks[task.name] = {
            "group": task.group,
            "by_seed": [place / 100, place / 50],
            "total": size[0],
            "copy": "",
        }
    for name, row in changes.items():
        tasks[name] = tasks[name] | row
    return {"partial": False, "tasks": tasks}


def test_vtab__by_task_by_group_and_in_all_over_seeds(tmp_path: Path) -> None:
    pretrained(tmp_path)
    finished(tmp_path, "vtab", "vtab", vtab_metrics(), from_sha256="b32")
    ours = our_results(tmp_path)
    assert ours.accuracies[B32, "vtab"] == (pytest.approx(9.0), pytest.approx(18.0))
    assert ours.accuracies[B32, "vtab natural"] == (pytest.approx(3.0), pytest.approx(6.0))
    assert ours.accuracies[B32, "vtab cifar100"] == (pytest.approx(1.0), pytest.approx(2.0))
    assert len(ours.accuracies) == 1 + 3 + 19


def test_vtab__in_part_of_copies_or_on_fewer_images_does_not_count(tmp_path: Path) -> None:
    pretrained(tmp_path)
    for name, metrics in {
        "some": {"partial": True, "tasks": {}},
        "copied": vtab_metrics(dtd={"copy": "a copy of others"}),
        "small": vtab_metrics(svhn={"total": 100}),
    }.items():
        finished(tmp_path, name, "vtab", metrics, from_sha256="b32")
    ours = our_results(tmp_path)
    assert ours.accuracies == {}
    assert reasons(ours) == {
        "some": "0 of 19 tasks",
        "copied": "dtd: a copy of others",
        "small": "svhn: 100 test images, should be 26,032",
    }


def test_few_shot__on_imagenet_alone(tmp_path: Path) -> None:
    pretrained(tmp_path)
    shots = {"by_seed": {"1": [0.3], "5": [0.6]}}
    finished(tmp_path, "digits", "fewshot", shots, from_sha256="b32")
    imagenet = {"data.dataset": "imagenet"}
    finished(tmp_path, "shots", "fewshot", shots, imagenet, from_sha256="b32", num_train=65_000)
    finished(tmp_path, "fewer", "fewshot", shots, {**imagenet, "seed": 1}, from_sha256="b32", num_train=5_000)
    ours = our_results(tmp_path)
    assert ours.accuracies == {(B32, "5-shot"): (60.0,)}
    assert reasons(ours) == {"fewer": "5,000 images of train[:65000] of imagenet, should be 65,000"}


def test_no_folder_and_broken_runs(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "result.json").write_text("{")
    assert our_results(tmp_path) == OurResults({}, folder=tmp_path)
    assert our_results(tmp_path / "nowhere") == OurResults({}, folder=tmp_path / "nowhere")
