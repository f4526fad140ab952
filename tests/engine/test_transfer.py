"""Batches reach the device ahead of their use, unchanged, in whatever order its streams do their work."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.engine.conftest import batch
from tests.fake_card import FakeCard
from tests.matrix import spread
from vitctl.data.loader.batches import Batch
from vitctl.engine.runtime import Transfer, given, sent

aten: Any = torch.ops.aten
CPU = torch.device("cpu")
BATCHES = [
    batch(4 if number != 6 else 2, seed=number, first=4 * number) for number in range(11)
]  # one is smaller


class Event:
    done = False


class Stream:
    """Work that is done later: functions, and events that are waited for or recorded."""

    def __init__(self, *_: Any) -> None:
        self.work: deque[Callable[[], bool]] = deque()
        Device.streams.append(self)

    def do(self, function: Callable[[], Any]) -> None:
        self.work.append(lambda: (function(), True)[1])

    def wait_event(self, event: Event) -> None:
        self.work.append(lambda: event.done)

    def record_event(self) -> Event:
        event = Event()
        self.do(lambda: setattr(event, "done", True))
        return event


class Device(TorchDispatchMode):
    """A device whose memory is that of the host, and whose streams do their work when chance has it: a copy
    is made late.
    """

    streams: list[Stream]

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        Device.streams = []
        self.current = self.computing = Stream()
        self.random = random.Random(seed)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: self.current)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is aten.is_pinned:
            return False
        if func.overloadpacket is aten._pin_memory:
            return args[0].clone()
        if func.overloadpacket is aten.copy_ and self.current is not self.computing:
            self.current.do(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))

    def work(self, at_most: int) -> bool:
        """Do some of what may be done now, of any stream; whether there was any."""
        for _ in range(at_most):
            order = [stream for stream in self.streams if stream.work]
            self.random.shuffle(order)
            for stream in order:
                if stream.work[0]():
                    stream.work.popleft()
                    break
            else:
                return False
        return True


def tensors(one: Batch) -> list[Tensor]:
    parts = [one] if one.neighbour is None else [one, one.neighbour]
    return [tensor for part in parts for tensor in (part.images, part.labels, part.weights)]


def computed(device: Device, loops: list[list[Batch]], transfer: Transfer) -> list[list[Tensor]]:
    """What the computing stream reads of every batch, when it comes to it."""
    read: list[list[Tensor]] = []
    for batches in loops:
        with transfer.ahead(batches) as coming:
            for one in coming:
                on_device, at = tensors(given(one)), len(read)
                read.append([])
                for tensor in on_device:
                    device.current.do(lambda tensor=tensor, at=at: read[at].append(tensor.clone()))
                device.work(device.random.randrange(12))
    while device.work(100):
        pass
    assert not any(stream.work for stream in device.streams)
    return read


@pytest.mark.parametrize("seed", spread(8, range(40)))
def test_transfer__every_batch_is_read_whole_whenever_the_streams_work(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In loops of several lengths, as the steps of a training are."""
    batches = [replace(one, neighbour=batch(1, seed=99)) for one in BATCHES] if seed % 2 else BATCHES
    with Device(seed, monkeypatch) as device:
        transfer = Transfer(CPU, copies=True)
        read = computed(device, [batches[:1], batches[1:2], batches[2:7], batches[7:]], transfer)
    assert len(read) == len(batches)
    for found, one in zip(read, batches, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, tensors(one), strict=True))


@pytest.mark.parametrize("left_out", ["free", "ready"])
def test_transfer__the_simulated_device_finds_a_wait_that_is_missing(
    left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgets(stream: Stream, event: Event) -> None:
        if (stream is Device.streams[0]) == (left_out == "free"):
            stream.work.append(lambda: event.done)

    monkeypatch.setattr(Stream, "wait_event", forgets)
    wrong = 0
    for seed in range(10):
        with Device(seed, monkeypatch) as device:
            read = computed(device, [BATCHES], Transfer(CPU, copies=True))
        wrong += not all(
            torch.equal(a, b)
            for found, one in zip(read, BATCHES, strict=True)
            for a, b in zip(found, tensors(one), strict=True)
        )
    assert wrong > 0


def test_transfer__sends_one_ahead_into_two_buffers() -> None:
    same = BATCHES[:5]
    with FakeCard() as card, card.watched():
        taken, places = [], []

        def loader() -> Iterator[Batch]:
            for one in same:
                taken.append(one)
                yield one

        with Transfer(torch.device("cuda:0")).ahead(loader()) as coming:
            for number, one in enumerate(coming):
                assert len(taken) == min(number + 2, len(same))
                assert given(one).images.device.type == "cuda"
                places.append(id(given(one).images))
        assert places[0] == places[2] == places[4] != places[1] == places[3]
        copies = [event for event in card.events if event.startswith("side copies")]
        assert len(copies) == 3 * len(same)


def test_transfer__what_is_on_the_host_stays_as_it_was() -> None:
    whole = replace(BATCHES[0], bad=((1, "key", "damaged"),), digests=("a", "b", "c", "d"))
    with FakeCard(), Transfer(torch.device("cuda:0")).ahead([whole]) as coming:
        (one,) = coming
        assert one is not whole
        assert all(a is b for a, b in zip(tensors(one), tensors(whole), strict=True))
        assert (one.samples is whole.samples, one.bad, one.digests) == (True, whole.bad, whole.digests)
        assert given(one).samples is whole.samples


def test_transfer__an_interrupted_loop_leaves_nothing_behind() -> None:
    """The computing stream waits for the copy that is under way, so that its memory may be used again."""
    with FakeCard() as card, card.watched():
        transfer = Transfer(torch.device("cuda:0"))
        with suppress(KeyError), transfer.ahead(BATCHES[:5]) as coming:
            next(coming)
            raise KeyError
        last_copy = max(at for at, event in enumerate(card.events) if "side records" in event)
        (event,) = [event.removeprefix("side records ") for event in card.events[last_copy : last_copy + 1]]
        assert f"compute waits for {event}" in card.events[last_copy:]
        with transfer.ahead(BATCHES[:5]) as coming:
            assert len(list(coming)) == 5


def test_transfer__a_loader_that_fails_is_heard() -> None:
    def loader() -> Iterator[Batch]:
        yield BATCHES[0]
        raise OSError("gone")

    with FakeCard():
        transfer = Transfer(torch.device("cuda:0"))
        with pytest.raises(OSError, match="gone"), transfer.ahead(loader()) as coming:
            list(coming)
        with transfer.ahead(BATCHES[:2]) as coming:
            assert len(list(coming)) == 2


def test_transfer__on_a_cpu_is_nothing() -> None:
    with Transfer(CPU).ahead(BATCHES) as coming:
        got = list(coming)
    assert all(a is b for a, b in zip(got, BATCHES, strict=True))
    assert given(BATCHES[0]) is BATCHES[0]
    labels = BATCHES[0].labels
    assert sent(labels, CPU) is labels
