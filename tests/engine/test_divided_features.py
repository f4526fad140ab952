"""Features divided over processes: the bits of one process, and no more of them than a share."""

import sys
from typing import Any

import pytest
import torch

from tests.conftest import started
from tests.engine import divided
from tests.engine.divided import IMAGES, QUERIES, STORED, TESTS, WINDOW
from vitctl.engine import probes

COUNTS = (1, 2, 3)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By number of processes, what each has."""
    folder = tmp_path_factory.mktemp("divided")
    for size in COUNTS:
        line = [sys.executable, "-m", divided.__name__, str(folder), str(size)]
        codes = [process.wait(timeout=120) for process in started(line, folder / "out.txt", size)]
        assert set(codes) == {0}, (folder / "out.txt").read_text()
    return {n: [torch.load(folder / f"{n}_{rank}.pt") for rank in range(n)] for n in COUNTS}


@pytest.mark.parametrize("size", COUNTS)
def test_features_and_neighbours__are_those_of_one_process(found: Any, size: int) -> None:
    (one,), (main, *others) = found[1], found[size]
    bits = [table.view(torch.int32) for table in one["tables False"]]
    assert all(table.eq(-(2**31)).any() for table in bits[:1])  # -0.0
    for process, name in ((main, "False"), *((process, "True") for process in (main, *others))):
        tables = process[f"tables {name}"]
        assert all(torch.equal(a.view(torch.int32), b) for a, b in zip(tables, bits, strict=True))
    assert all(table.is_meta for process in others for table in process["tables False"])
    for what in ("torch.float32", "torch.float64", "few"):  # few: more processes than chunks
        assert all(torch.equal(a, b) for a, b in zip(main[what], one[what], strict=True))


def test_neighbours__of_equal_similarities_the_lower_position(found: Any) -> None:
    train, test = (part.double() for part in found[1][0]["tables False"])
    values, places = found[3][0]["torch.float64"]
    same = train[places] == train[places[:, :1]]
    assert same.all(dim=2)[:, 1].any()
    for row, at in zip(values, places, strict=True):
        pairs = list(zip((-row).tolist(), at.tolist(), strict=True))
        assert pairs == sorted(pairs) and len(set(at.tolist())) == divided.K
    cosine = torch.nn.functional.cosine_similarity(test[:, None], train[places], dim=2)
    torch.testing.assert_close(values, cosine)


@pytest.mark.parametrize("size", COUNTS[1:])
def test_processes__hold_their_share_and_a_window(
    found: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is joined, and has one more batch in making; a chunk is normalised."""
    monkeypatch.setattr(probes, "_STORED", STORED)
    share = probes.share_of(IMAGES, size)
    assert IMAGES / size - STORED < share < IMAGES / size + STORED
    for process in found[size][1:]:
        assert (
            process["rows False"] <= 2 * (WINDOW // size + divided.BATCH) + 4 * divided.BATCH < IMAGES / size
        )
        assert process["rows of nearest"] <= share + 4 * (STORED + QUERIES)
    assert found[size][0]["rows True"] >= IMAGES + TESTS
