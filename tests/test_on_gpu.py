"""What a GPU alone can show: `pytest -m gpu tests/test_on_gpu.py`; `-m slow` rehearses it on a CPU."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from tests.conftest import TINY, checkpoint, train_records
from tests.trained import do
from vitctl import VitctlError, open_split
from vitctl.data.images.decode import open_picture
from vitctl.engine import optimizer as engine
from vitctl.engine.checkpoint import Saver
from vitctl.engine.journal import Journal
from vitctl.engine.mixing import erased
from vitctl.engine.optimizer import Average, build_optimizer, clip_gradients, take_step
from vitctl.engine.runtime import Computation
from vitctl.engine.update import TrainStep
from vitctl.jobs.http_server import Batcher
from vitctl.jobs.inputs.classifier import open_classifier
from vitctl.jobs.resources import Memory
from vitctl.models.build import build
from vitctl.models.kernels import Narrowed, attend
from vitctl.models.variants import variant
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import NetworkMachine, Pretrain
from vitctl.recipe.sections import Optimizer

DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
# What a later recipe may have: named where it is there.
_LATER = {"machine.deterministic": True}
EXACT = {key: value for key, value in _LATER.items() if key.partition(".")[2] in NetworkMachine.model_fields}
KERNELS = [one for one in get_args(NetworkMachine.model_fields["attention"].annotation) if one != "auto"]
LAST = 8
Train = Callable[..., Path]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return str(request.param)


@pytest.fixture
def train(tiny_data: Path, tmp_path: Path, device: str) -> Train:
    """train(name, **values) trains a tiny network in bf16 for eight steps and returns the run."""
    how = {
        "machine.device": device,
        "machine.precision": "bf16",
        "schedule.total_steps": LAST,
        "checkpoint.every_steps": 2,
        "checkpoint.keep_last": 9,
        "evaluation.every_steps": 0,
        "log.every_steps": 1,
        "data.path": str(tiny_data),
        **EXACT,
    }
    noise = {"model.dropout": 0.1, "model.drop_path": 0.2}

    def run(name: str, recipe: str | Path = TINY, **values: Any) -> Path:
        do(recipe, tmp_path / name, **{**how, **(noise if recipe == TINY else {}), **values})
        return tmp_path / name

    return run


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in train_records(folder)]


def test_training__repeats_its_bits(train: Train) -> None:
    assert checkpoint(train("a"), LAST) == checkpoint(train("b"), LAST)


def test_training__killed_and_resumed_is_straight(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, update = train("a"), TrainStep.update

    def dies(self: TrainStep, step: int, *given: Any, **more: Any) -> Any:
        if step == 5:
            raise MemoryError("killed")
        return update(self, step, *given, **more)

    monkeypatch.setattr(TrainStep, "update", dies)
    with pytest.raises(VitctlError, match="killed"):
        train("b")
    monkeypatch.undo()
    resumed = train("b")
    assert checkpoint(resumed, LAST) == checkpoint(straight, LAST)
    assert losses(resumed) == losses(straight)


def test_lanes__repeat_their_bits_for_any_micro_batch(train: Train) -> None:
    lanes = {"schedule.lanes": 4, "schedule.leaf_images": 4}
    one, other = train("a", **lanes), train("b", **lanes, **{"machine.workers": 2})
    assert checkpoint(one, LAST) == checkpoint(other, LAST)


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention__each_kernel_attends(
    kernel: Any, device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Forward and backward beside float64, at 197 tokens; twice with the same bits where they are so."""
    if device == "cpu" and kernel in ("efficient", "cudnn"):
        pytest.skip("a kernel of GPUs alone")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    repeats = kernel in ("flash", "efficient", "math")
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(repeats)
    torch.manual_seed(0)
    wide = [torch.randn(2, 3, 197, 64, dtype=torch.float64).requires_grad_() for _ in range(3)]
    mixed = attend(*wide, kernel="math")
    wanted = [mixed, *torch.autograd.grad(mixed.square().sum(), wide)]
    found: list[list[Tensor]] = []
    for _ in range(2):
        given = [one.detach().to(device, torch.bfloat16).requires_grad_() for one in wide]
        mixed = attend(*given, kernel=kernel)
        found.append([mixed.detach(), *torch.autograd.grad(mixed.float().square().sum(), given)])
    for one, again, exact in zip(*found, wanted, strict=True):
        assert torch.equal(one, again) or not repeats
        assert (one.cpu().double() - exact).abs().max() <= 0.05 * exact.abs().max()


