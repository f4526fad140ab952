"""Optimizers, their parameter groups and named state, exact clipping, and averaged weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import unwrap
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.sgd import sgd

from vitctl.engine.sharding import full, is_part, like, local
from vitctl.errors import CheckpointError
from vitctl.models.blocks import trainable
from vitctl.models.places import decay_exponent, is_head, is_matrix, is_relative, num_blocks
from vitctl.recipe.sections import OPTIMIZERS, LayerRates
from vitctl.recipe.sections import Optimizer as Section

Groups = list[dict[str, Any]]
# Devices where one kernel changes many tensors, of one type and size in each list, by a scalar of that type.
MANY_AT_ONCE = ("cuda",)


def build_optimizer(model: nn.Module, chosen: Section) -> Optimizer:
    """Build the optimizer of [optimizer] over every trained parameter, including biases and norms.

    The learning rate is set before each step. Adam's decay is decoupled: p -= lr * weight_decay * p. SGD's is
    coupled: gradient += weight_decay * p, before the momentum.

    Paper: Section 4.1, Tables 3 and 4; D.1 with BiT, Sections 3.3 and 4.2
    """
    build: Callable[[Groups, Section], Optimizer] = resolve_name(OPTIMIZERS[chosen.name].builder)
    return build(parameter_groups(model, chosen), chosen)


def parameter_groups(model: nn.Module, chosen: Section) -> Groups:
    """Return a group for each `scale` (factor of the learning rate) and `weight_decay`.

    With the paper's [optimizer], that is one group of all trained parameters in their order.

    Source: BEiT and MAE (layer_decay), timm's param_groups_layer_decay
    """
    scaled = isinstance(chosen, LayerRates) and (chosen.layer_decay, chosen.head_lr_multiplier) != (1, 1)
    if not scaled and chosen.decay_on == "all":
        every = list(trainable(model).values())
        return [{"params": every, "scale": 1.0, "weight_decay": chosen.weight_decay}]
    depth = num_blocks([name for name, _ in model.named_parameters()])
    # A norm after the pooling belongs to the head in either numbering.
    pooled = getattr(getattr(model, "config", None), "norm_at", "") == "pooled"
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in trainable(model).items():
        tables_too = chosen.decay_on == "matrices_and_relative" and is_relative(name)
        is_decayed = chosen.decay_on == "all" or tables_too or is_matrix(name, parameter.dim())
        decay, scale = chosen.weight_decay if is_decayed else 0.0, 1.0
        if isinstance(chosen, LayerRates):
            exponent = decay_exponent(name, depth, "mae" if pooled else chosen.layer_decay_numbering)
            scale = chosen.layer_decay**exponent * (chosen.head_lr_multiplier if is_head(name) else 1.0)
        group = groups.setdefault((scale, decay), {"params": [], "scale": scale, "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())


def adam(groups: Groups, chosen: Section) -> Optimizer:
    betas, decay = (chosen.beta1, chosen.beta2), chosen.weight_decay
    return EagerAdamW(groups, lr=0.0, betas=betas, eps=chosen.eps, weight_decay=decay, fused=True)


def momentum_sgd(groups: Groups, chosen: Section) -> Optimizer:
    """Return torch's SGD with momentum buffers, which torch leaves undefined if the first step is skipped."""
    optimizer = ShardableSGD(
        groups,
        lr=0.0,
        momentum=chosen.momentum,
        weight_decay=chosen.weight_decay,
        nesterov=chosen.nesterov,
        fused=True,
    )
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def lamb(groups: Groups, chosen: Section) -> Optimizer:
    return Lamb(groups, {"lr": 0.0, "betas": (chosen.beta1, chosen.beta2), "eps": chosen.eps})


