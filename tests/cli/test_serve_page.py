"""The page of `vitctl serve` in Chromium."""

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.cli.test_serve import png, served

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HAS_PACKAGES = all(importlib.util.find_spec(name) for name in ("playwright", "axe_playwright_python"))
SHOTS = os.environ.get("VITCTL_SCREENSHOTS", "")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.skipif(not HAS_PACKAGES, reason="no playwright here: pip install 'vitctl[browser]'"),
]
ROW = "one => [one.cells[0].textContent, Number(one.cells[2].dataset.value)]"
ROWS = f"[...document.querySelectorAll('tr')].map({ROW})"
DROP = """bytes => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
  document.querySelector("label").dispatchEvent(new DragEvent("drop", { bubbles: true, dataTransfer: data }));
}"""


@pytest.fixture(scope="module")
def address(pretrained: Path) -> Iterator[str]:
    with served("--from", pretrained) as (_, found, _):
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


class Page:
    """The page, what it said on the console, and what it asked for."""

    def __init__(self, browser: Any, address: str, width: int = 768, scheme: str = "light") -> None:
        size = {"width": width, "height": 800}
        self.page = browser.new_context(viewport=size, color_scheme=scheme).new_page()
        self.address, self.said, self.asked = address, list[str](), list[str]()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(f"{address}/")
        self.wait("Ready")

    def wait(self, start: str) -> str:
        script = "start => document.querySelector('[role=status]').textContent.startsWith(start)"
        self.page.wait_for_function(script, arg=start)
        return str(self.page.text_content("[role=status]"))

    def check(self, data: bytes) -> None:
        """The rows are what the server answers, and no other host was asked."""
        classes = httpx.post(f"{self.address}/predict", content=data).json()["predictions"][0]["classes"]
        assert self.page.evaluate(ROWS) == [[one["class"], one["probability"]] for one in classes]
        own = (self.address, f"blob:{self.address}")
        assert self.said == [] and [url for url in self.asked if not url.startswith(own)] == []


@pytest.mark.parametrize("width", [390, 768, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page__shows_the_answers_at_every_width(
    browser: Any, address: str, tmp_path: Path, width: int, scheme: str
) -> None:
    """Without a sideways scroll bar, and with no barrier that axe finds."""
    from axe_playwright_python.sync_playwright import Axe

    shown, photo = Page(browser, address, width, scheme), tmp_path / "photo.png"
    Image.effect_noise((400, 300), 90).convert("RGB").save(photo)
    shown.page.set_input_files("input", photo)
    shown.wait("photo.png: ")
    shown.check(photo.read_bytes())
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
    if SHOTS:
        shown.page.screenshot(path=Path(SHOTS) / f"serve_{width}_{scheme}.png", full_page=True)
    found = Axe().run(shown.page)
    assert found.violations_count == 0, found.generate_report()


def test_page__takes_what_is_dropped_and_says_what_is_wrong(browser: Any, address: str) -> None:
    shown = Page(browser, address)
    shown.page.evaluate(DROP, [*png(30, 20)])
    shown.wait("dropped.png: ")
    shown.check(png(30, 20))
    shown.page.evaluate(DROP, [*b"no image"])
    assert shown.wait("dropped.png cannot be read") == "dropped.png cannot be read: not an image"
    assert not shown.page.is_visible("table") and not shown.page.is_visible("img")


def test_page__long_names_the_same_file_again_and_a_stopped_server(
    browser: Any, pretrained: Path, tmp_path: Path
) -> None:
    photo = tmp_path / f"{'x' * 200}.png"
    photo.write_bytes(png(30, 20))
    with served("--from", pretrained, "--drain", 0) as (process, address, _):
        shown = Page(browser, address, 390)
        for number in (1, 2):
            shown.page.set_input_files("input", photo)
            shown.page.wait_for_function("() => !document.querySelector('table').hidden")
            assert sum(url.endswith("/predict") for url in shown.asked) == number
            shown.page.evaluate("document.querySelector('table').hidden = true")
        assert shown.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert shown.page.is_visible("img") and shown.page.locator("th bdi").count() == 5
        process.terminate()
        process.wait(20)
        shown.page.set_input_files("input", photo)
        assert shown.wait("the server") == "the server does not answer"


def test_page__is_worked_by_keyboard_and_camera(browser: Any, address: str) -> None:
    shown = Page(browser, address)
    shown.page.keyboard.press("Tab")
    assert shown.page.evaluate("document.activeElement.type") == "file"
    with shown.page.expect_file_chooser() as chosen:
        shown.page.keyboard.press("Space")
    chosen.value.set_files({"name": "key.png", "mimeType": "image/png", "buffer": png()})
    shown.wait("key.png: ")
    shown.page.keyboard.press("Tab")
    assert not shown.page.is_visible("video")
    shown.page.keyboard.press("Enter")
    shown.page.wait_for_function("() => document.querySelector('video').videoWidth > 0")
    assert shown.page.text_content("button") == "Take the photograph" and shown.page.is_visible("video")
    shown.page.keyboard.press("Enter")
    shown.wait("photograph.png: ")
    assert not shown.page.is_visible("video") and len(shown.page.evaluate(ROWS)) == 5
    assert shown.said == []


def test_page__a_script_of_others_does_not_run(browser: Any, address: str) -> None:
    shown = Page(browser, address)
    script = "Object.assign(document.createElement('script'), {textContent: 'window.bad = 1'})"
    shown.page.evaluate(f"document.body.append({script})")
    assert shown.page.evaluate("window.bad") is None
    assert "Content Security Policy" in " ".join(shown.said)
