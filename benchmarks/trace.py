"""What the record of every step costs: updates of ViT-S/16 with and without it in turns, in one process.

    python benchmarks/trace.py --batch 16 --steps 20                      # a CPU
    python benchmarks/trace.py --batch 512 --steps 200 --precision bf16   # a GPU

The images are noise and lie in memory, so that only the step is timed; what the checksums cost a loader
worker is timed beside it.
"""

import argparse
import statistics
import tempfile
import time
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vitctl.data.images.decode import open_picture
from vitctl.data.images.transforms import TrainTransform, augmentation_rng
from vitctl.data.loader.batches import Batch
from vitctl.data.source.unsharded import SyntheticSource
from vitctl.engine.distributed.gradients import AllReduced
from vitctl.engine.distributed.runtime import Runtime, start
from vitctl.engine.journal import LOG, Journal
from vitctl.engine.loop import Result, Trainer
from vitctl.engine.losses import classify
from vitctl.engine.optimizer import build_optimizer
from vitctl.engine.preemption import StopFlag
from vitctl.engine.trace.recorder import Recorder, weights_checksum
from vitctl.models.build import build
from vitctl.models.variants import variant

LOGGED_EVERY = 50
MEAN_STD = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    parser.add_argument("--precision", default="float32")
    given = parser.parse_args()
    runtime = start(precision=given.precision, device="auto", processes=1)
    trainer, batch = prepared(runtime, given.batch)
    plain, recorded, extra = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / LOG)
        recorder = Recorder(
            Path(folder), journal, runtime, trainer.unwrapped, range(given.batch), given.batch
        )
        recorder.start(0, {"made_of": {}})
        for step in range(-3, 2 * given.steps):
            began = seconds(runtime)
            result = trainer.update(max(step, 0), [batch])
            updated = seconds(runtime)
            if step >= 0 and step % 2:
                recorder.add(step // 2 + 1, result, [batch], weights=False)
                extra.append(seconds(runtime) - updated)
            if step >= 0:
                (recorded if step % 2 else plain).append(seconds(runtime) - began)
    one, two, own = (statistics.median(values) for values in (plain, recorded, extra))
    print(
        f"{runtime.device.type}, {runtime.precision}, batch {given.batch}, {torch.get_num_threads()} threads"
    )
    print(
        f"a step without the record {one * 1e3:.2f} ms, with it {two * 1e3:.2f} ms (medians of {given.steps})"
    )
    print(
        f"the record alone: median {own * 1e3:.3f} ms ({own / one:.2%} of a step), mean "
        f"{statistics.fmean(extra) * 1e3:.3f} ms "
        f"({statistics.fmean(extra) / one:.2%})"
    )
    digest = of_weights(runtime, trainer)
    print(
        f"the digest of the weights, at each {LOGGED_EVERY}th step and at checkpoints: "
        f"{digest * 1e3:.1f} ms, "
        f"{digest / LOGGED_EVERY * 1e3:.2f} ms a step ({digest / LOGGED_EVERY / one:.2%})"
    )
    for size in (512, 4096):
        print(f"the record alone, batch {size}: median {of_batch(runtime, trainer, size) * 1e3:.3f} ms")
    print(in_the_loader())


def of_weights(runtime: Runtime, trainer: Trainer, repeats: int = 7) -> float:
    """Seconds of a digest of the weights."""
    times = []
    for _ in range(repeats):
        began = seconds(runtime)
        weights_checksum(trainer.unwrapped)
        times.append(seconds(runtime) - began)
    return statistics.median(times)


def of_batch(runtime: Runtime, trainer: Trainer, size: int, repeats: int = 50) -> float:
    """Seconds of the record of a step with this batch size, without a digest of the weights."""
    rng = np.random.default_rng(0)
    empty = torch.zeros(size, 3, 0, 0, dtype=torch.uint8)
    batch = Batch(
        empty,
        torch.zeros(size, dtype=torch.int64),
        torch.ones(size),
        torch.arange(size),
        checksums=rng.integers(0, 9, (size, 2)),
    )
    norms = torch.rand(len(list(trainer.unwrapped.parameters())), device=runtime.device)
    result, times = Result(1.0, 1.0, 1e-4, 0, False, gradient=norms), []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            Path(folder), Journal(Path(folder) / LOG), runtime, trainer.unwrapped, range(size), size
        )
        recorder.start(0, {"made_of": {}})
        for step in range(1, repeats + 1):
            began = seconds(runtime)
            recorder.add(step, result, [batch], weights=False)
            times.append(seconds(runtime) - began)
    return statistics.median(times)


def prepared(runtime: Runtime, size: int) -> tuple[Trainer, Batch]:
    """A training of ViT-S/16, and a batch of noise."""
    config = variant("S/16", num_classes=1000, image_size=224)
    model = build(config, seed=0, dtype=runtime.dtype).to(runtime.device)
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (size, 3, 224, 224), dtype=np.uint8))
    labels, samples = torch.from_numpy(rng.integers(0, 1000, size)), torch.arange(size)
    batch = Batch(images, labels, torch.ones(size), samples, checksums=rng.integers(0, 2**32, (size, 2)))
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "momentum": 0.9}
    normalise = partial(runtime.images, **MEAN_STD)
    wrapped = runtime.wrap(model)
    trainer = Trainer(
        runtime=runtime,
        model=wrapped,
        gradients=AllReduced(runtime, wrapped, 0),
        unwrapped=model,
        optimizer=build_optimizer(model, name="adam", weight_decay=0.1, **adam),
        average=None,
        objective=partial(classify, normalise=normalise, name="softmax", label_smoothing=0.0),
        lr=lambda _step: 1e-4,
        batch_size=size,
        clip_norm=1.0,
        stop=StopFlag(),
    )
    return trainer, batch


def seconds(runtime: Runtime) -> float:
    """The clock, when the device has done what it was told."""
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def in_the_loader(images: int = 100) -> str:
    """Time of the checksums beside that of decoding and cropping, per image of 256 pixels to 224."""
    source, transform = SyntheticSource(images, 10, 256), TrainTransform(224)
    encoded = [source.read(number) for number in range(images)]
    decode, check = [], []
    for number, data in enumerate(encoded):
        began = time.perf_counter()
        picture = open_picture(data)
        chosen = transform.draw(picture.height, picture.width, augmentation_rng(0, 0, number))
        pixels = transform.apply(picture, chosen).permute(1, 2, 0).contiguous().numpy()
        decoded = time.perf_counter()
        zlib.crc32(data), zlib.crc32(pixels)
        decode.append(decoded - began)
        check.append(time.perf_counter() - decoded)
    one, two = statistics.median(decode), statistics.median(check)
    return f"in a loader worker: {one * 1e3:.2f} ms an image without checksums, {two * 1e3:.3f} ms for them ({two / one:.2%})"


if __name__ == "__main__":
    main()
