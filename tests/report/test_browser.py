"""Pages in a real Chromium: charts have drawn, nothing is asked of a network, and everybody can read them."""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY
from tests.report.conftest import made_up, vtab_result
from tests.trained import CPU, do
from vitctl.data.datasets.readers import shapes
from vitctl.data.writer.shard_writer import write_split
from vitctl.jobs.record.result import RunResult
from vitctl.report.html_report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HAS_PACKAGES = all(importlib.util.find_spec(name) for name in ("playwright", "axe_playwright_python"))
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
    pytest.mark.skipif(not HAS_PACKAGES, reason="no playwright here: pip install 'vitctl[browser]'"),
]
WIDTHS, SCHEMES = (1600, 1280, 390), ("light", "dark")
# Where the screenshots are left for whoever wants to look at them.
SHOTS = os.environ.get("VITCTL_SCREENSHOTS", "")


@pytest.fixture(scope="module")
def pages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of a run whose images are there, of a sweep, and of a VTAB suite."""
    root = tmp_path_factory.mktemp("pages")
    rows = []
    for rate, accuracy in ((0.1, 0.5), (0.01, 0.7), (0.001, 0.6)):
        name = f"lr_{rate}__seed_0"
        made_up(root / "sweep" / name, "smoke", RunResult("pretrain", "done", {"accuracy": accuracy}), 120)
        rows.append({"run": name, "recipe": "smoke", "varied": {"optimizer.lr": rate}, "status": "done",
                     "value": accuracy,
                     "numbers": {}, "loss": 1.0, "seconds": 3.0, "error": ""})  # fmt: skip
    (root / "sweep" / "sweep.json").write_text(json.dumps({"runs": rows}))
    suite = made_up(root / "suite", "vtab", vtab_result())
    made = {"run": [trained, suite], "sweep": [root / "sweep"], "vtab": [suite]}
    for name, folders in made.items():
        write_report(folders, root / f"{name}.html", most_images=None if name == "run" else 0)
    return {name: root / f"{name}.html" for name in made}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page in the browser, what its console said, and what it asked of others."""

    def __init__(self, browser: Any, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.mark.parametrize("name", ["run", "sweep", "vtab"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_page__draws_asks_nothing_and_can_be_read(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    shown = Opened(browser, pages[name], width=width, scheme=scheme)
    shown.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert shown.said == []
    assert [address for address in shown.asked if not address.startswith("data:")] == [pages[name].as_uri()]
    assert shown.run("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    marks = shown.run(
        "[...document.querySelectorAll('figure svg .line, figure svg .dot')].map((one) => "
        "one.getBBox().width)"
    )
    if name == "vtab":  # tables alone
        assert marks == []
    else:
        assert len(marks) > 10 and max(marks) > 100
    images = shown.run("[...document.images].map((one) => one.complete && one.naturalWidth > 0)")
    assert all(images)
    assert bool(images) == (name == "run")
    found = Axe().run(shown.page).response["violations"]
    assert [(one["id"], one["help"], one["nodes"][0]["html"][:200]) for one in found] == []
    if SHOTS:
        shown.page.screenshot(path=f"{SHOTS}/{name}-{width}-{scheme}.png", full_page=True)
    shown.context.close()


# Six names of 30 letters, of umlauts, CJK and emoji, some without a place to break.
WIDE = (
    "Miniature Pinscher, black, tan",
    "Übergrößenträgerüberprüfungsäm",
    "干" * 30,
    "日本の犬と猫の写真とその他の動物の写真をすべて集めた大きな箱",
    "🐕🐈🐎🐄🐖🐑🐐🐪🐘🦏" * 3,
    "Rettungshubschrauberlandeplatz",
)
# Pairs of texts anywhere on the page that share pixels, and texts outside the page.
COLLISIONS = """() => {
  const found = [], walker = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const owner = node.parentElement;
    if (!node.textContent.trim() || owner.closest('desc, title, output, .skip')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    let clip = [0, -1e9, 1e9, 1e9];
    for (let one = owner; one; one = one.parentElement) {
      if (getComputedStyle(one).overflowX === 'visible' || one === document.documentElement) continue;
      const r = one.getBoundingClientRect();
      clip = [Math.max(clip[0], r.left), Math.max(clip[1], r.top), Math.min(clip[2], r.right),
              Math.min(clip[3], r.bottom)];
    }
    for (const r of range.getClientRects()) {
      const b = [Math.max(clip[0], r.left), Math.max(clip[1], r.top), Math.min(clip[2], r.right),
                 Math.min(clip[3], r.bottom)];
      if (b[2] - b[0] > 1 && b[3] - b[1] > 1) found.push([...b, node.textContent.trim(), node]);
    }
  }
  const pairs = found.flatMap(([a, b, c, d, one, n], i) => found.slice(i + 1).filter(
    ([e, f, g, h, , m]) => n !== m && a + 1.5 < g && e + 1.5 < c && b + 4 < h && f + 4 < d)
    .map((other) => [one, other[4]]));
  return [pairs, found.filter((one) => one[2] > innerWidth + 1).map((one) => one[4])];
}"""


@pytest.fixture(scope="module")
def wide_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learned nothing of six classes with wide names, and its evaluation: images, figures, wrong
    answers and calibration.
    """
    root = tmp_path_factory.mktemp("wide")
    for split, size in (("train", 48), ("test", 24)):
        items = shapes.items("shape", split, size, seed=0, image_size=16)
        write_split(items, root / "data" / split, WIDE, seed=0, source_text="test")
    steps = {"schedule.total_steps": 1, "schedule.warmup_steps": 0}
    steps |= {"optimizer.lr": 1e-9, "schedule.end_lr": 0.0}
    values = {"data.path": str(root / "data"), **CPU}
    do(TINY, root / "run", **values, **steps, **{"loss.name": "softmax"})
    scored = {"weights.source": str(root / "run"), "evaluation.answers": str(root / "answers.csv")}
    do("evaluate", root / "scored", **values, **scored)
    write_report([root / "run", root / "scored"], root / "wide.html")
    return root / "wide.html"


@pytest.mark.parametrize("width", [390, 800, 1600])
def test_page__wide_names_do_not_collide(browser: Any, wide_page: Path, width: int) -> None:
    shown = Opened(browser, wide_page, width=width)
    shown.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    if SHOTS:
        shown.page.screenshot(path=f"{SHOTS}/wide-{width}.png", full_page=True)
    assert shown.run(COLLISIONS) == [[], []]
    assert shown.run("document.documentElement.scrollWidth <= innerWidth")
    text = shown.page.inner_text("main")
    assert "no better than always predicting the majority class" in text
    assert all(name in text for name in WIDE) and "wrong answers" in text.lower()
    assert "95 % interval" in text and "Reliability" in text and "List of wrong answers" in text
    shown.context.close()


def test_chart__is_read_by_pointer_and_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    shown = Opened(browser, pages["sweep"])
    chart = shown.page.locator("svg.chart").first
    reading = shown.page.locator("output").first
    chart.hover(position={"x": 200, "y": 80})
    assert reading.text_content().startswith("step ")
    shown.page.mouse.move(0, 0)
    assert reading.text_content() == ""
    chart.focus()
    shown.page.keyboard.press("End")
    last = reading.text_content()
    assert last.startswith("step 120: ")
    assert last.count("·") == 2
    shown.page.keyboard.press("Home")
    assert reading.text_content().startswith("step 1: ")
    shown.page.keyboard.press("ArrowRight")
    assert reading.text_content() not in ("", last)
    shown.page.keyboard.press("Escape")
    assert reading.text_content() == ""
    assert shown.said == []
    shown.context.close()


def test_page__is_complete_without_its_script(browser: Any, pages: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(pages["run"].as_uri())
    assert page.locator("figure svg path.line").count() > 1
    context.close()


def test_page__a_script_of_others_does_not_run(browser: Any, tmp_path: Path) -> None:
    run = made_up(tmp_path / "a", "smoke", None, 12)
    write_report([run], tmp_path / "report.html", most_images=0)
    text = (
        (tmp_path / "report.html").read_text().replace("<main", "<script>console.log('ran')</script><main", 1)
    )
    (tmp_path / "report.html").write_text(text)
    shown = Opened(browser, tmp_path / "report.html")
    assert "ran" not in shown.said
    assert any("Content Security Policy" in said for said in shown.said)
    shown.context.close()


def test_page__printed_it_shows_what_is_folded(browser: Any, pages: dict[str, Path], tmp_path: Path) -> None:
    shown = Opened(browser, pages["run"])
    shown.run("dispatchEvent(new Event('beforeprint'))")
    assert shown.run("[...document.querySelectorAll('details')].every((one) => one.open)")
    shown.page.emulate_media(media="print", color_scheme="dark")
    assert shown.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shown.page.pdf(path=str(tmp_path / "a.pdf"))
    assert (tmp_path / "a.pdf").stat().st_size > 20_000
    shown.context.close()
