"""What a sweep varies, and how its runs are called."""

import itertools
from pathlib import Path

import pytest

from tests.matrix import each, slow
from vitctl.errors import RecipeError
from vitctl.models.variants import variant
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import Pretrain
from vitctl.recipe.sweep import MAX_CELLS, Sweep, expand_sweep, find_sweep, parse_axis, sweep_names

PLAIN = Sweep("smoke", "", ("smoke",), {}, (), {})


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("optimizer.lr=0.001,3e-3", "optimizer.lr", (0.001, 0.003)),
        ("model.depth = 2,4", "model.depth", (2, 4)),
        ("model.name=B/16,L/32", "model.name", ("B/16", "L/32")),
        ("model.pre_logits=true,false", "model.pre_logits", (True, False)),
        ("model.stage_depths=[3, 4],[2, 2]", "model.stage_depths", ([3, 4], [2, 2])),
        ("seed=7", "seed", (7,)),
    ],
)
def test_parse_axis__reads_toml_or_texts(text: str, key: str, values: tuple[object, ...]) -> None:
    assert parse_axis(text) == (key, values)


@pytest.mark.parametrize("text", ["optimizer.lr", "=1,2", "seed="])
def test_parse_axis__refuses(text: str) -> None:
    with pytest.raises(RecipeError, match=r"write it as section\.key=v1,v2"):
        parse_axis(text)


@pytest.mark.parametrize("name", ["fig3_in1k", *slow("fig3_in21k")])
def test_fig_3__chooses_on_images_that_no_recipe_reports(name: str) -> None:
    """Weight decay, dropout and smoothing are chosen by the accuracy of their runs."""
    cells = expand_sweep(find_sweep(name), {}, ())
    loaded = [
        (load_recipe(cell.recipe, cell.overrides).recipe, load_recipe(cell.recipe).recipe) for cell in cells
    ]
    assert len(loaded) >= 48
    for chosen, reported in loaded:
        assert isinstance(chosen, Pretrain)
        assert isinstance(reported, Pretrain)
        parts = [
            images(text)
            for text in (chosen.data.train_split, chosen.data.eval_split, reported.data.eval_split)
        ]
        assert all(len(numbers) for _, numbers in parts)
        for (one, ours), (other, theirs) in itertools.combinations(parts, 2):
            assert one != other or ours.stop <= theirs.start or theirs.stop <= ours.start


def images(text: str) -> tuple[str, range]:
    """The split and the images of an expression, of 1,000,000."""
    name, _, part = text.partition("[")
    ends = (part.rstrip("]") or ":").split(":")
    numbers = [
        default if not end else 10_000 * int(end[:-1]) if end.endswith("%") else int(end)
        for end, default in zip(ends, (0, 1_000_000), strict=True)
    ]
    return name, range(*numbers)


def test_spread__is_the_product_with_the_last_axis_fastest() -> None:
    cells = expand_sweep(
        PLAIN, {"optimizer.lr": (0.001, 0.003), "seed": (0, 1)}, [Override("log.every_steps", 5)]
    )
    assert [cell.name for cell in cells] == [
        "lr_0.001__seed_0",
        "lr_0.001__seed_1",
        "lr_0.003__seed_0",
        "lr_0.003__seed_1",
    ]
    loaded = load_recipe("smoke", cells[2].overrides)
    assert isinstance(loaded.recipe, Pretrain)
    assert (loaded.recipe.optimizer.lr, loaded.recipe.seed, loaded.recipe.log.every_steps) == (0.003, 0, 5)
    assert loaded.origin("optimizer.lr") == "--grid"


def test_spread__keys_that_end_alike_keep_their_section() -> None:
    cells = expand_sweep(PLAIN, {"model.name": ("Ti/8", "S/8"), "loss.name": ("softmax", "sigmoid")}, [])
    assert cells[1].name == "model_name_Ti-8__loss_name_sigmoid"


