"""Training steps of ViTs at 224 beside timm's: `python benchmarks/step.py`, on a GPU `--device cuda`.

Both sides begin with the same uint8 images in memory, random ones, and labels, and normalise the images
themselves. Both take a step of AdamW with weight decay, at a clipped norm of 1. Ours is `TrainStep.update` of
a prepared `vitctl pretrain`, with the settings of [machine]; a run also writes a record of each step, which
`vitctl bench model` measures. timm's is that of its train.py. As they come, ours has a tanh-GELU and computes
the last block for the class token alone, timm an erf-GELU and all tokens.

Every setting of a side is a process of its own; the best one of each side, by a first step, and those that
both come with take turns. Of the larger model only the settings are tried that were best for the smaller one,
unless `--thorough`. On a CPU the number that is compared is seconds of the processor, on one thread, which
other work disturbs least; on a GPU, in bf16, wall-clock seconds (a batch that does not fit ends the script:
give a smaller --batch). Memory is what a process holds at most during a step, beyond its imported libraries.
"""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import measure
from measure import (
    DEFAULT,
    Choices,
    Compared,
    Machine,
    Numbers,
    Row,
    answer_turns,
    clock,
    matrix_rates,
    peak_mib,
    question,
    report,
    script_options,
    uncompiled,
)

LIBRARIES = ("torch", "timm", "accelerate")
GOALS = {("cpu", "float32"): 1.4, ("cpu", "bf16"): 1.2, ("cuda", "bf16"): 1.15}
MEMORY_GOAL, NO_DEVICE = 1 / 0.9, 3
MODELS = {"cpu": ["S/16", "B/16"], "cuda": ["B/16", "L/16", "H/14", "R50+B/16"]}
PRECISIONS = {"cpu": ["bf16", "float32"], "cuda": ["bf16"]}
GPU_BATCHES = {"B/16": 256, "L/16": 128, "H/14": 64, "R50+B/16": 128}
LR, WEIGHT_DECAY, BETAS, CLIP_NORM, CLASSES = 1e-4, 0.1, (0.9, 0.999), 1.0, 1000
TIMM_NAMES = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/16": "vit_base_patch16_224",
    "L/16": "vit_large_patch16_224",
    "H/14": "vit_huge_patch14_224",
    "R50+B/16": "vit_base_r50_s16_224",
}
# Keys of a recipe; in float32 `our_linear` is another.
OURS: Choices = {
    DEFAULT: {},
    "compiled by block": {"machine.compile": True},
}
# Of timm's train.py: --opt adamw is torch's AdamW; `fused` is its argument, `plain` is
# timm.layers.set_fused_attn(False).
THEIRS: Choices = {
    DEFAULT: {},
    "fused AdamW": {"fused": True},
    "fused AdamW, plain attention": {"fused": True, "plain": True},
    "fused AdamW, compiled": {"fused": True, "compile": True},
    "fused AdamW, plain attention, compiled": {"fused": True, "plain": True, "compile": True},
}
# On a GPU fused attention is the rule of both, and a minute of compiling is worth two settings.
GPU_SETTINGS = {DEFAULT, "compiled by block", "fused AdamW, compiled"}
Step = Callable[[], Any]  # its loss, to be read by float()


@dataclass(frozen=True)
class Work:
    """What both sides compute: a step of `model` at `image_size`, on `batch` images. precision: "bf16" or
    "float32".
    """

    model: str
    image_size: int
    batch: int
    precision: str
    device: str
    steps: int = 1  # of a turn

    def __str__(self) -> str:
        return f"{self.model} at {self.image_size}, {self.batch} images, {self.precision}"


def main() -> None:
    """Measure, print a table, and write results/step.json, or gpu.json of a GPU."""
    if asked := question():
        answer_turns(partial(prepare, asked["side"], asked["settings"], Work(**asked["work"])))
        return
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--precisions", nargs="+", choices=["bf16", "float32"])
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=0, help="images of a step; 0: 8, on a GPU by the model")
    parser.add_argument("--steps", type=int, default=0, help="of a turn; 0: 1, or 10 on a GPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--thorough", action="store_true", help="try all settings for every model")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes a minute each"
    )
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # of all processes

    import torch

    device, on_gpu = given.device, given.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured", file=sys.stderr)
        sys.exit(NO_DEVICE)
    number, machine, limits = "wall" if on_gpu else "cpu", Machine(), matrix_rates(device)
    rows: list[Row] = []
    for precision in given.precisions or PRECISIONS[device]:
        choices = {"ours": OURS, "timm": THEIRS}
        if on_gpu and not given.thorough:
            choices = {
                side: {k: v for k, v in own.items() if k in GPU_SETTINGS} for side, own in choices.items()
            }
        choices = uncompiled(choices) if given.no_compile else choices
        for model in given.models or MODELS[device]:
            batch = given.batch or (GPU_BATCHES.get(model, 128) if on_gpu else 8)
            steps = given.steps or (10 if on_gpu else 1)
            work = Work(model, given.image_size, batch, precision, device, steps)
            found = measure.compare(__file__, {"work": asdict(work)}, choices, number, given.rounds)
            rows += rows_of(work, found, number)
            if not given.thorough:
                choices = {side: found.narrowed(side, own) for side, own in choices.items()}
    report("gpu" if on_gpu else "step", rows, machine, limits, LIBRARIES, given.results)


