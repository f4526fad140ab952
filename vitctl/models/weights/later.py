"""Lazy tensors of weights files, read when their numbers are needed, and not kept."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Later(Tensor):
    """A tensor whose numbers are read or computed each time `now` requests them.

    Torch functions on it return another lazy tensor, or a fact that needs no numbers, such as a shape.
    """

    numbers: Callable[[slice], Tensor]  # of these rows

    @classmethod
    def of(cls, like: Tensor, numbers: Callable[[slice], Tensor]) -> "Later":
        """Return a lazy tensor with the shape and type of `like`; its numbers are on the CPU."""
        later = like.to("meta").as_subclass(cls)
        later.numbers = numbers
        return later

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _FACTS:
            return _FACTS[function]
        with torch._C.DisableTorchFunctionSubclass():
            blank, named = _each(args, _blank), _each(kwargs or {}, _blank)
            found = function(*blank, **named)
        if found is blank[0]:  # such as contiguous(): rows can still be read separately
            return args[0]

        def computed() -> Any:
            return function(*_each(args, now), **_each(kwargs or {}, now))

        if isinstance(found, Tensor):
            return cls.of(found, lambda rows: now(computed(), rows))
        if type(found) is tuple:  # several tensors

            def one_of(at: int, rows: slice) -> Tensor:
                return now(computed()[at], rows)

            return tuple(cls.of(one, partial(one_of, at)) for at, one in enumerate(found))
        return found


def now(tensor: Tensor, rows: slice = slice(None)) -> Tensor:
    """Return the numbers of a tensor, or some of its rows."""
    if isinstance(tensor, Later):
        return tensor.numbers(rows)
    return tensor[rows] if tensor.dim() else tensor


_FACTS: dict[Any, Any] = {
    Tensor.device.__get__: torch.device("cpu"),
    Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
}


def _blank(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(Tensor) if isinstance(tensor, Later) else tensor.to("meta")


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(_each(one, change) for one in value)
    return {k: _each(one, change) for k, one in value.items()} if isinstance(value, dict) else value