class _Eager(Optimizer):
    """An optimizer that is never compiled: torch's decorators import its compiler, for a second."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)


class EagerAdamW(_Eager, AdamW):
    step = torch.no_grad()(unwrap(AdamW.step))


class Lamb(_Eager):
    """Adam whose update of each tensor, weight decay included, is scaled to the tensor's norm.

    Norms are of full tensors, even if these are sharded. Without weight decay a tensor is updated as by Adam.
    The gradient is clipped by optimizer.clip_norm alone; the update reuses the gradient's memory.

    Source: You et al. 2020, Algorithm 2; timm's Lamb, which DeiT III uses
    """

    found_inf = torch.zeros(())  # above 0: skip the step

    def __init__(self, groups: Groups, defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float64, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ARG002 - there is none
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            if held and held[0].device.type in MANY_AT_ONCE and not is_part(held[0]):
                self._together(held, group)
                continue
            for parameter in held:
                self._to_update(parameter, group)
            updates = [p.grad for p in held]
            ratios = torch.ones(len(held))
            if held and group["weight_decay"]:
                ours, theirs = (full(torch.stack(_norms(some, None))) for some in (held, updates))
                ratios = torch.where((ours > 0) & (theirs > 0), ours / theirs, 1.0)
            for parameter, update, ratio in zip(held, updates, ratios, strict=True):
                if group["weight_decay"]:
                    local(update).mul_(ratio)
                local(parameter).add_(local(update), alpha=-group["lr"])

    def _together(self, held: list[Tensor], group: dict[str, Any]) -> None:
        """Update a group in a few kernels: torch's fused Adam gives the updates, of weights that are zero."""
        states, sizes = [self.state[p] for p in held], [p.numel() for p in held]
        steps, taken = [state["step"] for state in states], ~self.found_inf.bool()
        torch._foreach_add_(steps, [taken.to(steps[0].dtype)] * len(steps))
        joined = held[0].new_zeros(sum(sizes))
        updates = [own.view_as(p) for own, p in zip(torch.split(joined, sizes), held, strict=True)]
        first, second = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        (beta1, beta2), number = group["betas"], steps[0].float()  # the same for all: none is ever left out
        torch._fused_adam_(
            updates,
            [p.grad for p in held if p.grad is not None],
            first,
            second,
            [],
            [number] * len(held),
            lr=-1.0,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        if group["weight_decay"]:
            torch._foreach_add_(updates, held, alpha=group["weight_decay"])
            ours, theirs = (torch.stack(_norms(some, None)) for some in (held, updates))
            ratios = torch.where((ours > 0) & (theirs > 0), ours / theirs, 1.0) * taken
            each = zip(ratios, sizes, strict=True)
            joined *= torch.cat([ratio.expand(size) for ratio, size in each])
        torch._foreach_add_(held, updates, alpha=-group["lr"])

    def _to_update(self, parameter: Any, group: dict[str, Any]) -> None:
        """Replace a gradient by Adam's update plus weight decay, or by zeros if the step is skipped."""
        state, gradient = self.state[parameter], local(parameter.grad)
        first, second = local(state["exp_avg"]), local(state["exp_avg_sq"])
        skipped = self.found_inf.bool()
        state["step"] += ~skipped
        first_decay, second_decay = (
            torch.where(skipped, 1.0, torch.full_like(state["step"], beta)) for beta in group["betas"]
        )
        gradient.masked_fill_(skipped, 0.0)
        first.lerp_(gradient, (1 - first_decay).to(first.dtype))
        second.mul_(second_decay.to(second.dtype))
        second.addcmul_(gradient, gradient, value=1 - group["betas"][1])
        first_sum, second_sum = (1 - beta ** state["step"] for beta in group["betas"])
        gradient.copy_(first / first_sum).div_((second.sqrt() / second_sum.sqrt()).add_(group["eps"]))
        if group["weight_decay"]:
            gradient.add_(local(parameter), alpha=group["weight_decay"])
        gradient.masked_fill_(skipped, 0.0)


class ShardableSGD(_Eager, SGD):
    """SGD on this process's part of each parameter, because torch's fused kernel rejects sharded ones."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:  # noqa: ARG002 - there is none
        for group in self.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            sgd(
                [local(p) for p in held],
                [local(p.grad) for p in held],
                [local(self.state[p]["momentum_buffer"]) for p in held],
                fused=True,
                found_inf=getattr(self, "found_inf", None),
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )


def take_step(optimizer: Any, is_finite: Tensor) -> None:
    """Take a step, or none if `is_finite`, a bool on the device, is false. No device synchronisation."""
    optimizer.found_inf = (~is_finite).float()  # read by torch's fused optimizers
    optimizer.step()


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    *,
    max_value: float = 0.0,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Scale all gradients by `scale`, and then by min(1, max_norm / norm), without the small constant that
    torch adds to the norm; or cut each number to -max_value..max_value.

    If the norm is not finite, the gradients are of no use: the step is left out. No device synchronisation;
    if parameters are sharded, all processes call this.

    Args:
        parameters: with gradients; where they are sharded, all processes take part.
        max_norm: bound of the global norm; 0: none.
        max_value: bound of each number; 0: none.
        scale: a scalar on their device; None: 1.
        dtype: for adding squares; None: that of the gradients.

    Returns:
        the global norm before clipping, in float32 or wider, then those of the gradients, `[1 + P]`.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    each = torch.stack(_norms(gradients, dtype)) if gradients else torch.zeros(0)
    norms = torch.cat([full(torch.linalg.vector_norm(each))[None], full(each)])
    factor = torch.ones_like(norms[0]) if scale is None else scale.to(norms.dtype)
    if scale is not None:
        norms *= factor
    if max_norm:
        factor = factor * torch.clamp(max_norm / norms[0], max=1.0)
    # Reading the factor is free on a CPU; on a GPU it would synchronise.
    if factor.device.type != "cpu" or float(factor) != 1:
        own = [local(gradient) for gradient in gradients]
        torch._foreach_mul_(own, factor.to(own[0].dtype))
    for gradient in gradients if max_value else ():
        local(gradient).clamp_(-max_value, max_value)
    return norms


def _norms(gradients: list[Tensor], dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norms, bit for bit those of `torch.nn.utils.get_total_norm` unless `dtype` differs."""
    if any(map(is_part, gradients)):
        return [torch.linalg.vector_norm(gradient) for gradient in gradients]
    return list(torch._foreach_norm(gradients, 2, dtype=dtype))


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's state as "slot/parameter name" -> tensor, sharded if the parameter is."""
    names = trained_names(optimizer, model)
    return {
        f"{slot}/{name}": value
        for parameter, name in names.items()
        for slot, value in optimizer.state[parameter].items()
        if isinstance(value, Tensor)
    }


def load_optimizer_tensors(optimizer: Optimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load the result of `optimizer_tensors`; raise CheckpointError if it is another model's."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        slot, name = key.split("/", 1)
        by_name.setdefault(name, {})[slot] = value
    names = trained_names(optimizer, model)
    if by_name and set(by_name) != set(names.values()):
        odd = sorted(set(by_name) ^ set(names.values()))
        raise CheckpointError(
            f"optimizer state does not fit the model: {len(odd)} parameters differ, first {odd[0]}"
        )
    for parameter, name in names.items():
        for slot, value in by_name.get(name, {}).items():
            optimizer.state[parameter][slot] = (
                value.to(parameter.device, copy=True) if slot == "step" else like(value, parameter).clone()
            )


def trained_names(optimizer: Optimizer, model: nn.Module) -> dict[nn.Parameter, str]:
    known = {one: name for name, one in model.named_parameters()}
    return {p: known[p] for group in optimizer.param_groups for p in group["params"]}


class Average:
    """Average of every trained parameter: ema = decay * ema + (1 - decay) * weights, after each step.

    The model's weights are the first average, and keep a share of decay ** steps. With `debias` they are
    left out, and the other shares are rescaled to sum to 1: the weights after the first step are the first
    average.

    Paper: Section 4.1 (0.9999 for the runs at 512 and 518).
    """

    def __init__(self, model: nn.Module, decay: float, *, debias: bool = False) -> None:
        self.decay, self.debias = decay, debias
        # whether `averaged` has exchanged any weights of the model and averages
        self.is_swapped = False
        self.tensors = {name: p.detach().clone() for name, p in trainable(model).items()}
        first = local(next(iter(self.tensors.values())))
        self.updates = torch.zeros((), dtype=torch.float64, device=first.device)
        share = torch.float64 if debias else first.dtype
        self.share = torch.full((), 1.0 - decay, dtype=share, device=first.device)

    @torch.no_grad()
    def update(self, model: nn.Module, is_finite: Tensor) -> None:
        """Update after an optimizer step, unless that was skipped. No device synchronisation."""
        taken = is_finite * self.share
        if self.debias:
            self.updates += is_finite
            taken /= 1.0 - self.decay ** self.updates.clamp(min=1)
        own = [local(tensor) for tensor in self.tensors.values()]
        weights = [local(p.detach()) for p in trainable(model).values()]
        taken = taken.to(own[0].dtype)
        if own[0].device.type in MANY_AT_ONCE:
            way = torch._foreach_sub(weights, own)
            torch._foreach_mul_(way, taken)
            torch._foreach_add_(own, way)
        else:
            torch._foreach_lerp_(own, weights, [taken] * len(own))

    def load(self, tensors: dict[str, Tensor], updates: int) -> None:
        self.updates.fill_(updates)
        for name, own in self.tensors.items():
            if name in tensors:
                own.copy_(like(tensors[name], own))


@contextmanager
def averaged(model: nn.Module, average: Average | None) -> Iterator[None]:
    """Within the block the model has its averaged weights."""
    if average is not None:
        average.is_swapped = True
    _swap(model, average)
    try:
        yield
    finally:
        _swap(model, average)
        if average is not None:
            average.is_swapped = False


@torch.no_grad()
def _swap(model: nn.Module, average: Average | None) -> None:
    """Swap in place, because sharded parameters are views of memory that FSDP references too."""
    for name, parameter in trainable(model).items() if average is not None else ():
        assert average is not None
        own, other = local(parameter.data), local(average.tensors[name])
        kept = own.clone()
        own.copy_(other)
        other.copy_(kept)