def our_step(work: Work, settings: Mapping[str, Any]) -> Step:
    """The update of a pre-training that is prepared as `vitctl pretrain --synthetic` prepares it."""
    import torch

    from vitctl import load_recipe
    from vitctl.data.loader.batches import Batch
    from vitctl.engine.trainer import Trainer
    from vitctl.jobs.pretrain import pretrain

    values = {
        "model.name": work.model,
        "model.dropout": 0.0,
        "model.pre_logits": False,
        "data.synthetic": work.batch,
        "data.image_size": work.image_size,
        "data.eval_split": "",
        "optimizer.lr": LR,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.clip_norm": CLIP_NORM,
        "schedule.batch_size": work.batch,
        "schedule.total_steps": 1_000_000,
        "schedule.total_epochs": 0.0,
        "schedule.warmup_steps": 0,
        "loss.name": "softmax",
        "loss.label_smoothing": 0.0,
        "loss.smoothing": "spread",
        "machine.workers": 0,
        "machine.precision": work.precision,
        "machine.device": work.device,
        "machine.compile": False,
        **settings,
    }
    recipe = load_recipe("in1k_b16", list(values.items())).recipe
    kept: list[Trainer] = []

    class PreparedError(Exception):
        """Ends the job before its first step."""

    def act(trainer: Trainer) -> None:
        kept.append(trainer)
        raise PreparedError

    with tempfile.TemporaryDirectory() as folder, suppress(PreparedError):
        pretrain(recipe, Path(folder), act=act)
    trainer, (images, labels) = kept[0], examples(work)
    batch = Batch(images, labels, torch.ones(work.batch), torch.arange(work.batch))
    finished, update = 0, None

    def step() -> Loss:
        nonlocal finished, update
        before, update = update, trainer.train_step.update(finished, [batch])
        finished += 1
        if before is not None:
            before.result()  # one step late, as the loop reads it
        return Loss(update)

    return step


@dataclass(frozen=True)
class Loss:
    """The loss of an update of ours; as a number, it waits for the device."""

    update: Any

    def __float__(self) -> float:
        result = self.update.result()
        assert not result.skipped
        return float(result.loss)


def timm_step(work: Work, settings: Mapping[str, Any]) -> Step:
    """A step of timm's train.py: `create_model`, autocast around model and loss, `torch.compile` of the whole
    model.
    """
    import timm
    import torch
    from timm.data.constants import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
    from timm.layers import set_fused_attn

    set_fused_attn(not settings.get("plain", False))
    device, narrow = torch.device(work.device), work.precision == "bf16"
    name, size = TIMM_NAMES[work.model], {"img_size": work.image_size} if work.image_size != 224 else {}
    model = timm.create_model(name, num_classes=CLASSES, **size).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=settings.get("fused")
    )
    forward = torch.compile(model) if settings.get("compile") else model
    images, labels = examples(work)
    mean, std = (
        torch.tensor([255 * value for value in values], device=device).view(1, 3, 1, 1)
        for values in (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD)
    )

    def step() -> torch.Tensor:
        inputs = images.to(device, non_blocking=True).float().sub_(mean).div_(std)  # as its PrefetchLoader
        targets = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16) if narrow else nullcontext():
            loss = torch.nn.functional.cross_entropy(forward(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()  # which train.py reads when it logs

    return step


def examples(work: Work) -> tuple[Any, Any]:
    """Random images, uint8 `[B, 3, S, S]`, channels last as loaders give them, and random labels."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = work.batch, work.image_size, work.image_size, 3
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
    labels = torch.randint(0, CLASSES, (work.batch,), generator=generator)
    return (images.pin_memory(), labels.pin_memory()) if work.device == "cuda" else (images, labels)


def prepare(side: str, settings: Mapping[str, Any], work: Work) -> Callable[[], Numbers]:
    """Build a side and warm it up; returns what measures a turn: seconds and memory of a step, and the loss
    after it.

    Memory is the most that the process holds in a turn, without what it held after a step of a tiny network,
    by which all libraries are loaded; on a GPU, what torch allocates there.
    """
    import torch
    import torch._inductor.compile_fx

    build = {"ours": our_step, "timm": timm_step}[side]
    float(build(replace(work, model="Ti/16", image_size=32, batch=1), {})())
    before = peak_mib(reset=True)
    step = build(work, settings)
    first = float(step())
    for _ in range(2):  # the first compiles; the second finds the state of the optimizer there
        last = float(step())
    on_gpu = work.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()  # the other side needs it

    def turn() -> Numbers:
        nonlocal last
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):  # take the memory again
                float(step())
            torch.cuda.synchronize()
        else:
            peak_mib(reset=True)
        numbers: Numbers = {}
        with clock(numbers):
            for _ in range(work.steps):
                loss = step()
            last = float(loss)
        if not (math.isfinite(last) and last < first):
            raise SystemExit(f"{side}, {settings}: the loss was {first} and is {last} after more steps")
        memory = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else peak_mib() - before
        if on_gpu:
            torch.cuda.empty_cache()
        return {
            **{name: value / work.steps for name, value in numbers.items()},
            "peak_mib": memory,
            "loss": last,
        }

    return turn


def rows_of(work: Work, found: Compared, number: str) -> list[Row]:
    """Return time and memory of the best settings and of those that both sides come with."""
    return [
        found.row(f"training step, {work}", number, GOALS[work.device, work.precision]),
        found.row(f"training step, as it comes, {work}", number, None, best=False),
        found.row(f"memory of a training step, {work}", "peak_mib", MEMORY_GOAL),
        found.row(f"memory of a training step, as it comes, {work}", "peak_mib", None, best=False),
    ]


if __name__ == "__main__":
    main()
