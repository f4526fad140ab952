"""Steps computed again: equal if nothing was changed, else the first thing that differs, in causal order."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.conftest import TINY, batch_keys, run_as_two, two_processes
from tests.matrix import slow
from tests.trained import Job, crash_after
from tests.verify.conftest import (
    LAST,
    SHORT,
    Train,
    edit,
    first_use,
    found,
    replaced,
    said,
)
from tests.verify.other_data_worker import SAMPLE
from vitctl.data.datasets.readers import shapes
from vitctl.data.shards.index import read_index
from vitctl.data.source.order import Order
from vitctl.data.source.stores import ShardSource
from vitctl.data.writer.shard_writer import write_split
from vitctl.engine import assemble, computation
from vitctl.engine import update as step_module
from vitctl.engine.trace import StartLine
from vitctl.engine.update import TrainStep
from vitctl.errors import RecipeError
from vitctl.launch.prepare_run import prepare_run
from vitctl.models.weights.weights_file import read_weights
from vitctl.recipe.load import Override, load_recipe
from vitctl.verify import run_check
from vitctl.verify.finding import FAILS
from vitctl.verify.replay import differences
from vitctl.verify.run_check import verify

EQUAL = [("ok", "steps 1 to 12: equal, bit for bit")]


@pytest.mark.parametrize(
    "values",
    [
        {"data.mixup_alpha": 0.4, "data.cutmix_alpha": 1.0, "machine.micro_batch": 7, "machine.workers": 1},
        *slow(
            {
                "loss.name": "masked_patch",
                "model.pre_logits": False,
                "model.head_bias": 0.0,
                "data.eval_split": "",
            },
            {"optimizer.name": "sgd", "machine.precision": "float32", "log.every_steps": 5},
        ),
    ],
    ids=["mixing", "masked", "sgd"],
)
def test_honest_run__is_equal_bit_for_bit(train: Train, values: dict[str, Any]) -> None:
    folder = train("a", **values)
    findings = [one for _, one in verify(folder, steps="all", scores="data.eval_split" not in values)]
    assert [one for one in findings if one.state in FAILS] == []
    assert [(one.state, one.text) for one in findings if one.what == "replay"] == EQUAL


@pytest.mark.slow
def test_honest_run__its_steps_are_equal_bit_for_bit(finished: Path) -> None:
    assert found(finished, steps="all", scores=True) == []
    assert said(finished, "replay", steps="9") == [("ok", "step 9: equal, bit for bit")]


@pytest.mark.slow
def test_dropout__is_equal_but_proves_nothing_of_several_processes(train: Train) -> None:
    run = train("a", **{"model.dropout": 0.3, "model.drop_path": 0.2, "machine.micro_batch": 5})
    assert said(run, "replay", steps="all") == EQUAL
    edit(run / "steps.jsonl", '"processes": 1', '"processes": 2')
    words = "dropout was drawn by 2 processes: loss, gradient and weights cannot be compared by one"
    assert said(run, "replay", steps="all") == [("not proven", words)]


def shard_bytes(root: Path, key: str) -> tuple[Path, int]:
    """Where the encoded image of a sample lies: file, and the first byte."""
    index = read_index(root / "train")
    source = ShardSource(index)
    number = next(n for n in range(len(source)) if source.key(n) == key)
    row = index.rows[number]
    return Path(source.location(number)), int(row["header"]) + int(row["data"])


def test_a_flipped_byte__in_an_image_is_named_by_key(finished: Path, tiny_data: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    key = batch_keys(finished)[2][5]
    step, position = first_use(finished, key)
    shard, begin = shard_bytes(data, key)
    content = bytearray(shard.read_bytes())
    content[begin + 60] ^= 1
    shard.write_bytes(content)
    here = {"data": str(data)}
    assert found(finished, **here) == []
    [(what, text)] = found(finished, reads_bytes=True, **here)
    assert what == "shards"
    assert text.startswith(f"{shard}: checksum mismatch")
    [(what, text)] = found(finished, steps="all", **here)
    assert text == f"step {step}: the encoded image at position {position} of the batch, key {key}"


def test_a_relabelled_sample__is_named_by_key(finished: Path, tmp_path: Path) -> None:
    key = batch_keys(finished)[1][9]
    step, position = first_use(finished, key)
    for split, size in (("train", 70), ("test", 23)):
        items = [
            item if item.key != key else replace(item, label=(int(str(item.label)) + 1) % 6)
            for item in shapes.items("shape", split, size, seed=0, image_size=16)
        ]
        write_split(
            items, tmp_path / "data" / split, shapes.SHAPES, seed=0, source_text="test", max_samples=18
        )
    texts = [text for _, text in found(finished, steps="all", data=str(tmp_path / "data"))]
    assert texts[0].startswith("train: digest ")
    assert texts[1].startswith("other inputs: the training images or their labels differ")
    assert texts[2:] == [f"step {step}: the label at position {position} of the batch, key {key}"]


def test_another_seed__is_named_by_recipe_start_weights_and_sample(copy: Path, tiny_data: Path) -> None:
    edit(copy / "recipe.toml", "seed = 0", "seed = 1")
    texts = [text for _, text in found(copy, steps="1:2")]
    assert texts[0].endswith("its values are not those of the result")
    assert texts[1] == "other inputs: seed was 0, now 1"
    assert texts[2] == "the start weights"
    match = re.fullmatch(
        r"step 1: the sample at position 0 of the batch, here key (.*); 1\d of 16 differ", texts[3]
    )
    assert match is not None, texts[3]
    assert match[1] == ShardSource(read_index(tiny_data / "train")).key(
        int(Order(70, 1).at(np.arange(1))[1][0])
    )


def test_another_learning_rate__at_one_step_is_named(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = assemble.learning_rate

    def other(*given: Any) -> Callable[[int], float]:
        lr = rate(*given)
        return lambda step: lr(step) * (1 + 1e-12 * (step == 6))

    monkeypatch.setattr(assemble, "learning_rate", other)
    recorded = json.loads((finished / "steps.jsonl").read_text().splitlines()[7])["bits"]["lr"]
    [(_, text)] = found(finished, steps="all")
    assert text.startswith(f"step 7: the learning rate: recorded {float.fromhex(recorded)!r}, here ")


def test_another_learning_rate__than_the_recorded_one_is_found_in_the_weights(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = TrainStep._apply, [0]

    def other(trainer: TrainStep, lr: float, *rest: Any) -> None:
        calls[0] += 1
        step(trainer, lr * (1 + (calls[0] == 7)), *rest)

    monkeypatch.setattr(TrainStep, "_apply", other)
    [(_, text)] = found(finished, steps="all")
    assert text == "step 7: the weights after the update"


def scaled(monkeypatch: pytest.MonkeyPatch, factor: float, only: tuple[int, int] | None = None) -> None:
    """Multiply all gradients by a factor before they are clipped; `only`: one parameter at one step."""
    clip, calls = step_module.clip_gradients, [0]

    def other(parameters: Any, bound: float, **named: Any) -> Tensor:
        given = list(parameters)
        calls[0] += 1
        for number, parameter in enumerate(given):
            if parameter.grad is not None and only in (None, (calls[0], number)):
                parameter.grad.mul_(factor)
        return clip(given, bound, **named)

    monkeypatch.setattr(step_module, "clip_gradients", other)


def test_another_gradient__is_named_by_parameter(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled(monkeypatch, 1.5, only=(5, 7))
    names = list(read_weights(str(finished / LAST / "model.safetensors")).state)
    [(_, text)] = found(finished, steps="all")
    match = re.match(r"step 5: the gradient of (\S+) \(1 of (\d+) parameters differ", text)
    assert match is not None, text
    assert match[1] in names
    assert int(match[2]) == len(names)


@pytest.mark.slow
def test_another_environment__is_compared_bit_for_bit_then_within_a_tolerance(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is compared exactly in both cases."""
    here = computation.versions()["torch"]
    monkeypatch.setattr(computation, "versions", lambda: {"torch": "1.0.0"})
    findings = [one for _, one in verify(finished, steps="all")]
    [environment] = [one for one in findings if one.what == "environment"]
    assert environment.state == "not checked"
    assert f"torch {here}, here 1.0.0" in environment.text
    assert [(one.state, one.text) for one in findings if one.what == "replay"] == EQUAL
    scaled(monkeypatch, 1 + 1e-14)
    [(state, text)] = said(finished, "replay within a tolerance", steps="all")
    assert state == "ok"
    assert "images, labels and order equal; not the same bits from step 1: the gradient of " in text
    assert "loss within 0.001" in text
    scaled(monkeypatch, 1.1)
    [(what, text)] = found(finished, steps="all")
    assert what == "replay"
    assert re.match(r"step 1: the gradient of .* more than 0\.01 apart; rounding grows", text)


