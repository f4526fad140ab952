"""State and steps that jobs share: runtime, verified shards, one pass over a split, one training, its provenance."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.loader.batches import eval_batches
from vitctl.data.source.verification import Verification, Verified
from vitctl.data.source.views import Source, source_text
from vitctl.engine.checkpoint.files import SavedCheckpoint, read_state
from vitctl.engine.computation import computed_training, exact, kernels_used
from vitctl.engine.distributed.agreement import changed_on_purpose
from vitctl.engine.distributed.runtime import Runtime, num_workers, start
from vitctl.engine.evaluation import Score, evaluate_model, representations
from vitctl.engine.feature_cache import cached_features
from vitctl.engine.journal import LOG, Journal, Report, json_digest
from vitctl.engine.metrics import baselines
from vitctl.engine.preemption import StopFlag
from vitctl.engine.run_files import tensors_file
from vitctl.engine.tracking import tracking
from vitctl.engine.trainer import Images, RunContext, Trainer
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import eval_transform, mixing, train_transform, training_order
from vitctl.jobs.inputs.weights import FoundWeights
from vitctl.jobs.record.result import RunResult, choose_weights, data_used, logged_probes, logged_scores
from vitctl.models.blocks import compile_errors
from vitctl.models.build import Model
from vitctl.models.kernels import set_attention, set_linear
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.images import TrainImages
from vitctl.recipe.schema import Finetune, Log, Machine, Pretrain, TrainRecipe, Vtab
from vitctl.recipe.sections import Schedule, StartWeights
from vitctl.recipe.write import deciding_values

_PATIENCE = 5.0  # seconds that a finished training waits for the last shards
WHOLE = {"data_verified": "whole"}  # of results whose every image was verified by `check_whole`


def verify(runtime: Runtime, run_dir: Path, *sources: Source | None) -> Verification:
    """Start to verify the shards of some sources against their digests; the processes of the run share the
    work.

    Args:
        runtime, run_dir: of the job.
        sources: those that are scored first; None is ignored.
    """
    stored = [source for source in sources if source is not None]
    return Verification(stored, run_dir, part=runtime.rank, num_parts=runtime.num_processes)


def check_whole(begun: Verification, runtime: Runtime, *sources: Source) -> None:
    """Refuse a score unless every byte behind it is verified; all processes call this after the images were
    decoded.

    Args:
        begun: to which the sources were added before their images were decoded.
        runtime: of the job.
        sources: that are scored; without any, all of `begun`.

    Raises:
        DataError: a shard does not match its index, changed while it was read, or could not be verified.
    """
    begun.wait(*sources)
    runtime.wait()
    begun.complete(*sources)
    problem = not_whole(begun.found(*sources))
    if runtime.sum([float(bool(problem))])[0]:
        raise DataError(problem or "another process could not verify the shards behind this score")


def not_whole(found: Verified) -> str:
    """Return why images cannot be scored, "" where every byte of their shards was verified."""
    if found.damaged:
        return (
            f"{_first(found.damaged)}; a score must be of exactly the images of its digest: copy the file "
            f"again, or make the shards again; `vitctl data check` finds all problems"
        )
    if found.state != "whole":
        return (
            f"{1 - found.share:.1%} of the bytes behind this score could not be verified against their "
            f"digests; check permissions, set data.cache_gib above 0 for remote shards, then run again"
        )
    return ""


def verified(begun: Verification, runtime: Runtime, journal: Journal, train_on: Source) -> dict[str, Any]:
    """For the provenance of a training: `data_verified`, a `DataVerified`, with `data_damaged` where shards
    are or were damaged.

    Args:
        begun: result of `verify`.
        runtime, journal: of the job.
        train_on: the training images; those that are scored are whole, see `check_whole`.
    """
    begun.finish(_PATIENCE)
    runtime.wait()
    found = begun.found(train_on)
    if damaged := [*found.damaged, *found.damaged_before]:
        text = f"{_first(damaged)}; the result records data_verified = damaged"
        journal.write("warning", step=0, text=text)
        return {"data_verified": "damaged", "data_damaged": damaged}
    if found.state != "whole":
        text = f"{found.share:.1%} of the bytes of the training shards were verified against their digests; the result records it"
        journal.write("data", step=0, text=text)
    return {"data_verified": found.state}


def _first(problems: Sequence[str]) -> str:
    return f"{problems[0]} (and {len(problems) - 1} more)" if len(problems) > 1 else problems[0]


FORMAT = "vitctl-features/2"  # 1 could be of images that were changed on the way from a server


T = TypeVar("T")


@dataclass(frozen=True)
class ImagePass:
    """How images are shown to a network. `mean` and `std` are of the weights; `batch_size` is of one process.

    `whole_batches`: no batch depends on the number of processes, as `eval_batches` says. `shards`: every
    shard that is decoded is verified by it.
    """

    runtime: Runtime
    journal: Journal
    transform: EvalTransform
    mean: tuple[float, ...]
    std: tuple[float, ...]
    batch_size: int
    workers: int
    stop: StopFlag
    shards: Verification
    whole_batches: bool = False

    def __call__(self, model: Model, source: Source) -> Tensor:
        """The input of the classification layer, [N, R] float32 on the CPU, in the split's order, the same on
        every process.
        """
        return self.through(representations, "features", model, source)

    def through(self, function: Callable[..., T], what: str, model: Model, source: Source, **more: Any) -> T:
        """Apply a function of `vitctl.engine.evaluation` to a split; `what` names it on the screen.

        Raises:
            DataError: not every byte of its shards could be verified.
        """
        runtime = self.runtime
        self.shards.add(source)
        batches = eval_batches(
            source,
            self.transform,
            batch_size=self.batch_size,
            rank=runtime.rank,
            num_processes=runtime.num_processes,
            num_workers=self.workers,
            whole_batches=self.whole_batches,
            pinned=runtime.device.type == "cuda",
        )
        batches = self.journal.watch(batches, what, len(source), runtime.num_processes)
        normalise = runtime.normaliser(self.mean, self.std)
        found = function(
            runtime, model, batches, num_images=len(source), normalise=normalise, stop=self.stop, **more
        )
        check_whole(self.shards, runtime, source)
        return found

    def key(self, weights_sha256: str, config: Any, source: Source) -> dict[str, Any]:
        """Everything that the representations of a split depend on: the key of the cache."""
        return {
            "format": FORMAT,
            "weights_sha256": weights_sha256,
            "config": repr(config),
            "data_sha256": source.digest,
            "transform": asdict(self.transform),
            "mean": list(self.mean),
            "std": list(self.std),
            "precision": self.runtime.precision,
            "device": self.runtime.device.type,
            **kernels_used(),
        }


def cached_pass(
    one: ImagePass,
    model: Model,
    config: Any,
    folder: Path,
    *,
    limit_bytes: int,
    note: Callable[[str], None] = lambda _: None,
) -> Callable[[Source], tuple[Tensor | None, bool]]:
    """A feature pass with a cache folder: see `cached_features`."""
    digest = weights_digest(model.state_dict())

    def features(source: Source) -> tuple[Tensor | None, bool]:
        return cached_features(
            one.runtime,
            folder,
            one.key(digest, config, source),
            lambda: one(model, source),
            num_images=len(source),
            limit_bytes=limit_bytes,
            note=note,
        )

    return features


def shown(transform: EvalTransform) -> dict[str, Any]:
    """The evaluation pre-processing, with `eval_resize` resolved."""
    return {
        "image_size": transform.image_size,
        "eval_method": transform.method,
        "eval_resize": transform.resize or transform.image_size,
        "resample": transform.resample,
        "exif_orientation": transform.exif_orientation,
        **({"truncated": transform.truncated} if transform.truncated != "refuse" else {}),
    }


def _network_digest(found: FoundWeights) -> str:
    """Digest of what makes two networks with the same tensors different: the configuration, and the
    normalisation of images.
    """
    meta = found.weights.meta
    described = [repr(found.weights.config), list(meta["mean"]), list(meta["std"])]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def weights_used(found: FoundWeights, section: StartWeights) -> dict[str, Any]:
    """Which pre-trained weights a result starts from."""
    return {
        "from": found.path,
        "from_sha256": found.weights.digest,
        **found.chosen.used("from"),
        "assumed": dict(found.assumed),
        "initialise": section.initialise,
    }


def weights_scored(found: FoundWeights) -> dict[str, Any]:
    """Which weights a result scores."""
    return {
        "weights": found.path,
        "weights_sha256": found.weights.digest,
        "network_sha256": _network_digest(found),
        **found.chosen.used("weights"),
        "assumed": dict(found.assumed),
    }


def trained(
    recipe: TrainRecipe,
    data: TrainImages,
    runtime: Runtime,
    train_on: Source,
    score_on: Source | None,
    meta: dict[str, Any],
) -> dict[str, Any]:
    """Provenance of the numbers of a training run, except its weights.

    Args:
        recipe, runtime: of the run.
        data: [data] with resolved values.
        train_on, score_on: images.
        meta: what is stored with the weights.
    """
    machine = recipe.machine
    own = {
        **computed_training(recipe, runtime),
        "compiled": machine.compile,
        "micro_batch": machine.micro_batch,
        "train_split": data.train_split,
        "train_sha256": train_on.digest,
        "train_source": source_text(train_on),
        "num_train": len(train_on),
    }
    if score_on is None:
        return own
    used = {**data_used(score_on, data.eval_split), "labels": "original", **shown(eval_transform(data))}
    return own | used | {"mean": list(meta["mean"]), "std": list(meta["std"])}


def training_result(
    recipe: TrainRecipe,
    runtime: Runtime,
    run_dir: Path,
    score: Score | None,
    used: dict[str, Any],
    scored: Source | None,
) -> RunResult:
    """The result of a finished training run: of the checkpoint that represents it, with its step and digest.

    Args:
        recipe, runtime, run_dir: of the run.
        score: of that checkpoint; None without images to score.
        used: its provenance, except the weights.
        scored: the images that were scored; None: there are none.

    Paper: Section 4.3 (early stopping)
    """
    if not runtime.is_main:
        return RunResult(recipe.job, "done", provenance=used)
    path, chosen = choose_weights(run_dir)
    metrics: dict[str, Any] = dict(score.numbers) if score else {}
    if scored is not None and score is not None:
        metrics |= baselines(scored.labels(), len(scored.class_names))
    if chosen.step is not None:
        metrics |= logged_probes(run_dir, chosen.step)
    if recipe.evaluation.select_best:
        step, last = max(logged_scores(run_dir).items())
        metrics["last"] = {"step": step, **last.numbers}
    state = read_state(path.parent)
    weights = {
        **chosen.used(),
        "weights_sha256": weights_digest(SavedCheckpoint(path.parent, state).tensors(path.stem)),
        "skipped_updates": state.get("num_skipped", 0),
        **changed_on_purpose(run_dir),
    }
    files = {file.stem: str(file) for file in sorted(path.parent.glob(tensors_file("*")))}
    return RunResult(recipe.job, "done", metrics=metrics, provenance=used | weights, files=files)


M = TypeVar("M", bound=nn.Module)
Act = Callable[[Trainer], Score | None]  # done with a prepared training instead of `Trainer.fit`
Probe = Callable[[Model], dict[int, list[float]]]


def start_runtime(machine: Machine, run_dir: Path, log: Log | None = None) -> Runtime:
    """Join the processes that [machine] asks for."""
    set_attention("fused")
    set_linear("torch")
    return start(
        precision=machine.precision,
        device=machine.device,
        processes=machine.processes,
        trackers=log.trackers if log else (),
        folder=run_dir,
    )


def open_journal(runtime: Runtime, run_dir: Path, report: Report) -> Journal:
    """Open log.jsonl on the main process."""
    return Journal(run_dir / LOG if runtime.is_main else None, report)


def images_of(
    data: TrainImages, train_on: Source, score_on: Source | None, seed: int, schedule: Schedule
) -> Images:
    """Return the images of [data] with augmentation and pre-processing, in the order of the seed and [schedule]."""
    order = None if data.synthetic else training_order(data, train_on, seed, schedule)
    return Images(train_on, train_transform(data), score_on, eval_transform(data), order, mixing(data))


def train(
    recipe: Pretrain | Finetune | Vtab,
    run: RunContext,
    model: Model,
    images: Images,
    meta: dict[str, Any],
    *,
    objective: Callable[..., Tensor] | None = None,
    probe: Probe | None = None,
    start_weights_sha256: str = "",
) -> Score | None:
    """Train `model` in run.folder; see `Trainer` for the arguments.

    Returns:
        the score after the last step, or with select_best that of the best checkpoint; None without images to
        score, and possibly on processes other than the main one.
    """
    runtime, lanes = run.runtime, recipe.schedule.lanes > 0
    score = None
    if images.scored is not None:
        workers, size = num_workers(recipe.machine, runtime), recipe.evaluation.batch_size
        colours = tuple(meta["mean"]), tuple(meta["std"])
        shown = ImagePass(
            runtime, run.journal, images.pre_processing, *colours, size, workers, run.stop, run.shards, lanes
        )
        score = partial(shown.through, evaluate_model, "scoring", source=images.scored)
    with (
        exact(runtime, recipe.schedule.threads) if lanes else nullcontext(),
        compile_errors() if recipe.machine.compile else nullcontext(),
    ):
        trainer = Trainer(
            recipe,
            run,
            model,
            images,
            meta,
            objective=objective,
            score=score,
            probe=probe,
            start_weights_sha256=start_weights_sha256,
        )
        with tracking(runtime, recipe, run.folder):
            last = (run.act or Trainer.fit)(trainer)
    if not recipe.evaluation.select_best:
        return last
    if not runtime.is_main:
        return None
    _, chosen = choose_weights(run.folder, "best", by_size=True)
    return logged_scores(run.folder)[chosen.step or 0]


def digest_of(recipe: TrainRecipe) -> str:
    """Return the digest of the values that decide the result, for `RunContext`."""
    return json_digest(deciding_values(recipe))


def on_device(model: M, runtime: Runtime) -> M:
    """Move the model to the runtime's device, in the runtime's parameter type."""
    return model.to(device=runtime.device, dtype=runtime.dtype)
