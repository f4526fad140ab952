"""Nonsense in the JSON files beside weights is one line that names the file, and never a traceback."""

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import each, slow
from tests.models.weights.conftest import refused
from vitctl.errors import CheckpointError
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.huggingface import KEYS as HUGGING_FACE
from vitctl.models.weights.json_keys import Known, checked
from vitctl.models.weights.timm import KEYS as TIMM
from vitctl.models.weights.weights_file import Weights, read_weights, write_weights

Make = Callable[..., Weights]
_ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 3, 10**30, 1e300, -0.5, "", "x", "\ud800", "3", [], [1], [None, "x"],
    [1, 2, 3], ["a", "b", "c"], [[1]], {}, {"x": 1}, {"0": None}, {"height": "x"}, {"a": {"b": {}}},
)  # fmt: skip
_MORE = {
    "preprocessor_config.json": ("crop_size", "do_center_crop", "do_rescale", "rescale_factor"),
    "config.json": ("vision_config", "pooler_act", "rope_theta", "vitctl", "global_pool", "classifier",
                    "layer_scale_init_value", "license", "hidden_dropout_prob", "label_names"),
}  # fmt: skip


def _changed(described: Any) -> Iterator[Any]:
    """Yield the object without each key, and with each odd value in its place, at every depth."""
    for key, value in described.items():
        yield {name: one for name, one in described.items() if name != key}
        yield from ({**described, key: odd} for odd in _ODD)
        if isinstance(value, dict) and not key.endswith(("2id", "2label")):
            yield from ({**described, key: inner} for inner in _changed(value))


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("to", ["hf", *slow("timm")])
def test_read__nonsense_is_one_line(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, to: str, every: int
) -> None:
    weights, refused = make_weights(replace(plain, depth=1)), 0
    for file in write_weights(weights, tmp_path, to).files[1:]:
        described = json.loads(file.read_text())
        full = described | dict.fromkeys(_MORE[file.name])
        added = {key: value for key, value in full.items() if value is None}
        for content in [*_changed(described | added)][::every]:
            file.write_text(json.dumps(content))
            try:
                read_weights(tmp_path)
            except CheckpointError as error:
                text, refused = str(error), refused + 1
                assert "\n" not in text
                assert not any(word in text for word in ("NoneType", "'int'", "'str'", "'dict'", "object is"))
                text.encode()
        file.write_text(json.dumps(described))
    assert refused > 100 // every


@pytest.mark.parametrize(
    "content",
    [
        b'{"hidden_size": NaN}', b'{"hidden_size": 1' + b"0" * 9999 + b"}", b'{"a":' * 10**5, b"[" * 10**5,
        b"", b"null", b"3", b'"x"', b"[]", '{"a": 1}'.encode("utf-16"), b"\xff\xfe", b'{"a": 1e999}',
    ],
    ids=range(12),
)  # fmt: skip
@pytest.mark.parametrize("name", ["config.json", *slow("preprocessor_config.json", "open_clip_config.json")])
def test_read__no_json_is_one_line(
    plain: ViTConfig, make_weights: Make, tmp_path: Path, name: str, content: bytes
) -> None:
    write_weights(make_weights(plain), tmp_path, "hf")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as error:
        read_weights(tmp_path)
    assert "\n" not in str(error.value)
    assert "sys.set_int" not in str(error.value)


def test_read__a_byte_order_mark_and_the_last_of_equal_keys_count(
    plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    write_weights(make_weights(plain), tmp_path, "hf")
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text("\ufeff" + text.replace("{", '{"hidden_size": "x",', 1))
    assert read_weights(tmp_path).config == plain


def test_checked__names_file_key_value_and_what_it_should_be() -> None:
    used = {"an object": ("a",), "a whole number above 0": ("a.b",)}
    keys = Known(used, settled={"on": (True, 1.5)}, harmless=r"note|a\.seen")
    content = {"a": {"b": 3, "c": None, "on": True, "seen": [1]}, "note": "x", "d": None, "on": 1.5}
    assert checked("f.json", content, keys) == {
        "a": {"b": 3, "on": True, "seen": [1]}, "note": "x", "on": 1.5,
    }  # fmt: skip
    with pytest.raises(CheckpointError) as error:
        checked("f.json", {"a": {"b": "x"}}, keys)
    assert str(error.value) == 'f.json: a.b is "x", should be a whole number above 0'
    advice = "if it changes nothing that is computed, remove it from the file"
    for odd, words in (
        ({"a": {"note": 0}}, "a.note is 0, a key that vitctl does not know"),
        ({"seen": False}, "seen is false, a key that vitctl does not know"),
        ({"a": {"on": False}}, "a.on is false, only true or 1.5 is supported"),
    ):
        with pytest.raises(CheckpointError) as error:
            checked("f.json", odd, keys)
        assert str(error.value) == f"f.json: {words}; {advice}"


@pytest.mark.parametrize("key", ["config.json", "config.json model_args", "config.json pretrained_cfg"])
@pytest.mark.parametrize("to", ["timm", "hf"])
def test_read__a_key_that_is_not_known_is_refused(
    to: str, key: str, plain: ViTConfig, make_weights: Make, tmp_path: Path
) -> None:
    name, _, place = key.partition(" ")
    file = write_weights(make_weights(plain), tmp_path, to).files[0]
    described = json.loads((tmp_path / name).read_text())
    inside = described.setdefault(place, {}) if place else described
    inside |= {"of_next_year": 1.5}
    (tmp_path / name).write_text(json.dumps(described))
    if to == "timm" and not place:  # timm uses nothing else there
        assert read_weights(file).config == plain
        return
    where = f"{place}.of_next_year is 1.5" if to == "timm" else f"{place or 'of_next_year'} is "
    refused(tmp_path, rf"{name}: {where}.*a key that vitctl does not know")


_FAMILIES = ("ViT", "ViTMAE", "Dinov2", "Dinov2WithRegisters", "DINOv3ViT", "SiglipVision", "Siglip",
             "CLIPVision", "CLIP", "Beit")  # fmt: skip


@each("family", _FAMILIES)
def test_keys__all_of_the_installed_transformers_are_known(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    described = json.loads(json.dumps(getattr(transformers, f"{family}Config")().to_dict()))
    assert checked("config.json", described, HUGGING_FACE)


def test_keys__all_of_the_installed_timm_are_known() -> None:
    timm = pytest.importorskip("timm")
    from timm.models import PretrainedCfg

    pretrained = json.loads(json.dumps(PretrainedCfg().to_dict(remove_null=False)))
    assert checked("config.json", {"pretrained_cfg": pretrained | {"label_descriptions": {"a": "b"}}}, TIMM)
    changing = {"norm_layer", "block_fn", "mlp_layer", "attn_layer", "embed_layer", "embed_norm_layer"}
    model = inspect.signature(timm.models.VisionTransformer).parameters
    plain = {
        name: one.default
        for name, one in model.items()
        if not isinstance(one.default, type) and name not in changing
    }
    assert checked("config.json", {"model_args": plain}, TIMM)
    for name in changing:
        with pytest.raises(CheckpointError, match=f"model_args.{name} is .* a key that vitctl does not know"):
            checked("config.json", {"model_args": {name: "x"}}, TIMM)
