"""Our loader beside those of timm, torchvision, webdataset and Hugging Face over the same photographs:
`python benchmarks/loader.py`.

All crop at random, resize to 224 by bilinear interpolation, flip, and hand over uint8 batches. Every
measurement is a process of its own; the sides take turns. Wall time counts whatever else the machine does;
CPU time, of the workers and of the process that receives their batches, much less so: images per CPU second
are compared. Memory is proportional (PSS): pages that a worker shares with its parent are counted by halves,
on all sides alike.

`vitctl` resizes as our recipes do, `vitctl-antialias` with the filter that Pillow applies, and with it timm,
webdataset and datasets; `vitctl-scaled` decodes to a fraction where the crop allows it. torchvision decodes
by `decode_image` to tensors, as its documentation of v2 advises for speed. Hugging Face `datasets` needs
`--datasets-python`, the Python of an environment that has it.
"""

import io
import os
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Any

from measure import (
    Machine,
    Numbers,
    Row,
    Side,
    answer_turns,
    decode_rate,
    in_fresh_process,
    installed,
    question,
    report,
    script_options,
    take_turns,
)

PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet-500.tar"
SIZE, BATCH, WARM_UP_BATCHES, PER_SHARD = 224, 50, 10, 64
LIBRARIES = ("vitctl", "torch", "torchvision", "timm", "webdataset", "pillow", "simplejpeg", "numpy")
OURS = ("vitctl", "vitctl-antialias", "vitctl-scaled")
GOALS = {"timm": 2.0, "torchvision": 1.5}
WAYS: dict[str, dict[str, Any]] = {"shards": {}}
PEERS = {
    "timm": "create_loader, its worker's uint8 batches, use_multi_epochs_loader",
    "torchvision": "ImageFolder with decode_image, v2.RandomResizedCrop and flip on uint8 tensors",
    "webdataset": "WebDataset, shuffle 500, Pillow, v2 crop and flip, batched in the worker",
    "datasets": "imagefolder in Arrow, with_transform, Pillow, v2 crop and flip",
}


SMALL_WAYS: dict[str, dict[str, Any]] = {
    "padded": {"crop": "padded", "resize": 40},
    "random_resized": {"crop": "random_resized", "resample": "bilinear_antialias"},
    "padded, AutoAugment": {"crop": "padded", "resize": 40, "auto_augment": "cifar10"},
    "random_resized, AutoAugment": {
        "crop": "random_resized", "resample": "bilinear_antialias", "auto_augment": "cifar10"
    },
}  # fmt: skip


