"""The page: what it must show, what it must not do, and what names of others become in it."""

import base64
import csv
import hashlib
import html
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import TINY
from tests.matrix import slow
from tests.report.conftest import made_up, vtab_result
from tests.trained import do
from vitctl.data.datasets.catalog import open_split
from vitctl.errors import CheckpointError
from vitctl.jobs.record.answer_table import read_answers
from vitctl.jobs.record.result import RunResult, read_result
from vitctl.recipe.load import load_recipe
from vitctl.recipe.paper import TABLE_9
from vitctl.recipe.schema import Pretrain
from vitctl.report import html_report
from vitctl.report.answers import answer_split
from vitctl.report.charts import Block
from vitctl.report.class_tables import Budget, thumbnail, wrong_answers
from vitctl.report.html_report import MAX_BYTES, write_report
from vitctl.report.result_tables import table
from vitctl.report.run_records import read_folders, read_run

HOSTILE = "</td></script><script>alert(1)</script>\"'&\x1b[31m\u202e{{ 7*7 }}{% raw %}"
AS_TEXT = "</td></script><script>alert(1)</script>\"'&\\x1b[31m\\u202e{{ 7*7 }}{% raw %}"


class Reader(HTMLParser):
    """Elements, attributes that load something, and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: set[str] = set()
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.words: list[str] = []
        self.missing_alt = 0
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.elements.append(name)
        self.attributes |= values.keys()
        self.addresses += [
            str(values[key]) for key in ("src", "href", "action", "data", "poster") if key in values
        ]
        self.ids += [str(values["id"])] if "id" in values else []
        self.headings += [int(name[1])] if re.fullmatch("h[1-6]", name) else []
        self.missing_alt += name == "img" and not values.get("alt")
        self.inline += [key for key in values if key.startswith("on") or key == "style"]

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(tmp_path: Path, *folders: Path, images: int | None = 0) -> Reader:
    write_report(folders, tmp_path / "report.html", most_images=images)
    return Reader((tmp_path / "report.html").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_page__of_a_run_shows_what_its_numbers_belong_to(trained: Path, tmp_path: Path) -> None:
    shown = page_of(tmp_path, trained, images=None)
    result, recipe = read_result(trained), load_recipe(str(trained / "recipe.toml")).recipe
    assert result is not None and isinstance(recipe, Pretrain)
    for key in ("data_sha256", "train_sha256", "weights_sha256", "recipe_sha256", "precision"):
        assert str(result.provenance[key]) in shown.text, key
    env = json.loads((trained / "env.json").read_text())
    assert env["platform"] in shown.text
    assert (trained / "launch.txt").read_text().strip() in shown.text
    assert f"vitctl pretrain --recipe {trained}/recipe.toml --out {trained}_again" in shown.text
    assert "tiny.toml:" in shown.text
    assert f"{result.metrics['accuracy']:.2%}" in shown.text
    for title in (
        "Training loss",
        "Accuracy on the scored split",
        "Confusion",
    ):
        assert title in shown.text
    assert shown.elements.count("progress") >= 12
    assert "as in the result" in shown.text
    overview = page_of(tmp_path, trained, made_up(tmp_path / "other", "smoke", None))
    assert f"test of {Path(recipe.data.path).name}" in overview.text


def test_page__its_predictions_are_those_of_evaluate(trained: Path, tiny_data: Path, tmp_path: Path) -> None:
    result = do(
        "evaluate", tmp_path / "scored", **{"weights.source": str(trained), "data.path": str(tiny_data)}
    )
    found = answer_split(read_run(trained, "a"), None)
    assert sum(row["is_right"] for row in found.rows) == result["metrics"]["correct"]
    assert len(found.source) == result["metrics"]["total"] == len(found.rows)
    assert all(np.all(np.diff([share for _, share in row["best"]]) <= 0) for row in found.rows)
    lines = (tmp_path / "scored" / "confusion.csv").read_text().splitlines()[1:]
    pairs = [(row["truth"], row["answer"]) for row in found.rows]
    expected = sorted((own, answer, pairs.count((own, answer))) for own, answer in set(pairs))
    assert sorted((own, answer, int(n)) for own, answer, n in (line.split(",") for line in lines)) == expected
    few = answer_split(read_run(trained, "a"), 5)
    assert few.rows == [found.rows[n * 23 // 5] for n in range(5)]
    assert "5 of the 23 images" in few.remark


@pytest.mark.parametrize("ending", [".csv", *slow(".parquet")])
def test_wrong_answers__are_those_of_the_evaluation_the_most_confident_first(
    trained: Path, tiny_data: Path, tmp_path: Path, ending: str
) -> None:
    file, values = tmp_path / f"a{ending}", {"weights.source": str(trained), "data.path": str(tiny_data)}
    do("evaluate", tmp_path / "scored", **values, **{"evaluation.answers": str(file)})
    run = read_run(tmp_path / "scored", "a")
    wrong = [row for row in read_answers(file) if row["truth"] != row["answer"]]
    wrong.sort(key=lambda row: -row["probability"])
    suspects = {row["path"] for row in read_answers(tmp_path / "scored" / "suspects.csv")}
    *shown, (listing,) = _blocks(wrong_answers(run, answer_split(run, 3), Budget(10**6)))
    assert [row[:4] for row in listing["rows"]] == [
        (*(row[name] for name in ("path", "truth", "answer")), f"{row['probability']:.2%}") for row in wrong
    ]
    assert [row[0] for row in listing["rows"] if row[5] == "yes"] == [
        row["path"] for row in wrong if row["path"] in suspects
    ]
    pictures = [one["picture"]["alt"] for one in shown[1]["items"]]
    assert pictures == [f"{row['path']}, of class {row['truth']}" for row in wrong[:12]]
    source = open_split("test", path=tiny_data)
    keys = [source.key(sample) for sample in range(len(source))]
    best = thumbnail(source, keys.index(wrong[0]["path"]), "", Budget(10**6))
    assert best is not None and shown[1]["items"][0]["picture"]["address"] == best["address"]

    (*_, (alone,)) = _blocks(wrong_answers(run, None, Budget(10**6)))  # without weights and images
    assert alone["rows"] == listing["rows"]
    file.write_bytes(b"x")
    assert wrong_answers(run, None, Budget(10**6)) == []
    (*_, (computed,)) = _blocks(wrong_answers(run, answer_split(run, None), Budget(10**6)))
    assert {row[:3] for row in computed["rows"]} == {row[:3] for row in listing["rows"]}
    assert "Wrong answers" in page_of(tmp_path, tmp_path / "scored", images=None).text


def _blocks(blocks: list[Block]) -> tuple[Block, Block, list[Block]]:
    """Return the line, the examples, and the tables of the list."""
    line, examples, folded = blocks
    return line, examples, folded["blocks"][0]["blocks"]


def test_page__without_the_images_of_the_result_shows_no_examples(trained: Path, tmp_path: Path) -> None:
    recipe, result = ((trained / name).read_text() for name in ("recipe.toml", "result.json"))
    place = re.findall(r'(?m)^path = "(.*?)"', recipe)[0]
    digest = open_split("test", path=place).digest
    result = json.dumps(json.loads(result) | {"record": {}})  # without a digest of its fields
    assert digest in result
    for name, changed, reason in (
        ("recipe.toml", recipe.replace(place, f"{tmp_path}/gone"), "cannot be opened any more"),
        ("result.json", result.replace(digest, "0" * 64), "are not those of the result"),
    ):
        copy = Path(shutil.copytree(trained, tmp_path / name))
        (copy / name).write_text(changed)
        shown = page_of(tmp_path, copy, images=None)
        assert reason in shown.text
        assert "progress" not in shown.elements


@pytest.mark.slow
def test_page__answers_of_other_weights_than_those_of_the_result_are_not_shown(
    trained: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """The file that an evaluation named was replaced: its answers stood beside the numbers of the old one."""
    saved = sorted((trained / "checkpoints").iterdir())[-1] / "model.safetensors"
    weights = Path(shutil.copy(saved, tmp_path / "w.safetensors"))
    do("evaluate", tmp_path / "scored", **{"weights.source": str(weights), "data.path": str(tiny_data)})
    assert page_of(tmp_path, tmp_path / "scored", images=None).elements.count("progress") > 0
    tensors, metadata = load_file(weights), safe_open(weights, framework="pt").metadata()
    tensors["head.weight"] = tensors["head.weight"] * 0.5
    save_file(tensors, weights, metadata)
    shown = page_of(tmp_path, tmp_path / "scored", images=None)
    assert "the current weights are not those of the result" in shown.text
    assert "progress" not in shown.elements


def test_page__names_of_others_stay_text(tmp_path: Path) -> None:
    """Markup, quotes, control characters, direction marks and template code, wherever they may stand."""
    numbers = {"accuracy": 0.5, "correct": 1, "total": 2, "by_seed": {HOSTILE: {"accuracy": 0.5}}}
    provenance = {"data_source": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}, "versions": {HOSTILE: HOSTILE}}
    result = RunResult("pretrain", "done", numbers, provenance)
    run = made_up(tmp_path / "a<b>&'", "smoke", result, 12, note=HOSTILE)
    with (run / "confusion.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [("class", "answer", "images"), (HOSTILE, "other", 3), ("other", "other", 9)]
        )
    (run / "launch.txt").write_text(HOSTILE)
    (run / "env.json").write_text(json.dumps({"platform": HOSTILE}))
    (run / HOSTILE.replace("/", "")).mkdir()
    log = (run / "log.jsonl").read_text()
    (run / HOSTILE.replace("/", "") / "log.jsonl").write_text(log)
    (run / "inspect").mkdir()
    Image.new("RGB", (40, 30)).save(run / "inspect" / "<img onerror=x>.png")
    failed = made_up(tmp_path / "failed", "smoke", RunResult("pretrain", "failed", error=HOSTILE))
    shown = page_of(tmp_path, run, failed)
    assert (shown.elements.count("script"), shown.elements.count("b"), shown.inline) == (1, 0, [])
    assert shown.text.count(AS_TEXT) >= 12
    text = (tmp_path / "report.html").read_text()
    assert not {"\x1b", "\u202e"} & set(text)
    assert all(re.fullmatch("[a-z0-9-]+", name) for name in shown.attributes)


def test_page__loads_nothing_and_runs_nothing_but_its_own(trained: Path, tmp_path: Path) -> None:
    shown = page_of(tmp_path, trained, made_up(tmp_path / "b", "vtab", vtab_result()), images=None)
    text = (tmp_path / "report.html").read_text()
    assert shown.addresses
    assert all(address.startswith(("data:image/", "#")) for address in shown.addresses)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    rules = dict(part.strip().split(" ", 1) for part in html.unescape(policy[1]).split(";"))
    assert rules["default-src"] == "'none'" and rules["img-src"] == "data:"
    for name, element in (("style-src", "style"), ("script-src", "script")):
        [content] = re.findall(rf"<{element}>(.*?)</{element}>", text, re.S)
        assert (
            rules[name] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        )


def test_page__its_structure_can_be_read_aloud(trained: Path, tmp_path: Path) -> None:
    shown = page_of(tmp_path, trained, made_up(tmp_path / "b", "vtab", vtab_result(), 120), images=None)
    assert len(shown.ids) == len(set(shown.ids))
    assert shown.headings[0] == 1 and shown.headings.count(1) == 1
    titles = [word.strip() for word in shown.words if word.strip() in ("Classes", "Curves", "Provenance")]
    assert titles[:3] == ["Classes", "Curves", "Provenance"]  # of the first run
    assert all(after - before <= 1 for before, after in zip(shown.headings, shown.headings[1:], strict=False))
    assert shown.missing_alt == 0
    assert shown.elements.count("table") == shown.elements.count("caption") > 5
    assert {"header", "main", "nav", "footer"} <= set(shown.elements)
    targets = {address[1:] for address in shown.addresses if address.startswith("#")}
    assert targets <= set(shown.ids)


def test_page__vtab_stands_beside_table_9(tmp_path: Path) -> None:
    shown = page_of(tmp_path, made_up(tmp_path / "suite", "vtab", vtab_result()))
    for task, values in TABLE_9.items():
        paper = " ".join(f"{value:.1f}%" for value in values)
        row = rf"{task} {values[1] - 1:.2f}% 0.40% 10.00% {paper}"
        assert re.search(row, shown.text), task
    assert "the paper's results on the same tasks (Table 9)" in shown.text


def test_page__curves_of_everything_that_was_logged(tmp_path: Path) -> None:
    shown = page_of(tmp_path, made_up(tmp_path / "a", "smoke", None, 120))
    for title in ("Training loss", "Accuracy on the scored split", "Few-shot accuracy during training",
                  "Learning rate",
                  "Images per second", "MFU, share of the peak FLOP/s", "Data-wait, share of the time",
                  "Bad samples so far",
                  "Skipped updates so far"):  # fmt: skip
        assert title in shown.text
    assert "not finished" in shown.text
    assert "2 skipped, 2 bad images" in shown.text


def test_page__of_a_short_run_has_no_rates_and_of_several_runs_folds_their_curves(tmp_path: Path) -> None:
    short = page_of(tmp_path, made_up(tmp_path / "a", "smoke", None, 5)).text
    assert "Training loss" in short and "Images per second" not in short and "Learning rate" not in short
    alone = page_of(tmp_path, made_up(tmp_path / "b", "smoke", None, 120)).elements
    several = page_of(tmp_path, tmp_path / "a", tmp_path / "b").elements
    assert (alone.count("details"), several.count("details")) == (1, 4)  # provenance; of each run two
    assert [alone.count(name) for name in ("h2", "h3", "h4")] == [1, 2, 2]


@pytest.mark.slow
def test_page__stays_below_3_mb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty long runs, each with pictures of noise; and a limit that only the smallest page keeps."""
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)
    for number in range(60):
        run = made_up(
            tmp_path / "runs" / f"r{number:02d}",
            "smoke",
            RunResult("pretrain", "done", {"accuracy": 0.5}),
            60,
        )
        (run / "inspect").mkdir()
        Image.fromarray(noise).save(run / "inspect" / "rollout.png")
    shown = page_of(tmp_path, tmp_path / "runs")
    size = (tmp_path / "report.html").stat().st_size
    assert 500_000 < size < MAX_BYTES
    assert "the page has no room for it" in shown.text
    assert "Its curves and its recipe are left out" in shown.text
    assert shown.text.count("pretrain · recipe smoke") == 60
    monkeypatch.setattr(html_report, "MAX_BYTES", size - 1)
    page_of(tmp_path, tmp_path / "runs")
    assert (tmp_path / "report.html").stat().st_size < size - 1


