"""A CUDA device that computes nothing, on a machine without one: what waits for it, or is on the wrong
device, is an error.

    with FakeCard() as card:                 # tensors with device="cuda" have a shape, a type and a device,
    and no numbers
        model = card.put(built)          # built before: within the block a device="meta" is the card, too
        with card.watched():                 # in here whatever makes the host wait for the device raises
        HostWaitsError
            loss = model(images).sum()
            loss.backward()

It is torch's `FakeTensorMode`, changed in three places; shown with torch 2.11 and 2.14, with and without a
driver:

- The backward pass. Autograd asks a tensor for its device in C++ (`prim.device`), and would look for a stream
  and a queue of that device, which exist only where there is a driver ("hasPrimaryContext expects a valid
  device index"). It gets "meta" as the answer; Python code, which reads `FakeTensor.device`, gets "cuda:0".
  What C++ then makes on "meta" is made on the card.
- Tensors on the CPU are real and have numbers, so that code of the host which reads them works, and is not
  taken for a wait.
- Copies between the two are judged: one that blocks, or whose side on the host is not pinned, makes the host
  wait. `pin_memory()` is a copy that is remembered. What comes from the card is zeros.

Streams and events of `torch.cuda` are replaced by some that write down what happens, in `card.events`.

It shows nothing of time and of numbers. Nor does `torch.autocast("cuda")` cast here: it asks in C++ whether a
tensor is on CUDA. And a kernel may wait by itself: those that torch marks (`_TAGS`) and those in `_WAITING`
are known.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from vitctl.engine.runtime import Runtime

CARD, META = torch.device("cuda:0"), torch.device("meta")
M = TypeVar("M", bound=nn.Module)

aten: Any = torch.ops.aten
# The size of what they return, or a number of Python, depends on what is on the device: so torch marks most
# of them.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_WAITING = {aten.bincount, aten.multinomial, aten._linalg_eigh, aten._linalg_solve_ex, aten._linalg_svd}


class HostWaitsError(AssertionError):
    """The host waited for the device, or copied in a way that makes it wait."""


class WrongDeviceError(AssertionError):
    """An operation got tensors of the CPU together with some of the card."""


class FakeStream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, *_: Any, name: str = "side", **__: Any) -> None:
        self.name = name

    def wait_event(self, event: "FakeEvent") -> None:
        _note(f"{self.name} waits for {event.name}")

    def wait_stream(self, stream: "FakeStream") -> None:
        _note(f"{self.name} waits for all of {stream.name}")

    def record_event(self, event: "FakeEvent | None" = None) -> "FakeEvent":
        event = event or FakeEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _wait(f"{self.name}.synchronize()")


class FakeEvent:
    """Stands in for `torch.cuda.Event`. It is over at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.name = ""

    def record(self, stream: FakeStream | None = None) -> None:
        on = stream or _active().stream
        self.name = f"event {_active().count_event()} of {on.name}"
        _note(f"{on.name} records {self.name}")

    def wait(self, stream: FakeStream | None = None) -> None:
        (stream or _active().stream).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _wait(f"{self.name}.synchronize()")

    def elapsed_time(self, _end: "FakeEvent") -> float:
        return 0.0


