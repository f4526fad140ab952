"""JPEG decoders beside each other on one core: `python benchmarks/decode.py`. Libraries that are not there
are left out.

Three tasks: the whole picture; the picture down to the bottom of a random crop (what our loader asks for);
and the picture at half its size. `same` says whether the pixels are Pillow's, bit for bit, above the crop's
bottom.
"""

import argparse
import io
import tarfile
import time
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitctl.data.images.jpeg import Jpeg, decode_rows, read_header
from vitctl.data.images.transforms import inception_box

PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "imagenet-500.tar"
ROUNDS = 3
Decode = Callable[[bytes, Jpeg, int], np.ndarray]


def pillow(data: bytes, *_: object) -> np.ndarray:
    """The whole picture."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def pillow_half(data: bytes, *_: object) -> np.ndarray:
    """Half its size, by the scaled DCT of draft mode."""
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (image.width // 2, image.height // 2))
    return np.asarray(image.convert("RGB"))


def torchvision(data: bytes, *_: object) -> np.ndarray:
    """The whole picture."""
    import torch
    from torchvision.io import decode_image

    pixels = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode="RGB")
    return pixels.permute(1, 2, 0).numpy()


def opencv(data: bytes, *_: object) -> np.ndarray:
    """The whole picture."""
    cv2 = import_module("cv2")
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)


@cache
def _turbojpeg() -> Any:
    return import_module("turbojpeg").TurboJPEG()


def pyturbojpeg(data: bytes, *_: object) -> np.ndarray:
    """The whole picture."""
    pixels: np.ndarray = _turbojpeg().decode(data, pixel_format=import_module("turbojpeg").TJPF_RGB)
    return pixels


@cache
def _nvimgcodec() -> tuple[Any, Any]:
    library = import_module("nvidia.nvimgcodec")
    backends = [library.Backend(library.BackendKind.CPU_ONLY)]
    options = ":fancy_upsampling=1"
    return library, library.Decoder(
        device_id=-99999, backends=backends, max_num_cpu_threads=1, options=options
    )


def nvimagecodec(data: bytes, *_: object) -> np.ndarray:
    """The whole picture, on the CPU."""
    return np.asarray(_nvimgcodec()[1].decode(data).cpu())


def nvimagecodec_rows(data: bytes, jpeg: Jpeg, bottom: int) -> np.ndarray:
    """Down to the bottom of the crop, on the CPU."""
    library, decoder = _nvimgcodec()
    part = library.CodeStream(data).get_sub_code_stream(
        region=library.Region(start=(0, 0), end=(bottom, jpeg.width))
    )
    return np.asarray(decoder.decode(part).cpu())


def simplejpeg(data: bytes, *_: object) -> np.ndarray:
    """The whole picture."""
    return import_module("simplejpeg").decode_jpeg(data, strict=False)


def simplejpeg_rows(_: bytes, jpeg: Jpeg, bottom: int) -> np.ndarray:
    """Down to the bottom of the crop."""
    pixels = decode_rows(jpeg, bottom)
    assert pixels is not None
    return pixels


def simplejpeg_rows_kept(_: bytes, jpeg: Jpeg, bottom: int) -> np.ndarray:
    """The same into memory that is used again and again, as our loader asks for it."""
    pixels = decode_rows(jpeg, bottom, reuse_buffer=True)
    assert pixels is not None
    return pixels


def simplejpeg_half(_: bytes, jpeg: Jpeg, bottom: int) -> np.ndarray:
    """Down to the bottom of the crop at half the size."""
    pixels = decode_rows(jpeg, bottom, 2)
    assert pixels is not None
    return pixels


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="a tar of JPEG files")
    parser.add_argument("--images", type=int, default=250)
    given = parser.parse_args()
    with tarfile.open(given.photos) as tar:
        files = [tar.extractfile(member) for member in tar if member.isreg()]
        contents = [file.read() for file in files[: given.images] if file is not None]
    rng: np.random.Generator = np.random.default_rng(0)
    tasks: list[tuple[bytes, Jpeg, int]] = []
    for data in contents:
        if jpeg := read_header(data):
            top, _, height, _ = inception_box(jpeg.height, jpeg.width, rng, (0.05, 1.0), (0.75, 1.33))
            tasks.append((data, jpeg, top + height))
    decoders = (
        pillow,
        torchvision,
        opencv,
        pyturbojpeg,
        nvimagecodec,
        nvimagecodec_rows,
        simplejpeg,
        simplejpeg_rows,
        simplejpeg_rows_kept,
        pillow_half,
        simplejpeg_half,
    )
    times = dict.fromkeys(decoders, float("inf"))
    for decoder in [decoder for _ in range(ROUNDS) for decoder in decoders]:
        times[decoder] = min(times[decoder], milliseconds(decoder, tasks))
    print("| decoder | ms of CPU per photograph | same |\n|---|---|---|")
    for decoder, spent in ((decoder, spent) for decoder, spent in times.items() if spent < float("inf")):
        same = all(
            np.array_equal(pillow(task[0])[: task[2]], decoder(*task)[: task[2]]) for task in tasks[:50]
        )
        print(f"| {decoder.__name__} | {spent:.2f} | {'yes' if same else 'no'} |")


def milliseconds(decoder: Decode, tasks: list[tuple[bytes, Jpeg, int]]) -> float:
    """Mean CPU time of one picture; infinite when the library is not there."""
    began = time.process_time()
    try:
        for task in tasks:
            decoder(*task)
    except ModuleNotFoundError:
        return float("inf")
    return (time.process_time() - began) / len(tasks) * 1e3


if __name__ == "__main__":
    main()
