"""Few-shot at the size of ImageNet with 10 images per class, beside scikit-learn: `python benchmarks/ridge.py`.

10,000 images x 1,024 features, 1,000 classes, 30 regularisers, float64. scikit-learn's RidgeClassifier is fitted anew for each
regulariser, as its users do; the matrix that it gets is already standardised and has the constant column, so that both solve
the same problem. `--sklearn 3` fits only so many of them and multiplies, which is said.
"""

import argparse
import os
import platform
import time

import numpy as np
import sklearn
import torch
from sklearn.linear_model import RidgeClassifier

from vitctl.engine.ridge import BIAS, L2_GRID, decompose

NUM_TEST = 1000


def main() -> None:
    """Measure, compare the answers, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--sklearn", type=int, default=len(L2_GRID), help="regularisers that scikit-learn fits")
    given = parser.parse_args()
    train, labels, test = draw(given.images, given.features, given.classes)

    began, cpu = time.perf_counter(), time.process_time()
    ridge = decompose(train, labels, num_classes=given.classes)
    own = [ridge.weights(l2) for l2 in L2_GRID]
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu

    mean, std = ridge.mean, ridge.std
    x, x_test = (torch.cat([(t - mean) / std, torch.full((len(t), 1), BIAS)], dim=1).numpy() for t in (train, test))
    chosen = [round(i) for i in np.linspace(0, len(L2_GRID) - 1, given.sklearn)]
    worst, same, spent, spent_cpu = 0.0, 0, 0.0, 0.0
    for i in chosen:
        began, begun = time.perf_counter(), time.process_time()
        peer = RidgeClassifier(alpha=L2_GRID[i], fit_intercept=False).fit(x, labels.numpy())
        spent, spent_cpu = spent + time.perf_counter() - began, spent_cpu + time.process_time() - begun
        scores = ridge.scores(ridge.project(test), L2_GRID[i]).numpy()
        worst = max(worst, float(np.abs(scores - x_test @ peer.coef_.T).max()))
        assert np.allclose(own[i].numpy().T, peer.coef_, atol=1e-6)
        same += int((scores.argmax(axis=1) == peer.predict(x_test)).sum())
    whole, whole_cpu = (value * len(L2_GRID) / len(chosen) for value in (spent, spent_cpu))

    print(f"{platform.platform()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}, scikit-learn {sklearn.__version__}")  # fmt: skip
    print(f"{given.images:,} x {given.features:,} features, {given.classes:,} classes, {len(L2_GRID)} regularisers\n")
    print("| solver | seconds for all regularisers | of them on the processor |\n|---|---|---|")
    print(f"| vitctl, one decomposition | {seconds:.1f} | {cpu:.1f} |")
    said = "" if len(chosen) == len(L2_GRID) else f" ({len(chosen)} fitted in {spent:.1f} s, multiplied)"
    print(f"| scikit-learn RidgeClassifier, one fit each | {whole:.1f}{said} | {whole_cpu:.1f} |\n")
    print(f"ratio {whole / seconds:.1f}, on the processor {whole_cpu / cpu:.1f}; largest difference of a score {worst:.1e}; "
          f"same answer for {same:,} of {NUM_TEST * len(chosen):,} test images")  # fmt: skip


def draw(num: int, width: int, num_classes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images of each class around a centre of its own."""
    generator = torch.Generator().manual_seed(0)
    torch.set_default_dtype(torch.float64)
    labels = torch.arange(num) % num_classes
    centres = torch.randn(num_classes, width, generator=generator)
    train = centres[labels] + 3 * torch.randn(num, width, generator=generator)
    test = centres[torch.arange(NUM_TEST) % num_classes] + 3 * torch.randn(NUM_TEST, width, generator=generator)
    return train, labels, test


if __name__ == "__main__":
    main()