class FakeCard(FakeTensorMode):
    """See the module.

    `events` are copies, streams and events in order; `waits` are those that made the host wait while it was
    not `watched`.
    """

    _cards: ClassVar["list[FakeCard]"] = []

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=False)
        self.events: list[str] = []
        self.waits: list[str] = []
        self.stream = FakeStream(name="compute")
        self._watched = False
        self._num_events = self._depth = 0
        self._pinned: weakref.WeakKeyDictionary[torch.UntypedStorage, bool] = weakref.WeakKeyDictionary()
        self._stack = ExitStack()

    def __enter__(self) -> "FakeCard":
        if not self._depth:  # the mode enters itself to make some tensors
            self._replace()
        self._depth += 1
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._depth -= 1
        if not self._depth:
            self._cards.remove(self)
            self._stack.close()

    def _replace(self) -> None:
        dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

        def with_meta(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return META if _asks_for_device(func, args) else dispatch(cls, func, types, args, kwargs)

        replaced = {
            "Stream": FakeStream,
            "Event": FakeEvent,
            "stream": self._on_stream,
            "current_stream": lambda *_: self.stream,
            "synchronize": lambda *_: _wait("torch.cuda.synchronize()"),
            "get_device_name": lambda *_: "Fake Card",
            "empty_cache": lambda: None,
        }
        for name, value in replaced.items():
            self._stack.enter_context(patch.object(torch.cuda, name, value))
        self._stack.enter_context(patch.object(FakeTensor, "__torch_dispatch__", classmethod(with_meta)))
        self._stack.enter_context(patch.object(torch.Tensor, "record_stream", _record_stream, create=True))
        self._cards.append(self)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within the block it is an error when the host waits; elsewhere it is noted in `waits`."""
        before, self._watched = self._watched, True
        try:
            yield
        finally:
            self._watched = before

    def put(self, model: M) -> M:
        """A network that was built before the card was entered, moved there in place; `waits` and `events`
        begin anew.
        """
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                moved = nn.Parameter(parameter.detach().to(CARD), parameter.requires_grad)
                setattr(module, name, moved)
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(CARD))
        self.waits.clear()
        self.events.clear()
        return model

    def count_event(self) -> int:
        """The number of a new event."""
        self._num_events += 1
        return self._num_events

    @contextmanager
    def _on_stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _asks_for_device(func, args):
            return META
        if (
            torch.is_inference_mode_enabled() and func._can_decompose()
        ):  # there operations arrive before they are taken apart
            with self:
                return func.decompose(*args, **kwargs)
        if isinstance(target := kwargs.get("device"), torch.device) and target.type in ("meta", "cuda"):
            kwargs["device"] = target = CARD
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        of_host = [one for one in tensors if not isinstance(one, FakeTensor)]
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            return self._copied(func, types, args, kwargs)
        if len(of_host) == len(tensors) and target != CARD:
            return self._on_host(func, args, kwargs)
        if _waits(func, args):
            _wait(str(func))
            if packet is aten._local_scalar_dense:
                return torch.zeros((), dtype=args[0].dtype).item()
        if len(of_host) < len(tensors) and any(one.dim() for one in of_host):
            shapes = ", ".join(f"{list(one.shape)} on {one.device}" for one in tensors)
            raise WrongDeviceError(f"{func}: {shapes}")
        if packet is aten._fused_sgd_:  # torch has no shapes for it, and it changes none
            return None
        args, kwargs = tree_map(self._as_fake, (args, kwargs))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _as_fake(self, value: Any) -> Any:
        return (
            self.from_tensor(value)
            if isinstance(value, Tensor) and not isinstance(value, FakeTensor)
            else value
        )

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func.overloadpacket is aten._pin_memory:
            return self._as_pinned(args[0].clone())
        if func.overloadpacket is aten.is_pinned:
            return args[0].untyped_storage() in self._pinned
        pinned = bool(kwargs.pop("pin_memory", None))
        made = func(*args, **kwargs)
        return self._as_pinned(made) if pinned else made

    def _as_pinned(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor.untyped_storage()] = True
        return tensor

    def _copied(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """A copy, by `to` or `copy_`, within the host, within the card or between them."""
        in_place = func.overloadpacket is aten.copy_
        source = args[1] if in_place else args[0]
        to_card = isinstance(args[0], FakeTensor) if in_place else kwargs.get("device", source.device) == CARD
        from_card = isinstance(source, FakeTensor)
        non_blocking = bool(kwargs.get("non_blocking") or (in_place and len(args) > 2 and args[2]))
        if not to_card and not from_card:
            return func(*args, **kwargs)
        if to_card and not from_card and not (in_place and source.dim() == 0):
            pinned = source.untyped_storage() in self._pinned
            self._judge(f"{list(source.shape)} {source.dtype} to the card", non_blocking, pinned)
        if to_card:
            args, kwargs = tree_map(self._as_fake, (args, kwargs))
            return super().__torch_dispatch__(func, types, args, kwargs)
        pinned = (
            args[0].untyped_storage() in self._pinned if in_place else True
        )  # torch pins what it makes itself
        self._judge(f"{list(source.shape)} {source.dtype} from the card", non_blocking, pinned)
        if in_place:
            return args[0].zero_()
        return self._as_pinned(torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype))

    def _judge(self, copy: str, non_blocking: bool, pinned: bool) -> None:
        if not non_blocking:
            _wait(f"a copy that blocks: {copy}")
        elif not pinned:
            _wait(f"a copy that blocks, because the memory of the host is not pinned: {copy}")
        else:
            _note(f"{self.stream.name} copies {copy}")

    def note_wait(self, what: str) -> None:
        """The host waited."""
        if self._watched:
            raise HostWaitsError(f"the host waits for the device: {what}")
        self.waits.append(what)


def card_runtime(precision: str = "float32") -> Runtime:
    """A process alone whose device is the fake card."""
    alone: Any = SimpleNamespace(
        process_index=0,
        num_processes=1,
        is_main_process=True,
        device=CARD,
        backward=lambda loss: loss.backward(),
        no_sync=lambda _: nullcontext(),
        prepare_model=lambda model, **_: model,
    )
    return Runtime(CARD, precision, alone)


def _asks_for_device(func: Any, args: Any) -> bool:
    return func is torch.ops.prim.device.default and args[0].fake_device.type == "cuda"


def _waits(func: Any, args: Any) -> bool:
    """Whether an operation on the card waits; with an index where it is a mask, whose places are counted, or
    on the CPU.
    """
    packet = func.overloadpacket
    if packet not in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        return packet in _WAITING or bool(_TAGS & {*func.tags})
    used = [index for index in args[1] if index is not None]
    fills = (
        packet is not aten.index and args[2].numel() == 1 and all(index.dtype == torch.bool for index in used)
    )
    return not fills and any(index.dtype == torch.bool or not isinstance(index, FakeTensor) for index in used)


def _record_stream(_tensor: Tensor, stream: FakeStream) -> None:
    _note(f"memory kept for {stream.name}")


def _active() -> FakeCard:
    return FakeCard._cards[-1]


def _note(event: str) -> None:
    _active().events.append(event)


def _wait(what: str) -> None:
    _active().note_wait(what)
