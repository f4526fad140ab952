"""trace.bin: the marks of each step, found by its number, also after a resume; torn or missing marks are not
used. Digests of a batch: the same however it is split, and as plain Python computes them.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import Tiny, batch
from vitctl.data.loader.batches import Batch
from vitctl.engine.journal import LOG, STEP_RECORDS, TRACE, Journal, read_records
from vitctl.engine.runtime import Runtime
from vitctl.engine.trace import Recorder, batch_digest, marks_every, norm_marks, read_marks, read_steps
from vitctl.engine.update import Result

SIZE, NORMS = 5, 4


def recorder(folder: Path, runtime: Runtime, size: int = SIZE) -> Recorder:
    return Recorder(folder, Journal(folder / LOG), runtime, Tiny(), range(size), size)


def add(to: Recorder, step: int) -> None:
    norms = torch.arange(NORMS, dtype=torch.float64) + step / 7
    rows = batch(to.batch_size, seed=step)
    rows = type(rows)(
        *(rows.images, rows.labels, rows.weights, rows.samples),
        checksums=rows.labels.numpy()[:, None] + [[1, step]],
    )
    to.add(step, Result(step / 3, 1.0, 0.1, 0, False, gradient=norms), [rows], weights=step == 2)


def marks(folder: Path) -> dict[int, Any]:
    """Of each step that has a line."""
    steps = read_steps(folder)
    assert steps is not None
    return {n: read_marks(folder / TRACE, n, steps.at(n).trace, SIZE + NORMS) for n in steps.by_step}


@pytest.fixture
def written(tmp_path: Path, runtime: Runtime) -> Path:
    """Four steps."""
    one = recorder(tmp_path, runtime)
    one.start(0, {"made_of": {}})
    for step in range(1, 5):
        add(one, step)
    return tmp_path


def test_marks__of_each_step_are_found_by_its_number(written: Path) -> None:
    found = marks(written)
    assert sorted(found) == [1, 2, 3, 4]
    for step, own in found.items():
        assert own is not None
        assert own[SIZE:].tolist() == norm_marks(np.arange(NORMS) + step / 7).tolist()
    assert (written / TRACE).stat().st_size == 32 + 4 * 2 * (SIZE + NORMS)
    steps = read_steps(written)
    assert steps is not None
    assert [bool(steps.at(n).weights) for n in (1, 2, 3)] == [False, True, False]
    assert [steps.at(n).number("loss") for n in (1, 2, 3)] == [1 / 3, 2 / 3, 1.0]


def test_marks__are_cut_on_resume_and_written_again(written: Path, runtime: Runtime) -> None:
    before = (written / TRACE).read_bytes()
    one = recorder(written, runtime)
    one.start(2, {"made_of": {}})
    assert (written / TRACE).stat().st_size == 32 + 2 * 2 * (SIZE + NORMS)
    for step in (3, 4):
        add(one, step)
    assert (written / TRACE).read_bytes() == before


def test_marks__of_another_batch_size_begin_anew(written: Path, runtime: Runtime) -> None:
    one = recorder(written, runtime, 7)
    one.start(4, {"made_of": {}})
    add(one, 5)
    assert {step: own is not None for step, own in marks(written).items()} == dict.fromkeys(
        (1, 2, 3, 4, 5), False
    )
    line = read_records(written / STEP_RECORDS)
    assert line  # the chain goes on
    steps = read_steps(written)
    assert steps is not None
    assert read_marks(written / TRACE, 5, steps.at(5).trace, 7 + NORMS) is not None


def test_marks__that_do_not_fit_are_kept_of_the_steps_after_a_checkpoint(
    tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, most = 2 * (SIZE + NORMS), 20
    monkeypatch.setattr("vitctl.engine.trace.MARKS_BYTES", most * size)
    assert marks_every(size, most, 8) == 0
    every = marks_every(size, 50, 8)
    assert every == 16  # 8 would keep 30
    one = replace(recorder(tmp_path, runtime), steps=(50, 8))
    one.start(0, {"made_of": {}})
    for step in range(1, 41):
        add(one, step)
    one.start(36, {"made_of": {}})  # a resume, in the middle of those that are kept
    assert (tmp_path / TRACE).stat().st_size == 32 + 14 * size
    for step in range(37, 51):
        add(one, step)
    kept = [step for step, own in marks(tmp_path).items() if own is not None]
    assert kept == [*range(1, 6), *range(17, 22), *range(33, 38), 49, 50]
    assert (tmp_path / TRACE).stat().st_size == 32 + len(kept) * size
    own = marks(tmp_path)[35]
    assert own is not None
    assert own[SIZE:].tolist() == norm_marks(np.arange(NORMS) + 35 / 7).tolist()


def test_marks__of_an_earlier_release_go_on_as_they_began(
    written: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitctl.engine.trace.MARKS_BYTES", 1)
    one = replace(recorder(written, runtime), steps=(50, 8))
    one.start(4, {"made_of": {}})
    for step in range(5, 20):
        add(one, step)
    assert all(own is not None for own in marks(written).values())


@pytest.mark.parametrize("harm", ["cut", "zeros", "gone", "foreign"])
def test_marks__that_are_torn_are_not_used(written: Path, harm: str) -> None:
    path = written / TRACE
    content = path.read_bytes()
    if harm == "gone":
        path.unlink()
    else:
        cut = {"cut": content[:-3], "zeros": content[:-18] + bytes(18), "foreign": b"x" * 40}[harm]
        path.write_bytes(cut)
    found = marks(written)
    assert found[4] is None
    assert (found[3] is None) == (harm in ("gone", "foreign"))


WORD = 2**64


class Peers:
    """Processes whose words are collected, then added."""

    def __init__(self) -> None:
        self.words: list[np.ndarray] = []

    def sum_words(self, words: np.ndarray) -> np.ndarray:
        self.words.append(words.copy())
        return words


def mix(word: int) -> int:
    """SplitMix64's finaliser, as published."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


