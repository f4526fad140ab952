"""What a recipe may say, and what is answered when it says something else."""

import datetime
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.matrix import each, slow
from vitctl.errors import RecipeError
from vitctl.recipe.load import (
    Override,
    _line_numbers,
    every_key,
    find_recipe,
    load_recipe,
    parse_override,
    recipe_names,
    with_overrides,
)
from vitctl.recipe.neutral_keys import deciding_values
from vitctl.recipe.schema import JOBS, REMOVED, Pretrain
from vitctl.recipe.write import to_toml

MINIMAL = """\
job = "pretrain"

[model]
name = "B/16"

[optimizer]
name = "adam"
lr = 0.1

[schedule]
batch_size = 8
total_steps = 4

[loss]
name = "softmax"
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(path: Path | str, *overrides: Override, job: str | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(path), overrides, job=job)
    return str(caught.value)


def test_load_recipe__gives_values_defaults_and_origins(tmp_path: Path) -> None:
    loaded = load_recipe(str(write(tmp_path, "a.toml", MINIMAL)))
    assert isinstance(loaded.recipe, Pretrain)
    assert (loaded.recipe.optimizer.lr, loaded.recipe.optimizer.beta2) == (0.1, 0.999)
    assert loaded.origin("optimizer.lr") == "a.toml:8"
    assert loaded.origin("job") == "a.toml:1"
    assert loaded.origin("optimizer.beta2") == "default"


def test_with_overrides__is_what_loading_with_them_gives() -> None:
    seed = Override("seed", 7, "--seed")
    for name in recipe_names():
        loaded = load_recipe(name)
        assert with_overrides(loaded, []) == loaded, name
        if "seed" in type(loaded.recipe).model_fields:
            assert with_overrides(loaded, [seed]) == load_recipe(name, [seed]), name
    with pytest.raises(RecipeError, match="unknown key seeed"):
        with_overrides(loaded, [seed._replace(key="seeed")])


def test_load_recipe__names_every_problem_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("lr = 0.1", 'lr = "fast"\nweight_decya = 0.1').replace(
        "batch_size = 8", "batch_size = 8.5"
    )
    text += '\n[schedul]\nx = 1\n[data]\nflip = 1\ncrop = "centre"\nbatch_size = 3\n'
    said = refused(write(tmp_path, "a.toml", text.replace('[loss]\nname = "softmax"\n', "")))
    assert "has 8 problems:" in said
    for line in (
        "a.toml:8: optimizer.lr = 'fast' is not allowed: input should be a valid number",
        "a.toml:9: unknown key optimizer.weight_decya; did you mean optimizer.weight_decay?",
        "a.toml:12: schedule.batch_size = 8.5 is not allowed: input should be a valid integer",
        "unknown key schedul; did you mean schedule?",
        "data.flip = 1 is not allowed: input should be a valid boolean",
        "data.crop = 'centre' is not allowed: input should be 'inception', 'random_resized', "
        "'random', 'padded', 'none' or 'letterbox'",
        "unknown key data.batch_size; did you mean schedule.batch_size (images of all",
        "loss is missing; set it in the recipe, or override it",
    ):
        assert line in said


@each(
    ("change", "said"),
    [
        (("total_steps = 4", ""), "set exactly one of schedule.total_steps and schedule.total_epochs"),
        (
            ("total_steps = 4", "total_steps = 4\nwarmup_steps = 4"),
            "warmup_steps = 4 must be below total_steps = 4",
        ),
        (
            ("lr = 0.1", "lr = 0.1\nmomentum = 0.5"),
            "momentum belongs to sgd and does nothing for adam; leave it out",
        ),
        (
            ('name = "softmax"', 'name = "softmax"\nsmoothing = "per_class"'),
            "smoothing = 'per_class' belongs to the sigmoid loss",
        ),
        (
            ("[loss]", "[machine]\nsharding_replicas = 2\n[loss]"),
            "sharding_replicas does nothing while nothing is sharded; leave it out, or set sharding = 'fsdp'",
        ),
        (
            ("[loss]", '[machine]\ncompile = true\ncheckpoint_blocks = "attention"\n[loss]'),
            "checkpoint_blocks = 'attention' cuts compiled layers in two; set compile = false, or "
            "checkpoint_blocks to a number",
        ),
        (
            ("[loss]", "[averaging]\ndebias = true\n[loss]"),
            "averaging.debias does nothing without an average",
        ),
        (("lr = 0.1", "lr = 0"), "a.toml:8: optimizer.lr = 0 is not allowed: input should be greater than 0"),
        (
            ("lr = 0.1", "lr = 2020-01-01"),
            "a.toml:8: optimizer.lr = datetime.date(2020, 1, 1) is not allowed",
        ),
        (("[loss]\nname =", "loss ="), "a.toml:14: unknown key schedule.loss; known here: batch_size"),
        (('[loss]\nname = "softmax"', ""), "a.toml: loss is missing"),
        (
            ('job = "pretrain"', 'job = "pretrian"'),
            "a.toml:1: job = 'pretrian'; did you mean pretrain? set it to one of",
        ),
        (('job = "pretrain"', ""), "a.toml: job is missing; set it to one of pretrain, finetune"),
        (('name = "B/16"', "name = B/16"), "a.toml: not valid TOML: Invalid value (at line 4, column 8)"),
    ],
)
def test_load_recipe__refuses(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    assert change[0] in MINIMAL
    assert said in refused(write(tmp_path, "a.toml", MINIMAL.replace(*change)))


@pytest.mark.parametrize("value", ['["shards"]', "[1]", '["a=1", {path = "b"}]'])
def test_load_recipe__what_should_be_a_table_in_a_list(tmp_path: Path, value: str) -> None:
    path = tmp_path / "r.toml"
    path.write_text(f'extends = "smoke"\n[data]\nmixture = {value}\n')
    with pytest.raises(
        RecipeError, match=r"data\.mixture\.0 = .* should be a table; `vitctl recipes explain` shows"
    ):
        load_recipe(str(path))


def test_extends__deep_merge_the_nearest_wins_and_origins_stay(tmp_path: Path) -> None:
    write(tmp_path, "first.toml", MINIMAL)
    write(tmp_path, "second.toml", 'extends = "first.toml"\n[optimizer]\nlr = 0.2\nbeta1 = 0.8\n')
    third = write(tmp_path, "third.toml", 'extends = "second.toml"\n\n[optimizer]\nbeta1 = 0.7\n')
    loaded = load_recipe(
        str(third), [Override("optimizer.eps", 1e-5), Override("optimizer.eps", 1e-6, "--often")]
    )
    optimizer: Any = loaded.recipe.optimizer  # type: ignore[attr-defined]
    assert (optimizer.name, optimizer.lr, optimizer.beta1, optimizer.eps) == ("adam", 0.2, 0.7, 1e-6)
    origins = {key: loaded.origin(f"optimizer.{key}") for key in ("name", "lr", "beta1", "eps", "beta2")}
    assert origins == {
        "name": "first.toml:7",
        "lr": "second.toml:3",
        "beta1": "third.toml:4",
        "eps": "--often",
        "beta2": "default",
    }


def test_extends__circle(tmp_path: Path) -> None:
    a = write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    write(tmp_path, "b.toml", 'extends = "a.toml"\n')
    assert "recipes extend each other in a circle: a.toml -> b.toml -> a.toml" in refused(a)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('extends = "smok"', "no recipe is called 'smok'; did you mean smoke?"),
        ('extends = "gone.toml"', "gone.toml: no such recipe file"),
        ("extends = ['smoke']", "a.toml:1: extends takes one recipe name or path"),
        ('extends = ""', "no recipe is called ''"),
    ],
)
def test_extends__refuses(tmp_path: Path, line: str, said: str) -> None:
    assert said in refused(write(tmp_path, "a.toml", line + "\n"))


def test_inline_table__its_values_have_its_line(tmp_path: Path) -> None:
    text = MINIMAL.replace('[model]\nname = "B/16"', 'model = { name = "B/16", dropout = 0.1 }')
    loaded = load_recipe(str(write(tmp_path, "a.toml", text)))
    assert loaded.origin("model.dropout") == "a.toml:3"
    bad = write(tmp_path, "b.toml", text.replace("dropout = 0.1", "dropout = 2"))
    assert "b.toml:3: model.dropout = 2 is not allowed: input should be less than 1" in refused(bad)


def test_dotted_and_quoted_keys__have_their_line(tmp_path: Path) -> None:
    text = 'optimizer.lr = 0.1\n"optimizer".name = "adam"\n' + MINIMAL.replace(
        '[optimizer]\nname = "adam"\nlr = 0.1\n', ""
    )
    loaded = load_recipe(str(write(tmp_path, "a.toml", text)))
    assert [loaded.origin(key) for key in ("optimizer.lr", "optimizer.name", "job")] == [
        "a.toml:1",
        "a.toml:2",
        "a.toml:3",
    ]


@each(
    ("text", "value"),
    [
        ("a.b=1", 1),
        ("a.b=1.5", 1.5),
        ("a.b=true", True),
        ("a.b=B/16", "B/16"),
        ('a.b="x"', "x"),
        ("a.b=", ""),
        ("a.b=x=y", "x=y"),
        ("a.b=[1, 2]", [1, 2]),
        ("a.b=train[:98%]", "train[:98%]"),
        ("a.b=1\nc = 2", "1\nc = 2"),
        ("a.b=2020-01-01", datetime.date(2020, 1, 1)),
    ],
)
def test_parse_override__reads_toml_or_text(text: str, value: object) -> None:
    override = parse_override(text)
    assert (override.key, override.value, override.flag) == ("a.b", value, "--set")
    assert type(override.value) is type(value)


@pytest.mark.parametrize("text", ["optimizer.lr", "", "=3"])
def test_parse_override__refuses(text: str) -> None:
    with pytest.raises(
        RecipeError, match=r"--set .*: write it as section\.key=value, e\.g\. --set optimizer\.lr=0\.001"
    ):
        parse_override(text)


@each(
    ("override", "said"),
    [
        ("optimizer.lr.x=1", "--set optimizer.lr.x: 'lr' is a value, not a section"),
        (
            "optimizer.learning_rate=1",
            "--set: unknown key optimizer.learning_rate; did you mean optimizer.lr?",
        ),
        ("lr=1", "--set: unknown key lr; did you mean optimizer.lr?"),
        ("optimizer..lr=1", "--set: unknown key optimizer."),
        ("model.name=3", "--set: model.name = 3 is not allowed: input should be a valid string"),
        ("seed=-1", "--set: seed = -1 is not allowed: input should be greater than or equal to 0"),
        ("schedule.drops=[0.5]", "drops need decay = 'steps', e.g. schedule.drops = [0.3, 0.6, 0.9]"),
        (
            "schedule={batch_size = 8, total_steps = 9, decay = 'steps', drops = [0.6, 0.3]}",
            "drops = [0.6, 0.3] should be increasing shares between 0 and 1",
        ),
    ],
)
def test_override__refuses(override: str, said: str) -> None:
    assert said in refused(TINY, parse_override(override))


def test_load_recipe__of_another_job() -> None:
    assert (
        refused("smoke", job="finetune")
        == "recipe 'smoke' is for `vitctl pretrain`, not for `vitctl finetune`"
    )
    said = refused("smoke", parse_override("job=evaluate"), job="pretrain")
    assert said == "recipe 'smoke' is for `vitctl evaluate`, not for `vitctl pretrain`"


def test_find_recipe__by_name_by_path_and_nowhere(tmp_path: Path) -> None:
    assert len(recipe_names()) >= 28
    assert find_recipe("smoke").name == "smoke.toml"
    path = write(tmp_path, "my[b16].toml", MINIMAL)
    assert load_recipe(str(path)).origin("job") == "my[b16].toml:1"
    with pytest.raises(RecipeError, match="no recipe is called 'jft_h15'; did you mean jft_h14"):
        find_recipe("jft_h15")
    with pytest.raises(RecipeError, match=r"none\.toml: no such recipe file"):
        find_recipe(str(tmp_path / "none.toml"))


def test_load_recipe__refuses_what_is_no_text_and_what_is_too_large(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(bytes(range(256)))
    assert "binary.toml: not UTF-8 text" in refused(binary)
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (2**20 + 1))
    assert "huge.toml: larger than 1,048,576, the limit" in refused(huge)
    assert "no such recipe file" in refused(write(tmp_path, "x", "").parent / "folder.toml")


@pytest.mark.parametrize("value", ["note=" + "a" * 20_000, "data.classes=[" + '"class", ' * 4_000 + "]"])
def test_parse_override__what_is_longer_than_a_line_of_a_recipe(value: str) -> None:
    with pytest.raises(
        RecipeError,
        match="characters, should be at most 16,384; write it into a recipe",
    ):
        parse_override(value)


@pytest.mark.parametrize(
    "key",
    [
        "mean=[inf, 0, 0]",
        "std=[0.5, 0, 0.5]",
        "std=[0.5, -1, 0.5]",
        "mean=[nan, 0, 0]",
        "std=[1e-46, 1, 1]",
    ],
)
def test_load__a_value_range_that_makes_no_numbers_is_refused(key: str) -> None:
    with pytest.raises(RecipeError, match="finite"):
        load_recipe("smoke", [parse_override(f"data.{key}")])


@pytest.mark.parametrize(
    "line",
    [
        "[" + " " * 3000 + "x",
        "x" + "-" * 4000 + "!",
        "a." * 8000 + "b = 1",
        "x = " + "9" * 5000,
        "x = " + "[" * 50_000 + "]" * 50_000,
    ],
    ids=["header", "hyphens", "dots", "digits", "deep"],
)
def test_load_recipe__no_line_takes_long(tmp_path: Path, line: str) -> None:
    """The search for line numbers took the cube of a line's length: 3,000 blanks were 40 minutes."""
    path = write(tmp_path, "slow.toml", f"{line}\n")
    began = time.process_time()
    assert "slow.toml" in refused(path)
    assert time.process_time() - began < 5  # the usual half a second, on a machine that does other things
    began = time.process_time()
    _line_numbers(line)
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("typed", "value"),
    [("1,5", (1, 5)), ("5", (5,)), ("[1, 5]", (1, 5)), ("10,1", (10, 1))],
)
def test_load_recipe__a_list_of_numbers_as_people_type_it(typed: str, value: tuple[int, ...]) -> None:
    recipe = load_recipe("fewshot", [parse_override(f"fewshot.shots={typed}")]).recipe
    assert recipe.fewshot.shots == value  # type: ignore[attr-defined]


