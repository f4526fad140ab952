"""Sixty mistakes of newcomers and of people from other programs: a line says where, what, and how to fix it.

What people who know vitctl mistype is in test_bad_inputs.py.
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Vitctl, words
from tests.docs.conftest import write_photos
from vitctl.cli.show.console import CONSOLE


class Mistake(NamedTuple):
    """What is typed, and pieces of the answer: where and what is wrong, how to fix it ("": unsaid)."""

    typed: str
    where: str
    what: str
    fix: str


TRAIN = "finetune --from run --data PHOTOS --dry-run"  # so that a mistake that is not seen costs little
ON = "finetune --from run --dry-run --data"
OF = "finetune --data PHOTOS --dry-run --from"
MISTAKES = [
    # Options of timm, Hugging Face's Trainer, MAE, peft, ultralytics
    Mistake(f"{TRAIN} --opt adamw", "finetune", "no such option --opt;", "--set optimizer.name=VALUE"),
    Mistake(f"{TRAIN} --warmup-epochs 5", "finetune", "--warmup-epochs", "--set schedule.warmup_epochs=5?"),
    Mistake(f"{TRAIN} --mixup 0.8", "finetune", "--mixup", "--set data.mixup_alpha=0.8?"),
    Mistake(f"{TRAIN} --smoothing 0.1", "finetune", "--smoothing", "--set loss.label_smoothing=0.1?"),
    Mistake(f"{TRAIN} --crop-pct 0.9", "finetune", "--crop-pct", "data.eval_resize=VALUE (size / crop_pct"),
    Mistake(f"{TRAIN} --pretrained", "finetune", "--pretrained", "--from VALUE"),
    Mistake(f"{TRAIN} --learning_rate 1e-4", "finetune", "--learning_rate", "--lr 1e-4?"),
    Mistake(f"{TRAIN} --num_train_epochs 3", "finetune", "--num_train_epochs", "--epochs 3?"),
    Mistake(f"{TRAIN} --per_device_train_batch_size 8", "finetune", "no such option", "--batch-size VALUE"),
    Mistake(f"{TRAIN} --train_dir PHOTOS", "finetune", "--train_dir", "--data VALUE (the folder above"),
    Mistake(f"{TRAIN} --output_dir out", "finetune", "--output_dir", "--out out?"),
    Mistake(f"{TRAIN} --save_steps 100", "finetune", "--save_steps", "--set checkpoint.every_steps=100?"),
    Mistake(f"{TRAIN} --bf16", "finetune", "--bf16", "--precision bf16?"),
    Mistake(f"{TRAIN} --fp16", "finetune", "--fp16", "machine.precision"),
    Mistake(f"{TRAIN} --blr 5e-4", "finetune", "--blr", "--lr VALUE (base x batch / 256)"),
    Mistake(f"{TRAIN} --layer_decay 0.65", "finetune", "--layer_decay", "--set optimizer.layer_decay=0.65"),
    Mistake(f"{TRAIN} --nb_classes 2", "finetune", "--nb_classes", "the data say how many"),
    Mistake(f"{TRAIN} --lora_r 8", "finetune", "--lora_r", "--set lora.rank=8?"),
    Mistake(f"{TRAIN} --imgsz 32", "finetune", "--imgsz", "--res 32?"),
    Mistake(f"{TRAIN} --freeze_backbone", "finetune", "--freeze_backbone", "--freeze backbone?"),
    Mistake(f"{TRAIN} --resume run", "finetune", "--resume", "type `vitctl resume RUN`"),
    Mistake(f"{TRAIN} --gpus 2", "finetune", "--gpus", "--processes 2?"),
    # Commands and their arguments
    Mistake("train --data PHOTOS", "", "no such command train", "did you mean pretrain or finetune?"),
    Mistake("fine-tune --data PHOTOS", "", "no such command fine-tune", "did you mean finetune?"),
    Mistake("test --from run --data PHOTOS", "", "no such command test", "did you mean evaluate?"),
    Mistake("data shard PHOTOS out", "data", "no such command shard", "did you mean shards?"),
    Mistake("finetune PHOTOS", "finetune", "unexpected argument: PHOTOS", "did you mean --data PHOTOS?"),
    Mistake("predict", "predict", "missing argument IMAGES", "see: vitctl predict --help"),
    Mistake("export --from run --to tflite", "--to", "tflite cannot be written", "choose from onnx"),
    Mistake("compare run", "run", "at least two runs", "give at least two"),
    # Values
    Mistake(f"{TRAIN} --lr fast", "--lr fast", "write numbers with commas", ""),
    Mistake(f"{TRAIN} --lr 0", "--lr", "optimizer.lr = 0.0 is not allowed", "greater than 0"),
    Mistake(f"{TRAIN} --epochs 0", "--epochs 0", "should be above 0", "omit --epochs"),
    Mistake(f"{TRAIN} --batch-size -8", "--batch-size", "-8 is not allowed", "greater than or equal to 0"),
    Mistake("export --from RUN --opset=", "--opset ''", "should be a valid integer", "vitctl export --help"),
    Mistake(f"{TRAIN} --steps --seed 1", "--steps --seed", "should be a valid", "vitctl finetune --help"),
    Mistake(f"{TRAIN} --steps 2.5", "--steps 2.5", "should be a valid integer", "vitctl finetune --help"),
    Mistake(f"{TRAIN} --epochs 5 --steps 9", "--epochs 5", "both set the length", "give one of them"),
    Mistake(f"{TRAIN} --res 2", "image_size 2", "patch_size 4 is larger", ""),
    Mistake(f"{TRAIN} --precision float16", "--precision", "is not allowed", "should be 'auto', 'bf16'"),
    Mistake(f"{TRAIN} --set optimizer.name=rmsprop", "--set", "'rmsprop' is not allowed", "'adam', 'sgd'"),
    Mistake(f"{TRAIN} --set data.flip=True", "--set", "'True' is not allowed", "a valid boolean"),
    Mistake(f"{TRAIN} --set optimizer.lr 0.1", "finetune", "argument: 0.1", "--set optimizer.lr=0.1?"),
    Mistake(f"{TRAIN} --set lr=0.1", "--set", "unknown key lr", "did you mean optimizer.lr?"),
    # Recipes
    Mistake(f"{TRAIN} --recipe mae-b16", "", "no recipe is called 'mae-b16'", "did you mean mae_b16"),
    Mistake(f"{TRAIN} --recipe gone.toml", "gone.toml", "no such recipe file", "`vitctl recipes list --all`"),
    Mistake(f"{TRAIN} --recipe mine.toml", "mine.toml:3", "unknown key optimiser", "did you mean optimizer?"),
    Mistake("pretrain -r finetune --data PHOTOS", "'finetune'", "not for `vitctl pre", "`vitctl finetune`"),
    # Data
    Mistake(f"{ON} PHOTO", "PHOTO", "no such folder", "did you mean PHOTOS?"),
    Mistake(f"{ON} PHOTOS:test", "PHOTOS:test", "no such", "--data PHOTOS --set data.train_split=test"),
    Mistake(f"{ON} PHOTOS:train", "", "no such folder", "give --data PHOTOS"),
    Mistake("evaluate --from run --data PHOTOS:val", "", "no such folder", "give --data PHOTOS --split val"),
    Mistake("data check PHOTOS:test", "PHOTOS:test", "no such folder", "did you mean PHOTOS?"),
    Mistake(f"{ON} elsewhere", "elsewhere", "no such folder", "--data takes a folder of class folders"),
    Mistake(f"{ON} flat", "flat", "holds no", "class folders"),
    Mistake(f"{ON} texts", "texts", "no images found", "<class>/<image>"),
    Mistake(f"{ON} columns.csv", "columns.csv", "columns are file_id,kind", "path,label"),
    Mistake(f"{ON} lost.csv", "lost.csv", "1 of 7 files are missing", "PHOTOS/cat/99.jpg"),
    Mistake(f"{ON} cut.zip", "cut.zip", "cannot be unpacked", ""),
    Mistake(f"{ON} differ", "differ", "with the classes", "--drop-class owl"),
    Mistake(f"{ON} http://127.0.0.1:1/x.tar", "http://127.0.0.1:1/x.tar", "could not be", "leave --data out"),
    Mistake("finetune --from run --data hurt", "hurt", "1 image cannot be used", "--bad skip"),
    Mistake("evaluate --from run --data PHOTOS", "model.safetensors", "6 classes", "fine-tune on this data"),
    # Weights
    Mistake(f"{OF} vit_base_patch16_224", "vit_base", "no such weights", "timm:vit_base_patch16_224?"),
    Mistake(f"{OF} cut.safetensors", "cut.safetensors", "damaged or truncated", "copy it again"),
    Mistake(f"{OF} resnet.safetensors", "resnet.safetensors", "unknown weights format", "supported: vitctl,"),
    Mistake(f"{OF} whole.pt", "whole.pt", "more than tensors", "convert it to safetensors"),
    # Outputs and runs
    Mistake("resume PHOTOS", "PHOTOS", "not a run folder", "`vitctl runs` lists"),
    Mistake("finetune --from run --data PHOTOS --out a.txt", "a.txt", "is a file", "folder"),
    Mistake("finetune --from run --data PHOTOS --out PHOTOS", "PHOTOS", "not a run", "--out"),
    Mistake("finetune --from run --data PHOTOS --out /proc/x", "/proc", "cannot write", "choose another"),
]  # fmt: skip


@pytest.fixture(scope="module")
def world(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, photographs in class folders, and what is none of them or damaged."""
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(pretrained, root / "run")
    write_photos(root / "PHOTOS", ("cat", "dog"), 3)
    write_photos(root / "differ" / "train", ("cat", "dog"), 1)
    write_photos(root / "differ" / "val", ("cat", "owl"), 1)
    shutil.copytree(root / "PHOTOS" / "cat", root / "flat")
    shutil.copytree(root / "PHOTOS", root / "hurt")
    image = root / "hurt" / "cat" / "IMG_0000.jpg"
    image.write_bytes(image.read_bytes()[:300])
    (root / "texts" / "cat").mkdir(parents=True)
    (root / "texts" / "cat" / "a.txt").write_text("a cat\n")
    rows = [f"PHOTOS/{name}/IMG_000{number}.jpg,{name}\n" for name in ("cat", "dog") for number in range(3)]
    (root / "columns.csv").write_text("".join(["file_id,kind\n", *rows]))
    (root / "lost.csv").write_text("".join(["path,label\n", "PHOTOS/cat/99.jpg,cat\n", *rows]))
    (root / "cut.zip").write_bytes(b"PK\x03\x04" + bytes(60))
    (root / "a.txt").write_text("milk\n")
    (root / "mine.toml").write_text('extends = "finetune"\n[optimiser]\nlr = 0.1\n')
    save_file({"conv1.weight": torch.zeros(4, 3, 3, 3)}, root / "resnet.safetensors")
    torch.save(torch.nn.Linear(2, 2), root / "whole.pt")
    weights = next(root.rglob("model.safetensors")).read_bytes()
    (root / "cut.safetensors").write_bytes(weights[:5000])
    return root


