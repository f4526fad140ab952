"""`vitctl probe` beside DINOv2's own code, on random features: `python benchmarks/probe.py DINOV2`.

DINOV2 is a clone of github.com/facebookresearch/dinov2. Its k-NN module runs in one process, in float32 as it
is and in float64, and gives a class by argmax. Its linear layers are trained here as its script trains them,
without its images and its GPU: with its modules, SGD and schedule, from the weights that vitctl starts from.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vitctl.engine.probes import C_GRID, drawn, linear, logistic, nearest, predicted, vote
from vitctl.engine.runtime import start
from vitctl.jobs.probe import heads_of, held_out
from vitctl.models.variants import variant

KS = (10, 20, 100, 200)
TEMPERATURE = 0.07
CLASSES = 50
LRS, STEPS, BATCH = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1), 500, 128


def main() -> None:
    """Print the table of k-NN, then that of the linear layers."""
    sys.path.insert(0, sys.argv[1])
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    neighbours()
    print()
    layers()
    print()
    regression()


def layers() -> None:
    """Print a row for each input of the linear layers."""
    from dinov2.eval.linear import AllClassifiers, LinearClassifier, create_linear_input, scale_lr

    generator = torch.Generator().manual_seed(0)
    width, patches = 24, 9
    labels, test_labels = (torch.randint(CLASSES, (n,), generator=generator) for n in (4_000, 1_000))
    centres = torch.randn(CLASSES, 4, patches + 1, width, generator=generator)

    def tokens(of: Tensor) -> list[tuple[Tensor, Tensor]]:
        states = centres[of] + 4 * torch.randn(len(of), 4, patches + 1, width, generator=generator)
        return [(state[:, 1:], state[:, 0]) for state in states.unbind(1)]  # as its feature model gives them

    train, test = tokens(labels), tokens(test_labels)
    ours = [torch.cat([*(token for _, token in part), part[-1][0].mean(1)], 1) for part in (train, test)]
    config = variant("S/16", hidden_size=width, num_heads=1, classifier="token_patches", token_blocks=4)
    heads = heads_of(config, (1, 4))
    how = {"num_classes": CLASSES, "seed": 0, "momentum": 0.9, "device": torch.device("cpu")}
    batches = [drawn(0, len(labels), BATCH, step) for step in range(STEPS)]
    rates = [scale_lr(lr, BATCH) for lr in LRS]
    inputs = [head.features for head in heads]
    print(
        "| type | input | largest difference of a weight | other classes of 13,000 | best, DINOv2 | vitctl |"
    )
    print("|---|---|---|---|---|---|")
    for dtype in (torch.float32, torch.float64):
        about = {"steps": STEPS, "inputs": inputs, "dtype": dtype, **how}
        start = linear(ours[0], labels, rates, batches=[], **about)
        made = linear(ours[0], labels, rates, batches=batches, **about)
        theirs = AllClassifiers({})
        groups = []
        for head, first in zip(heads, start, strict=True):
            blocks, joins = int(head.name[0]), "patches" in head.name
            size = create_linear_input(train, use_n_blocks=blocks, use_avgpool=joins).shape[1]
            for number, rate in enumerate(rates):
                layer = LinearClassifier(size, blocks, joins, CLASSES).to(dtype)
                layer.linear.load_state_dict({"weight": first[number, :-1].T, "bias": first[number, -1]})
                theirs.classifiers_dict[f"{blocks} {joins} {number}"] = layer
                groups.append({"params": layer.parameters(), "lr": rate})
        solver = torch.optim.SGD(groups, momentum=0.9, weight_decay=0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(solver, STEPS, eta_min=0)
        for one in theirs.modules():  # their input is cast to float32: for float64 it is cast back
            if isinstance(one, nn.Linear):
                one.register_forward_pre_hook(lambda layer, x: (x[0].to(layer.weight.dtype),))
        for at in batches:
            outputs = theirs([(some[at], token[at]) for some, token in train])
            loss = sum(nn.functional.cross_entropy(scores, labels[at]) for scores in outputs.values())
            solver.zero_grad()
            loss.backward()
            solver.step()
            schedule.step()
        with torch.no_grad():
            answers = {name: scores.argmax(1) for name, scores in theirs(test).items()}
        for head, of_head in zip(heads, made, strict=True):
            key = f"{head.name[0]} {'patches' in head.name}"
            other, difference, shares = 0, 0.0, []
            for number, layer in enumerate(of_head):
                their_layer = theirs.classifiers_dict[f"{key} {number}"].linear
                difference = max(difference, float((their_layer.weight.detach().T - layer[:-1]).abs().max()))
                classes = predicted(ours[1][:, head.features], layer)
                other += int((classes != answers[f"{key} {number}"]).sum())
                right = [
                    (some == test_labels).double().mean() for some in (answers[f"{key} {number}"], classes)
                ]
                shares.append([float(share) for share in right])
            best = [f"{max(column):.2%}" for column in zip(*shares, strict=True)]
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {head.name} | {difference:.1e} | {other} | {' | '.join(best)} |")


def regression() -> None:
    """Print a row for each set: the choice of C with exact and with rough solutions, in this process."""
    from sklearn.datasets import load_digits, load_iris, load_wine

    generator = torch.Generator().manual_seed(0)
    sets = {"digits, 200": load_digits(), "iris": load_iris(), "wine": load_wine()}
    data = {
        name: (torch.tensor(one.data)[:200], torch.tensor(one.target)[:200]) for name, one in sets.items()
    }
    classes = torch.arange(300) % 8
    centres = torch.randn(8, 32, generator=generator)
    data["normal, 8 classes"] = (centres[classes] + 3 * torch.randn(300, 32, generator=generator), classes)
    print("| set | other numbers of correct answers of 45 | C, exact | C, rough | time of rough / exact |")
    print("|---|---|---|---|---|")
    for name, (rows, labels) in data.items():
        rows = ((rows - rows.mean(0)) / rows.std(0).clamp(min=1e-6)).float()
        held = held_out(labels.numpy(), 0.1, 0)
        counts, times = [], []
        for rough in (False, True):
            begun, layer, right = time.process_time(), None, []
            for c in C_GRID:
                how = {"num_classes": int(labels.max()) + 1, "start": layer, "rough": rough}
                layer = logistic(rows[~held], labels[~held], c, **how)
                right.append(int((predicted(rows[held], layer) == labels[held]).sum()))
            times.append(time.process_time() - begun)
            counts.append(right)
        other = sum(one != two for one, two in zip(*counts, strict=True))
        chosen = " | ".join(f"{C_GRID[right.index(max(right))]:.3g}" for right in counts)
        print(f"| {name} | {other} | {chosen} | {times[1] / times[0]:.2f} |", flush=True)


def neighbours() -> None:
    """Print a row for each type of numbers and number of neighbours."""
    from dinov2.eval.knn import KnnModule

    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, 384, generator=generator)
    labels, test_labels = (torch.randint(CLASSES, (n,), generator=generator) for n in (20_000, 5_000))
    train, test = (
        centres[of] + 4 * torch.randn(len(of), 384, generator=generator) for of in (labels, test_labels)
    )
    print("| type | k | images | other classes | accuracy, DINOv2 | accuracy, vitctl |")
    print("|---|---|---|---|---|---|")
    runtime = start(precision="float64", device="cpu", processes=1)
    for dtype in (torch.float32, torch.float64):
        unit = [torch.nn.functional.normalize(part.to(dtype), dim=1) for part in (train, test)]
        theirs = KnnModule(unit[0], labels, KS, TEMPERATURE, "cpu", num_classes=CLASSES)(unit[1])
        similarities, places = nearest(train, test, max(KS), dtype=dtype, runtime=runtime)
        ours = vote(similarities, labels[places], KS, num_classes=CLASSES, temperature=TEMPERATURE)
        for k in KS:
            their_classes = theirs[k].argmax(dim=1)
            rates = [f"{(some == test_labels).double().mean():.4%}" for some in (their_classes, ours[k])]
            other = int((their_classes != ours[k]).sum())
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {k} | {len(test)} | {other} | {' | '.join(rates)} |")


if __name__ == "__main__":
    main()
