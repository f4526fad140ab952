"""Class weights: scikit-learn's, a mean of 1 over the images, and what is refused."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from sklearn.utils.class_weight import compute_class_weight

from vitctl.data.source.uneven import correction
from vitctl.errors import RecipeError

LABELS = np.array([2, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0])
NAMES = ("cat", "dog", "emu")


@dataclass(frozen=True)
class Labelled:
    """Only the labels of a source."""

    of: np.ndarray
    class_names: tuple[str, ...] = NAMES
    digest: str = field(default="")

    def __len__(self) -> int:
        return len(self.of)

    def labels(self, samples: np.ndarray | None = None) -> np.ndarray:
        return self.of if samples is None else self.of[samples]


def factors(weights: Any, sampling: str = "shuffle", labels: np.ndarray = LABELS) -> np.ndarray:
    return correction(weights, sampling, Labelled(labels)).factors  # type: ignore[arg-type]


def test_weights__balanced_are_scikit_learns() -> None:
    expected = compute_class_weight("balanced", classes=np.arange(3), y=LABELS)
    assert factors("balanced").tolist() == expected.tolist()
    assert factors("none", "balanced").tolist() == expected.tolist()  # draws of each image in an epoch


@pytest.mark.parametrize("weights", ["balanced", "sqrt", {"emu": 5}, {"cat": 0.1, "dog": 3, "emu": 9.0}])
def test_weights__have_mean_1_over_the_images(weights: Any) -> None:
    assert factors(weights)[LABELS].mean() == pytest.approx(1, abs=1e-15)


def test_weights__keep_their_ratios() -> None:
    roots, table = factors("sqrt"), factors({"emu": 5})
    np.testing.assert_allclose(roots / roots[0], np.sqrt([1, 7 / 3, 7]), rtol=1e-15)
    np.testing.assert_allclose(table / table[0], [1, 1, 5], rtol=1e-15)


def test_weights__of_a_table_go_by_name_in_any_form() -> None:
    source = Labelled(LABELS, ("é", "ü", "z"))
    found = [correction({name: 5}, "shuffle", source).factors for name in ("é", "e\u0301")]  # type: ignore[arg-type]
    assert found[0].tolist() == found[1].tolist() != [1, 1, 1]


def test_note_and_provenance__name_the_ends() -> None:
    found = correction("none", "balanced", Labelled(LABELS))  # type: ignore[arg-type]
    assert found.note == (
        "data.sampling = balanced; images of each class x how often each image is drawn in an epoch: "
        "emu 1 x 3.67, dog 3 x 1.22, cat 7 x 0.524"
    )
    assert found.used == {
        "sampling": {
            "name": "balanced",
            "smallest": {"class": "emu", "images": 1, "draws_per_epoch": 11 / 3},
            "largest": {"class": "cat", "images": 7, "draws_per_epoch": 11 / 21},
        }
    }


@pytest.mark.parametrize(
    ("weights", "sampling", "labels", "said"),
    [
        (
            "balanced",
            "shuffle",
            LABELS[:1],
            "'balanced': 2 classes without training images \\(cat, dog\\); name",
        ),
        ("none", "balanced", LABELS[1:], "data.sampling = 'balanced': 1 class without training images"),
        ({"emo": 2.0}, "shuffle", LABELS, "loss.class_weights: there is no class 'emo'; did you mean emu"),
        ("sqrt", "shuffle", LABELS[:, None], "loss.class_weights: needs one label per image"),
    ],
)
def test_correction__refuses(weights: Any, sampling: str, labels: np.ndarray, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        factors(weights, sampling, labels)