def labelled(rows: np.ndarray, labels: np.ndarray | None = None) -> Batch:
    labels = rows[:, 3] if labels is None else labels
    size = len(rows)
    images = torch.zeros(size, 3, 1, 1, dtype=torch.uint8)
    return Batch(
        images,
        torch.from_numpy(labels),
        torch.ones(size),
        torch.from_numpy(rows[:, 0]),
        checksums=rows[:, 1:3],
    )


@pytest.fixture
def rows() -> np.ndarray:
    """Number, checksums and label of 11 samples."""
    return np.random.default_rng(0).integers(0, 2**32, (11, 4))


def digest(
    rows: np.ndarray, cuts: list[list[int]], labels: np.ndarray | None = None
) -> tuple[list[int], list[int]]:
    """Of a batch whose processes begin at the first number of each list, and whose micro-batches at the
    others.
    """
    peers: Any = Peers()
    ends = [cut[0] for cut in cuts[1:]] + [len(rows)]
    for cut, end in zip(cuts, ends, strict=True):
        begins = [*cut, end]
        parts = [labelled(rows[a:b], None if labels is None else labels[a:b]) for a, b in pairwise(begins)]
        batch_digest(peers, parts, range(cut[0], end), len(rows))
    total = np.sum(peers.words, axis=0, dtype=np.uint64)
    return total[:4].tolist(), total[4:].view(np.uint16)[: len(rows)].tolist()


def test_digest__is_the_documented_sum(rows: np.ndarray) -> None:
    parts, marks = digest(rows, [[0]])
    expected = [
        sum(mix(mix(int(v)) ^ mix(n + 1)) for n, v in enumerate(rows[:, part])) % WORD for part in range(4)
    ]
    assert parts == expected
    assert marks == [mix(mix(mix(int(r[1])) ^ int(r[2])) ^ int(r[3])) >> 48 for r in rows]


@pytest.mark.parametrize(
    "cuts", [[[0, 4, 8]], [[0], [5]], [[0, 2], [3], [7, 9]], [[n] for n in range(11)]], ids=str
)
def test_digest__does_not_depend_on_how_the_batch_is_split(rows: np.ndarray, cuts: list[list[int]]) -> None:
    assert digest(rows, cuts) == digest(rows, [[0]])


def test_digest__of_several_labels(rows: np.ndarray) -> None:
    labels = np.random.default_rng(1).integers(-1, 9, (11, 3))
    whole = digest(rows, [[0]], labels)
    assert digest(rows, [[0], [3, 6]], labels) == whole
    labels[7, 2] += 1
    other = digest(rows, [[0]], labels)
    assert [a == b for a, b in zip(whole[0], other[0], strict=True)] == [True, True, True, False]
    assert [n for n in range(11) if whole[1][n] != other[1][n]] == [7]


@pytest.mark.parametrize("part", range(4))
def test_digest__tells_which_part_and_which_sample(rows: np.ndarray, part: int) -> None:
    whole, other = digest(rows, [[0]]), rows.copy()
    other[6, part] ^= 1
    found = digest(other, [[0]])
    assert [n for n in range(4) if whole[0][n] != found[0][n]] == [part]
    assert [n for n in range(11) if whole[1][n] != found[1][n]] == ([6] if part else [])


def test_digest__of_the_same_samples_in_another_order_is_another(rows: np.ndarray) -> None:
    assert all(
        a != b for a, b in zip(digest(rows, [[0]])[0], digest(rows[::-1].copy(), [[0]])[0], strict=True)
    )


def test_norm_marks__of_the_last_bit(rows: np.ndarray) -> None:
    norms = rows[:, 0] / 7
    other = norms.copy()
    other[4] = np.nextafter(other[4], np.inf)
    assert np.flatnonzero(norm_marks(norms) != norm_marks(other)).tolist() == [4]
