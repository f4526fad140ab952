"""k-NN of `vitctl probe` beside DINOv2's own module, on random features: `python benchmarks/probe.py DINOV2`.

DINOV2 is a clone of github.com/facebookresearch/dinov2. Its module runs in one process, in float32 as it is
and in float64, and gives a class by argmax.
"""

import sys

import torch
import torch.distributed as dist

from vitctl.engine.probes import nearest, vote

KS = (10, 20, 100, 200)
TEMPERATURE = 0.07
CLASSES = 50


def main() -> None:
    """Print a row for each type of numbers and number of neighbours."""
    sys.path.insert(0, sys.argv[1])
    from dinov2.eval.knn import KnnModule

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 384, generator=generator)
    labels, test_labels = (torch.randint(CLASSES, (n,), generator=generator) for n in (20_000, 5_000))
    train, test = (
        centres[of] + 4 * torch.randn(len(of), 384, generator=generator) for of in (labels, test_labels)
    )
    print("| type | k | images | other classes | accuracy, DINOv2 | accuracy, vitctl |")
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.float64):
        unit = [torch.nn.functional.normalize(part.to(dtype), dim=1) for part in (train, test)]
        theirs = KnnModule(unit[0], labels, KS, TEMPERATURE, "cpu", num_classes=CLASSES)(unit[1])
        similarities, places = nearest(train, test, max(KS), dtype=dtype, device=torch.device("cpu"))
        ours = vote(similarities, labels[places], KS, num_classes=CLASSES, temperature=TEMPERATURE)
        for k in KS:
            their_classes = theirs[k].argmax(dim=1)
            rates = [f"{(some == test_labels).double().mean():.4%}" for some in (their_classes, ours[k])]
            other = int((their_classes != ours[k]).sum())
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {k} | {len(test)} | {other} | {' | '.join(rates)} |")


if __name__ == "__main__":
    main()
