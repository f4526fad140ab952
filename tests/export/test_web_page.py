"""The page of `export --web` in Chromium, with onnxruntime-web from npm beside it."""

import importlib.util
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.export.conftest import Saved, pixels
from vitctl import predict
from vitctl.errors import RecipeError

Exported = Callable[..., dict[str, Any]]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# Where `npm install onnxruntime-web` put it; the clone's own folder by default.
MODULES = Path(os.environ.get("VITCTL_NODE_MODULES", Path(__file__).parents[2] / "node_modules"))
ORT = MODULES / "onnxruntime-web" / "dist"
FILES = ("ort.wasm.min.js", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm")
SHOTS = os.environ.get("VITCTL_SCREENSHOTS", "")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
with_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")
with_playwright = pytest.mark.skipif(not HAS_PLAYWRIGHT, reason="not here: pip install 'vitctl[browser]'")
with_runtime = pytest.mark.skipif(not ORT.exists(), reason="not here: npm install onnxruntime-web")


class Served:
    """A page over loopback, what it said, and what it asked for."""

    def __init__(self, browser: Any, folder: Path, width: int = 1280) -> None:
        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

        handler = partial(Handler, directory=str(folder))
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        self.page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{self.url}model.html")

    def status(self, start: str) -> str:
        self.page.wait_for_function(
            "start => document.querySelector('[role=status]').textContent.startsWith(start)", arg=start
        )
        return str(self.page.text_content("[role=status]"))

    def answers(self) -> dict[str, float]:
        row = "one => [one.cells[0].textContent, one.cells[2].dataset.value]"
        script = f"[...document.querySelectorAll('tr')].map({row})"
        return {name: float(value) for name, value in self.page.evaluate(script)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    flags = (
        "--no-sandbox",
        "--disable-quic",
        "--disable-background-networking",
        "--disable-component-update",
    )
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=[*flags, "--disable-sync"])
        yield chromium
        chromium.close()


def page_of(weights: Path, exported: Exported, tmp_path: Path, *, runtime: bool = True) -> Path:
    exported(weights, "onnx", **{"export.include_preprocess": True, "export.web": True})
    for name in FILES * runtime:
        shutil.copyfile(ORT / name, tmp_path / "run" / name)
    return tmp_path / "run"


@pytest.mark.browser
@with_chromium
@with_playwright
@with_runtime
@pytest.mark.parametrize(("loss", "method"), [("softmax", "shorter_side"), ("sigmoid", "letterbox")])
def test_page__answers_as_predict_and_asks_no_other_host(
    browser: Any, saved: Saved, exported: Exported, tmp_path: Path, loss: str, method: str
) -> None:
    """Photographs of several sizes; one lies on its side, as a phone stores it."""
    weights = saved(loss=loss, eval_method=method)
    served = Served(browser, page_of(weights, exported, tmp_path))
    assert served.status("Ready") == "Ready"
    for number in range(3):
        photo = tmp_path / f"{number}.png"
        turned = Image.Exif()
        turned[0x0112] = 6 if number == 1 else 1
        Image.fromarray(pixels(number)).save(photo, exif=turned)
        served.page.set_input_files("input", photo)
        served.status(photo.name)
        [wanted] = predict(str(photo), from_=str(weights), top=5, precision="float32")
        found = served.answers()
        assert list(found) == [name for name, _ in wanted.classes]
        np.testing.assert_allclose([*found.values()], [value for _, value in wanted.classes], atol=1e-4)
    if SHOTS:
        served.page.screenshot(path=Path(SHOTS) / f"page_{loss}_{method}.png", full_page=True)
    assert [url for url in served.asked if not url.startswith((served.url, f"blob:{served.url}"))] == []
    assert served.said == []


@pytest.mark.browser
@with_chromium
@with_playwright
@pytest.mark.parametrize("width", [1280, 390])
def test_page__without_the_runtime_says_the_line_to_type(
    browser: Any, saved: Saved, exported: Exported, tmp_path: Path, width: int
) -> None:
    served = Served(browser, page_of(saved(), exported, tmp_path, runtime=False), width)
    assert "npm pack onnxruntime-web && tar xzf" in served.status("onnxruntime-web is not beside this page")
    assert served.page.evaluate("document.documentElement.scrollWidth") <= width


def test_page__class_names_cannot_end_the_script(saved: Saved, exported: Exported, tmp_path: Path) -> None:
    names = ["</script><b>", "b", "c", "d", "e"]
    page = page_of(saved(class_names=names), exported, tmp_path, runtime=False) / "model.html"
    text = page.read_text()
    facts = text.partition('id="facts">')[2].partition("</script>")[0]
    assert json.loads(facts)["names"] == names and text.count("</script>") == 3
    assert "http://" not in text and "https://" not in text


@pytest.mark.parametrize(
    ("to", "inside", "words"),
    [
        ("onnx", False, "web needs the pre-processing inside the file; add --include-preprocess"),
        ("pt2", True, "web is for onnx alone"),
    ],
)
def test_page__what_cannot_be_written(
    saved: Saved, exported: Exported, to: str, inside: bool, words: str
) -> None:
    with pytest.raises(RecipeError, match=words):
        exported(saved(), to, **{"export.web": True, "export.include_preprocess": inside})
