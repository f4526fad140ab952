"""The gradient of eight leaves, as one of several processes gets it; run by `test_lane_sum`."""

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.conftest import LOSS, Tiny, batch
from vitctl.data.loader.batches import Batch
from vitctl.data.source.order import Lanes
from vitctl.engine import lanes as step
from vitctl.engine.lanes import ByLanes, LaneSum
from vitctl.engine.runtime import Runtime, join, start

LANES = Lanes(21, 8, 2)
BUCKET = 970  # bytes: one bucket for each of the two layers


def summed(runtime: Runtime) -> tuple[str, list[str]]:
    """Return a digest of the gradient and the counts, and what happened in the last backward pass: the
    parameters whose gradients were there, and the members of each group that exchanged sums.
    """
    model, events, swap = Tiny(torch.float32), list[str](), torch.distributed.all_to_all_single
    total = LaneSum(LANES, runtime.rank, runtime.num_processes, runtime.nodes)
    parts = LANES.parts(runtime.rank, runtime.num_processes)
    leaves = [batch(len(part.slots), seed=part.slots.start) for part in parts]

    def backward(leaf: Batch, _step: int, _scale: float) -> Tensor:
        events.clear()
        loss = LOSS(model(leaf.images.float() / 255), leaf.labels, leaf.weights)
        torch.autograd.backward(loss)
        return loss.detach()

    def told(*given: Any, group: Any) -> None:
        events.append(str(torch.distributed.get_process_group_ranks(group)))
        swap(*given, group=group)

    def seen(name: str) -> Any:
        return lambda _: events.append(name)

    for name, parameter in model.named_parameters():
        parameter.register_hook(seen(name))  # type: ignore[no-untyped-call]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "BUCKET_BYTES", BUCKET)
        patch.setattr(torch.distributed, "all_to_all_single", told)
        sums = ByLanes(runtime, model, 0, total)(backward, 0, leaves, False)
    found = [*(p.grad for p in model.parameters() if p.grad is not None), *sums]
    assert len(found) == 4 + len(sums)
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in found)).hexdigest(), events


if __name__ == "__main__":
    join(cpu=True, group_seconds=77)
    alike = start(precision="float32", device="cpu", processes=torch.distributed.get_world_size())
    assert alike.nodes is not None
    for group in alike.nodes[1:]:
        assert group._get_backend(torch.device("cpu")).options._timeout.seconds == 77
    print(summed(alike))
