"""Few-shot at the size of ImageNet with 10 images per class, beside scikit-learn: `python
benchmarks/ridge.py`.

10,000 images x 1,024 features, 1,000 classes, 30 regularisers, float64. scikit-learn's RidgeClassifier is
fitted anew for each regulariser, as its users do; the matrix that it gets is already standardised and has the
constant column, so that both solve the same problem. The answers are held against each other. `--sklearn 3`
fits only so many of them and multiplies, which is said.
"""

from functools import partial

import numpy as np
import torch
from measure import Machine, Numbers, Row, Side, clock, rate, report, script_options, take_turns
from sklearn.linear_model import RidgeClassifier

from vitctl.engine.fewshot_ridge import BIAS, L2_GRID, Ridge, decompose

NUM_TEST = 1000
LIBRARIES = ("vitctl", "torch", "numpy", "scikit-learn")


def main() -> None:
    """Measure, compare the answers, print, and write results/ridge.json."""
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument(
        "--sklearn", type=int, default=len(L2_GRID), help="regularisers that scikit-learn fits"
    )
    given = parser.parse_args()
    machine = Machine()
    problem = Problem(given.images, given.features, given.classes)
    chosen = [round(i) for i in np.linspace(0, len(L2_GRID) - 1, given.sklearn)]
    sides = {"ours": partial(ours, problem), "theirs": partial(theirs, problem, chosen)}
    found = take_turns(sides, given.rounds)
    size = f"{given.images:,} x {given.features:,}, {given.classes:,} classes, {len(L2_GRID)} regularisers"
    said = "" if len(chosen) == len(L2_GRID) else f", {len(chosen)} fitted and multiplied"
    own, other = (
        Side("one decomposition", found["ours"]),
        Side(f"RidgeClassifier, one fit each{said}", found["theirs"]),
    )
    row = Row(f"few-shot solve, {size}", "wall", "less", own, other, 10.0, compare(problem, chosen))
    report("ridge", [row], machine, {"float64_tflops": matrix_rate()}, LIBRARIES, given.results)


class Problem:
    """Images of each class around a centre of its own, and what both sides know of them."""

    def __init__(self, num: int, width: int, num_classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        centres = torch.randn(num_classes, width, generator=generator, dtype=torch.float64)
        self.num_classes, self.labels = num_classes, torch.arange(num) % num_classes
        self.train, self.test = (
            centres[labels] + 3 * torch.randn(len(labels), width, generator=generator, dtype=torch.float64)
            for labels in (self.labels, torch.arange(NUM_TEST) % num_classes)
        )
        self.ridge: Ridge = decompose(self.train, self.labels, num_classes=num_classes)
        self.x, self.x_test = (
            torch.cat([(t - self.ridge.mean) / self.ridge.std, t.new_full((len(t), 1), BIAS)], dim=1).numpy()
            for t in (self.train, self.test)
        )


def ours(problem: Problem) -> Numbers:
    """One decomposition, and the weights of every regulariser."""
    numbers = Numbers()
    with clock(numbers):
        ridge = decompose(problem.train, problem.labels, num_classes=problem.num_classes)
        for l2 in L2_GRID:
            ridge.weights(l2)
    return numbers


def theirs(problem: Problem, chosen: list[int]) -> Numbers:
    """A fit for each of the chosen regularisers, multiplied to all of them."""
    numbers = Numbers()
    with clock(numbers):
        for i in chosen:
            RidgeClassifier(alpha=L2_GRID[i], fit_intercept=False).fit(problem.x, problem.labels.numpy())
    return {name: value * len(L2_GRID) / len(chosen) for name, value in numbers.items()}


def compare(problem: Problem, chosen: list[int]) -> dict[str, float]:
    """How far the answers of the two are apart, for the first and the last of the chosen regularisers."""
    worst, same, ends = 0.0, 0, sorted({chosen[0], chosen[-1]})
    for i in ends:
        peer = RidgeClassifier(alpha=L2_GRID[i], fit_intercept=False).fit(problem.x, problem.labels.numpy())
        assert np.allclose(problem.ridge.weights(L2_GRID[i]).numpy().T, peer.coef_, atol=1e-6)
        scores = problem.ridge.scores(problem.ridge.project(problem.test), L2_GRID[i]).numpy()
        worst = max(worst, float(np.abs(scores - problem.x_test @ peer.coef_.T).max()))
        same += int((scores.argmax(axis=1) == peer.predict(problem.x_test)).sum())
    return {"largest difference of a score": worst, "share of equal answers": same / (NUM_TEST * len(ends))}


def matrix_rate() -> float:
    """TFLOP/s of a float64 matrix product on random numbers."""
    a = torch.randn(1024, 1024, dtype=torch.float64)
    return rate(lambda: a @ a, 2e-12 * 1024**3)


if __name__ == "__main__":
    main()