def small(images: int, rounds: int) -> None:
    """Print images per CPU second of 2,000 PNG files of 32 pixels, decoded once and each time, in turns."""
    import numpy as np
    import torch

    from vitctl.data.datasets.readers.arrays import encode_png
    from vitctl.data.writer.intake import Item
    from vitctl.data.writer.shard_writer import write_split
    from vitctl.system import limits

    torch.set_num_threads(1)
    draw, side = np.random.default_rng(0).integers, limits.SMALL_SIDE
    files = [encode_png(draw(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(2000)]
    with tempfile.TemporaryDirectory() as folder:
        items = [Item(str(n), 0, partial(bytes, data)) for n, data in enumerate(files)]
        write_split(items, Path(folder) / "shards", ("any",), seed=0, source_text="noise", max_samples=2000)
        for name, how in SMALL_WAYS.items():
            rates: dict[int, list[float]] = {side: [], 0: []}
            for _ in range(rounds):
                for limits.SMALL_SIDE, found in rates.items():
                    batches = our_batches(Path(folder), 0, size=32, **how)
                    for _ in range(2000 // BATCH + 1):  # every image once
                        next(batches)
                    began = time.process_time()
                    seen = sum(len(next(batches)) for _ in range(images // BATCH))
                    found.append(seen / (time.process_time() - began))
            once, each = (statistics.median(found) for found in rates.values())
            print(f"{name}: decoded once {once:,.0f}, each time {each:,.0f}, ratio {once / each:.2f}")


def main() -> None:
    """Measure, print, and write results/loader.json."""
    if asked := question():
        asked["folder"] = Path(asked["folder"])
        answer_turns(lambda: partial(measure, **asked))
        return
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="a tar of JPEG files")
    parser.add_argument("--images", type=int, default=1500, help="per measurement")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS])
    parser.add_argument(
        "--datasets-python", default="", help="Python of an environment with datasets and torchvision"
    )
    parser.add_argument(
        "--enlarge", type=int, default=1, help="times that the photographs are enlarged first"
    )
    parser.add_argument("--small", action="store_true", help="images of 32 pixels instead, ours alone")
    given = parser.parse_args()
    if given.small:
        return small(given.images, given.rounds)
    if not given.photos.is_file():
        sys.exit(f"{given.photos}: not there; give a tar of JPEG files with --photos")
    machine = Machine()
    pythons = dict.fromkeys(given.sides, sys.executable)
    if "datasets" in pythons and installed("datasets") == "not installed":
        pythons["datasets"] = given.datasets_python
    sides = [name for name in given.sides if pythons[name]]
    with tempfile.TemporaryDirectory() as folder:
        contents = unpack(given.photos, Path(folder), given.enlarge)
        asks = {"workers": given.workers, "folder": folder, "images": given.images}
        found = take_turns(
            {
                name: partial(in_fresh_process, __file__, {"side": name, **asks}, pythons[name])
                for name in sides
            },
            given.rounds,
        )
        limits = {
            f"{key}, whole pictures, one core": value for key, value in decode_rate(contents[:100]).items()
        }
    report("loader", rows(found, given.workers), machine, limits, LIBRARIES, given.results)


def rows(found: dict[str, list[Numbers]], workers: int) -> list[Row]:
    """Each of ours against each peer; the goals are those of exact pixels with Pillow's filter."""
    what = f"photographs to batches of {BATCH} x {SIZE} x {SIZE}, {workers} workers"
    own = {
        "vitctl": "train_batches, decode exact, bilinear of four pixels, as the authors' code",
        "vitctl-antialias": "train_batches, decode exact, bilinear with Pillow's filter",
        "vitctl-scaled": 'train_batches, decode = "scaled"',
    }
    return [
        Row(what, "per CPU second", "more", Side(own[ours], found[ours]),
            Side(f"{peer}: {PEERS[peer]}", found[peer]),
            GOALS.get(peer) if ours == "vitctl-antialias" else None)
        for peer in PEERS for ours in OURS if ours in found and peer in found
    ]  # fmt: skip


def measure(side: str, workers: int, folder: Path, images: int, **choices: Any) -> Numbers:
    """Run one side for a while, with its choices; returns images/s by wall clock and CPU second, and MiB per
    worker.
    """
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    batches = SIDES[side](folder, workers, **choices)
    for _ in range(WARM_UP_BATCHES):
        next(batches)
    pids = [os.getpid(), *(child.pid or 0 for child in active_children())]
    assert len(pids) == 1 + workers
    busy, began, seen = sum(map(cpu_seconds, pids)), time.perf_counter(), 0
    while seen < images:
        batch = next(batches)
        assert batch.shape == (BATCH, 3, SIZE, SIZE) and batch.dtype == torch.uint8
        seen += len(batch)
    wall, busy = time.perf_counter() - began, sum(map(cpu_seconds, pids)) - busy
    memory = statistics.median(
        pss_mib(pid) for _ in range(3) if next(batches) is not None for pid in pids[1:]
    )
    return {"per second": seen / wall, "per CPU second": seen / busy, "PSS per worker, MiB": memory}


def our_batches(
    folder: Path, workers: int, shards: str = "shards", size: int = SIZE, **choices: Any
) -> Iterator[Any]:
    """Batches of vitctl, with timm's range of areas."""
    from vitctl.data.images.transforms import TrainTransform
    from vitctl.data.loader.batches import train_batches
    from vitctl.data.shards.index import read_index
    from vitctl.data.source.order import Order
    from vitctl.data.source.stores import ShardSource

    source = ShardSource(read_index(folder / shards))
    transform = TrainTransform(size, area_range=(0.08, 1.0), **choices)
    sizes = {"batch_size": BATCH, "micro_batch": BATCH, "rank": 0, "num_processes": 1, "first_step": 0}
    for batch in train_batches(
        source, Order(len(source), 0), transform, seed=0, num_workers=workers, **sizes
    ):
        assert not batch.bad
        yield batch.images


def timm_batches(folder: Path, workers: int) -> Iterator[Any]:
    """Batches of timm as its workers hand them over, before it normalises them."""
    import torch
    from timm.data import ImageDataset, create_loader

    loader = create_loader(
        ImageDataset(str(folder / "photos")),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        num_workers=workers,
        color_jitter=None,
        auto_augment=None,
        interpolation="bilinear",
        device=torch.device("cpu"),
        pin_memory=False,
        use_multi_epochs_loader=True,
    )
    while True:
        for images, _ in loader.loader:
            yield images


def torchvision_batches(folder: Path, workers: int) -> Iterator[Any]:
    """Batches of torchvision's folder of classes, on tensors."""
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image

    read = partial(decode_image, mode=ImageReadMode.RGB)
    data = ImageFolder(str(folder / "photos"), transform=crop_and_flip(), loader=read)
    return endless(data, workers)


def webdataset_batches(folder: Path, workers: int) -> Iterator[Any]:
    """Batches of webdataset over the shards that ours reads."""
    import webdataset as wds
    from torch.utils.data import default_collate

    shards = sorted(str(path) for path in (folder / "shards").glob("*.tar"))
    assert len(shards) >= workers
    data = wds.WebDataset(shards, shardshuffle=len(shards), nodesplitter=wds.split_by_node, seed=0)
    data = (
        data.shuffle(500)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(crop_and_flip(pil=True), int)
        .repeat()
    )
    loader = wds.WebLoader(
        data.batched(BATCH, collation_fn=default_collate, partial=False), batch_size=None, num_workers=workers
    )
    for images, _ in loader:
        yield images


def datasets_batches(folder: Path, workers: int) -> Iterator[Any]:
    """Batches of Hugging Face's loader of image folders."""
    os.environ.update(HF_DATASETS_CACHE=str(folder / "arrow"), HF_HUB_OFFLINE="1")
    from datasets import load_dataset

    apply = crop_and_flip(pil=True)

    def transformed(rows: dict[str, Any]) -> dict[str, Any]:
        return {"image": [apply(image.convert("RGB")) for image in rows["image"]]}

    data = load_dataset("imagefolder", data_dir=str(folder / "photos"), split="train").with_transform(
        transformed
    )
    yield from endless(data, workers, itemwise=False)


def crop_and_flip(pil: bool = False) -> Callable[[Any], Any]:
    """torchvision's transforms with timm's range of areas."""
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(SIZE, scale=(0.08, 1.0), antialias=True)
    return v2.Compose([crop, v2.RandomHorizontalFlip(), *([v2.PILToTensor()] if pil else [])])


def endless(data: Any, workers: int, itemwise: bool = True) -> Iterator[Any]:
    """Shuffled batches of a data set, epoch after epoch."""
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "persistent_workers": workers > 0}
    loader = DataLoader(data, batch_size=BATCH, num_workers=workers, **options)
    while True:
        for batch in loader:
            yield batch[0] if itemwise else batch["image"]


def unpack(
    photos: Path, folder: Path, enlarge: int, ways: Mapping[str, Mapping[str, Any]] = WAYS
) -> list[bytes]:
    """Put the photographs into a folder, and for each of the ways into a folder of shards; returns them."""
    from vitctl.data.images.decode import Reencode
    from vitctl.data.writer.intake import Item
    from vitctl.data.writer.shard_writer import write_split

    with tarfile.open(photos) as tar:
        files = [tar.extractfile(member) for member in tar if member.isreg()]
        contents = [enlarged(file.read(), enlarge) for file in files if file is not None]
    place = folder / "photos" / "any"
    place.mkdir(parents=True)
    for number, data in enumerate(contents):
        (place / f"{number}.jpg").write_bytes(data)
    reads: list[Callable[[], bytes]] = [
        (place / f"{number}.jpg").read_bytes for number in range(len(contents))
    ]
    items = [Item(str(number), 0, read) for number, read in enumerate(reads)]
    sizes: dict[str, Any] = {"seed": 0, "source_text": "photographs", "max_samples": PER_SHARD}
    for name, options in ways.items():
        reencode = Reencode(**options) if options else None
        write_split(items, folder / name, ("any",), reencode=reencode, **sizes)
    return contents


def enlarged(data: bytes, times: int) -> bytes:
    """The photograph as a camera of more pixels would have stored it."""
    from PIL import Image

    if times == 1:
        return data
    image, file = Image.open(io.BytesIO(data)).convert("RGB"), io.BytesIO()
    image.resize((image.width * times, image.height * times)).save(file, "JPEG", quality=90)
    return file.getvalue()


def cpu_seconds(pid: int) -> float:
    """Seconds that a process has computed, in user and in kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def pss_mib(pid: int) -> float:
    """Memory of a process, in which shared pages are divided among their users."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


SIDES: dict[str, Callable[..., Iterator[Any]]] = {
    "vitctl": our_batches,
    "vitctl-antialias": partial(our_batches, resample="bilinear_antialias"),
    "vitctl-scaled": partial(our_batches, decode="scaled"),
    "timm": timm_batches,
    "torchvision": torchvision_batches,
    "webdataset": webdataset_batches,
    "datasets": datasets_batches,
}

if __name__ == "__main__":
    main()
