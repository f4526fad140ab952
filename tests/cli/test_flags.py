"""The table of everyday flags, and what an unknown option suggests."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tests.cli.conftest import Vitctl
from tests.conftest import TINY
from tests.docs.conftest import find_command
from tests.matrix import each, slow
from vitctl.cli.app import NO_VALUE, USAGE_ERROR, instead
from vitctl.cli.flags import FLAGS, RECIPE_OF, UNREAD, Flag, image_recipe
from vitctl.errors import RecipeError
from vitctl.recipe.load import Override, every_key, load_recipe, takes
from vitctl.recipe.schema import JOBS
from vitctl.recipe.synonyms import SYNONYMS
from vitctl.recipe.write import explain

STEPS, WARMUP = 20, 5  # of TINY
DECAYED = f"({SYNONYMS['wd'].note})"
DID_YOU_MEAN = "did you mean "
KEYS = every_key(JOBS["finetune"])


@each("row", FLAGS)
def test_flags__a_row_sets_a_key_of_every_command_that_takes_it(row: Flag) -> None:
    keys = {row.key} | ({row.also[0]} if row.also else set())
    for command in row.commands.split():
        job = RECIPE_OF.get(command, command)
        schemas = [JOBS[job]] if job in JOBS else list(JOBS.values())  # `resume`, `sweep`
        assert any(keys <= set(every_key(schema)) for schema in schemas), command
        assert sum(r.option == row.option and command in r.commands.split() for r in FLAGS) == 1


@each(
    ("line", "instead"),
    [
        ("finetune --learning-rate 0.1", "--lr 0.1"),
        ("finetune --batch_size=64", "--batch-size 64"),
        ("pretrain --recipe smoke --num-epochs 3", "--epochs 3"),
        ("finetune --output_dir runs/a", "--out runs/a"),
        ("finetune --init-from runs/a", "--from runs/a"),
        ("predict a.png --ckpt runs/a", "--from runs/a"),
        ("finetune --num-workers 4", "--set machine.workers=4"),
        ("finetune --weight-decay 0.1", f"--set optimizer.weight_decay=0.1 {DECAYED}"),
        ("pretrain --recipe smoke --weight-decay=0.1", f"--set optimizer.weight_decay=0.1 {DECAYED}"),
        ("pretrain --recipe smoke --wd 0.1", f"--set optimizer.weight_decay=0.1 {DECAYED}"),
        ("finetune --learning-rate 1e-3", "--lr 1e-3"),
        ("finetune --no-sweep", "--set 'sweep.lrs=[]'"),
        ("finetune --compile", "--set machine.compile=true"),
        ("fewshot --batch-size 7", "--set evaluation.batch_size=7"),
        ("vtab --lr 0.5", "--set optimizer.lr=0.5"),
        ("evaluate --dataset digits --image-size 32", "--res 32"),
        ("predict a.jpg --batch-size 7", "--batch 7"),
        ("inspect --batch-size 3", "--set evaluation.batch_size=3"),
        ("export --batch-sizes 4", "--set export.batch_sizes=4"),
        (
            "resume runs/x --label-smoothing 0.1",
            "--set loss.label_smoothing=0.1 --allow loss.label_smoothing",
        ),
        ("resume runs/x --steps 20", "--set schedule.total_steps=20 --allow schedule.total_steps"),
        ("pretrain --model B/16", "--set model.name=B/16"),
        ("bench model --model B/16", "--set model.name=B/16"),
        ("bench data --crop none", "--set data.crop=none"),
        ("sweep smoke --patch-size 4", "--set model.patch_size=4"),
        ("recipes show smoke --patch-size 4", "--set model.patch_size=4"),
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


# Misspelt options, and options of other programs that nothing here resembles.
OTHERS = (
    "model-emma",
    "local-rank",
    "warmup-ratios",
    "norm-weight-decay",
    "name",
    "dynamic",
    "gpu",
    "scal",
)
WORDS = [(word, value) for word in (*SYNONYMS, *OTHERS) for value in ("", "7", "x")]


@pytest.mark.parametrize(
    "line",
    ["finetune", *slow("predict a.png", "pretrain -r smoke", "evaluate", "probe", "resume r", "export")],
)
def test_unknown_option__is_never_answered_by_what_is_refused(line: str) -> None:
    """VALUE stands for a value that the user must choose: the typed one would be refused, or means another
    thing.
    """
    command, rest = find_command(line.split())
    job = command.name if command.name in JOBS else "evaluate"
    keys = [key for name in (JOBS if command.name == "resume" else [job]) for key in every_key(JOBS[name])]
    for word, value in WORDS:
        arguments = [*rest, f"--{word}", *([value] if value else [])]
        advice = ""
        try:
            command.make_context(command.name, [*arguments])
        except USAGE_ERROR as error:
            advice = instead(error, [command.name, *arguments])
        row = SYNONYMS.get(word)
        if not advice.startswith(DID_YOU_MEAN):
            assert not advice or (row and (advice.startswith(("type ", "it is ")) or not row.here)), (
                word,
                advice,
            )
            continue
        proposed = advice.removeprefix(DID_YOU_MEAN).removesuffix("?").partition(" (")[0]
        for one in proposed.split(" or "):
            parts = ["1" if part == NO_VALUE else part for part in shlex.split(one)]
            command.make_context(command.name, [*rest, *parts])
            for _, _, key, chosen in re.findall(r"(--set) (['\"]?)([\w.]+)=(\S+?)\2(?= |$)", one):
                assert key in keys and (chosen == NO_VALUE or takes(key, chosen)), (word, advice)
                assert not key.startswith("known.") and key not in UNREAD.get(command.name, ()), word


@each("word", SYNONYMS)
def test_synonym__is_answered_as_an_option(word: str) -> None:
    """A place that `finetune` takes is proposed, and a value only where it means the same."""
    row, command = SYNONYMS[word], find_command(["finetune"])[0]
    flags = {flag for parameter in command.params for flag in parameter.opts}
    if "--" + word.replace("_", "-") in flags:
        return  # an option of ours
    try:
        command.make_context("finetune", [f"--{word}", "0.25"])
    except USAGE_ERROR as error:
        said = instead(error, ["finetune", f"--{word}", "0.25"])
    keys = {one.option: one.key for one in FLAGS if "finetune" in one.commands.split()}
    taken = [place for place in row.places if place.partition("=")[0] in {*flags, *keys.values(), *KEYS}]
    for place in taken:
        flag = next((flag for flag, key in keys.items() if key == place.partition("=")[0]), place)
        assert place in said or flag in said, said
    assert row.note in said or not taken, said
    assert "0.25" not in said or (row.keeps_value and taken), said
    assert row.here or said.startswith("vitctl has no such setting"), said


@each("word", SYNONYMS)
def test_synonym__is_answered_in_a_recipe_and_by_explain(word: str, tmp_path: Path) -> None:
    row, file = SYNONYMS[word], tmp_path / "r.toml"
    places = [place for place in row.places if place.partition("=")[0] in KEYS]
    file.write_text(f'extends = "finetune"\n[loss]\n{word} = 1\n')
    if f"loss.{word}" in KEYS:
        return  # a key of ours
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    said = str(caught.value)
    assert all(place in said for place in places) and (row.note in said or not places), said
    assert row.here or "vitctl has no such setting" in said, said
    explained = "\n".join(explain(word))
    if explained.startswith(f"{word}."):
        return  # a section of ours
    assert all(place.partition("=")[0].rpartition(".")[2] in explained for place in row.places), explained


@each(
    ("line", "fix"),
    [
        (
            "--opt adamw",
            f"did you mean --set optimizer.name=VALUE ({SYNONYMS['opt'].note})?",
        ),
        ("--warmup-epochs 5", "did you mean --set schedule.warmup_epochs=5?"),
        ("--lora_r 8", "did you mean --set lora.rank=8?"),
        (
            "--crop-pct 0.9",
            f"did you mean --set data.eval_resize=VALUE ({SYNONYMS['crop_pct'].note})?",
        ),
        ("--blr 1e-3", "did you mean --lr VALUE (base x batch / 256)?"),
        ("--eval_steps 100", "did you mean --set evaluation.every_steps=100?"),
        ("--resume x", "type `vitctl resume RUN`"),
        (
            "--bce-loss",
            f"did you mean --set loss.name=sigmoid ({SYNONYMS['bce_loss'].note})?",
        ),
        (
            "--load_best_model_at_end",
            "did you mean --set evaluation.select_best=true --set checkpoint.keep_best=1 "
            f"({SYNONYMS['load_best_model_at_end'].note})?",
        ),
        ("--amp", "did you mean --precision bf16?"),
        ("--fp16", "vitctl has no such setting (bf16 has the range of float32: machine.precision)"),
        ("--local-rank 0", "see: vitctl finetune --help"),
    ],
)
def test_unknown_option__of_another_program(vitctl: Vitctl, line: str, fix: str) -> None:
    assert vitctl("finetune", *line.split()).err.endswith(f"; {fix}\n")


@each(
    ("line", "message"),
    [
        ("pretrain --lrr 1", "pretrain: no such option --lrr; did you mean --lr VALUE?"),
        ("pretrain --dry_run", "pretrain: no such option --dry_run; did you mean --dry-run?"),
        ("inspect --grid", "inspect: no such option --grid; see: vitctl inspect --help"),
        ("--fnord", "no such option --fnord; see: vitctl --help"),
        (
            "data list --weight-decay 1",
            "data list: no such option --weight-decay; see: vitctl data list --help",
        ),
        ("prettrain", "no such command prettrain; did you mean pretrain?"),
        ("train", "no such command train; did you mean pretrain or finetune?"),
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


@pytest.mark.slow
def test_finetune__a_warmup_that_is_set_stays(vitctl: Vitctl, tiny_data: Path, pretrained: Path) -> None:
    line = tuple(
        f"finetune --recipe finetune_pets --from {pretrained} --data {tiny_data} --res 16 --lr 0.1".split()
    )
    small = ("--batch-size", 8, "--steps", 5)
    assert vitctl(*line, *small, "--out", "a").code == 0
    assert schedule(Path("a"))["warmup_steps"] == 1  # 100 of 500
    assert vitctl(*line, *small, "--out", "b", "--set", "schedule.warmup_steps=3").code == 0
    assert schedule(Path("b"))["warmup_steps"] == 3
