"""Building blocks of jobs: runtime, verified shards, one pass over a split, one training, its provenance."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor, nn

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.loader.batches import eval_batches
from vitctl.data.source.verification import Verification, Verified
from vitctl.data.source.views import Source, source_text
from vitctl.engine.agreement import changed_on_purpose
from vitctl.engine.assemble import Images, Options, RunContext, assembled
from vitctl.engine.checkpoint import read_checkpoint, read_state
from vitctl.engine.computation import computed_training, exact
from vitctl.engine.evaluation import Score, cached_features, evaluate_model, representations
from vitctl.engine.journal import (
    LOG,
    Journal,
    Record,
    Report,
    json_digest,
    read_records,
    tensor_files,
)
from vitctl.engine.metrics import baselines, wilson
from vitctl.engine.mixing import Mixing
from vitctl.engine.optimizer import averaged
from vitctl.engine.preemption import StopFlag
from vitctl.engine.runtime import Runtime, num_workers, start, tracking
from vitctl.engine.trainer import Trainer
from vitctl.errors import DataError
from vitctl.jobs.inputs.data import corrected, eval_transform, train_transform, training_order
from vitctl.jobs.inputs.weights import FoundWeights
from vitctl.jobs.record.result import (
    RunResult,
    choose_weights,
    data_used,
    logged_scores,
    logged_test,
)
from vitctl.jobs.resources import busiest, expected
from vitctl.models.blocks import compile_errors
from vitctl.models.build import Model
from vitctl.models.flops import known_device
from vitctl.models.kernels import attention_of, is_compiled
from vitctl.models.roofline import GPUS, Estimate
from vitctl.models.variants import Config
from vitctl.models.weights.containers import read_later
from vitctl.models.weights.weights_file import weights_digest
from vitctl.recipe.images import TrainImages
from vitctl.recipe.neutral_keys import deciding_values
from vitctl.recipe.schema import Evaluate, Finetune, FrozenRecipe, Log, Machine, Pretrain, TrainRecipe, Vtab
from vitctl.recipe.sections import Schedule, StartWeights
from vitctl.system.process import keep_freed_memory

_PATIENCE = 5.0  # seconds that a finished training waits for the last shards to be verified
FORMAT = "vitctl-features/2"  # version 1 could hold features of images altered in transit
WHOLE = {"data_verified": "whole"}  # for results whose images all passed `check_whole`

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Act = Callable[[Trainer], Score | None]  # called with a prepared training instead of `Trainer.fit`


def check_whole(begun: Verification, runtime: Runtime, *sources: Source) -> None:
    """Refuse a score unless every byte behind it is verified. All processes call this after decoding.

    Args:
        begun: the sources were added to it before their images were decoded.
        sources: that are scored; default: all of `begun`.

    Raises DataError if a shard is damaged, changed while it was read, or could not be verified.
    """
    begun.wait(*sources)
    runtime.wait()
    begun.complete(*sources)
    problem = not_whole(begun.found(*sources))
    if runtime.sum([float(bool(problem))])[0]:
        raise DataError(problem or "another process could not verify the shards behind this score")


def not_whole(found: Verified) -> str:
    """Return why images cannot be scored; "" if every byte of their shards was verified."""
    if found.damaged:
        from vitctl.data.datasets.converted import RECORD

        made = Path(found.damaged[0].partition(": ")[0]).parent.parent
        if (made / RECORD).is_file():
            return f"{_first(found.damaged)}; delete {made}: the same command makes it again from your images"
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


def verified(run: RunContext, train_on: Source) -> dict[str, Any]:
    """Return `data_verified` of a training, and `data_damaged` if shards are or were damaged.

    Scored shards are verified by `check_whole` instead.
    """
    run.shards.finish(_PATIENCE)
    run.runtime.wait()
    found = run.shards.found(train_on)
    if damaged := [*found.damaged, *found.damaged_before]:
        text = f"{_first(damaged)}; the result records data_verified = damaged"
        run.journal.write("warning", step=0, text=text)
        return {"data_verified": "damaged", "data_damaged": damaged}
    if found.state != "whole":
        text = (
            f"{found.share:.1%} of the bytes of the training shards were verified against their digests; "
            "the result records it"
        )
        run.journal.write("data", step=0, text=text)
    return {"data_verified": found.state}


def _first(problems: Sequence[str]) -> str:
    return f"{problems[0]} (and {len(problems) - 1} more)" if len(problems) > 1 else problems[0]


@dataclass(frozen=True)
class ImagePass:
    """Passes over splits with a network's pre-processing. Every decoded shard is verified.

    Args:
        recipe: evaluation.batch_size and machine.workers, per process.
        colours: `mean` and `std` of the weights.
        whole_batches: batches do not depend on the number of processes, see `eval_batches`.
    """

    run: RunContext
    recipe: TrainRecipe | FrozenRecipe | Evaluate
    transform: EvalTransform
    colours: Mapping[str, Any]
    whole_batches: bool = False

    def __call__(self, model: Model, source: Source, *, everywhere: bool = False) -> Tensor:
        """Return `representations`, [N, R] float32 on the CPU, in the split's order."""
        return self.through(representations, "features", model, source, everywhere=everywhere)

    def through(
        self,
        function: Callable[..., T],
        what: str,
        model: Model,
        source: Source,
        *,
        verifies: bool = True,
        **more: Any,
    ) -> T:
        """Apply a function of `vitctl.engine.evaluation` to a split; `what` names it on the screen.

        Without `verifies`, for training images, unverified bytes are not a DataError: the result records
        them.
        """
        run, runtime = self.run, self.run.runtime
        if verifies:
            run.shards.add(source)
        batches = eval_batches(
            source,
            self.transform,
            batch_size=self.recipe.evaluation.batch_size,
            rank=runtime.rank,
            num_processes=runtime.num_processes,
            num_workers=num_workers(self.recipe.machine, runtime.device, runtime.num_processes),
            whole_batches=self.whole_batches,
            pinned=runtime.device.type == "cuda",
        )
        batches = run.journal.watch(batches, what, len(source), runtime.num_processes)
        normalise = runtime.normaliser(tuple(self.colours["mean"]), tuple(self.colours["std"]))
        found = function(
            runtime, model, batches, num_images=len(source), normalise=normalise, stop=run.stop, **more
        )
        if verifies:
            check_whole(run.shards, runtime, source)
        return found

    def cached(
        self, model: Model, digest: str, source: Source, folder: Path, limit_bytes: int
    ) -> tuple[Tensor | None, bool]:
        """Return the representations, cached by the weights' `digest`, see `cached_features`."""
        runtime = self.run.runtime
        key = {  # everything that the features depend on
            "format": FORMAT,
            "weights_sha256": digest,
            "config": repr(model.config),
            "data_sha256": source.digest,
            "transform": asdict(self.transform),
            "mean": list(self.colours["mean"]),
            "std": list(self.colours["std"]),
            "precision": runtime.precision,
            "device": runtime.device.type,
            "attention": attention_of(model),
            "linear": "torch",  # kept so that keys of earlier releases match
            **({"compiled": True} if is_compiled(model) else {}),
        }
        return cached_features(
            runtime,
            folder,
            key,
            lambda: self(model, source),
            num_images=len(source),
            limit_bytes=limit_bytes,
            note=lambda text: self.run.journal.write("warning", step=0, text=text),
        )


