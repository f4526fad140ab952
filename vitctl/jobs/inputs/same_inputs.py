"""Check before anything is computed that all processes read the same weights and the same images."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from vitctl.data.source.views import Source
from vitctl.engine.distributed.agreement import checksum
from vitctl.engine.distributed.process_group import check_same
from vitctl.engine.distributed.runtime import Runtime
from vitctl.jobs.inputs.weights import FoundWeights

_FIX = (
    "make sure that all nodes read the same files (a network disk may show one of them an old state; a run "
    "that is active writes "
    "new checkpoints: name one of them with --from), then start again"
)


def check_inputs(
    runtime: Runtime,
    state: Mapping[str, Tensor],
    config: Any,
    meta: Mapping[str, Any],
    sources: Iterable[Source | None],
) -> None:
    """Compare what this process has read with what rank 0 has read.

    Args:
        runtime: this process among its peers, all of which call this.
        state, config, meta: the weights that the job starts from, their model, and what is stored with them.
        sources: the splits that it reads; None is ignored.

    Raises:
        LaunchError: they differ; the same message on every process.
    """
    if runtime.num_processes == 1:
        return
    facts = {
        "start weights": checksum(sorted(state.items())),
        "model": f"{config!r} {json.dumps(meta, sort_keys=True, default=str)}",
        "data index": " ".join(source.digest if source is not None else "none" for source in sources),
    }
    check_same(facts, _FIX)


def check_found(runtime: Runtime, found: FoundWeights, sources: Iterable[Source]) -> None:
    """`check_inputs` for weights that were found."""
    check_inputs(runtime, found.weights.state, found.weights.config, found.weights.meta, sources)
