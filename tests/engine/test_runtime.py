"""Where and in what a process computes."""

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import two_processes
from tests.fake_card import FakeCard, card_runtime
from tests.matrix import slow
from vitctl.engine import runtime as module
from vitctl.engine.runtime import (
    Computation,
    Runtime,
    alone,
    best_precision,
    check_name,
    moment,
    seconds_between,
    seed_step,
    slowest,
    start,
)
from vitctl.errors import LaunchError


@pytest.mark.parametrize(
    ("flags", "expected"), [("avx2 amx_bf16", "bf16"), ("avx512_bf16", "bf16"), ("avx2 avx512f", "float32")]
)
def test_best_precision__of_a_cpu_is_what_it_multiplies_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    monkeypatch.setattr(module, "Path", lambda _: tmp_path / "cpuinfo")
    assert best_precision(cpu=True) == expected
    monkeypatch.setattr(module, "Path", lambda _: tmp_path / "none")
    assert best_precision(cpu=True) == "float32"


def test_start__refuses_another_number_of_processes() -> None:
    with pytest.raises(LaunchError, match=r"machine\.processes = 2: 1 processes were started"):
        start(precision="float32", device="cpu", processes=2)


@pytest.fixture
def tf32() -> Iterator[Callable[[], tuple[bool, bool]]]:
    """Whether matrix products and convolutions are rounded; at first as torch does it."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32, convolutions.allow_tf32 = False, True
    yield lambda: (products.allow_tf32, convolutions.allow_tf32)
    products.allow_tf32, convolutions.allow_tf32 = before


@pytest.mark.parametrize("precision", ["auto", "float32", "bf16"])
def test_start__switches_tf32_off(precision: str, tf32: Callable[[], tuple[bool, bool]]) -> None:
    assert tf32() == (False, True)
    start(precision=precision, device="cpu", processes=1)
    assert tf32() == (False, False)


def test_start__tf32_where_it_is_asked_for(
    tf32: Callable[[], tuple[bool, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        LaunchError, match=r"machine\.precision = 'tf32': needs an NVIDIA GPU of 2020 or later"
    ):
        alone(precision="tf32", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda: True)
    assert alone(precision="tf32", device="cuda").dtype == torch.float32
    assert tf32() == (True, True)
    assert alone(precision="float32", device="cuda").precision == "float32"
    assert tf32() == (False, False)


def test_start__refuses_a_tracker_that_is_not_there() -> None:
    with pytest.raises(
        LaunchError, match=r"log\.trackers: tensorbord is not installed here, or unknown to accelerate"
    ):
        start(precision="float32", device="cpu", processes=1, trackers=("tensorbord",))


def test_start__does_not_take_precision_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert start(precision="float32", device="cpu", processes=1).accelerator.mixed_precision == "no"


def test_runtime__images_are_normalised_in_its_own_type(runtime: Runtime) -> None:
    images = torch.tensor([[[[0, 255]], [[51, 102]], [[255, 0]]]], dtype=torch.uint8)
    got = runtime.normaliser((0.5, 0.0, 0.5), (0.5, 1.0, 0.25))(images)
    assert got.dtype == torch.float64
    torch.testing.assert_close(
        got, torch.tensor([[[[-1.0, 1.0]], [[0.2, 0.4]], [[2.0, -2.0]]]], dtype=torch.float64)
    )


def test_bf16__keeps_float32_parameters_and_logits() -> None:
    bf16 = start(precision="bf16", device="cpu", processes=1)
    assert bf16.dtype == torch.float32
    inside: list[torch.dtype] = []
    layer = torch.nn.Linear(4, 4)
    layer.register_forward_hook(lambda _m, _i, output: inside.append(output.dtype))
    model = bf16.wrap(torch.nn.Sequential(layer))
    logits = model(torch.ones(2, 4))
    assert inside[0] == torch.bfloat16
    assert logits.dtype == torch.float32
    logits.sum().backward()
    assert {p.dtype for p in layer.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in layer.parameters() if p.grad is not None} == {torch.float32}


def test_seed_step__is_a_pure_function_of_seed_step_and_rank() -> None:
    def draw(*place: int) -> float:
        seed_step(*place)
        return float(torch.rand(1))

    places = [(seed, step, rank) for seed in (0, 1) for step in (0, 1, 10**6) for rank in (0, 1)]
    draws = [draw(*place) for place in places]
    assert len(set(draws)) == len(places)
    assert draws == [draw(*place) for place in places]
    assert 0 <= draw(2**32 - 1, 2**40, 4096) < 1


def test_normaliser__takes_its_constants_to_the_device_once() -> None:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    with FakeCard() as card:
        normalise = card_runtime().normaliser((0.5, 0.0, 0.5), (0.5, 1.0, 0.25))
        assert len(card.waits) == 2
        with card.watched():
            for _ in range(3):
                shown = normalise(images.pin_memory())
                assert (shown.device.type, shown.dtype, shown.shape) == ("cuda", torch.float32, images.shape)


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [
        # Seconds without images, in forward passes and in backward passes; what follows is ignored.
        ([[9, 1, 2], [0, 1, 2], [0, 1, 2]], 30, (0, "data", 0.3)),
        ([[0, 5, 10], [0, 5, 10], [1, 8, 16], [0, 5, 10]], 40, (2, "computation", 0.25)),
        ([[0, 5, 10], [6, 5, 10]], 40, (1, "data", 0.15)),  # of two, the other is the measure
        ([[8, 5, 10], [8, 5, 10], [9, 5, 10]], 40, None),  # all wait alike
        ([[0, 5, 10], [0, 5, 10], [4, 5, 10]], 40, None),  # a tenth
        ([[0, 0.1, 0.2], [0.9, 0.1, 0.2]], 2, None),  # less than a second
        ([[0, 4.1, 1, 0, 2], [0, 0.5, 0.5, 4, 2]], 10, (0, "computation", 0.41)),  # no more than measured
        ([[0, 4, 3], [0, 2, 5]], 10, None),  # one pass makes up for the other
        ([[0, 5, 5], [0, 9, 9]], 7.5, (1, "computation", 1.0)),  # a step that began before the window
        ([[5, 5, 5]], 8, None),
        ([], 8, None),  # not the main process
    ],
)
def test_slowest(rows: list[list[float]], length: float, expected: tuple[int, str, float] | None) -> None:
    found = slowest([torch.tensor(row, dtype=torch.float64) for row in rows], length)
    assert found == (
        {} if expected is None else {"slowest": dict(zip(("rank", "what", "share"), expected, strict=True))}
    )


def test_moment__of_a_card_is_an_event_that_nothing_waits_for() -> None:
    with FakeCard() as card, card.watched():
        began = moment(torch.device("cuda"))
        assert seconds_between(began, moment(torch.device("cuda"))) == 0
        assert [event.split()[1] for event in card.events] == ["records", "records"]
    assert 0 <= seconds_between(moment(torch.device("cpu")), moment(torch.device("cpu"))) < 60


@pytest.mark.parametrize(
    "places",
    [
        ["0 of 2", "0 of 2", "1 of 2", "1 of 2"],  # ranks go round the nodes
        ["0 of 2", "1 of 2", "0 of 1", "0 of 1"],
        ["0 of 4", "1 of 4", "2 of 4", "3 of 4"],
        ["0 of 1", "0 of 1", "0 of 1", "0 of 1"],
        ["None of 1"] * 4,  # not told
        ["0 of 2", "1 of 2", "0 of 2"],
    ],
)
def test_nodes__of_another_kind_are_no_groups(places: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gather_texts", lambda _: places)
    monkeypatch.setattr(module.dist, "new_group", None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", places[0].split()[-1])
    one: Any = SimpleNamespace(num_processes=len(places), process_index=0)
    assert Runtime(torch.device("cpu"), "float32", one).nodes is None


def test_runtime__sums_on_the_host() -> None:
    with FakeCard() as card, card.watched():
        assert card_runtime().sum([1.5, 2.0]) == [1.5, 2.0]


@pytest.mark.parametrize("line", ["3 checkpointed frozen", *slow("1", "3", "1 checkpointed", "1 compiled")])
def test_wrap__trains_to_the_bits_of_a_plain_ddp(line: str, tmp_path: Path) -> None:
    """Gradients in the buckets and a graph that is learned once save memory and time, and change nothing."""
    shown = tmp_path / "shown.txt"
    worker = [sys.executable, "-m", "tests.engine.wrapped_worker", *line.split()]
    assert two_processes(worker, shown) == (0, 0), shown.read_text()
    digests = [found.split()[1] for found in shown.read_text().splitlines() if found.startswith("weights ")]
    assert len(digests) == 4
    assert len({*digests}) == 1


@pytest.mark.parametrize("precision", ["bf16", "float32", "float64"])
def test_normaliser__gives_the_bits_of_its_equation(precision: str) -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    mean, std = (0.5, 0.485, 0.0), (0.5, 0.229, 1.0)
    computation = Computation(torch.device("cpu"), precision)
    rows = [torch.tensor(one, dtype=computation.dtype).view(1, 3, 1, 1) for one in (mean, std)]
    wanted = (images.to(computation.dtype) / 255.0 - rows[0]) / rows[1]
    found = computation.normaliser(mean, std)(images)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("env", "address", "what"),
    [
        ({}, "127.0.1.1", "is 127.0.1.1 here"),
        ({}, "", "has no address"),
        ({}, "10.0.0.7", ""),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, "127.0.1.1", ""),
        ({}, "::1", "is ::1 here"),
        ({}, "fd00::7", ""),  # a network of IPv6 alone
        ({"LOCAL_WORLD_SIZE": "4"}, "127.0.1.1", ""),  # one machine
        ({"MASTER_ADDR": "127.0.0.1"}, "127.0.1.1", ""),  # as in tests
    ],
)
def test_name__of_a_machine_that_others_would_look_for_on_themselves_is_refused(
    env: dict[str, str], address: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Debian's /etc/hosts has it: every process would wait at its own address."""

    def resolved(*_: object) -> list[tuple[object, ...]]:
        if not address:
            raise socket.gaierror("unknown")
        return [(None, None, None, "", (address, 0))]

    given = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "gpu01", **env}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu02")
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(LaunchError, match=f"gpu02: {what}.*GLOO_SOCKET_IFNAME") if what else nullcontext():
        check_name()
