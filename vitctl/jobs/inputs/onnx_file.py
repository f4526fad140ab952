"""An ONNX file that `vitctl export` wrote, opened to predict with: the network, and what its metadata say of
images and classes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitctl.errors import CheckpointError, LaunchError
from vitctl.jobs.inputs.forward import Outputs
from vitctl.models.weights.meta import Meta, require_meta
from vitctl.system.bounds import WEIGHTS
from vitctl.system.files import parse_json
from vitctl.system.text import one_line

LOGITS, FEATURES = "logits", "features"
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_ONLY_ERRORS = 3


class OnnxNetwork:
    """A `Network` that onnxruntime runs.

    Args:
        path: of the file.
        device: "auto", "cpu" or "cuda".

    Raises:
        CheckpointError: it is no ONNX file, or not one of an image classifier as `vitctl export` writes it.
        LaunchError: onnxruntime has no CUDA here, and that was asked for.
    """

    def __init__(self, path: Path, device: str = "auto") -> None:
        import onnxruntime

        if not path.is_file():
            raise CheckpointError(f"{path}: no such ONNX file; write one with `vitctl export --to onnx`")
        if path.stat().st_size > WEIGHTS.limit:
            raise CheckpointError(f"{path}: {path.stat().st_size:,} bytes, should be at most {WEIGHTS}")
        has_cuda = _CUDA in onnxruntime.get_available_providers()
        if device == "cuda" and not has_cuda:
            raise LaunchError(
                f"{path}: the installed onnxruntime has no CUDA; pip install onnxruntime-gpu, or use the CPU"
            )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ONLY_ERRORS
        options.intra_op_num_threads = torch.get_num_threads()
        self.device = torch.device("cuda" if has_cuda and device != "cpu" else "cpu")
        providers = [_CUDA, _CPU] if self.device.type == "cuda" else [_CPU]
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=providers)
        except Exception as error:  # its classes of errors are not public
            raise CheckpointError(
                f"{path}: onnxruntime cannot open it ({one_line(str(error))}); export it again"
            ) from None
        self.path = path
        self.resizes = self._session.get_modelmeta().custom_metadata_map.get("input") == "photographs"
        self._input, size = self._check_input()
        outputs = {str(output.name): list(output.shape) for output in self._session.get_outputs()}
        self.has_head, self.has_features = LOGITS in outputs, FEATURES in outputs
        if not (self.has_head or self.has_features):
            raise CheckpointError(f"{path}: gives {', '.join(map(one_line, outputs))}, should give {LOGITS}")
        self.meta = self._read_meta()
        self.image_size = size or int(self.meta["image_size"])
        names, num_classes = self.meta.get("class_names"), outputs.get(LOGITS, [0])[-1]
        if names and self.has_head and num_classes != len(names):
            raise CheckpointError(
                f"{path}: names {len(names)} classes and gives {num_classes} logits; export it again"
            )

    def _check_input(self) -> tuple[str, int]:
        """The name of its only input, uint8 [batch, 3, S, S], and S; 0 where it resizes photographs [batch,
        H, W, 3].
        """
        inputs = self._session.get_inputs()
        shape = list(inputs[0].shape) if inputs else []
        if self.resizes and len(inputs) == 1 and inputs[0].type == "tensor(uint8)" and shape[3:] == [3]:
            return str(inputs[0].name), 0
        is_ours = len(inputs) == 1 and inputs[0].type == "tensor(uint8)" and len(shape) == 4 and shape[1] == 3
        if not is_ours or not isinstance(shape[2], int) or shape[2] != shape[3] or isinstance(shape[0], int):
            found = ", ".join(f"{one.name} {one.type} {list(one.shape)}" for one in inputs) or "nothing"
            raise CheckpointError(
                f"{self.path}: takes {one_line(found)}, should take uint8 [batch, 3, S, S], as `vitctl "
                f"export --to onnx` writes it"
            )
        return str(inputs[0].name), int(shape[2])

    def _read_meta(self) -> dict[str, Any]:
        """What `weights.meta` of a run holds, from the metadata of the file."""
        stored = self._session.get_modelmeta().custom_metadata_map
        self.digest = str(stored.get("weights_sha256", ""))
        told = {
            name: self._parsed(name, stored.get(name, "null")) for name in ("preprocessing", "class_names")
        }
        meta = told["preprocessing"] if isinstance(told["preprocessing"], dict) else {}
        meta |= {"class_names": told["class_names"]} if told["class_names"] else {}
        try:
            Meta.model_validate(meta)
            require_meta(meta, ("image_size", "eval_method", "eval_resize", "resample"))
        except (CheckpointError, ValueError):
            raise CheckpointError(
                f"{self.path}: its metadata do not say how images are pre-processed; give a file of `vitctl "
                f"export --to onnx`"
            ) from None
        return meta

    def _parsed(self, name: str, text: str) -> Any:
        return parse_json(
            text.encode("utf-8", "surrogatepass"), f"{self.path}: {name}", error=CheckpointError
        )

    def __call__(self, images: Tensor, *, with_features: bool = False) -> Outputs:
        """Outputs of uint8 images `[B, 3, S, S]`; `[B, 3, H, W]` where it resizes them."""
        images = images.permute(0, 2, 3, 1) if self.resizes else images
        wanted = [LOGITS] * self.has_head + [FEATURES] * with_features
        found = self._session.run(wanted, {self._input: np.ascontiguousarray(images.numpy())})
        for name, value in zip(wanted, found, strict=True):
            if value.ndim != 2 or len(value) != len(images) or value.dtype.kind != "f":
                raise CheckpointError(
                    f"{self.path}: {name} of {len(images)} images is {value.dtype} {list(value.shape)}, "
                    f"should be numbers, a row for each "
                    "image; export it again"
                )
        by_name = {name: torch.from_numpy(value) for name, value in zip(wanted, found, strict=True)}
        features = by_name.get(FEATURES)
        return Outputs(by_name.get(LOGITS), None if features is None else features.float())
