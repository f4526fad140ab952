"""Networks ready for inference, from PyTorch or an ONNX file."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitctl.data.images.decode import BadSample, Picture
from vitctl.data.images.transforms import EvalTransform, open_for
from vitctl.data.loader.batches import Batch, eval_batches
from vitctl.data.source.views import Source, sample_key
from vitctl.engine.computation import choose_attention
from vitctl.engine.evaluation import NOT_FINITE, class_logits, image_features, most_likely
from vitctl.engine.runtime import Computation, Fetched, Normaliser, Transfer, alone, given
from vitctl.errors import CheckpointError, DataError, LaunchError, RecipeError, refuse
from vitctl.jobs.inputs.weights import loaded_model, remarks, scored_weights, stored_eval_transform
from vitctl.jobs.record.result import newest_run
from vitctl.models.build import Model
from vitctl.models.kernels import pack
from vitctl.models.variants import unseen_pixels
from vitctl.models.weights.download import fetch, locate
from vitctl.models.weights.meta import (
    Activation,
    Meta,
    activation_of,
    compared_names,
    distinct,
    no_head,
    require_meta,
)
from vitctl.recipe.schema import Evaluate
from vitctl.recipe.sections import WeightsSource
from vitctl.system import limits
from vitctl.system.files import parse_json
from vitctl.system.text import count_text, one_line

LOGITS, FEATURES = "logits", "features"
_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def probabilities(logits: Tensor, activation: Activation, temperature: float = 1.0) -> Tensor:
    """Return class probabilities, float64 `[B, K]`: they sum to 1 (softmax), or are independent (sigmoid).

    The temperature divides the logits in float64, which keeps the order of numbers of less precision.
    """
    wide = logits.double() / temperature
    return wide.softmax(dim=1) if activation == "softmax" else wide.sigmoid()


class Outputs(NamedTuple):
    """A network's outputs on the CPU.

    Args:
        logits: `[B, K]`; None without a head.
        features: float32 `[B, R]`, the input of the classification layer; None if not requested.
    """

    logits: Tensor | None
    features: Tensor | None


@dataclass(frozen=True)
class TorchNetwork:
    """A model in evaluation mode on its device.

    Args:
        resizes: whether it accepts photographs of any size.
        flip_average: whether its logits are the mean over an image and its mirror image.
    """

    model: Model
    computation: Computation
    normalise: Normaliser
    has_head: bool
    has_features: bool = True
    resizes: bool = False
    flip_average: bool = False

    @property
    def device(self) -> torch.device:
        return self.computation.device

    @property
    def num_classes(self) -> int:
        return self.model.config.num_classes

    def __call__(self, images: Tensor, *, with_features: bool = False) -> Outputs:
        return self.begin(images, with_features=with_features)()

    @torch.inference_mode()
    def begin(self, images: Tensor, *, with_features: bool = False) -> Callable[[], Outputs]:
        """Queue the computation on the device; the result waits for it."""
        inputs, features, logits = self.normalise(images), None, None
        if with_features:
            features = image_features(self.computation, self.model, inputs)
        if features is None or (self.has_head and self.flip_average):
            flips = self.flip_average
            logits = Fetched(class_logits(self.computation, self.model, inputs, flip_average=flips))
        elif self.has_head and self.model.head is not None:
            logits = Fetched(class_logits(self.computation, self.model.head, features))
        wide = None if features is None else Fetched(features.float())
        return lambda: Outputs(*(None if one is None else one.wait() for one in (logits, wide)))


_ONLY_ERRORS, _NO_ERRORS = 3, 4
_SPIN_MICROSECONDS = "100"
_SHOWN = 4


class OnnxNetwork:
    """A network run by onnxruntime, with the attributes of `TorchNetwork`.

    Raises CheckpointError if the file is not an ONNX classifier of `vitctl export`, LaunchError if "cuda" is
    asked for but missing.
    """

    def __init__(self, path: Path, device: str = "auto") -> None:
        import onnxruntime

        if not path.is_file():
            raise CheckpointError(path, "no such ONNX file", "write one with `vitctl export --to onnx`")
        if path.stat().st_size > limits.WEIGHTS:
            raise CheckpointError(
                path, f"{path.stat().st_size:,} bytes, should be at most {limits.WEIGHTS:,}"
            )
        has_cuda = _CUDA in onnxruntime.get_available_providers()
        if device == "cuda" and not has_cuda:
            raise LaunchError(
                path, "the installed onnxruntime has no CUDA", "pip install onnxruntime-gpu, or use the CPU"
            )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _ONLY_ERRORS
        options.intra_op_num_threads = torch.get_num_threads()
        # A thread that waits gives its core away soon, to the image of another request or another program.
        options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_MICROSECONDS)
        self.device = torch.device("cuda" if has_cuda and device != "cpu" else "cpu")
        providers = [_CUDA, _CPU] if self.device.type == "cuda" else [_CPU]
        # A graph may loop forever, and this thread could not be interrupted, so another one runs it.
        self._pool, self._options = ThreadPoolExecutor(thread_name_prefix="onnx"), onnxruntime.RunOptions
        self._running = set[Any]()
        try:
            made = self._pool.submit(onnxruntime.InferenceSession, path, options, providers=providers)
            self._session = made.result()
            self.digests = {"file_sha256": _file_digest(path)}
        except Exception as error:  # onnxruntime's error classes are not public
            raise CheckpointError(
                path,
                f"onnxruntime cannot open it ({one_line(str(error))})",
                "copy it again, with the files beside it, or export it again",
            ) from None
        self.path = path
        told = self._session.get_modelmeta().custom_metadata_map
        self.resizes = told.get("input") == "photographs"
        self.precision = told.get("precision", "float32")
        self._input, size = self._check_input()
        outputs = {str(output.name): list(output.shape) for output in self._session.get_outputs()}
        self.meta = self._read_meta()
        self.has_head = LOGITS in outputs and not self.meta.get("head")
        self.has_features = FEATURES in outputs
        if claimed := one_line(told.get("weights_sha256", ""))[:64]:
            self.digests["claimed_weights_sha256"] = claimed
        if not (self.has_head or self.has_features):
            if LOGITS in outputs:
                raise no_head(path)
            raise CheckpointError(path, f"outputs are {', '.join(map(one_line, outputs))}, expected {LOGITS}")
        self.image_size = size or int(self.meta["image_size"])
        self._names = self.meta.get("class_names") or ()
        self.num_classes = (outputs.get(LOGITS) or [0])[-1]
        if self._names and self.has_head and self.num_classes != len(self._names):
            raise CheckpointError(
                path,
                f"names {count_text(len(self._names), 'class', 'classes')}, but its logits are "
                f"{one_line(str(outputs[LOGITS]))}",
                "export it again",
            )

    def _check_input(self) -> tuple[str, int]:
        """Return the input's name, and S of its uint8 [batch, 3, S, S] or 0 for [batch, H, W, 3]."""
        inputs = self._session.get_inputs()
        shape = list(inputs[0].shape) if inputs else []
        axes = [axis if isinstance(axis, int) else 0 for axis in shape]  # 0: free
        size = 0 if self.resizes or len(axes) != 4 else axes[2]
        wanted = [0, 0, 0, 3] if self.resizes else [0, 3, size or -1, size]
        if len(inputs) != 1 or inputs[0].type != "tensor(uint8)" or axes != wanted:
            found = ", ".join(f"{one.name} {one.type} {list(one.shape)}" for one in inputs) or "nothing"
            expected = "[batch, height, width, 3]" if self.resizes else "[batch, 3, S, S]"
            raise CheckpointError(
                self.path,
                f"input is {one_line(found)}, expected uint8 {expected}",
                "use a file of `vitctl export --to onnx`",
            )
        return str(inputs[0].name), size

    def _read_meta(self) -> dict[str, Any]:
        """Return what a run's `weights.meta` holds, from the file's metadata."""
        stored = self._session.get_modelmeta().custom_metadata_map
        self.flip_average = stored.get("flip_average") == "true"
        told = {
            name: parse_json(
                stored.get(name, "null").encode("utf-8", "surrogatepass"),
                f"{self.path}: {name}",
                error=CheckpointError,
            )
            for name in ("preprocessing", "class_names")
        }
        meta = told["preprocessing"] if isinstance(told["preprocessing"], dict) else {}
        names = told["class_names"]
        meta |= {"class_names": names, **compared_names(names)} if names else {}
        meta |= {"loss": stored["activation"]} if "activation" in stored else {}
        try:
            Meta.model_validate(meta)
            require_meta(meta, ("image_size", "eval_method", "eval_resize", "resample"))
        except (CheckpointError, ValueError):
            raise CheckpointError(
                self.path,
                "its metadata do not say how images are pre-processed",
                "give a file of `vitctl export --to onnx`",
            ) from None
        return meta

    def begin(self, images: Tensor, *, with_features: bool = False) -> Callable[[], Outputs]:
        return partial(self, images, with_features=with_features)

    def __call__(self, images: Tensor, *, with_features: bool = False) -> Outputs:
        """Return the outputs for uint8 images `[B, 3, S, S]`; `[B, 3, H, W]` if it resizes them."""
        images = images.permute(0, 2, 3, 1) if self.resizes else images
        wanted = [LOGITS] * self.has_head + [FEATURES] * with_features
        found = self._run(wanted, {self._input: np.ascontiguousarray(images.numpy())})
        for name, value in zip(wanted, found, strict=True):
            columns = (len(self._names),) if name == LOGITS and self._names else value.shape[-1:]
            if value.shape != (len(images), *columns) or value.dtype.kind != "f":
                raise CheckpointError(
                    self.path,
                    f"{name} of {len(images)} images is {value.dtype} {list(value.shape)}, should "
                    "be numbers, a row for each image",
                    "export it again",
                )
        by_name = {name: torch.from_numpy(value) for name, value in zip(wanted, found, strict=True)}
        features = by_name.get(FEATURES)
        return Outputs(by_name.get(LOGITS), None if features is None else features.float())

    def _run(self, wanted: list[str], feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run the graph in another thread, so that a signal can interrupt the wait."""
        options = self._options()
        options.log_severity_level = _NO_ERRORS
        self._running.add(options)
        try:
            found = self._pool.submit(self._session.run, wanted, feed, options).result()
            return [np.asarray(value) for value in found]  # an ONNX sequence is not an array
        except Exception as error:
            raise CheckpointError(
                self.path, f"cannot be run ({one_line(str(error))})", "export it again"
            ) from None
        except BaseException:
            options.terminate = True
            raise
        finally:
            self._running.discard(options)

    def stop(self) -> None:
        for options in tuple(self._running):
            options.terminate = True


def _file_digest(path: Path) -> str:
    """Return the SHA-256 of an ONNX file followed by its external weight files, sorted by name."""
    import onnx
    from onnx.external_data_helper import ExternalDataInfo, _get_all_tensors, uses_external_data

    tensors = _get_all_tensors(onnx.load(path, load_external_data=False))
    beside = {ExternalDataInfo(tensor).location for tensor in tensors if uses_external_data(tensor)}
    digest = hashlib.sha256()
    for name in (path.name, *sorted(beside)):
        with (path.parent / name).open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


Network = TorchNetwork | OnnxNetwork
ONNX = ".onnx"
Ranking = list[tuple[str, float]]


class Answers(NamedTuple):
    """A classifier's answers for the images of a batch, in order.

    Args:
        names: paths, addresses, or keys in a shard.
        errors: why an image cannot be used; "" if it can.
        logits: `[B, K]`, None without a head; rows of images with an error are meaningless.
        features: float32 `[B, R]`, if requested.
        digests: hexadecimal SHA-256 of the encoded images, if features were requested.
    """

    names: Sequence[str]
    errors: Sequence[str]
    logits: Tensor | None
    features: Tensor | None
    digests: Sequence[str]


@dataclass(frozen=True)
class OpenClassifier:
    """A network with everything that its weights record about images and classes.

    Args:
        transform: the pre-processing of `vitctl evaluate`.
        class_names: in the order of the logits, see `distinct`; empty if unknown.
        activation: turns logits into probabilities.
        temperature: by which these logits are still to be divided.
        digests: of the weights; for an ONNX file, of the file and of the weights it claims to come from.
        text: one line that names the weights.
        warnings: lines for the user.
    """

    network: Network
    transform: EvalTransform
    class_names: tuple[str, ...]
    activation: Activation
    temperature: float
    digests: Mapping[str, str]
    path: str
    text: str
    warnings: tuple[str, ...] = ()

    def answers(
        self, source: Source, *, batch_size: int, workers: int, with_features: bool = False
    ) -> Iterator[Answers]:
        """Run the network on all images of a source, in the batches of `vitctl evaluate`; report bad images.

        Raises DataError if logits are NaN or infinite, or a loader process was killed.
        """
        if self.network.resizes:
            yield from self._of_photographs(source, with_features=with_features)
            return
        batches = eval_batches(
            source,
            self.transform,
            batch_size=batch_size,
            rank=0,
            num_processes=1,
            num_workers=workers if len(source) > batch_size else 0,
            unchecked=True,
            digests=with_features,
            pinned=self.network.device.type == "cuda",
        )
        for batch, outputs in self._computed(batches, with_features=with_features):
            logits, features = check_finite(outputs())
            samples = [sample for sample in batch.samples.tolist() if sample >= 0]
            reasons = {sample: reason for sample, _, reason in batch.bad}
            count = len(samples)
            yield Answers(
                [sample_key(source, sample) for sample in samples],
                [reasons.get(sample, "") for sample in samples],
                None if logits is None else logits[:count],
                None if features is None else features[:count],
                batch.digests[:count],
            )

    def _computed(
        self, batches: Iterator[Batch], *, with_features: bool
    ) -> Iterator[tuple[Batch, Callable[[], Outputs]]]:
        """Yield batches with their outputs; a GPU computes the next batch before one is yielded."""
        torchs = isinstance(self.network, TorchNetwork)
        device = self.network.device if torchs else torch.device("cpu")
        waiting = deque[tuple[Batch, Callable[[], Outputs]]]()
        with Transfer(device).ahead(batches) as coming:
            for batch in coming:
                images = given(batch).images
                waiting.append((batch, self.network.begin(images, with_features=with_features)))
                if device.type != "cuda" or len(waiting) == 2:
                    yield waiting.popleft()
        yield from waiting

    def shown(self, picture: Picture) -> Tensor:
        """Return a pre-processed image, uint8 `[3, S, S]`; its original size if the network resizes it."""
        if not self.network.resizes:
            return self.transform(picture)
        pixels = picture.region(0, 0, picture.height, picture.width)
        return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)

    def _of_photographs(self, source: Source, *, with_features: bool) -> Iterator[Answers]:
        """Yield answers one image at a time, because photographs differ in size."""
        for sample in range(len(source)):
            name = [sample_key(source, sample)]
            try:
                data = source.read(sample)
                images = self.shown(open_for(self.transform, data))[None]
            except BadSample as error:
                nothing = torch.zeros(1, max(1, len(self.class_names)))
                yield Answers(
                    name, [error.reason], nothing if self.network.has_head else None, torch.zeros(1, 0), [""]
                )
                continue
            logits, features = check_finite(self.network(images, with_features=with_features))
            digests = [hashlib.sha256(data).hexdigest()] * with_features
            yield Answers(name, [""], logits, features, digests)

    def rankings(self, logits: Tensor, top: int, threshold: float = 0.0) -> list[Ranking]:
        """Return the `top` likeliest classes and probabilities of logits `[B, K]`, from `threshold` up."""
        best, likely = most_likely(logits, top), self.probabilities(logits)
        return [
            [(self.name(k), p) for k, p in zip(classes, own[classes].tolist(), strict=True) if p >= threshold]
            for classes, own in zip(best.tolist(), likely, strict=True)
        ]

    def probabilities(self, logits: Tensor) -> Tensor:
        return probabilities(logits, self.activation, self.temperature)

    def name(self, number: int) -> str:
        """Return the name of a class, or its number if the weights have no names."""
        return self.class_names[number] if self.class_names else str(number)


def check_finite(outputs: Outputs) -> Outputs:
    """Return the outputs. Raises DataError if they hold NaN or infinities."""
    if any(tensor is not None and not tensor.isfinite().all() for tensor in outputs):
        raise DataError(NOT_FINITE, fix="use other weights")
    return outputs


def open_classifier(
    recipe: Evaluate,
    *,
    needs_head: bool = True,
    note: Callable[[str], None] = lambda _: None,
    images: int = 0,
) -> OpenClassifier:
    """Open the classifier that [weights] means, with the pre-processing of `vitctl evaluate`.

    Args:
        needs_head: False if only features are wanted.
        note: called with a line that names the run if weights.source is "newest".
        images: that it will see, if known: many are worth compiling for.

    Raises VitctlError if the weights are missing or not a classifier's, or a value or the precision is
    unsupported.
    """
    if recipe.weights.source == "newest":
        note(newest_run(recipe.job)[1])
    is_onnx = recipe.weights.source.endswith(ONNX)
    opened = _from_onnx(recipe) if is_onnx else _from_weights(recipe, needs_head, images)
    if needs_head and not opened.network.has_head:
        raise no_head(opened.path)
    return opened


def _from_weights(recipe: Evaluate, needs_head: bool, images: int) -> OpenClassifier:
    found = scored_weights(recipe)
    if needs_head and not found.weights.has_head:
        raise no_head(found.path)
    machine, meta = recipe.machine, found.weights.meta
    computation = alone(precision=machine.precision, device=machine.device)
    transform = _transform(recipe, meta)
    model, _ = loaded_model(found, transform.image_size, computation.dtype)
    model.to(device=computation.device, dtype=computation.dtype).eval()
    choose_attention(model, machine, computation, images=images)
    pack(model, computation.product_dtype)
    network = TorchNetwork(
        model,
        computation,
        computation.normaliser(meta["mean"], meta["std"]),
        found.weights.has_head,
        flip_average=recipe.evaluation.flip_average,
    )
    return _opened(
        network,
        transform,
        meta,
        {"weights_sha256": found.weights.digest},
        found.path,
        "; ".join(
            filter(None, (found.chosen.text, computation.precision, "flip average" * network.flip_average))
        ),
        [*unseen_pixels(model.config), *found.warnings],
    )


def _from_onnx(recipe: Evaluate) -> OpenClassifier:
    weights, data, machine = recipe.weights, recipe.data, recipe.machine
    if weights != WeightsSource(source=weights.source):
        raise CheckpointError(
            weights.source,
            "an ONNX file holds one set of weights",
            "leave out --weights, --model and weights.*",
        )
    refuse(
        RecipeError,
        (
            recipe.evaluation.flip_average,
            "evaluation.flip_average",
            f"{weights.source} averages or not as it was exported",
            "leave it out, or export again with --flip-average",
        ),
        (
            machine.attention != "auto",
            f"machine.attention = '{machine.attention}'",
            f"{weights.source} has its own",
            "leave it out",
        ),
    )
    network = OnnxNetwork(Path(locate(weights.source, fetch)), machine.device)
    refuse(
        RecipeError,
        (
            data.image_size not in (0, network.image_size),
            f"data.image_size = {data.image_size}",
            f"{weights.source} takes images of {network.image_size} pixels",
            "leave it out",
        ),
        (
            machine.precision not in ("auto", "float32"),
            f"machine.precision = '{machine.precision}'",
            f"{weights.source} has the precision of its export",
            "leave it out",
        ),
    )
    told = [f"{name} {digest[:12]}" for name, digest in network.digests.items()]
    guessed = network.meta.get("assumed")
    assumed = f"assumed when the file was exported: {', '.join(guessed)}" if guessed else ""
    sized = recipe.model_copy(update={"data": data.model_copy(update={"image_size": network.image_size})})
    return _opened(
        network,
        _transform(sized, network.meta),
        network.meta,
        network.digests,
        weights.source,
        "; ".join(filter(None, (*told, "flip average" * network.flip_average))),
        remarks(network.meta, assumed),
    )


def _opened(
    network: Network,
    transform: EvalTransform,
    meta: dict[str, Any],
    digests: Mapping[str, str],
    path: str,
    text: str,
    warnings: list[str],
) -> OpenClassifier:
    names = distinct(meta.get("class_names") or ())
    if network.has_head and not names:
        warnings = [*warnings, "these weights do not name their classes; the classes are numbered from 0"]
    if shared := [repr(name) for name in names if name not in meta["class_names"]]:
        called = ", ".join(shared[:_SHOWN]) + ", ..." * (len(shared) > _SHOWN)
        text = f"several classes have one name: here they are {called}, and the bare name is of no class"
        warnings = [*warnings, text]
    # An exported graph already divides its logits by the temperature.
    temperature = (meta.get("temperature") or 1.0) if isinstance(network, TorchNetwork) else 1.0
    told = f"temperature {temperature:.4g}" if temperature != 1 else ""
    about = "; ".join(filter(None, (text, told, str(transform))))
    return OpenClassifier(
        network,
        transform,
        names,
        activation_of(meta, network.num_classes),
        temperature,
        digests,
        path,
        about,
        tuple(warnings),
    )


def _transform(recipe: Evaluate, meta: dict[str, Any]) -> EvalTransform:
    """Return the pre-processing; photographs are rotated upright unless weights or recipe say otherwise."""
    told = meta if meta.get("exif_orientation") is not None else {**meta, "exif_orientation": True}
    return stored_eval_transform(recipe, told)