def test_another_loss__is_named_also_in_another_environment(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(copy / "steps.jsonl", '"step": 2, "bits": {"loss": "0x1.', '"step": 2, "bits": {"loss": "0x1.f')
    assert dict(found(copy, steps="2"))["replay"].startswith("step 2: the loss: recorded ")
    monkeypatch.setattr(computation, "versions", lambda: {"torch": "1.0.0"})
    [(state, text)] = said(copy, "replay", steps="2")
    assert (state, "more than 0.001 apart" in text) == ("not proven", True)


def test_checkpoint_of_another_training__is_found(copy: Path, on_test: Path) -> None:
    """Its digests are right; only the tensors tell."""
    replaced(copy, on_test, "optimizer")
    [(state, text)] = said(copy, "replay", steps="9:12")
    assert (state, text.startswith("step 12: the checkpoint of step 12: optimizer ")) == ("differs", True)


@pytest.mark.slow
def test_two_processes__are_compared_within_a_tolerance(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    run_as_two(folder, tiny_data, **SHORT)
    assert found(folder, steps="all", scores=True) == []
    [(_, text)] = said(folder, "environment", steps="all")
    words = (
        "the last bits of numbers may differ here: made by 2 processes, "
        "whose sum of gradients depends on their number"
    )
    assert text.startswith(words)
    [(state, text)] = said(folder, "replay within a tolerance", steps="all") or said(
        folder, "replay", steps="all"
    )
    assert state == "ok"


@pytest.mark.slow
def test_one_process_that_saw_other_data__is_found(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "two"
    values = {"data.path": str(tiny_data), **SHORT, "machine.processes": 2}
    prepare_run(load_recipe(str(TINY), [Override(key, value) for key, value in values.items()]), folder)
    line = [sys.executable, "-m", "tests.verify.other_data_worker", str(folder)]
    codes = two_processes(line, tmp_path / "shown.txt")
    assert codes == (0, 0), "".join(path.read_text() for path in (folder / "logs").glob("*"))
    positions = np.flatnonzero(Order(70, 0).at(np.arange(12 * 16))[1] == SAMPLE)
    place = next(int(p) for p in positions if p % 16 >= 8)  # the first that rank 1 read
    key = ShardSource(read_index(tiny_data / "train")).key(SAMPLE)
    texts = [text for what, text in found(folder, steps="all") if what == "replay"]
    assert texts == [
        f"step {place // 16 + 1}: the encoded image at position {place % 16} of the batch, key {key}"
    ]


@pytest.mark.parametrize("text", ["0:3", "5:4", "1:13", "two", ":"])
def test_steps_that_do_not_exist__are_one_line(finished: Path, text: str) -> None:
    with pytest.raises(
        RecipeError,
        match=(
            r"--replay .*: (should be a step such as 30|\S+ has records of steps 1 to 12|steps count|the "
            r"first)"
        ),
    ):
        found(finished, steps=text)


@pytest.mark.slow
def test_a_run_that_resumed_in_another_way__is_equal(train: Train, tmp_path: Path) -> None:
    with crash_after(8):
        train("a")
    changed = {"machine.micro_batch": 4, "machine.attention": "math", "machine.checkpoint_blocks": True}
    train("a", **changed, **{"checkpoint.keep_last": 9})
    assert found(tmp_path / "a", steps="all", scores=True) == []


def test_any__draws_no_step_twice(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are four steps apart, and five steps after each are replayed."""
    monkeypatch.setattr(
        run_check.random.SystemRandom, "sample", lambda _self, places, count: sorted(places)[:count]
    )
    assert said(finished, "replay", steps="any") == [("ok", "steps 1 to 5, 9 to 12: equal, bit for bit")]


@pytest.mark.slow
def test_missing_start_weights__are_not_needed_after_a_checkpoint(
    job: Job, pretrained: Path, tmp_path: Path
) -> None:
    shutil.copytree(pretrained, tmp_path / "weights")
    job("finetune", "a", **{"weights.source": str(tmp_path / "weights"), "checkpoint.every_steps": 2})
    run = tmp_path / "a"
    shutil.move(tmp_path / "weights", tmp_path / "moved")
    assert said(run, "replay", steps="6") == [("ok", "steps 5 to 6: equal, bit for bit")]
    [(state, text)] = said(run, "score", scores=True)
    assert (state, text.startswith("scored again: ")) == ("ok", True)
    [(state, text)] = said(run, "replay", steps="1:6")
    assert state == "not proven"
    assert text.startswith("steps 1 to 6: ")
    assert text.endswith("; --from START names another place")
    equal = [("ok", "steps 1 to 6: equal, bit for bit")]
    assert said(run, "replay", steps="all", weights=str(tmp_path / "moved")) == equal


def test_differences__of_processor_driver_and_versions() -> None:
    made_of = {"made_of": {}, "step": 0}
    before = StartLine.model_validate(
        {**made_of, "hardware": {"driver": "1", "cuDNN": "9"}, "versions": {"torch": "2"}}
    )
    here = StartLine.model_validate(
        {**made_of, "hardware": {"driver": "2", "cuDNN": "9"}, "versions": {"torch": "2"}}
    )
    assert differences(before, here) == ["driver 1, here 2"]
    assert differences(StartLine.model_validate(made_of), here) == [
        "driver not recorded, here 2",
        "cuDNN not recorded, here 9",
        "torch not recorded, here 2",
    ]
