"""ONNX files of strangers: their own digest, graphs without an end, and what is no classifier of images."""

import hashlib
import json
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open

from tests.matrix import each
from tests.trained import do
from vitctl import load_classifier, open_split
from vitctl.engine.preemption import interrupt_on_signals
from vitctl.errors import CheckpointError
from vitctl.jobs.inputs.classifier import OnnxNetwork, open_classifier
from vitctl.jobs.predict import predict
from vitctl.recipe.load import Override, load_recipe

SIZE, CLAIMED = 8, "c" * 64
HOW = {"mean": [0.5] * 3, "std": [0.5] * 3, "image_size": SIZE, "eval_method": "square", "eval_resize": SIZE}
HOW |= {"resample": "bilinear_antialias"}
META = {"preprocessing": json.dumps(HOW), "class_names": '["a", "b", "c"]', "weights_sha256": CLAIMED}
IMAGE = np.zeros((SIZE, SIZE, 3), np.uint8)
FLOAT, BYTES = TensorProto.FLOAT, TensorProto.UINT8
to_float = helper.make_node("Cast", ["images"], ["f"], to=FLOAT)


def value(name: str, shape: Any, kind: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def constant(name: str, kind: int, numbers: list[Any], *shape: int) -> onnx.TensorProto:
    return helper.make_tensor(name, kind, shape, numbers)


def mean_over(axes: str, out: str = "logits") -> onnx.NodeProto:
    return helper.make_node("ReduceMean", ["f", axes], [out], keepdims=0)


def graph(
    path: Path,
    *,
    inputs: tuple[Any, ...] = (value("images", ("batch", 3, SIZE, SIZE), BYTES),),
    output: onnx.ValueInfoProto | None = None,
    nodes: tuple[Any, ...] = (to_float, mean_over("squares")),
    meta: dict[str, str] | None = None,
    constants: tuple[Any, ...] = (),
) -> Path:
    """Write a graph; by default the mean of each of three colours is the logit of a class."""
    sides = constant("squares", TensorProto.INT64, [2, 3], 2)
    outputs = [output or value("logits", ("batch", 3))]
    made = helper.make_graph([*nodes], "graph", [*inputs], outputs, [sides, *constants])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    helper.set_model_props(model, META if meta is None else meta)
    onnx.save(model, path)
    return path


def loop(path: Path, repeats: int = 2**62) -> Path:
    """Write a graph that adds 1 to its logits again and again."""
    scalar = (value("i", [], TensorProto.INT64), value("on", [], TensorProto.BOOL), value("x", None))
    again = helper.make_node("Identity", ["on"], ["still"])
    add = helper.make_node("Add", ["x", "one"], ["y"])
    ends = [value("still", [], TensorProto.BOOL), value("y", None)]
    body = helper.make_graph([again, add], "body", [*scalar], ends)
    nodes = (to_float, mean_over("squares", "m"))
    nodes += (helper.make_node("Loop", ["repeats", "always", "m"], ["logits"], body=body),)
    kinds = ("repeats", TensorProto.INT64, repeats), ("always", TensorProto.BOOL, 1), ("one", FLOAT, 1.0)
    return graph(path, nodes=nodes, constants=tuple(constant(name, kind, [x]) for name, kind, x in kinds))


def opened(path: Path) -> Any:
    return open_classifier(load_recipe("evaluate", [Override("weights.source", str(path))]).recipe)


# Digests


def test_digest__is_that_of_the_file_and_the_other_is_called_claimed(tmp_path: Path) -> None:
    path = graph(tmp_path / "a.onnx")
    own = hashlib.sha256(path.read_bytes()).hexdigest()
    found = opened(path)
    assert found.digests == {"file_sha256": own, "claimed_weights_sha256": CLAIMED}
    assert f"file_sha256 {own[:12]}; claimed_weights_sha256 {CLAIMED[:12]}" in found.text
    said = {"class_names": META["class_names"], "preprocessing": META["preprocessing"]}
    assert opened(graph(tmp_path / "b.onnx", meta=said)).digests.keys() == {"file_sha256"}
    said["weights_sha256"] = "\x1b[31m\n" + "x" * 10_000
    claimed = opened(graph(tmp_path / "c.onnx", meta=said)).digests["claimed_weights_sha256"]
    assert len(claimed) == 64
    assert claimed.isprintable()


def test_digest__counts_the_weights_in_other_files(tmp_path: Path) -> None:
    """Also those that a graph within the graph uses."""
    digests = set()
    for number in (1.0, 2.0):
        path = loop(tmp_path / "a.onnx", 3)
        model = onnx.load(path)
        body = next(node for node in model.graph.node if node.op_type == "Loop").attribute[0].g
        body.initializer.append(numpy_helper.from_array(np.full(600, number, np.float32), "one"))
        body.node.insert(0, helper.make_node("ReduceMin", ["one"], ["least"], keepdims=0))
        next(node for node in body.node if node.op_type == "Add").input[1] = "least"
        del model.graph.initializer[-1]
        onnx.save(model, path, save_as_external_data=True, location="a.onnx.data")
        both = path.read_bytes() + (tmp_path / "a.onnx.data").read_bytes()
        found = opened(path)
        assert found.digests["file_sha256"] == hashlib.sha256(both).hexdigest()
        digests.add(found.digests["file_sha256"])
        (tmp_path / "a.onnx.data").unlink()
    assert len(digests) == 2


@pytest.mark.slow
def test_digest__of_features_is_that_of_the_file(tmp_path: Path, speck: Path, tiny_data: Path) -> None:
    values = {"weights.source": str(speck), "export.to": ("onnx",), "export.features": True}
    do("export", tmp_path / "out", **values)
    path = tmp_path / "out" / "model.onnx"
    recipe = load_recipe("evaluate", [Override("weights.source", str(path))]).recipe
    for _ in predict(recipe, [open_split("test", path=str(tiny_data))], features=tmp_path / "f.safetensors"):
        pass
    with safe_open(tmp_path / "f.safetensors", framework="pt") as file:
        about = file.metadata()
    assert about["file_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    used = json.loads((tmp_path / "out" / "result.json").read_text())["provenance"]
    assert about["claimed_weights_sha256"] == used["weights_sha256"]
    assert "weights_sha256" not in about


# Graphs without an end


def test_a_graph_without_an_end__is_stopped_by_a_signal(tmp_path: Path) -> None:
    classify = load_classifier(loop(tmp_path / "a.onnx"))
    began = time.monotonic()
    with interrupt_on_signals():
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
        try:
            with pytest.raises(KeyboardInterrupt):
                classify(IMAGE)
        finally:
            signal.signal(signal.SIGALRM, before)
    network = classify._opened.network
    network._pool.shutdown(wait=True)  # as the interpreter does when it ends
    assert time.monotonic() - began < 20


def test_a_graph_without_an_end__in_a_thread_is_stopped(tmp_path: Path) -> None:
    """As the server does, whose networks compute in threads."""
    network, images = OnnxNetwork(loop(tmp_path / "a.onnx")), torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(network, images)
        time.sleep(0.3)
        network.stop()
        with pytest.raises(CheckpointError, match=r"a\.onnx: cannot be run \(.*terminate flag"):
            found.result(timeout=20)


def test_loops__that_end_answer_also_after_an_interrupt(tmp_path: Path) -> None:
    classify = load_classifier(loop(tmp_path / "a.onnx", 3))
    network = classify._opened.network
    network.stop()
    assert classify.logits(IMAGE).tolist() == [[3.0, 3.0, 3.0]]


# What is no classifier of images


def photographs(path: Path) -> Path:
    return graph(path, meta={**META, "input": "photographs"})


def reshaped(path: Path) -> Path:
    """Says that it has 3 logits, and computes as many as its input has bytes."""
    count = helper.make_node("Shape", ["images"], ["s"])
    size = helper.make_node("ReduceProd", ["s"], ["n"], keepdims=1)
    shape = helper.make_node("Concat", ["first", "n"], ["all"], axis=0)
    nodes = (to_float, count, size, shape, helper.make_node("Reshape", ["f", "all"], ["logits"]))
    return graph(path, nodes=nodes, constants=(constant("first", TensorProto.INT64, [1], 1),))


def of_input(*shape: Any, kind: int = BYTES) -> Callable[[Path], Path]:
    inputs, output = (value("images", shape, kind),), value("logits", None)
    flat = helper.make_node("Flatten", ["f"], ["logits"])
    return lambda path: graph(path, inputs=inputs, output=output, nodes=(to_float, flat))


ODD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "scalar": (
        lambda path: graph(
            path,
            nodes=(to_float, helper.make_node("ReduceMean", ["f"], ["logits"], keepdims=0)),
            output=value("logits", []),
        ),
        r"names 3 classes, but its logits are \[\]; export it again",
    ),
    "scalar without names": (
        lambda path: graph(
            path,
            nodes=(to_float, helper.make_node("ReduceMean", ["f"], ["logits"], keepdims=0)),
            output=value("logits", []),
            meta={"preprocessing": META["preprocessing"]},
        ),
        r"logits of 1 images is float32 \[\], should be numbers, a row for each image",
    ),
    "other logits than it says": (reshaped, r"logits of 1 images is float32 \[1, 192\], should be numbers"),
    "photographs": (photographs, r"input is images .*, expected uint8 \[batch, height, width, 3\]"),
    "no pixels": (of_input("batch", 3, 0, 0), r"expected uint8 \[batch, 3, S, S\]"),
    "int64": (of_input("batch", 3, SIZE, SIZE, kind=TensorProto.INT64), r"tensor\(int64\)"),
    "no batch": (of_input(3, SIZE, SIZE), r"expected uint8 \[batch, 3, S, S\]"),
    "one image": (of_input(1, 3, SIZE, SIZE), r"expected uint8 \[batch, 3, S, S\]"),
    "five axes": (of_input("batch", 3, SIZE, SIZE, 1), r"expected uint8 \[batch, 3, S, S\]"),
    "free axes": (of_input("a", "b", "c", "d"), r"expected uint8 \[batch, 3, S, S\]"),
    "two inputs": (
        lambda path: graph(
            path, inputs=(value("images", ("batch", 3, SIZE, SIZE), BYTES), value("more", [1]))
        ),
        r"more tensor\(float\) \[1\], expected uint8",
    ),
    "fails": (
        lambda path: graph(
            path,
            nodes=(
                to_float,
                helper.make_node("Shape", ["images"], ["s"]),
                helper.make_node("Sub", ["s", "big"], ["t"]),
                helper.make_node("Reshape", ["f", "t"], ["logits"]),
            ),
            constants=(constant("big", TensorProto.INT64, [100] * 4, 4),),
            meta={"preprocessing": META["preprocessing"]},
        ),
        r"cannot be run \(.*\); export it again",
    ),
    **{
        f"metadata {number}": (lambda path, said=said: graph(path, meta={**META, **said}), words)
        for number, (said, words) in enumerate(
            [
                ({"preprocessing": "{no"}, "preprocessing: not JSON"),
                ({"preprocessing": "[" * 100_000}, "preprocessing: not JSON"),
                ({"preprocessing": "[1, 2]"}, "do not say how images are pre-processed"),
                ({"preprocessing": json.dumps({**HOW, "image_size": "8"})}, "do not say how images"),
                ({"preprocessing": json.dumps({**HOW, "eval_resize": 10**30})}, "do not say how images"),
                ({"class_names": "hello"}, "class_names: not JSON"),
                ({"class_names": '{"a": 1}'}, "do not say how images"),
                ({"class_names": "[1, 2, 3]"}, "do not say how images"),
                ({"class_names": '["a"]'}, r"names 1 class, but its logits are \['batch', 3\]"),
            ]
        )
    },
}


@pytest.mark.filterwarnings("ignore:these weights do not name their classes")
@each("name", ODD)
def test_odd_graphs__are_one_line(tmp_path: Path, name: str) -> None:
    make, words = ODD[name]
    with pytest.raises(CheckpointError, match=words) as raised:
        load_classifier(make(tmp_path / "a.onnx"))(IMAGE)
    assert str(raised.value).startswith(str(tmp_path / "a.onnx"))
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:these weights do not name their classes")
def test_graphs_without_class_names__answer_with_numbers(tmp_path: Path) -> None:
    classify = load_classifier(graph(tmp_path / "a.onnx", meta={"preprocessing": META["preprocessing"]}))
    assert [name for name, _ in classify(IMAGE)] == ["0", "1", "2"]
