"""Processes that see one GPU each, as Slurm's --gpus-per-task=1 starts them, on fake devices."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vitctl.engine import runtime


@pytest.mark.parametrize(("visible", "wanted"), [(1, 0), (8, 3)])
def test_one_gpu__each_process_takes_the_device_that_it_sees(
    visible: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(runtime.dist, "rendezvous", lambda *_, **__: iter([(None, 3, 8)]))
    monkeypatch.setattr(runtime.dist, "init_process_group", lambda *_, **__: None)
    runtime.join(cpu=False)
    assert chosen == [wanted]

    # As accelerate counts: the device is the local rank modulo the visible ones. It wraps with
    # DDP(device_ids=[local_process_index]), and synchronises on that index.
    state = SimpleNamespace(device=torch.device("cuda", 3 % visible), local_process_index=3)
    indices: list[int] = []

    def accelerator(**_: Any) -> Any:
        indices.append(state.local_process_index)
        return SimpleNamespace(num_processes=8, device=state.device)

    monkeypatch.setattr(runtime, "PartialState", lambda **_: state)
    monkeypatch.setattr(runtime, "Accelerator", accelerator)
    monkeypatch.setattr(runtime, "device_and_precision", lambda *_: (False, "bf16"))
    started = runtime.start(precision="bf16", device="cuda", processes=8)
    assert (started.device.index, indices) == (wanted, [wanted])
