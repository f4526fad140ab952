"""Ten lines of Python that run an exported ONNX file: a program for the user to start from."""

from typing import Any

from vitctl.export.graph import Raw
from vitctl.jobs.resizing import own_transform

_PILLOW = {"bicubic_antialias": "BICUBIC", "area": "BOX"}  # else BILINEAR, which always has antialias


def sample(meta: dict[str, Any], model: Raw) -> str:
    """The source of a program that prints the five best classes of a photograph.

    Args:
        meta: of the weights.
        model: what was exported.
    """
    opened = "Image.open(sys.argv[1])"
    if meta.get("exif_orientation") is not False:  # as `vitctl predict` reads weights that do not say
        opened = f"ImageOps.exif_transpose({opened})"
    prepared = [] if model.preprocess is not None or "eval_method" not in meta else _prepared(meta)
    pixels = "numpy.asarray(image)[None]" + ("" if model.preprocess is not None else ".transpose(0, 3, 1, 2)")
    lines = [
        "import json, pathlib, sys",
        "import numpy, onnxruntime",
        "from PIL import Image, ImageOps"
        if "ImageOps" in opened or any("ImageOps" in line for line in prepared)
        else "from PIL import Image",
        'session = onnxruntime.InferenceSession(pathlib.Path(__file__).with_suffix(".onnx"))',
        f'image = {opened}.convert("RGB")',
        *prepared,
        f'[logits] = session.run(["logits"], {{"images": {pixels}}})[0]',
        'names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])',
        'for number in (-logits).argsort(kind="stable")[:5]:',
        '    print(f"{logits[number]:8.3f}", names[number] if names else number)',
    ]
    return "\n".join(lines) + "\n"


def _prepared(meta: dict[str, Any]) -> list[str]:
    """Resize and crop with Pillow."""
    own = own_transform(meta)
    size, rule = own.image_size, f"Image.Resampling.{_PILLOW.get(own.resample, 'BILINEAR')}"
    side = own.resize
    resized = f"image = image.resize(({side}, {side}), {rule})"
    if own.method == "shorter_side":
        resized = (
            f"image = image.resize([round(side * {side} / min(image.size)) for side in image.size], {rule})"
        )
    if own.method == "square" and side == size:
        return [resized]
    cut = [
        f"left, top = ((side - {size}) // 2 for side in image.size)",
        f"image = image.crop((left, top, left + {size}, top + {size}))",
    ]
    return [resized, *cut]
