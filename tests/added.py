"""The code of the optimizer and the export format that test_additions.py adds."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitctl.export.export import ExportRequest, Written
from vitctl.export.proof import Opened, answering, run_model
from vitctl.recipe.sections import Optimizer as Section


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al., 2023), with decoupled weight decay."""

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], chosen: Section) -> "Lion":
        """Build it from [optimizer]."""
        betas = (chosen.beta1, chosen.beta2)
        return cls(parameters, {"lr": 0.0, "betas": betas, "weight_decay": chosen.weight_decay})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        """Step, or change nothing where `found_inf` is set."""
        takes: Tensor = 1 - self.found_inf  # type: ignore[attr-defined]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = torch.lerp(p.grad, mean, beta1).sign() + group["weight_decay"] * p
                p.sub_(lr * takes.to(p.dtype) * direction)
                mean.lerp_(p.grad, (takes * (1 - beta2)).to(p.dtype))


def write_npy(request: ExportRequest, folder: Path) -> Written:
    """Write all tensors, one after the other, as one array."""
    tensors = request.model.state_dict().values()
    path = folder / f"{request.name}.npy"
    np.save(path, np.concatenate([tensor.numpy().ravel() for tensor in tensors]))
    return Written(path, ())


def open_npy(request: ExportRequest, path: Path) -> Opened:
    """Return the model with the numbers of the file, and the answers of its metadata."""
    numbers = torch.from_numpy(np.load(path))
    state = request.model.state_dict()
    parts = numbers.split([tensor.numel() for tensor in state.values()])
    request.model.load_state_dict(
        {name: part.view(state[name].shape) for name, part in zip(state, parts, strict=True)}
    )
    meta = request.found.weights.meta
    return Opened(run_model(request.model), answering(meta, meta.get("temperature")))
