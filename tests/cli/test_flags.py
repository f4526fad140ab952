"""The table of everyday flags, and what an unknown option suggests."""

import tomllib
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.conftest import TINY
from tests.docs.conftest import find_command
from vitctl.cli.app import OTHER_FLAGS, OTHER_NAMES, USAGE_ERROR, instead
from vitctl.cli.completion import RECIPE_OF
from vitctl.cli.flags import FLAGS, UNREAD, Flag, image_recipe
from vitctl.errors import RecipeError
from vitctl.recipe.load import Override, every_key
from vitctl.recipe.schema import JOBS

STEPS, WARMUP = 20, 5  # of TINY


@pytest.mark.parametrize("row", FLAGS, ids=lambda row: f"{row.option}: {row.commands}")
def test_flags__a_row_sets_a_key_of_every_command_that_takes_it(row: Flag) -> None:
    keys = {row.key} | ({row.also[0]} if row.also else set())
    for command in row.commands.split():
        job = RECIPE_OF.get(command, command)
        schemas = [JOBS[job]] if job in JOBS else list(JOBS.values())  # `resume`, `sweep`
        assert any(keys <= set(every_key(schema)) for schema in schemas), command
        assert sum(r.option == row.option and command in r.commands.split() for r in FLAGS) == 1


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("finetune --learning-rate 0.1", "--lr"),
        ("finetune --batch_size=64", "--batch-size"),
        ("pretrain --recipe smoke --num-epochs 3", "--epochs"),
        ("finetune --output_dir runs/a", "--out"),
        ("finetune --pretrained runs/a", "--from"),
        ("predict a.png --pretrained runs/a", "--from"),
        ("finetune --num-workers 4", "--set machine.workers=VALUE"),
        ("finetune --weight-decay 0.1", "--set optimizer.weight_decay=VALUE"),
        ("pretrain --recipe smoke --weight-decay=0.1", "--set optimizer.weight_decay=VALUE"),
        ("pretrain --recipe smoke --wd 0.1", "--set optimizer.weight_decay=VALUE"),
        ("finetune --learning-rate 1e-3", "--lr"),
        ("finetune --no-sweep", "--set sweep.lrs=VALUE"),
        ("finetune --compile", "--set machine.compile=VALUE"),
        ("fewshot --batch-size 7", "--set evaluation.batch_size=VALUE"),
        ("vtab --lr 0.5", "--set optimizer.lr=VALUE"),
        ("evaluate --dataset digits --image-size 32", "--res"),
        ("predict a.jpg --batch-size 7", "--batch"),
        ("inspect --batch-size 3", "--set evaluation.batch_size=VALUE"),
        ("export --batch-sizes 4", "--set export.batch_sizes=VALUE"),
        (
            "resume runs/x --label-smoothing 0.1",
            "--set loss.label_smoothing=VALUE --allow loss.label_smoothing",
        ),
        ("resume runs/x --steps 20", "--set schedule.total_steps=VALUE --allow schedule.total_steps"),
        ("pretrain --model B/16", "--set model.name=VALUE"),
        ("bench model --model B/16", "--set model.name=VALUE"),
        ("bench data --crop none", "--set data.crop=VALUE"),
        ("sweep smoke --patch-size 4", "--set model.patch_size=VALUE"),
        ("recipes show smoke --patch-size 4", "--set model.patch_size=VALUE"),
    ],
)
def test_unknown_option__names_the_flag_or_the_set_that_does_it(
    vitctl: Vitctl, line: str, instead: str
) -> None:
    said = vitctl(*line.split())
    assert said.code == 2
    assert said.err.endswith(f"; did you mean {instead}?\n")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("command", UNREAD)
def test_unread__keys_of_evaluate_are_refused_by_commands_on_single_images(command: str) -> None:
    keys = every_key(JOBS["evaluate"])
    for key in UNREAD[command]:
        value = {"machine.processes": 2, "evaluation.fit_temperature": True}.get(key, "a.csv")
        assert key in keys
        with pytest.raises(RecipeError, match=f"^--set {key}: {command} does not read it; leave it out$"):
            image_recipe(command, {}, [Override(key, value)])
    read = {"evaluation.batch_size": 2, "data.group_by": "a", "weights.gelu": "erf", "machine.workers": 0}
    image_recipe(command, {}, [Override(*one) for one in read.items()])


@pytest.mark.parametrize("flag", ["--answers x.csv", "--data P"])
def test_unread__no_such_key_is_proposed(vitctl: Vitctl, flag: str) -> None:
    said = vitctl("predict", "a.png", *flag.split())
    assert said.err.endswith("; see: vitctl predict --help\n")


# Options of timm, DeiT, MAE, torchvision, transformers and ultralytics.
FOREIGN = """aa rand-m9-mstd0.5-inc1|opt-eps 1e-8|remode pixel|drop 0.1|model-ema|amp|amp-dtype x|crop-pct 0.9
accum-iter 4|local-rank 0|src|ThreeAugment|warmup-ratio 0.1|fp16|label-smoothing-factor 0.1|num-classes 10
nb-classes 9|save-steps 500|eval-steps 500|norm-weight-decay 0|ra-sampler|imgsz 224|device 0|name y|r 8
optimizer SGD|fliplr 0.5|translate 0.1|val-split 0.1|mixed-precision fp16|devices 4|pretrained|opset 17
gpus many|num-epochs x|arch vit_b"""
WORDS = [line.partition(" ")[::2] for line in FOREIGN.replace("\n", "|").split("|")]
WORDS += [(word, value) for words in OTHER_FLAGS.values() for word in words for value in ("", "7")]
WORDS += [(word, value) for word in OTHER_NAMES for value in ("", "7", "x")]