@pytest.fixture
def typed(world: Path, vitctl: Vitctl, monkeypatch: pytest.MonkeyPatch) -> Vitctl:
    """`vitctl` as typed in that folder."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(CONSOLE, "width", 200)
    return vitctl


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_mistake__is_answered(mistake: Mistake, typed: Vitctl) -> None:
    answer = typed(*words(mistake.typed))
    said = answer.err.splitlines()[-1]
    assert answer.code == 2 and said.startswith("vitctl: ") and "Traceback" not in said
    assert [part for part in mistake[1:] if part not in said] == [], said


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [one for one in MISTAKES if one.fix.endswith("?") and "--" in one.fix])
def test_mistake__its_proposal_works(mistake: Mistake, typed: Vitctl) -> None:
    """In the place of the option, with its value, that is not known; or of the last words."""
    said = typed(*words(mistake.typed)).err.splitlines()[-1]
    [proposal] = re.findall(r"did you mean (--.*)\?", said)
    given = mistake.typed.split()
    wrong = next((word for word in given if f"no such option {word};" in said), "--set")
    kept = given[: given.index(wrong) if wrong in given else 1]
    start = [] if "--from" in kept else ["--from", "run", "--dry-run"]
    small = [] if "batch" in proposal else ["--batch-size", "2"]  # there are a few images
    assert typed(*kept, *start, *small, *words(proposal)).code == 0