@pytest.mark.filterwarnings("ignore:.*")  # of the compiler
def test_compile__has_the_losses_of_eager(train: Train) -> None:
    plain = {"model.dropout": 0.0, "model.drop_path": 0.0}
    one, other = (train(str(on), **plain, **{"machine.compile": on}) for on in (False, True))
    assert losses(other) == pytest.approx(losses(one), rel=0.02)


def toy(device: str) -> Any:
    config = variant(
        "Ti/16", image_size=32, num_classes=10, depth=2, hidden_size=48, mlp_size=96, num_heads=3
    )
    return build(config, seed=0).to(device)


def with_gradients(model: Any) -> Any:
    for number, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(number)).to(p.device)
    return model


@pytest.mark.parametrize("name", ["adam", "lamb", "sgd"])
def test_update__is_that_of_a_cpu(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped, averaged, and skipped where it is not finite; the way of many tensors at once."""
    models = []
    for place, many in (("cpu", ()), (device, (device,))):
        monkeypatch.setattr(engine, "MANY_AT_ONCE", many)
        model = toy(place)
        optimizer = build_optimizer(model, Optimizer(name=name, lr=1.0, weight_decay=0.1))
        average = Average(model, 0.9)
        for finite in (True, False, True):
            clip_gradients(with_gradients(model).parameters(), 1.0, scale=torch.tensor(2.0, device=place))
            optimizer.param_groups[0]["lr"] = 1e-3
            take_step(optimizer, torch.tensor(finite, device=place))
            average.update(model, torch.tensor(finite, device=place))
        models.append([*model.parameters(), *average.tensors.values()])
    for one, other in zip(*models, strict=True):
        torch.testing.assert_close(one.detach(), other.detach().cpu(), rtol=1e-5, atol=1e-6)


def test_narrowed__has_the_bits_of_autocast(device: str) -> None:
    model, found = toy(device).train(), []
    images = torch.randn(4, 3, 32, 32).to(device)
    with torch.no_grad():
        model.head.weight.normal_()
    for context in (nullcontext(), Narrowed(model)()):
        model.zero_grad()
        with context:
            with torch.autocast(device, torch.bfloat16):
                loss = model(images).square().sum()
            torch.autograd.backward(loss)
        # of linear layers: a convolution's gradient may be added in any order
        found.append([loss.detach(), *(p.grad for name, p in model.named_parameters() if "mlp" in name)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_images__are_those_of_a_cpu(device: str) -> None:
    """Normalised to a rounding, and erased with the same fills."""
    images, positions = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8), torch.arange(16)
    both = []
    for place in ("cpu", device):
        normalise = Computation(torch.device(place), "float32").normaliser((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
        both.append(erased(normalise(images), positions, probability=0.5, seed=1, count=2).cpu())
    torch.testing.assert_close(*both, rtol=1e-6, atol=1e-6)


def test_averages__and_their_checkpoint_are_used(train: Train) -> None:
    files = checkpoint(train("a"), LAST)
    assert files["ema.safetensors"] != files["model.safetensors"]


def test_lora__trains_adapters_alone(train: Train, pretrained: Path, tiny_data: Path) -> None:
    del tiny_data
    few = {"schedule.batch_size": 8, "schedule.warmup_steps": 1, "data.crop": "none", "averaging.decay": 0.0}
    lora = {"lora.rank": 2, "lora.targets": ("q", "v"), "weights.source": str(pretrained), **few}
    runs = [train(name, "finetune", **lora) for name in ("a", "b")]
    assert checkpoint(runs[0], LAST) == checkpoint(runs[1], LAST)
    assert losses(runs[0])[-1] < losses(runs[0])[0]


def test_save__copies_what_was_there(device: str, tmp_path: Path) -> None:
    """Weights change as soon as the copies are queued."""
    config = variant("Ti/4", depth=1, hidden_size=6, image_size=8, num_classes=2)
    saver = Saver(tmp_path / "checkpoints", config, {}, 9, 0, Journal(tmp_path / "log.jsonl", lambda _: None))
    weight = torch.zeros(2**22, device=device)
    for step in (1, 2, 3):
        weight.fill_(step)
        saver.start(step, [("model", "w", weight)], {"a": step}, {})
        saver.wait_for_copy()
        weight.fill_(99)
        assert saver.finish() == ""
        copied = saver._buffers["model"]["w"]
        assert bool((copied == step).all())
        assert copied.is_pinned() == (device == "cuda")


@pytest.fixture
def opened(pretrained: Path, device: str) -> Any:
    values = {"weights.source": str(pretrained), "machine.device": device, "machine.precision": "float32"}
    recipe = load_recipe("evaluate", [Override(key, value) for key, value in values.items()]).recipe
    return open_classifier(recipe)  # type: ignore[arg-type]


def test_predict__ahead_is_one_by_one(opened: Any, tiny_data: Path) -> None:
    source = open_split("test", path=tiny_data)
    found = [answers.logits for answers in opened.answers(source, batch_size=4, workers=2)]
    images = [opened.shown(open_picture(source.read(number))) for number in range(len(source))]
    one_by_one = [opened.network(torch.stack(images[at : at + 4])).logits for at in range(0, 23, 4)]
    torch.testing.assert_close(torch.cat(found), torch.cat(one_by_one), rtol=1e-5, atol=1e-5)


def test_serve__answers_as_predict(opened: Any, tiny_data: Path) -> None:
    source = open_split("test", path=tiny_data)
    wanted = torch.cat([answers.logits for answers in opened.answers(source, batch_size=23, workers=0)])

    async def served() -> list[Tensor]:
        batcher = Batcher(opened, batch_size=8, wait=0.01, decoders=2)
        running = asyncio.create_task(batcher.run())
        rows = await asyncio.gather(*(batcher.logits(source.read(number)) for number in range(len(source))))
        running.cancel()
        return list(rows)

    torch.testing.assert_close(torch.stack(asyncio.run(served())), wanted, rtol=1e-4, atol=1e-4)


def test_fewshot__has_the_accuracies_of_a_cpu(
    pretrained: Path, tiny_data: Path, tmp_path: Path, device: str
) -> None:
    values = {"weights.source": str(pretrained), "data.path": str(tiny_data), "machine.precision": "float64"}
    found = [
        do("fewshot", tmp_path / place, **values, **{"machine.device": place, "fewshot.shots": (2, 5)})
        for place in dict.fromkeys(("cpu", device))
    ]
    assert found[0]["metrics"] == found[-1]["metrics"]


def test_memory__is_what_the_plan_says(train: Train, device: str) -> None:
    if device == "cpu":
        pytest.skip("torch does not count what it holds on a CPU")
    shape = {
        "model.hidden_size": 384,
        "model.mlp_size": 1536,
        "model.num_heads": 6,
        "model.depth": 6,
        "model.patch_size": 16,
        "data.image_size": 224,
        "schedule.batch_size": 64,
    }
    torch.cuda.reset_peak_memory_stats()
    train("a", **shape)
    values = [Override("machine.precision", "bf16"), *(Override(k, v) for k, v in shape.items())]
    recipe = load_recipe(str(TINY), values).recipe
    assert isinstance(recipe, Pretrain)
    planned = Memory.of(recipe.network(6), recipe, None, "")
    assert 0.7 <= torch.cuda.max_memory_allocated() / planned.at(64) <= 1.1
