"""Reads tables_1_3_4.txt, the transcription of the paper's settings, and says which recipe each row stands
for.
"""

import itertools
import re
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parent / "tables_1_3_4.txt"
DATA = {
    "JFT-300M": ("jft", "jft300m"),
    "ImageNet-21k": ("in21k", "imagenet21k"),
    "ImageNet": ("in1k", "imagenet"),
}
USUAL_EPOCHS = {"JFT-300M": 7, "ImageNet-21k": 90, "ImageNet": 300}
FINETUNE = {
    "ImageNet": "imagenet",
    "CIFAR-100": "cifar100",
    "CIFAR-10": "cifar10",
    "Oxford-IIIT-Pets": "pets",
    "Oxford-Flowers-102": "flowers102",
}


class PretrainRow(NamedTuple):
    """A row of Table 3 for one model and one length."""

    model: str
    dataset: str
    epochs: int
    lr: float
    decay: str
    weight_decay: float
    dropout: float


def table_rows(number: int) -> list[list[str]]:
    """The cells of a table, without its caption and header."""
    block = next(part for part in FILE.read_text().split("\n\n") if part.startswith(f"Table {number}"))
    return [line.split() for line in block.splitlines()[2:]]


def _spread(text: str) -> list[str]:
    """a{b,c} -> ab, ac."""
    parts = [part.split(",") for part in re.split(r"[{}]", text)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


def _recipe(model: str, dataset: str, epochs: int) -> str:
    short = model.replace("ViT-", "").replace("/", "").replace("+", "_").lower()
    usual = epochs == USUAL_EPOCHS[dataset] or model == "ViT-H/14"
    return f"{DATA[dataset][0]}_{short}" + ("" if usual else f"_{epochs}ep")


def _table_3() -> dict[str, PretrainRow]:
    rows = {}
    for models, dataset, lengths, lr, decay, weight_decay, dropout in table_rows(3):
        for model, epochs in itertools.product(_spread(models), map(int, lengths.split("/"))):
            row = PretrainRow(
                model.replace("ViT-", ""),
                DATA[dataset][1],
                epochs,
                float(lr),
                decay,
                float(weight_decay),
                float(dropout),
            )
            rows[_recipe(model, dataset, epochs)] = row
    return rows


def _table_4() -> dict[str, tuple[str, int, tuple[float, ...]]]:
    return {
        f"finetune_{FINETUNE[dataset]}": (FINETUNE[dataset], int(steps), tuple(map(float, _spread(lrs))))
        for dataset, steps, lrs in table_rows(4)
        if dataset in FINETUNE
    }


TABLE_3 = _table_3()
TABLE_4 = _table_4()