def test_page__pictures_of_inspect(tmp_path: Path) -> None:
    run = made_up(tmp_path / "a", "smoke", None)
    (run / "inspect" / "deep").mkdir(parents=True)
    Image.new("RGB", (40, 30), (200, 10, 10)).save(run / "inspect" / "filters.png")
    Image.new("RGB", (3000, 30)).save(run / "inspect" / "deep" / "attention_distance.png")
    (run / "inspect" / "broken.png").write_bytes(b"no png")
    shown = page_of(tmp_path, run)
    pictures = [address for address in shown.addresses if address.startswith("data:")]
    assert len(pictures) == 2
    assert all(address.startswith("data:image/png") for address in pictures)
    assert "Attention distance" in shown.text
    assert "Not shown: inspect/broken.png" in shown.text


def test_page__of_a_damaged_run_shows_the_rest(tmp_path: Path) -> None:
    run = made_up(tmp_path / "a", "smoke", RunResult("pretrain", "done", {"accuracy": 0.5}), 12)
    (run / "recipe.toml").write_text('job = "pretrain"\nnonsense = 3\n')
    (run / "env.json").write_text("{")
    shown = page_of(tmp_path, run)
    assert shown.text.count("Could not be read:") == 2
    assert "Training loss" in shown.text


def test_page__of_a_sweep(tiny_data: Path, tmp_path: Path) -> None:
    rows = []
    for rate, accuracy in ((0.1, 0.5), (0.01, 0.7)):
        name = f"lr_{rate}__seed_0"
        made_up(tmp_path / "sw" / name, str(TINY), RunResult("pretrain", "done", {"accuracy": accuracy}), 20,
                **{"data.path": str(tiny_data)})  # fmt: skip
        rows.append({"run": name, "recipe": "tiny", "varied": {"optimizer.lr": rate, "seed": 0},
                     "status": "done",
                     "value": accuracy, "numbers": {}, "loss": 1.0, "seconds": 3.0, "error": ""})  # fmt: skip
    (tmp_path / "sw" / "sweep.json").write_text(json.dumps({"runs": rows}))
    shown = page_of(tmp_path, tmp_path / "sw")
    assert "lr_0.1__seed_0 0.1 0 done 50.00% 1 3" in shown.text
    assert "lr_0.01__seed_0 0.01 0 done 70.00% 1 3 highest" in shown.text
    assert shown.text.count("optimizer.lr") >= 1
    (tmp_path / "sw" / "sweep.json").write_text('{"runs": 3}')
    with pytest.raises(CheckpointError, match="not the table of a sweep"):
        read_folders([tmp_path / "sw"])


def test_page__warns_of_unverified_images_and_of_an_accuracy_of_a_constant_prediction(tmp_path: Path) -> None:
    numbers = {"total": 16, "majority_class": 0.25, "chance": 0.25}
    for state, accuracy, warnings in (
        ("whole", 0.5, 0),
        ("whole", 0.25, 1),
        ("part", 0.5, 1),
        ("none", 0.25, 2),
    ):
        scores = numbers | {"accuracy": accuracy, "correct": int(16 * accuracy)}
        result = RunResult("finetune", "done", scores, {"data_verified": state})
        run = made_up(tmp_path / f"{state}{accuracy}", "smoke", result)
        write_report([run], tmp_path / "a.html", most_images=0)
        assert (tmp_path / "a.html").read_text().count("Warning: ") == warnings


def test_table__columns_of_numbers_are_at_the_right() -> None:
    made = table("t", ("class", "answer", "share"), [("2", "3", "8.16%"), ("4", "1", "-")], names=2)
    assert made["numeric"] == [False, False, True]
