"""`vitctl inspect` as typed: its pictures, its numbers, and one line for what a network does not have."""

import json
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image

from tests.cli.conftest import Vitctl, words
from tests.matrix import slow
from tests.models.tiny_models import TINY
from tests.models.weights.conftest import META
from vitctl.data.datasets.catalog import open_split
from vitctl.data.inspect.overview import choose
from vitctl.jobs import inspection
from vitctl.models.build import build
from vitctl.models.variants import Config
from vitctl.models.weights.meta import distinct
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights
from vitctl.system.figures import save_figure

pytest.importorskip("matplotlib")

ALL = ["attention_distance", "filters", "position_similarity", "rollout"]


def numbers(folder: Path) -> Any:
    found = json.loads((folder / "inspect.json").read_text())
    assert found["format"] == "vitctl-inspect/1"
    return found


def drawn(folder: Path) -> list[str]:
    """The pictures in a folder; each is there as PNG and as SVG, and opens."""
    names = sorted(path.stem for path in folder.glob("*.png"))
    assert sorted(path.name for path in folder.iterdir() if path.is_file()) == sorted(
        [f"{name}.{kind}" for name in names for kind in ("png", "svg")]
        + ["inspect.json"] * (folder / "inspect.json").exists()
    )
    for name in names:
        with Image.open(folder / f"{name}.png") as picture:
            assert min(picture.size) > 100
            assert (
                len(picture.convert("RGB").resize((300, 300), Image.Resampling.NEAREST).getcolors(90_000))
                > 50
            )
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
    return names


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render each picture once, coarsely and without a layout. `test_run` draws as users do."""

    def save(figure: Any, path: Path) -> Path:
        if path.suffix == ".svg":
            path.write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
            return path
        figure.set_layout_engine("none")
        figure.set_dpi(60)
        return save_figure(figure, path)

    monkeypatch.setattr(inspection, "save_figure", save)


LEFT_OUT = "skipped 1 file that are not images: notes.txt\n"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two photographs of different sizes, one in a folder of its own, and files that are none."""
    folder = tmp_path / "photos"
    (folder / "inner").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, size in (("b.jpg", (40, 60, 3)), ("inner/a.png", (33, 32, 3))):
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("nothing to see")
    (folder / ".hidden.jpg").write_text("nothing to see")
    return folder


def stored(config: Config, folder: Path, **meta: Any) -> Path:
    """Weights with noise on every number as a folder that --from takes."""
    generator = torch.Generator().manual_seed(0)
    state = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in build(config).state_dict().items()
    }
    folder.mkdir(parents=True)
    write_weights(
        Weights(config, state, {**META, "image_size": config.image_size, **meta}), folder, "safetensors"
    )
    return folder