@pytest.mark.parametrize(
    "line", ["pretrain -r smoke", "finetune", "evaluate", "predict a.png", "probe", "resume r", "export"]
)
def test_unknown_option__is_answered_by_what_the_command_takes(line: str) -> None:
    command, rest = find_command(line.split())
    job = command.name if command.name in JOBS else "evaluate"
    keys = [key for name in (JOBS if command.name == "resume" else [job]) for key in every_key(JOBS[name])]
    for word, value in WORDS:
        advice = ""
        try:
            command.make_context(command.name, [*rest, f"--{word}", *([value] if value else [])])
        except USAGE_ERROR as error:
            advice = instead(error)
        for one in filter(None, advice.split(" or ")):
            option, *given = one.split()
            assert option in [flag for parameter in command.params for flag in parameter.opts], (word, advice)
            key = given[0].partition("=")[0] if given else keys[0]
            assert key in keys and not key.startswith("known."), (word, advice)
            assert key not in UNREAD.get(command.name, ()), (word, advice)


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("--aa rand-m9", "--set data.randaugment_layers=VALUE"),
        ("--drop 0.1", "--set dropout=VALUE or --set lora.dropout=VALUE"),
        ("--eval-steps 500", "--set evaluation.every_steps=VALUE"),
        ("--mixed-precision fp16", "--precision"),
        ("--gpus many", "--processes"),
        ("--pretrained", "--from"),
        *(
            (line, "")
            for line in ("--crop-pct 0.9", "--local-rank 0", "--r 8", "--src x", "--warmup-ratio 0.1")
        ),
    ],
)
def test_unknown_option__of_another_program(vitctl: Vitctl, line: str, instead: str) -> None:
    said = vitctl("finetune", *line.split())
    end = f"did you mean {instead}?" if instead else "see: vitctl finetune --help"
    assert said.err.endswith(f"; {end}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("pretrain --lrr 1", "pretrain: no such option --lrr; did you mean --lr?"),
        ("pretrain --dry_run", "pretrain: no such option --dry_run; did you mean --dry-run?"),
        ("inspect --grid", "inspect: no such option --grid; see: vitctl inspect --help"),
        ("--fnord", "no such option --fnord; see: vitctl --help"),
        (
            "data list --weight-decay 1",
            "data list: no such option --weight-decay; see: vitctl data list --help",
        ),
        ("prettrain", "no such command prettrain; did you mean pretrain?"),
        ("data shrds", "data: no such command shrds; did you mean shards?"),
        ("runs \x1b", "runs: no such command \\x1b; see: vitctl runs --help"),
        ("data shards", "data shards: missing argument SOURCE; see: vitctl data shards --help"),
        ("pretrain", "pretrain: missing option --recipe / -r; see: vitctl pretrain --help"),
        ("doctor x y", "doctor: unexpected argument: x y; see: vitctl doctor --help"),
        ("bench model --seconds", "bench model: --seconds: needs a value; see: vitctl bench model --help"),
        ("pretrain --dry-run=1", "pretrain: --dry-run: takes no value; see: vitctl pretrain --help"),
    ],
)
def test_usage_error__is_one_line(vitctl: Vitctl, line: str, message: str) -> None:
    said = vitctl(*line.split())
    assert (said.code, said.err) == (2, f"vitctl: {message}\n")


def schedule(folder: Path) -> dict[str, float]:
    values = tomllib.loads((folder / "recipe.toml").read_text())["schedule"]
    return {name: values[name] for name in ("batch_size", "total_steps", "total_epochs", "warmup_steps")}


def test_pretrain__has_finetunes_flags_of_length(vitctl: Vitctl, tiny_data: Path) -> None:
    """One epoch of the 70 images in batches of 8 is 8 steps."""
    line = ("pretrain", "--recipe", TINY, "--data", tiny_data)
    said = vitctl(*line, "--out", "a", "--steps", 3, "--lr", 0.1)
    assert (said.code, said.err) == (0, "")
    own = schedule(Path("a"))
    assert own == {"batch_size": 16, "total_steps": 3, "total_epochs": 0, "warmup_steps": 3 * WARMUP // STEPS}
    assert "total_steps = 3                           # --steps" in Path("a/recipe.toml").read_text()
    assert vitctl(*line, "--out", "b", "--epochs", 1, "--batch-size", 8).code == 0
    assert schedule(Path("b")) == {
        "batch_size": 8, "total_steps": 0, "total_epochs": 1, "warmup_steps": 8 * WARMUP // STEPS
    }  # fmt: skip
    both = vitctl(*line, "--steps", 3, "--epochs", 1)
    assert both.err == "vitctl: --steps 3 and --epochs 1 both set the length; give one of them\n"


def test_finetune__a_warmup_that_is_set_stays(vitctl: Vitctl, tiny_data: Path, pretrained: Path) -> None:
    line = tuple(
        f"finetune --recipe finetune_pets --from {pretrained} --data {tiny_data} --res 16 --lr 0.1".split()
    )
    small = ("--batch-size", 8, "--steps", 5)
    assert vitctl(*line, *small, "--out", "a").code == 0
    assert schedule(Path("a"))["warmup_steps"] == 1  # 100 of 500
    assert vitctl(*line, *small, "--out", "b", "--set", "schedule.warmup_steps=3").code == 0
    assert schedule(Path("b"))["warmup_steps"] == 3