def shown(transform: EvalTransform) -> dict[str, Any]:
    """Return the evaluation pre-processing, with `eval_resize` resolved."""
    return {
        "image_size": transform.image_size,
        "eval_method": transform.method,
        "eval_resize": transform.resize or transform.image_size,
        "resample": transform.resample,
        "exif_orientation": transform.exif_orientation,
        **({"truncated": transform.truncated} if transform.truncated != "refuse" else {}),
    }


def stated(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights' licence and its address, if known: everything made from them keeps both."""
    return {key: meta[key] for key in ("licence", "licence_link") if meta.get(key)}


def weights_used(found: FoundWeights, section: StartWeights) -> dict[str, Any]:
    """Return the provenance of the weights that a result starts from."""
    return {
        "from": found.path,
        "from_sha256": found.weights.digest,
        **found.chosen.used("from"),
        **stated(found.weights.meta),
        "assumed": dict(found.assumed),
        "initialise": section.initialise,
    }


def weights_scored(found: FoundWeights) -> dict[str, Any]:
    """Return the provenance of the weights that a result scores.

    `network_sha256` is of what tensors alone do not tell of a network: configuration and normalisation.
    """
    meta = found.weights.meta
    described = [repr(found.weights.config), list(meta["mean"]), list(meta["std"])]
    return {
        "weights": found.path,
        "weights_sha256": found.weights.digest,
        "network_sha256": hashlib.sha256(json.dumps(described).encode()).hexdigest(),
        **found.chosen.used("weights"),
        **stated(found.weights.meta),
        "assumed": dict(found.assumed),
    }


def trained(
    recipe: TrainRecipe,
    data: TrainImages,
    run: RunContext,
    config: Config,
    images: Images,
) -> dict[str, Any]:
    """Return a training's provenance, except its weights; `data` has resolved values."""
    machine = recipe.machine
    used = {
        **computed_training(recipe, run.runtime, config),
        "compiled": machine.compile,
        "micro_batch": machine.micro_batch,
        "train_split": data.train_split,
        "train_sha256": images.train.digest,
        "train_source": source_text(images.train),
        "num_train": len(images.train),
        **({"group_by": data.group_by} if data.group_by else {}),
    }
    if isinstance(recipe, Pretrain | Finetune) and (uneven := corrected(recipe, images.train)):
        used |= uneven.used
    if images.tested is not None:
        used["test"] = data_used(images.tested, data.test_split)
    if images.scored is None:
        return used
    used |= {**data_used(images.scored, data.eval_split), "labels": "original"}
    colours = {name: list(images.colours[name]) for name in ("mean", "std")}
    return used | shown(images.pre_processing) | colours


def training_result(
    recipe: TrainRecipe, run: RunContext, score: Score | None, used: dict[str, Any], scored: Source | None
) -> RunResult:
    """Return a finished training's result, for the checkpoint that represents it.

    Args:
        score: of that checkpoint; None without images to score.
        used: its provenance, except the weights.
        scored: the images that were scored, if any.

    Paper: Section 4.3 (early stopping)
    """
    if not run.runtime.is_main:
        return RunResult(recipe.job, "done", provenance=used)
    run_dir = run.folder
    path, chosen = choose_weights(run_dir)
    metrics: dict[str, Any] = dict(score.numbers) if score else {}
    if scored is not None and score is not None:
        metrics |= baselines(scored.labels(), len(scored.class_names))
        metrics["accuracy_interval"] = wilson(score.correct, score.total)
    metrics |= {
        f"{record['shots']}-shot": record["accuracy"]
        for record in read_records(run_dir / LOG)
        if (record.get("kind"), record.get("step")) == ("fewshot", chosen.step)
        and {"shots", "accuracy"} <= record.keys()
    }
    if tested := used.get("test"):
        test = logged_test(run_dir, chosen.step, tested["data_sha256"])
        assert test is not None
        interval = wilson(test.correct, test.total)
        metrics["test"] = {**test.numbers, "accuracy_interval": interval}
    if recipe.evaluation.select_best:
        step, last = max(logged_scores(run_dir).items())
        metrics["last"] = {"step": step, **last.numbers}
        stops = [r for r in read_records(run_dir / LOG) if r.get("kind") == "early_stop"]
        if stops and stops[-1]["step"] == step:  # of an earlier end that a longer patience undid: not
            metrics["stopped_early"] = {name: stops[-1][name] for name in ("step", "total_steps", "best")}
    state = read_state(path.parent)
    weights = {
        **chosen.used(),
        "weights_sha256": weights_digest(read_later(path)),
        "skipped_updates": state.get("num_skipped", 0),
        **changed_on_purpose(run_dir),
    }
    files = {name: str(file) for name, file in sorted(tensor_files(path.parent).items())}
    return RunResult(recipe.job, "done", metrics=metrics, provenance=used | weights, files=files)


def start_runtime(machine: Machine, run_dir: Path, log: Log | None = None) -> Runtime:
    """Join the processes that [machine] asks for."""
    return start(
        precision=machine.precision,
        device=machine.device,
        processes=machine.processes,
        trackers=log.trackers if log else (),
        folder=run_dir,
    )


def start_run(
    recipe: TrainRecipe | FrozenRecipe | Evaluate,
    run_dir: Path,
    report: Report,
    stop: StopFlag | None,
    *sources: Source | None,
    act: Act | None = None,
) -> RunContext:
    """Join the processes of a job, open its log, and start to verify shards, which the processes share.

    Scored sources come first; None is ignored.
    """
    runtime = start_runtime(recipe.machine, run_dir, getattr(recipe, "log", None))
    if runtime.device.type == "cpu" and isinstance(recipe, FrozenRecipe | Evaluate):
        keep_freed_memory()  # not in training: with recomputed blocks it would hold 1.4 times the memory
    stored = [source for source in sources if source is not None]
    shards = Verification(stored, run_dir, part=runtime.rank, num_parts=runtime.num_processes)
    journal = Journal(run_dir / LOG if runtime.is_main else None, report)
    digest = json_digest(deciding_values(recipe))
    return RunContext(runtime, run_dir, journal, stop or StopFlag(), shards, act, digest)


def within(run: RunContext, folder: Path, task: str) -> RunContext:
    """Return the context of one of several trainings of a run; its records carry the name `task`."""

    def report(record: Record) -> None:
        run.journal.report({**record, "task": task})

    return replace(run, folder=folder, journal=Journal(folder / LOG if run.runtime.is_main else None, report))


def images_of(
    data: TrainImages,
    train_on: Source,
    score_on: Source | None,
    seed: int,
    schedule: Schedule,
    colours: Mapping[str, Any],
    tested: Source | None = None,
) -> Images:
    """Return the images of [data], augmented and pre-processed, in the order of the seed and [schedule].

    `colours` are `mean` and `std` of the weights; a letterbox is filled with the mean.
    """
    order = None if data.synthetic else training_order(data, train_on, seed, schedule)
    off, mean = data.mixup_off_epoch, colours["mean"]
    mixing = Mixing(
        data.mixup_alpha,
        data.cutmix_alpha,
        data.random_erasing,
        data.erasing_mode,
        data.erasing_count,
        data.mixup_probability,
        data.cutmix_share,
        until=int(len(train_on) * off // schedule.batch_size) if off else None,
    )
    transforms = train_transform(data, mean), eval_transform(data, mean)
    return Images(train_on, transforms[0], score_on, transforms[1], colours, order, mixing, tested)


def train(
    recipe: Pretrain | Finetune | Vtab,
    run: RunContext,
    model: Model,
    images: Images,
    stored: Mapping[str, Any] = MappingProxyType({}),
    **options: Unpack[Options],
) -> Score | None:
    """Train `model` in run.folder; see `assembled` for the arguments. Weights files record `stored`.

    Returns:
        the score after the last step, or with select_best that of the best checkpoint; None without images to
            score, and possibly on processes other than the main one.
    """
    runtime, lanes = run.runtime, recipe.schedule.lanes > 0
    is_exact = lanes or (recipe.machine.deterministic and runtime.device.type == "cuda")
    meta = images.meta(recipe.loss.name) | stated(images.colours) | dict(stored)
    look = ImagePass(run, recipe, images.pre_processing, images.colours, whole_batches=lanes)
    loss = recipe.loss.name if recipe.evaluation.metric == "loss" else ""
    scored_on = partial(partial, look.through, evaluate_model, "scoring", loss=loss)
    score = scored_on(source=images.scored) if images.scored else None
    test = scored_on(source=images.tested) if images.tested else None
    if runtime.device.type == "cuda" and not is_exact:
        text = "machine.deterministic = false: faster, and a resume or a repetition has other last digits"
        run.journal.say("warning", text)
    with (
        exact(runtime, recipe.schedule.threads, lanes=lanes) if is_exact else nullcontext(),
        compile_errors(run.stop.check) if recipe.machine.compile else nullcontext(),
    ):
        trainer = assembled(recipe, run, model, images, meta, score, test=test, **options)
        if runtime.device.type == "cuda" and isinstance(recipe, Pretrain | Finetune):
            _expect(recipe, trainer, torch.cuda.get_device_name(runtime.device))
        with tracking(runtime, recipe, run.folder):
            last = (run.act or Trainer.fit)(trainer)
            if images.tested is not None and run.act is None:
                _test(trainer, run, images.tested)
    if not recipe.evaluation.select_best:
        return last
    if not runtime.is_main:
        return None
    _, chosen = choose_weights(run.folder, "best", by_size=True)
    return logged_scores(run.folder)[chosen.step or 0]


def _expect(recipe: Pretrain | Finetune, trainer: Trainer, device_name: str) -> None:
    """Log the rate that the plan expects of this GPU, with which `runs show` compares the run's."""
    device, micro_batch = known_device(device_name), trainer.facts["micro_batch"]
    if device not in GPUS:
        return
    config, most = trainer.state.network.config, busiest(recipe, micro_batch)
    found = expected(config, recipe, None, device, micro_batch or most[0], most)
    if isinstance(found, Estimate):
        rate = round(found.images_per_second * recipe.machine.processes, 1)
        trainer.log.journal.write("expected", step=0, mfu=round(found.mfu, 4), images_per_second=rate)


def _test(trainer: Trainer, run: RunContext, tested: Source) -> None:
    """Score the weights that represent the run on images that chose nothing, unless its log has it."""
    runtime = run.runtime
    runtime.wait()
    path, chosen = choose_weights(run.folder, by_size=True)
    is_known = runtime.is_main and logged_test(run.folder, chosen.step, tested.digest) is not None
    if trainer.test is None or runtime.sum([float(is_known)])[0]:
        return
    trainer.state.load(read_checkpoint(path.parent))
    with averaged(trainer.state.network, trainer.state.average if chosen.averaged else None):
        score = replace(trainer.test(trainer.state.network), metric=trainer.recipe.evaluation.metric)
    run.journal.write("test", step=chosen.step, data_sha256=tested.digest, **score.numbers)


def on_device(model: M, runtime: Runtime) -> M:
    """Move the model to the runtime's device and parameter type."""
    return model.to(device=runtime.device, dtype=runtime.dtype)