@pytest.mark.parametrize("typed", ["tensorboard", '["tensorboard"]', "'tensorboard'"])
def test_load_recipe__a_list_of_one_name_as_people_type_it(typed: str) -> None:
    recipe = load_recipe("smoke", [parse_override(f"log.trackers={typed}")]).recipe
    assert recipe.log.trackers == ("tensorboard",)  # type: ignore[attr-defined]


def _numeric(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _numeric(value, f"{prefix}{key}.")
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield prefix + key


@pytest.mark.parametrize("name", ["finetune", "evaluate", *slow("smoke", "fewshot", "vtab", "export")])
def test_no_number_of_a_recipe_is_absurd(name: str) -> None:
    keys = [*_numeric(load_recipe(name).recipe.model_dump())]
    assert keys
    for key, value in product(keys, (float("inf"), float("nan"), 10**201, -(10**201))):
        with pytest.raises(RecipeError) as caught:
            load_recipe(name, [Override(key, value)])
        assert key in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("job", ["evaluate", "export", "fewshot", "probe"])
def test_eval_resize__unset_is_no_value(tmp_path: Path, job: str) -> None:
    """0 was both, unset and a value. An earlier run's recipe.toml keeps its meaning and its digest."""
    with pytest.raises(RecipeError, match=r"eval_resize: 0 is no size; leave it out, or set it to the image"):
        load_recipe(job, [Override("data.eval_resize", 0)])
    write(tmp_path, "mine.toml", f'extends = "{job}"\n[data]\neval_resize = 300\n')
    mine = load_recipe(tmp_path / "mine.toml")
    undone = load_recipe(tmp_path / "mine.toml", [Override("data.eval_resize", "unset")])
    assert (mine.recipe.data.eval_resize, undone.recipe.data.eval_resize) == (300, None)
    default = load_recipe(job)
    now, tables = to_toml(default), to_toml(default).split("[data]")
    assert "# eval_resize is unset" in now
    assert deciding_values(undone.recipe) == deciding_values(default.recipe)
    before = f"{tables[0]}[data]\neval_resize = 0  # default{tables[1]}"
    old = load_recipe(write(tmp_path, "recipe.toml", before))
    assert old.recipe == load_recipe(write(tmp_path, "new.toml", now)).recipe == default.recipe
    values = deciding_values(old.recipe)
    assert values["data.eval_resize"] == "0" and ("data.eval_method" in values) == (
        job in ("evaluate", "export")
    )


def test_load_recipe__a_key_of_an_earlier_release_loads_and_leaves_digests_as_they_were(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, "a.toml", 'extends = "smoke"\n[evaluation]\nearly_stopping = true\n')
    old, new = load_recipe(path), load_recipe("smoke", [Override("evaluation.early_stopping", True)])
    for loaded, origin in ((old, "a.toml:3"), (new, "--set")):
        assert loaded.recipe.evaluation.select_best is True  # type: ignore[union-attr]
        assert loaded.origin("evaluation.select_best") == origin
        assert deciding_values(loaded.recipe)["evaluation.early_stopping"] == "true"
        assert "early_stopping" not in to_toml(loaded)


def test_load__a_removed_value_is_refused_but_in_the_recipe_of_a_run(tmp_path: Path) -> None:
    said = "machine.sharding = 'zero1' was removed; set 'fsdp', or 'hsdp' on several machines"
    assert refused("smoke", Override("machine.sharding", "zero1")) == f"--set: {said}"
    text = to_toml(load_recipe("smoke", [Override("machine.sharding", "fsdp")])).replace('"fsdp"', '"zero1"')
    assert load_recipe(write(tmp_path, "run.toml", text)).recipe == load_recipe("smoke").recipe
    assert refused(write(tmp_path, "mine.toml", text.partition("\n")[2])).endswith(f": {said}")


def test_load__hsdp_needs_a_number_of_copies() -> None:
    with pytest.raises(RecipeError, match="sharding = 'hsdp' needs sharding_replicas"):
        load_recipe("smoke", [Override("machine.sharding", "hsdp")])


def test_load__a_rule_of_a_section_names_the_flag_of_its_key() -> None:
    given = [Override("data.path", "x", "--data"), Override("data.group_by", "(a", "--group-by")]
    with pytest.raises(RecipeError, match=r"^--group-by: '\(a' is not a regular expression"):
        load_recipe("finetune", given)


def test_load_recipe__a_removed_key_is_refused_but_in_the_recipe_of_a_run(tmp_path: Path) -> None:
    mine = write(tmp_path, "a.toml", 'extends = "smoke"\n[log]\nsample_keys = true\n')
    said = "unknown key log.sample_keys: it was removed; log.trace records the images of every step"
    assert refused(mine) == f"a.toml:3: {said}"
    assert refused("smoke", Override("log.sample_keys", False)) == f"--set: {said}"
    smoke = load_recipe("smoke")
    of_run = to_toml(smoke).replace("[log]\n", "[log]\nsample_keys = true\n")
    assert load_recipe(write(tmp_path, "recipe.toml", of_run)).recipe == smoke.recipe
    for key, removed in REMOVED.items():  # a key that is still there has lost some values
        is_there = any(key in every_key(schema) for schema in JOBS.values())
        assert {value is None for value in removed.values.values()} == {not is_there}


def test_load_recipe__kernels_that_are_gone_are_left_out_of_the_recipe_of_a_run(tmp_path: Path) -> None:
    smoke = load_recipe("smoke", [("machine.attention", "math")])
    of_run = to_toml(smoke).replace('attention = "math"', 'attention = "mixed"\nlinear = "onednn"')
    assert load_recipe(write(tmp_path, "recipe.toml", of_run)).recipe == smoke.recipe
    assert "machine.linear: it was removed; torch multiplies" in refused(
        "smoke", Override("machine.linear", "auto")
    )
    said = "--set: machine.attention = 'mixed' was removed; set 'math' or 'fused', or leave it out"
    assert refused("smoke", Override("machine.attention", "mixed")) == said
