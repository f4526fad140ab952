"""What a training on a GPU fixes for its bits and its speed, on fakes: see README, "What you can rely on"."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.conftest import TINY
from tests.trained import do
from vitctl.engine import assemble, computation, runtime, trainer
from vitctl.engine.computation import (
    attention_kernel,
    computed_training,
    exact,
    gpu_settings,
    kept_activations,
    settled,
)
from vitctl.engine.runtime import Computation, check_gpus, device_and_precision, join
from vitctl.engine.state import RunState
from vitctl.errors import CheckpointError, LaunchError, explained
from vitctl.jobs import training
from vitctl.launch import doctor
from vitctl.models.blocks import KEPT
from vitctl.models.flops import compile_rule, computed_flops, training_memory_bytes
from vitctl.models.variants import variant
from vitctl.recipe.load import load_recipe
from vitctl.recipe.schema import NetworkMachine, Pretrain, TrainMachine

GPU = torch.device("cuda", 0)
B16 = variant("B/16")
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process alone on an H100 that computes nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(computation, "find_spec", lambda _: "triton")
    monkeypatch.setattr(computation, "which", lambda _: "/usr/bin/gcc")
    return SimpleNamespace(
        device=GPU,
        precision="bf16",
        product_dtype=torch.bfloat16,
        num_processes=1,
        is_main=True,
        broadcast=lambda text: text,
    )


def recipe(**values: Any) -> Pretrain:
    given = {"model.name": "B/16", "data.image_size": 224, **values}
    loaded = load_recipe("in1k_b16", list(given.items())).recipe
    assert isinstance(loaded, Pretrain)
    return loaded


def test_settled__a_long_training_on_a_gpu_is_compiled_and_a_short_one_is_not(
    gpu: Any, tmp_path: Path
) -> None:
    def machine(**values: Any) -> TrainMachine:
        return settled(recipe(**values), gpu, B16, tmp_path, 1_281_167).machine

    brief = {"schedule.total_steps": 100, "schedule.total_epochs": 0.0, "schedule.warmup_steps": 0}
    long, short = machine(), machine(**brief)
    assert (long.attention, long.compile) == ("flash", True)
    assert (short.attention, short.compile) == ("flash", False)
    assert not machine(**{"machine.checkpoint_blocks": "attention"}).compile
    assert machine(**{"machine.compile": "max-autotune"}).compile == "max-autotune"
    assert machine(**{"machine.deterministic": False}).attention == "cudnn"
    gpu.device = torch.device("cpu")
    assert (machine().attention, machine().compile) == ("auto", False)


def test_settled__needs_what_torch_compiles_with(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computation, "which", lambda _: None)
    assert not settled(recipe(), gpu, B16, tmp_path, 1_281_167).machine.compile


def test_settled__a_resume_keeps_what_its_checkpoint_was_computed_with(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"attention": "efficient", "compile": "False", "deterministic": "True"}
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    monkeypatch.setattr(computation, "read_state", lambda _: {"computed_on": saved})
    kept = settled(recipe(), gpu, B16, tmp_path, 1_281_167).machine
    assert (kept.attention, kept.compile) == ("efficient", False)
    asked = settled(recipe(**{"machine.attention": "math"}), gpu, B16, tmp_path, 1_281_167).machine
    assert asked.attention == "math"  # `RunState` judges it
    del saved["deterministic"]  # of a CPU
    assert settled(recipe(), gpu, B16, tmp_path, 1_281_167).machine.attention == "flash"


def test_compile_rule__by_the_time_that_it_saves() -> None:
    """0.15 of the time at 0.4 of the peak outweighs 90 s from 600 s on."""
    flops = 989e12 * 0.4 * 600
    assert [compile_rule("H100", share * flops) for share in (0.99, 1.01)] == [False, True]
    assert compile_rule("a card of next year", 1e21)
    assert computed_flops(B16) * 1_281_167 * 300 > flops


def test_attention_kernel__what_a_device_lacks_is_refused(gpu: Any) -> None:
    cpu = Computation(torch.device("cpu"), "float32")
    for name in ("efficient", "cudnn"):
        with pytest.raises(LaunchError, match=r"machine\.attention: '.*' needs a GPU"):
            attention_kernel(NetworkMachine(attention=name), B16, cpu)
    with pytest.raises(ValidationError, match=r"no fixed order.*'flash'"):
        TrainMachine(attention="cudnn")
    free = TrainMachine(attention="cudnn", deterministic=False)
    assert attention_kernel(free, B16, gpu) == "cudnn"
    assert attention_kernel(NetworkMachine(attention="cudnn"), B16, gpu) == "cudnn"  # scoring has no backward
    assert attention_kernel(TrainMachine(attention="fused"), B16, gpu) == "flash"
    assert attention_kernel(TrainMachine(), B16, gpu, lanes=True) == "math"
    found = explained(RuntimeError("No available kernel. Aborting execution."))
    assert found is not None and "machine.attention" in str(found)


@pytest.mark.parametrize("deterministic", [True, False])
def test_train__on_a_gpu_algorithms_are_deterministic_unless_switched_off(
    deterministic: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, said = list[bool](), list[str]()

    def prepared(*_: Any, **__: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        raise LaunchError("here")

    monkeypatch.setattr(training, "assembled", prepared)
    images: Any = SimpleNamespace(
        meta=lambda _: {}, colours={}, pre_processing=None, scored=None, tested=None
    )
    journal = SimpleNamespace(say=lambda _, *texts: said.extend(texts))
    run: Any = SimpleNamespace(runtime=gpu, journal=journal)
    given = recipe(**{"machine.deterministic": deterministic, "machine.compile": False})
    with pytest.raises(LaunchError, match="here"):
        training.train(given, run, torch.nn.Linear(1, 1), images)  # type: ignore[arg-type]
    assert seen == [deterministic]
    assert [text[:29] for text in said] == ["machine.deterministic = false"] * (not deterministic)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("lanes", "fix"), [(False, ""), (True, "schedule.lanes = 0 and ")])
def test_exact__names_the_key_that_lifts_it(lanes: bool, fix: str, gpu: Any) -> None:
    with (
        pytest.raises(LaunchError, match=f"train with {fix}machine.deterministic = false$"),
        exact(gpu, 1, lanes=lanes),
    ):
        raise RuntimeError("cumsum_cuda does not have a deterministic implementation")


def test_cublas__is_set_before_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that accelerate starts join before they choose a device."""
    found: list[str | None] = []
    monkeypatch.setenv(CUBLAS, "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: found.append(os.environ.get(CUBLAS)))
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda **_: found.append(os.environ.get(CUBLAS)) or True
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(runtime.dist, "rendezvous", lambda *_, **__: iter([(None, 0, 1)]))
    monkeypatch.setattr(runtime.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.delenv(CUBLAS)
    join(cpu=False)
    monkeypatch.delenv(CUBLAS)
    assert device_and_precision("cuda", "float32") == (False, "float32")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    found.append(os.environ.get(CUBLAS))
    assert found == [":4096:8", ":4096:8"]
    assert not torch.backends.cuda.matmul.allow_tf32 and not torch.backends.cudnn.allow_tf32
    assert gpu_settings(TrainMachine(compile=True)) | {"cudnn": "", "torch": ""} == {
        "deterministic": "True",
        "compile": "True",
        "tf32": "False",
        "bf16_reduction": "True",
        "cudnn": "",
        "torch": "",
    }


def resumed(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is said of a resume on a GPU with other settings."""
    said: list[str] = []
    log = SimpleNamespace(warn=lambda text, _: said.append(text))
    state: Any = SimpleNamespace(_computed_on=now, _log=log, step=3)
    saved: Any = SimpleNamespace(folder=Path("step_3"), state={"computed_on": was})
    RunState._warn_of_rounding(state, saved)
    return said


def test_resume__another_kernel_is_refused_where_the_bits_are_promised_and_else_said() -> None:
    flash = {
        "attention": "flash",
        "compile": "True",
        "tf32": "False",
        "deterministic": "True",
        "cudnn": "91900",
    }
    assert resumed(flash, flash) == []
    for change, back in (
        ({"attention": "math"}, "--set machine.attention=flash,"),
        ({"compile": "False"}, "--set machine.compile=true,"),
        ({"tf32": "True"}, "the same precision,"),
    ):
        with pytest.raises(CheckpointError, match=f"resume with {back} or --set machine.deterministic=false"):
            resumed(flash, flash | change)
        free = {"deterministic": "False"}
        assert len(resumed(flash | free, flash | free | change)) == 1
    [said] = resumed(flash, flash | {"deterministic": "False", "attention": "cudnn"})
    assert "deterministic True, here False" in said
    [said] = resumed(flash, flash | {"cudnn": "92500"})  # another machine may have no other
    assert "cudnn 91900, here 92500" in said


def test_micro_batch__no_size_that_is_tried_is_compiled(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str, result: Any) -> Callable[..., Any]:
        return lambda *_, **__: order.append(name) or result

    monkeypatch.setattr(assemble, "choose_micro_batch", noted("sizes", 4))
    monkeypatch.setattr(assemble, "compile_blocks", noted("compile", 1))
    monkeypatch.setattr(assemble, "compile_loss", lambda _, loss, **__: loss)
    do(TINY, tmp_path / "run", **{"data.path": str(tiny_data), "machine.compile": True, "machine.workers": 0})
    assert order == ["sizes", "compile"]


def test_result__names_what_decided_the_bits(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    for name, kernel in (("deterministic", "flash"), ("not", "cudnn")):
        given = recipe(
            **{"machine.deterministic": name == "deterministic", "machine.compile": "max-autotune"}
        )
        said = computed_training(given, gpu, B16)
        assert said["attention"] == kernel and said["hardware"]["cuDNN"] == "91900"
        assert said["settings"]["deterministic"] == str(name == "deterministic")
        assert (said["settings"]["compile"], said["settings"]["cudnn"]) == ("max-autotune", "91900")


def test_compile__graphs_beyond_twice_those_of_the_start_are_said(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scoring needs as many as training at most; more mean that torch compiles for each size or step."""
    monkeypatch.setattr(assemble, "compile_blocks", lambda *_, **__: 0)
    monkeypatch.setattr(assemble, "compile_loss", lambda _, loss, **__: loss)
    for name, later in (("usual", 10), ("many", 11)):
        found = iter((5, later))
        monkeypatch.setattr(trainer, "_graphs", lambda found=found: next(found))
        values = {"data.path": str(tiny_data), "machine.compile": True, "machine.workers": 0}
        do(TINY, tmp_path / name, **values)
        text = (tmp_path / name / "log.jsonl").read_text()
        assert '"graphs": 5' in text
        assert ("torch compiled 11 graphs, 5 at the start" in text) == (name == "many")


def test_kept_activations__all_where_the_plan_has_room(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch whose plan needs more than nine tenths of the card recomputes what is cheap."""
    needed = training_memory_bytes(B16, 256, "bf16", 2, False)
    for size, kept in ((needed / 0.9 + 1, 1.0), (needed / 0.9 - 1, KEPT)):
        card = SimpleNamespace(total_memory=size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
        assert kept_activations(recipe(), gpu, B16, 256) == kept
    gpu.device = torch.device("cpu")
    assert kept_activations(recipe(), gpu, B16, 256) == KEPT


@pytest.mark.parametrize(
    ("uuids", "expected"),
    [
        (["a", "b"], nullcontext()),
        (["a", "a"], pytest.raises(LaunchError, match=r"= 2: one GPU, 2 processes.* to 1$")),
        (["a", "b", "a", "b"], pytest.raises(LaunchError, match=r"= 4: one GPU, 2 processes.* to 2$")),
    ],
)
def test_check_gpus__each_process_has_one_of_its_own(
    uuids: list[str], expected: AbstractContextManager[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    monkeypatch.setattr(runtime, "gather_texts", lambda own: [own[: -len("a")] + one for one in uuids])
    with expected:
        check_gpus()


def test_doctor__of_a_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise doctor.importlib.metadata.PackageNotFoundError("vitctl")

    monkeypatch.setattr(doctor.importlib.metadata, "requires", missing)
    [finding] = doctor._guarded(doctor._extras)
    assert finding.ok and "was not installed" in finding.said
