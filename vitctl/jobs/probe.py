"""Few-shot accuracy of a network during training: the paper's cheap measure of a representation."""

from collections.abc import Callable

import torch

from vitctl.data.images.transforms import EvalTransform
from vitctl.data.source.verification import Verification
from vitctl.engine.distributed.runtime import Runtime, num_workers
from vitctl.engine.evaluation import stop_together
from vitctl.engine.journal import Journal
from vitctl.engine.preemption import StopFlag
from vitctl.jobs.features import ImagePass
from vitctl.jobs.inputs.fewshot_sets import FewshotSet, score_draw
from vitctl.models.build import Model
from vitctl.recipe.protocols import FewshotImages
from vitctl.recipe.schema import Pretrain

Scores = dict[int, list[float]]


def make_probe(
    recipe: Pretrain,
    one: FewshotSet,
    runtime: Runtime,
    journal: Journal,
    stop: StopFlag,
    shards: Verification,
) -> Callable[[Model], Scores]:
    """A function from the network to shots -> accuracy of each seed, on the main process; empty on the
    others.

    It uses none of the random generators of training, and does not change the network.

    Args:
        recipe: of the pre-training, whose pre-processing it shares.
        one: the data set.
        runtime, journal, stop, shards: of the job.

    Paper: Section 4.1: few-shot accuracies for fast on-the-fly evaluation
    """
    p, d = recipe.fewshot_probe, recipe.data
    transform = EvalTransform(
        d.image_size,
        method="square",
        resize=round(d.image_size * 256 / 224),
        resample=FewshotImages().resample,
        exif_orientation=p.turns_upright,
        truncated=p.truncated,
    )
    workers, size, by_lanes = (
        num_workers(recipe.machine, runtime),
        recipe.evaluation.batch_size,
        recipe.schedule.lanes > 0,
    )
    extract = ImagePass(runtime, journal, transform, d.mean, d.std, size, workers, stop, shards, by_lanes)

    def probe(model: Model) -> Scores:
        features = extract(model, one.train), extract(model, one.test)
        scores: Scores = {}
        for shots in p.shots if runtime.is_main else ():
            draws = [
                score_draw(one, features, shots=shots, seed=seed, l2s=(p.l2,), dtype=torch.float64)[0]
                for seed in p.seeds
                if not stop.raised
            ]
            scores[shots] = [score.accuracy for score in draws]
        stop_together(runtime, stop)
        return scores

    return probe