def test_spread__fixed_values_go_below_the_grid_and_sets_above_everything(tmp_path: Path) -> None:
    found = find_sweep(
        write(
            tmp_path,
            'recipes = ["smoke"]\n[set]\nlog.every_steps = 3\nseed = 9\n[grid]\nmodel.depth = [1, 2]\n',
        )
    )
    cells = expand_sweep(found, {"model.depth": (5, 6)}, [Override("seed", 4)])
    recipe = load_recipe("smoke", cells[0].overrides).recipe
    assert isinstance(recipe, Pretrain)
    assert (recipe.log.every_steps, recipe.seed, recipe.model.depth) == (3, 4, 5)
    assert [cell.varied for cell in cells] == [{"model.depth": 5}, {"model.depth": 6}]


@pytest.mark.parametrize(
    ("axes", "sets", "said"),
    [
        ({}, [], "'smoke' varies nothing; give --grid section.key=v1,v2"),
        ({"seed": (0, 1)}, [Override("seed", 3)], "seed is varied by the sweep and set by --set"),
        (
            {"seed": tuple(range(MAX_CELLS + 1))},
            [],
            "'smoke' has 1,001 runs, more than 1,000; use fewer values",
        ),
        ({"data.path": ("a b", "a-b")}, [], "'smoke' has two runs called 'path_a-b'"),
    ],
)
def test_spread__refuses(axes: dict[str, tuple[object, ...]], sets: list[Override], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        expand_sweep(PLAIN, axes, sets)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("note = 'x'", "mine.toml: recipes should name one recipe or more"),
        ("recipes = 'smoke'", "mine.toml: recipes should name one recipe or more"),
        (
            "recipes = ['smoke']\nsteps = 3",
            "mine.toml: unknown key steps; a sweep has note, recipes, set, grid, cells",
        ),
        ("recipes = ['smoke']\ngrid = 3", "mine.toml: set and grid are tables, cells is a list of tables"),
        ("recipes = ['smoke']\n[grid]\nseed = [1, 1]", "mine.toml: grid.seed: has duplicate values"),
        ("recipes = [", "mine.toml: not valid TOML"),
    ],
)
def test_find_sweep__refuses(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        find_sweep(write(tmp_path, text))
    assert said in str(error.value)


def test_find_sweep__a_recipe_is_a_sweep_of_itself(tmp_path: Path) -> None:
    assert find_sweep("smoke") == PLAIN
    path = write(tmp_path, 'extends = "smoke"\nnote = "of my own"\n')
    assert find_sweep(path).recipes == (path,)


def test_spread__cells_and_grid_may_not_share_a_key(tmp_path: Path) -> None:
    found = find_sweep(write(tmp_path, "recipes = ['smoke']\n[grid]\nseed = [1, 2]\n[[cells]]\nseed = 3\n"))
    with pytest.raises(RecipeError, match="seed is varied by the grid and by the cells of 'mine'"):
        expand_sweep(found, {}, [])


@each("name", sweep_names())
def test_shipped_sweeps__every_run_is_a_sound_recipe(name: str) -> None:
    found = find_sweep(name)
    assert len(found.note) > 20
    cells = expand_sweep(found, {}, [])
    for cell in cells:
        recipe = load_recipe(cell.recipe, cell.overrides).recipe
        assert isinstance(recipe, Pretrain)
        fields = recipe.model.model_dump(exclude={"name", "pre_logits"})
        variant(
            recipe.model.name,
            image_size=recipe.data.image_size,
            **{k: v for k, v in fields.items() if v is not None},
        )


def test_shipped_sweeps__are_those_of_the_paper() -> None:
    of_paper = {
        "d1",
        "d2_all",
        "d2_depth",
        "d2_hidden_size",
        "d2_mlp_size",
        "d2_patch_size",
        "d3",
        "d4",
        "d6",
        "fig4",
    }
    assert of_paper | {"fig3_in1k", "fig3_in21k", "d3_small", "d4_small"} <= set(sweep_names())
    assert len(expand_sweep(find_sweep("d4"), {}, [])) == 8
    images = {cell.varied["data.subset_images"] for cell in expand_sweep(find_sweep("fig4"), {}, [])}
    assert images == {9_000_000, 30_000_000, 90_000_000, 0}
    for name in ("d3", "d4"):
        assert find_sweep(f"{name}_small").recipes == find_sweep(name).recipes
    depths = [cell.varied["model.depth"] for cell in expand_sweep(find_sweep("d2_depth"), {}, [])]
    assert (8 in depths, max(depths)) == (True, 64)  # the base, and as deep as the paper says
