"""What people type by mistake: one line that says what is wrong, code 2, and nothing written that refuses the
corrected command.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from tests.cli.conftest import Vitctl, words
from tests.conftest import TINY
from tests.matrix import few
from vitctl.cli.show.console import CONSOLE
from vitctl.engine.journal import read_run_json
from vitctl.launch.prepare_run import prepare_run
from vitctl.launch.worker import work
from vitctl.recipe.load import Override, load_recipe


class Slip(NamedTuple):
    """A command, a piece of what it says, and the command as it was meant.

    "" where nothing is to be typed.
    """

    typed: str
    said: str
    meant: str = ""


PRETRAIN = "pretrain -r tiny.toml --data shards"
EVALUATE = "evaluate --from run --data shards --out e"
SLIPS = [
    # Words
    Slip("pretrian -r smoke", "no such command pretrian; did you mean pretrain?"),
    Slip("pretrain", "pretrain: missing option --recipe", "pretrain -r smoke --dry-run"),
    Slip("pretrain -r", "pretrain: -r: needs a value"),
    Slip("pretrain smoke", "pretrain: missing option --recipe", "pretrain -r smoke --dry-run"),
    Slip("pretrain -r smoke --recipee tiny", "no such option --recipee; did you mean --recipe VALUE?",
         "pretrain -r smoke --dry-run"),
    Slip("-r smoke pretrain", "no such option -r"),
    Slip("data shards photos", "missing argument OUT", "data shards photos new"),
    Slip("data shards photos new --workers 2 --workers x", "--workers x: should be a valid integer"),
    Slip("data shards my photos new", "unexpected argument: ", "data shards 'my photos' new"),
    Slip("resume", "missing argument RUN"),
    Slip("compare run", "give at least two runs to compare"),
    # Recipes
    Slip("pretrain -r smok --out new", "did you mean smoke?", "pretrain -r smoke --dry-run --out new"),
    Slip("pretrain -r jft_H14 --dry-run", "did you mean jft_h14", "pretrain -r jft_h14 --dry-run"),
    Slip("pretrain -r finetune --out new", "is for `vitctl finetune`, not for `vitctl pretrain`"),
    Slip("finetune -r smoke --from run", "is for `vitctl pretrain`, not for `vitctl finetune`"),
    Slip("pretrain -r missing.toml", "missing.toml: no such recipe file"),
    Slip("pretrain -r shards", "no recipe is called 'shards'"),
    Slip("pretrain -r torn.toml", "torn.toml: not valid TOML"),
    Slip("pretrain -r latin1.toml", "latin1.toml: not UTF-8 text"),
    Slip("pretrain -r photos/cat/0.png", "not UTF-8 text"),
    Slip("pretrain -r misspelt.toml --data shards", "unknown key optimizer.lrr; did you mean optimizer.lr?"),
    Slip("recipes show d4", "no recipe is called 'd4'", "sweep d4 --dry-run"),
    Slip("recipes explain optimiser.lr", "did you mean optimizer.lr", "recipes explain optimizer.lr"),
    Slip("recipes explain ''", "no recipe has a key ''"),
    Slip("recipes table 17", "17", "recipes table 2"),
    # Values
    Slip(f"{PRETRAIN} --set lr=0.1", "did you mean optimizer.lr?", f"{PRETRAIN} --set optimizer.lr=0.1 "
                                                                   f"--dry-run"),
    Slip(f"{PRETRAIN} --set optimizer.lr", "write it as section.key=value"),
    Slip(f"{PRETRAIN} --set optimizer.lr 0.1", "unexpected argument: "),
    Slip(f"{PRETRAIN} --set optimizer.lr=-1 --out new", "optimizer.lr = -1 is not allowed",
         f"{PRETRAIN} --out new --dry-run"),
    Slip(f"{PRETRAIN} --set optimizer.lr=1e-3x", "optimizer.lr = '1e-3x' is not allowed"),
    Slip(f"{PRETRAIN} --set optimizer.lr=nan", "should be a finite number"),
    Slip(f"{PRETRAIN} --set optimizer=adam", "optimizer is a section, not a value"),
    Slip(f"{PRETRAIN} --set schedule.total_steps=10k", "schedule.total_steps = '10k' is not allowed"),
    Slip(f"{PRETRAIN} --set schedule.total_steps=1e4", "write 10000",
         f"{PRETRAIN} --set schedule.total_steps=10000 --dry-run"),
    Slip(f"{PRETRAIN} --set schedule.batch_size=16.5", "schedule.batch_size = 16.5 is not allowed"),
    Slip(f"{PRETRAIN} --set schedule.batch_size=0", "schedule.batch_size = 0 is not allowed"),
    Slip(f"{PRETRAIN} --set data.flip=yes", "data.flip = 'yes' is not allowed"),
    Slip(f"{PRETRAIN} --set data.flip=True", "data.flip = 'True' is not allowed"),
    Slip(f"{PRETRAIN} --set model.name=b/16", "did you mean 'B/16'?"),
    Slip(f"{PRETRAIN} --set model.name=B16", "did you mean 'B/16'?"),
    Slip(f"{PRETRAIN} --set log.trackers=tensorbord --out new", "tensorbord", f"{PRETRAIN} --out new --set "
                                                                              f"log.trackers=tensorboard"),
    Slip(f"{PRETRAIN} --res 16px", "--res 16px: "),
    Slip(f"{PRETRAIN} --res -16", "is not allowed"),
    Slip(f"{PRETRAIN} --res 2", "patch_size 4 is larger than image_size 2"),
    Slip(f"{PRETRAIN} --res 10000000 --out new", "image_size must be a whole number from 1 to 16,384",
         f"{PRETRAIN} --out new"),
    Slip(f"{PRETRAIN} --seed -1", "seed = -1 is not allowed"),
    Slip(f"{PRETRAIN} --processes 0", "machine.processes = 0 is not allowed"),
    Slip(f"{PRETRAIN} --restarts -1", "--restarts -1: should be "),
    Slip(f"{PRETRAIN} --restarts -1 --dry-run", "--restarts -1: should be "),
    Slip(f"{PRETRAIN} --nodes 3@gpu01:29400 --processes 2 --out new --dry-run", "give a multiple of 3"),
    Slip(f"{PRETRAIN} --precision fp16", "machine.precision = 'fp16' is not allowed"),
    # Data
    Slip("pretrain -r tiny.toml --data ''", "--data '': is empty"),
    Slip("pretrain -r tiny.toml --out new", "no data was given", f"{PRETRAIN} --out new --dry-run"),
    Slip(f"{PRETRAIN} --dataset digits", "both name the source of the images"),
    Slip(f"{PRETRAIN} --synthetic", "both name the source of the images"),
    Slip("pretrain -r tiny.toml --dataset cifar", "did you mean cifar10 or cifar100?"),
    Slip("pretrain -r tiny.toml --dataset Digit", "did you mean digits"),
    Slip("pretrain -r tiny.toml --data photos --nodes 2@gpu01:29400 "
         "--out new", "convert them first with `vitctl data shards", PRETRAIN),
    Slip("pretrain -r tiny.toml --data empty", "empty: is empty; should be a folder of shards"),
    Slip("pretrain -r tiny.toml --data notes.txt", "notes.txt"),
    Slip("pretrain -r tiny.toml --data shard", "shard: "),
    Slip("pretrain -r tiny.toml --data htp://x/y", "htp://"),
    Slip("pretrain -r tiny.toml --data halved", "samples.npy"),
    Slip(f"{PRETRAIN} --set data.train_split=trian --out new", "has no split 'trian'",
         f"{PRETRAIN} --out new --dry-run"),
    Slip("data shards missing new", "missing", "data shards photos new"),
    Slip("data shards empty new", "empty", "data shards photos new"),
    Slip("data shards notes.txt new", "notes.txt"),
    Slip("data shards photos notes.txt", "notes.txt"),
    Slip("data shards photos shards", "shards"),
    Slip("data shards photos new --quality 500", "--quality 500: ", "data shards photos new"),
    Slip("data index empty", "no .tar files here"),
    Slip("data index missing.tar", "missing.tar"),
    Slip("data index shards/train --classes notes.bin", "notes.bin: "),
    Slip("data check nothing", "nothing"),
    Slip("data show shards sheet.jpg", "should be the name of a .png file", "data show shards new/sheet.png"),
    Slip("data show shards notes.txt/sheet.png", "notes.txt"),
    Slip("data show shards sheet.png --split val", "has no split 'val'"),
    Slip("data dedup shards --against missing", "missing"),
    Slip("data prepare cifr10", "did you mean cifar10"),
    # Runs and weights
    Slip("evaluate --data shards", "no finished", EVALUATE),
    Slip("evaluate --from nowhere --data shards --out e", "nowhere: no such weights", EVALUATE),
    Slip("evaluate --from empty --data shards --out e", "empty/model.safetensors: no such weights", EVALUATE),
    Slip("evaluate --from notes.txt --data shards --out e", "notes.txt: not a safetensors file", EVALUATE),
    Slip("evaluate --from tiny.toml --data shards --out e", "tiny.toml: not a safetensors file", EVALUATE),
    Slip("evaluate --from other.safetensors --data shards --out e", "unknown weights format", EVALUATE),
    Slip("evaluate --from cut.safetensors --data shards --out e", "cut.safetensors: ", EVALUATE),
    Slip("evaluate --from unbegun --data shards --out e", "unbegun: has no checkpoints", EVALUATE),
    Slip("evaluate --from run --data shards --split tset --out e", "has no split 'tset'", EVALUATE),
    Slip("evaluate --from run --data shards --labels reel --out e", "evaluation.labels = 'reel'", EVALUATE),
    Slip("evaluate --from run --model B/16 --data shards --out e", "not a B/16, it has", EVALUATE),
    Slip("fewshot --from run --data shards --shots five", "write whole numbers with commas"),
    Slip("fewshot --from run --data shards --shots 500",
         "training images, 500 are needed; use fewer --shots"),
    Slip("finetune --from run --data shards --lr fast", "--lr fast: "),
    Slip("finetune --from run --data shards --steps -5", "should be above 0"),
    Slip("vtab --from run --suite mini --task digit", "digit"),
    Slip("export --from run --to onx --out e", "onx", "export --from run --to safetensors --out e"),
    Slip("export --from run --to google --out x.onnx", "a .onnx file is for --to onnx, not for --to google"),
    Slip("resume nowhere", "nowhere: not a run folder, it has no recipe.toml"),
    Slip("resume started", "started: its command was stopped before it had written recipe.toml; type that"),
    Slip("resume shards", "shards: not a run folder"),
    Slip("resume run/recipe.toml", "run/recipe.toml: not a run folder"),
    Slip("resume orphan", "gone"),
    Slip("resume run --steps 9", "did you mean --set schedule.total_steps=9 --allow schedule.total_steps?"),
    Slip("resume run --compile true", "did you mean --set machine.compile=true?"),
    Slip("resume run -s schedule.total_steps=4 -s schedule.warmup_steps=1", "has a checkpoint of step 6"),
    Slip(f"{PRETRAIN} --out run --set optimizer.lr=0.5", "holds a run of another recipe"),
    Slip(f"{PRETRAIN} --out photos", "photos: holds cat and 1 more, but not a run", f"{PRETRAIN} --out new "
                                                                                    f"--dry-run"),
    Slip(f"{PRETRAIN} --out notes.txt", "notes.txt: is a file"),
    Slip(f"{PRETRAIN} --out notes.txt/new", "not a directory"),
    Slip(f"{PRETRAIN} --out /proc/new", "/proc/new"),
    Slip(f"{PRETRAIN} --out {'n' * 300}", "file name too long"),
    Slip("compare run nowhere", "nowhere"),
    Slip("compare run shards", "shards"),
    # Sweeps
    Slip("sweep tiny.toml --data shards", "varies nothing; give --grid"),
    Slip("sweep tiny.toml --data shards --grid optimizer.lr", "write it as section.key=v1,v2"),
    Slip("sweep tiny.toml --data shards --grid lr=1,2 --out new", "did you mean optimizer.lr?",
         "sweep tiny.toml --data shards --grid optimizer.lr=1,2 --out new --dry-run"),
    Slip("sweep tiny.toml --data shards --grid optimizer.lr=0.1,-1 "
         "--out new", "optimizer.lr = -1 is not allowed",
         "sweep tiny.toml --data shards --grid optimizer.lr=0.1,1 --set schedule.batch_size=8 --out "
         "new --print"),
    Slip("sweep tiny.toml --data shards --grid seed=0,1 --out photos", "photos: holds cat and 1 more, but "
                                                                       "not a sweep"),
    Slip("quickstart --out photos", "photos: holds cat and 1 more, but not a quickstart"),
    # The machine
    Slip(f"{PRETRAIN} --slurm nodes=two --out new", "nodes", f"{PRETRAIN} --out new --dry-run"),
    Slip(f"{PRETRAIN} --nodes 2@", "--nodes"),
    Slip(f"{PRETRAIN} --nodes gpu01,gpu02", "--nodes"),
    Slip("finetune --from run --data photos --set evaluation.select_best=true --set evaluation.every_steps=5",
         "add --set checkpoint.keep_best=1 --set checkpoint.every_steps=5"),
]  # fmt: skip


@pytest.fixture(scope="module")
def world(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it looks after some work: photographs, shards, a finished run, and things that are none of
    them.
    """
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(tiny_data, root / "shards")
    shutil.copytree(tiny_data, root / "halved")
    (root / "halved" / "train" / "samples.npy").write_bytes(b"\x93NUMPY")
    shutil.copy(TINY, root / "tiny.toml")
    (root / "empty").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (2, 3, 16, 16, 3), dtype=np.uint8)
    for photos in ("photos", "my photos"):
        for name, images in zip(("cat", "dog"), pixels, strict=True):
            (root / photos / name).mkdir(parents=True)
            for number, image in enumerate(images):
                Image.fromarray(image).save(root / photos / name / f"{number}.png")
    (root / "notes.txt").write_text("milk, bread\n")
    (root / "notes.bin").write_bytes(bytes(range(256)))
    (root / "torn.toml").write_text('job = "pretrain\n')
    (root / "latin1.toml").write_bytes('note = "größe"\n'.encode("latin-1"))
    (root / "misspelt.toml").write_text('extends = "tiny.toml"\n[optimizer]\nlrr = 0.1\n')
    save_file({"encoder.weight": np.zeros((2, 2), np.float32)}, root / "other.safetensors")
    loaded = load_recipe(
        str(TINY), [Override("data.path", str(root / "shards")), Override("schedule.total_steps", 6)]
    )
    for name in ("run", "unbegun"):
        prepare_run(loaded, root / name)
    work(root / "run")
    [weights] = sorted((root / "run" / "checkpoints").glob("step_00000006/model.safetensors"))
    (root / "cut.safetensors").write_bytes(weights.read_bytes()[:500])
    (root / "started").mkdir()
    (root / "started" / ".lock").touch()
    shutil.copytree(root / "run", root / "orphan")
    recipe = root / "orphan" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace(str(root / "shards"), str(root / "gone")))
    return root


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it; the files are links, as none is written to."""
    folder = tmp_path / "here"
    shutil.copytree(world, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(CONSOLE, "width", 200)
    monkeypatch.setenv("COLUMNS", "200")
    return folder


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder, with size and time of change of the files."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (
            (0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns)
        )
    return found


@pytest.mark.parametrize("slip", few({slip.typed: (slip,) for slip in SLIPS}, *[s.typed for s in SLIPS[::8]]))
def test_slip(slip: Slip, vitctl: Vitctl, here: Path) -> None:
    before, answer = tree(here), vitctl(*words(slip.typed))
    said = answer.err
    assert (answer.code, slip.said in said) == (2, True), said
    assert "Traceback" not in said and "[Errno" not in said
    lines = said.rstrip("\n").splitlines()
    assert len(lines) == 1 and lines[0].startswith("vitctl: ")
    after = tree(here)
    if (
        after != before
    ):  # only a job itself could tell: its folder says that it failed, and the corrected command takes it
        written = {Path(name).parts[0] for name in after.keys() ^ before.keys()}
        assert len(written) == 1 and slip.meant
        assert read_run_json(here / written.pop() / "result.json")["status"] == "failed"
        assert {name: after[name] for name in before} == before
    if slip.meant:
        assert vitctl(*words(slip.meant)).code == 0