@pytest.mark.slow
def test_run__on_a_split(
    vitctl: Vitctl, pretrained: Path, tiny_data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    line = ("inspect", "--from", pretrained, "--data", tiny_data, "--num-images", 9)
    said = vitctl(*line, "--split", "train", "--out", "one")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("pretrained, step 20")
    assert drawn(tmp_path / "one") == [*ALL, "rollout_sheet"]
    found = numbers(tmp_path / "one")
    assert (
        found["images"]["num_images"] == len(found["images"]["names"]) == len(found["images"]["labels"]) == 9
    )
    assert found["images"]["from"].endswith(" train")
    assert vitctl(*line, "--split", "train", "--out", "again").code == 0
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    request.getfixturevalue("quick")
    other = words("--num-images 1 --seed 3 --set machine.precision=float64 --out scored")
    assert vitctl(*line, *other).code == 0
    scored = numbers(tmp_path / "scored")
    assert scored["images"]["from"].endswith(" test")  # the split that evaluate scores
    source = open_split("test", path=tiny_data)
    assert scored["images"]["names"] == [source.key(sample) for sample in choose(len(source), 1, 3)]
    assert (scored["precision"], found["precision"]) == ("float64", "float32")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("name", "pictures", "reasons"),
    [
        (
            "resnet v1",
            ["filters"],
            [
                "a ResNet has no position embedding",
                "a ResNet has no attention",
            ],
        ),
        *slow(
            (
                "axial resnet",
                ["filters"],
                [
                    "its positions are offsets within rows and columns",
                    "its attention stays within rows and columns",
                ],
            ),
            (
                "axial",
                ["filters", "position_similarity"],
                ["its attention stays within rows and columns"],
            ),
            ("gap", ALL, []),
            (
                "no position",
                ["attention_distance", "filters", "rollout"],
                ["built without position embedding"],
            ),
            ("hybrid", ALL, []),
            ("relative", ALL, []),
            ("2d every layer", ALL, []),
        ),
    ],
)
def test_families__have_their_parts_and_say_why_not(
    name: str, pictures: list[str], reasons: list[str], vitctl: Vitctl, photos: Path, tmp_path: Path
) -> None:
    stored(TINY[name], tmp_path / "weights")
    said = vitctl("inspect", "--from", "weights", photos, "--out", "out")
    assert (said.code, said.err) == (0, f"{photos}: {LEFT_OUT}")
    assert drawn(tmp_path / "out") == pictures
    text = " ".join(said.out.split())
    assert [reason for reason in reasons if reason not in text] == []
    [found] = numbers(tmp_path / "out")["weights"]
    assert sorted(found["missing"]) == sorted(set(ALL) - set(pictures))
    assert set(pictures) < set(found)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_several__side_by_side(vitctl: Vitctl, tmp_path: Path) -> None:
    for name in ("vit", "2d", "no position", "relative"):
        stored(TINY[name], tmp_path / name)
    said = vitctl(
        "inspect", *(word for name in ("vit", "2d", "no position", "relative") for word in ("--from", name))
    )
    assert (said.code, said.err) == (0, "")
    assert drawn(tmp_path / "inspect") == ["position_similarity"]
    assert drawn(tmp_path / "inspect" / "no_position") == ["filters"]
    for name in ("vit", "2d", "relative"):
        assert drawn(tmp_path / "inspect" / name) == ["filters", "position_similarity"]
    assert [one["name"] for one in numbers(tmp_path / "inspect")["weights"]] == [
        "vit",
        "2d",
        "no position",
        "relative",
    ]
    assert "needs images: name files or folders, or a split with --data" in " ".join(said.out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_predictions__are_those_of_the_network(vitctl: Vitctl, photos: Path, tmp_path: Path) -> None:
    from vitctl.data.images.decode import open_picture
    from vitctl.data.images.transforms import EvalTransform

    config = TINY["vit"]
    stored(config, tmp_path / "weights")
    assert vitctl("inspect", "--from", "weights", photos / "b.jpg", "--out", "out").code == 0
    [one] = numbers(tmp_path / "out")["weights"][0]["rollout"]["images"]
    weights = read_weights(tmp_path / "weights")
    model = build(config).eval()
    model.load_state_dict(weights.state)
    pixels = EvalTransform(32, resample="bilinear_antialias")(open_picture((photos / "b.jpg").read_bytes()))
    mean, std = (torch.tensor(META[name]).view(3, 1, 1) for name in ("mean", "std"))
    with torch.no_grad():
        best = int(model(((pixels / 255 - mean) / std)[None]).argmax())
    assert one["prediction"] == distinct(META["class_names"])[best]


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_res__gives_a_finer_grid(vitctl: Vitctl, photos: Path, tmp_path: Path) -> None:
    stored(TINY["vit"], tmp_path / "weights")
    assert (
        vitctl(
            "inspect", "--from", "weights", photos, "--res", 48, "--precision", "float64", "--out", "out"
        ).code
        == 0
    )
    found = numbers(tmp_path / "out")
    assert found["precision"] == "float64"
    assert np.array(found["weights"][0]["rollout"]["images"][0]["mask"]).shape == (6, 6)
    assert found["weights"][0]["preprocessing"]["image_size"] == 48
    assert len((tmp_path / "out" / "inspect.json").read_text().splitlines()) < 300  # a list is one line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("photos --data x", "photos and --data: both name images"),
        ("photos --split x", "photos and --split: both name images"),
        ("nothing.jpg", "nothing.jpg: no such file or folder"),
        ("empty", "empty: holds no images"),
        ("bad.jpg", "bad.jpg: cannot be used (not an image: "),
        ("photos --out bad.jpg", "bad.jpg: "),
        ("photos --from ''", "--from '': is empty"),
        ("photos --from nowhere", "nowhere: "),
    ],
)
def test_errors__are_one_line(words: str, message: str, vitctl: Vitctl, photos: Path, tmp_path: Path) -> None:
    stored(TINY["vit"], tmp_path / "weights")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jpg").write_text("no image at all")
    source = [] if "--from" in words else ["--from", "weights"]
    said = vitctl("inspect", *source, *shlex.split(words))
    message = f"vitctl: {message}"
    assert (said.code, said.err.removeprefix(f"{photos.name}: {LEFT_OUT}")[: len(message)]) == (2, message)
    assert not (tmp_path / "inspect").is_dir() or words == "bad.jpg"


def test_errors__a_network_of_nan(vitctl: Vitctl, photos: Path, tmp_path: Path) -> None:
    state = {name: torch.full_like(tensor, 1e30) for name, tensor in build(TINY["vit"]).state_dict().items()}
    (tmp_path / "weights").mkdir()
    write_weights(Weights(TINY["vit"], state, META), tmp_path / "weights", "safetensors")
    said = vitctl("inspect", "--from", "weights", photos)
    assert said.code == 2
    assert "the network gives NaN or infinite numbers; use other weights" in said.err


@pytest.mark.slow
def test_data__takes_photographs_in_class_folders(vitctl: Vitctl, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 24, 24, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        folder = tmp_path / "sets" / ("cat", "dog")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    stored(TINY["vit"], tmp_path / "weights")
    said = vitctl("inspect", "--from", "weights", "--data", "sets", "--num-images", 2, "--out", "pictures")
    assert said.code == 0, said.err
    assert numbers(tmp_path / "pictures")["images"]["num_images"] == 2
