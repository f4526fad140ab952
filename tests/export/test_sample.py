"""The program beside an ONNX file is run as it is."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.export.conftest import Saved, network
from vitctl.data.images.transforms import EvalTransform

CASES: list[tuple[dict[str, Any], bool]] = [
    ({"eval_method": "square", "eval_resize": 0, "resample": "bilinear_antialias"}, False),
    ({"eval_method": "shorter_side", "eval_resize": 36, "resample": "bicubic_antialias"}, False),
    ({"eval_method": "shorter_side", "eval_resize": 36, "resample": "bilinear"}, True),
]


@pytest.mark.parametrize(("rule", "inside"), CASES)
@pytest.mark.parametrize(
    "turned", [False, True, None]
)  # None: weights that do not say are taken as `predict` takes them
def test_sample__prints_our_five_best(
    saved: Saved,
    exported: Callable[..., Any],
    tmp_path: Path,
    rule: dict[str, Any],
    inside: bool,
    turned: bool | None,
) -> None:
    exported(saved(**rule, exif_orientation=turned), "onnx", **{"export.include_preprocess": inside})
    program = tmp_path / "run" / "model.py"
    assert len(program.read_text().splitlines()) <= 13
    pixels = np.kron(np.random.default_rng(1).integers(0, 256, (9, 12, 3)), np.ones((9, 9, 1))).astype(
        np.uint8
    )
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=exif)
    command = [sys.executable, str(program), str(tmp_path / "photo.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    shown = np.ascontiguousarray(np.rot90(pixels, -1)) if turned is not False else pixels
    transform = EvalTransform(
        32, method=rule["eval_method"], resize=rule["eval_resize"], resample=rule["resample"]
    )
    mean, std = torch.tensor([0.5, 0.4, 0.6]).view(3, 1, 1), torch.tensor([0.5, 0.3, 0.4]).view(3, 1, 1)
    with torch.inference_mode():
        logits = network("vit")((transform(shown)[None].float() / 255 - mean) / std)[0]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [name for _, name in rows] == ["abcde"[number] for number in logits.argsort(descending=True)]
    np.testing.assert_allclose(
        [float(value) for value, _ in rows], logits.sort(descending=True).values, atol=0.01
    )
