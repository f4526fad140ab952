"""The names that `vitctl` promises, used as their users would."""

import ast
import inspect
import io
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import FunctionType

import numpy as np
import pytest
import torch
from PIL import Image

import vitctl
from tests.conftest import README, ROOT, TINY
from vitctl import VitctlError, as_webdataset, load_model, load_recipe, open_split

NAMES = (
    "VitctlError",
    "as_webdataset",
    "finetune",
    "load_classifier",
    "load_model",
    "load_recipe",
    "open_split",
    "predict",
)


@pytest.fixture
def home(pretrained: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as examples know it: data/mine and runs/mine."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(tiny_data)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(pretrained)
    Image.linear_gradient("L").save(tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names__are_those_of_all_of_the_table_and_of_the_type_checker() -> None:
    tree = ast.parse((ROOT / "vitctl" / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        name.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert typed == vitctl._MODULES
    assert {*typed, "__version__"} == {*vitctl.__all__} == {*NAMES, "__version__"}
    assert {*vitctl.__all__} <= {*dir(vitctl)}
    with pytest.raises(AttributeError, match="module 'vitctl' has no attribute 'load_modle'"):
        vitctl.load_modle  # noqa: B018
    with pytest.raises(ImportError):
        exec("from vitctl import load_modle")


def test_import__is_light() -> None:
    """Nothing but the standard library, and none of our own modules, until a name is asked for."""
    code = (
        "import sys; before = {*sys.modules}; import vitctl; new = {*sys.modules} - before; "
        "print(sorted(n for n in new if n.partition('.')[0] not in sys.stdlib_module_names)); "
        "from vitctl import VitctlError; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['vitctl']\nFalse False\n"


@pytest.mark.usefixtures("home")
def test_error__is_caught_whatever_is_wrong() -> None:
    for wrong in (
        lambda: load_recipe("jft_b61"),
        lambda: load_recipe("jft_b16", [("optimizer.lrr", 1.0)]),
        lambda: load_model("runs/none"),
        lambda: open_split("train", path="data/none"),
        lambda: as_webdataset("data/mine", split="trian", batch_size=4),
    ):
        with pytest.raises(VitctlError) as error:
            wrong()
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.usefixtures("home")
def test_error__is_caught_whatever_the_values_are() -> None:
    """Of the right types, and senseless: names too long, places of the kernel, numbers that fit nowhere."""
    endless, odd = "x" * 5000, Path("dangling")
    odd.symlink_to("nothing")
    for name in (endless, "/proc/self/mem", "/dev/zero", "a\0b", "", odd):
        for wrong in (load_recipe, load_model, lambda name: open_split("train", path=str(name))):
            with pytest.raises(VitctlError):
                wrong(name)
        with pytest.raises(VitctlError):
            as_webdataset(name, batch_size=4)
    with pytest.raises(VitctlError, match="'x y' should be last, best, ema, model or the number of a step"):
        load_model("runs/mine", weights="x y")
    with pytest.raises(VitctlError, match=r"dtype torch.int8: should be a floating-point type"):
        load_model("runs/mine", dtype=torch.int8)
    with pytest.raises(VitctlError):
        open_split("train", dataset="digits", scratch=Path("/proc/none"))
    for steps in ({"first_step": -1}, {"num_steps": -1}, {"first_step": 2**61}, {"num_steps": 10**30}):
        with pytest.raises(VitctlError, match="steps should be 0 or more"):
            as_webdataset("data/mine", batch_size=4, **steps)


@pytest.mark.usefixtures("home")
def test_open_split__samples_by_number() -> None:
    source, whole = open_split("test[:50%]", path="data/mine"), open_split("test", path="data/mine")
    assert (len(source), len(whole), len(source.class_names)) == (12, 23, 6)
    stored = dict(zip(map(whole.key, range(23)), whole.labels().tolist(), strict=True))
    assert [stored[source.key(n)] for n in range(12)] == source.labels().tolist()
    assert Image.open(io.BytesIO(source.read(3))).size == (16, 16)


def test_load_model__answers_as_often_right_as_its_run_says(home: Path) -> None:
    """The images of the run are decoded and normalised here, as the documentation says."""
    model, meta = load_model("runs/mine", dtype=torch.float64)
    source = open_split("test", path="data/mine")
    pixels = [np.array(Image.open(io.BytesIO(source.read(n))).convert("RGB")) for n in range(len(source))]
    colours = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255.0
    mean, std = (torch.tensor(meta[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        logits = model(((colours - mean) / std).double())
    assert not model.training
    assert logits.shape == (23, 6)
    assert meta["class_names"] == list(source.class_names)
    right = int((logits.argmax(dim=1).numpy() == source.labels()).sum())
    scored = json.loads((home / "runs/mine/result.json").read_text())
    assert (right, len(source)) == (scored["metrics"]["correct"], scored["metrics"]["total"])


@pytest.mark.usefixtures("home")
def test_load_model__other_weights_and_sizes() -> None:
    averaged, _ = load_model("runs/mine")
    plain, _ = load_model("runs/mine", weights="model")
    assert not torch.equal(averaged.head.weight, plain.head.weight)
    larger, meta = load_model("runs/mine", image_size=24)
    assert meta["image_size"] == larger.config.image_size == 24
    assert larger(torch.zeros(2, 3, 24, 24)).shape == (2, 6)


def example(name: str) -> str:
    """The code of a docstring's example."""
    text = inspect.getdoc(getattr(vitctl, name))
    assert text is not None
    found = re.search(r"^Example:\n((?:    .*\n|\n)+)", text + "\n", re.M)
    assert found is not None, name
    return textwrap.dedent(found[1])


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", NAMES)
def test_docstring__its_example_runs_and_says_all(name: str) -> None:
    code = example(name)
    assert re.match(rf"from vitctl import .*\b{name}\b", code)
    exec(compile("import torch\n" + code, name, "exec"), {})
    thing, text = getattr(vitctl, name), inspect.getdoc(getattr(vitctl, name)) or ""
    if isinstance(thing, FunctionType):
        for argument in inspect.signature(thing).parameters:
            assert re.search(rf"^    (\w+, )*{argument}(, \w+)*: ", text, re.M), argument
        assert "\nRaises:\n" in text


@pytest.mark.usefixtures("home")
def test_docs__from_python_names_all_and_its_code_runs() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    assert "(docs/python.md)" in README
    assert {name for name in NAMES if re.search(rf"\b{name}\b", page)} == {*NAMES}
    first = page.split("```python\n")[1].partition("```")[0]
    names: dict[str, object] = {}
    exec(compile(first, "python.md", "exec"), names)
    assert {"load_classifier", "load_model", "load_recipe", "open_split"} <= {*names}
    second = page.split("```python\n")[2].partition("```")[0]
    exec(compile(second, "python.md", "exec"), names)
    assert names["run"].metrics["total"] == 23  # type: ignore[attr-defined]


def test_wheel__has_the_whole_package_the_marker_of_types_and_the_recipes() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    assert (wheel["packages"], wheel["force-include"]) == (["vitctl"], {"recipes": "vitctl/recipes"})
    assert (ROOT / "vitctl" / "py.typed").is_file()
    assert not {"exclude", "include", "only-include"} & {*wheel, *build}


def test_paths__are_taken_as_text_is(tiny_data: Path) -> None:
    assert len(open_split("test", path=tiny_data)) == len(open_split("test", path=str(tiny_data))) == 23
    assert load_recipe(TINY).recipe == load_recipe(str(TINY)).recipe
