"""What a terminal sees, and that nothing typed by a person is taken for markup."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from vitctl.cli.show.console import waiting
from vitctl.cli.show.render import Screen, _line, show_result
from vitctl.system.screen import VIEW, above_view

TRAIN = {
    "kind": "train",
    "step": 5,
    "total_steps": 20,
    "samples": 80,
    "epoch": 1.14,
    "loss": 0.123456,
    "lr": 0.01,
    "images_per_second": 40.0,
    "data_wait": 0.25,
    "num_bad": 0,
}


def test_line__of_a_training_record() -> None:
    expected = "step 5/20  epoch 1.14  lr 0.01  loss 0.1235  40 images/s  data-wait 25%  left 6 s"
    assert _line(TRAIN) == expected
    slowest = {"rank": 3, "what": "data", "share": 0.415}
    assert _line({**TRAIN, "slowest": slowest}) == expected.replace(
        "25%", "25%  slowest: process 3, data 42%"
    )
    assert _line({**TRAIN, "num_bad": 3}) == expected.replace("25%", "25%  bad 3")


def test_screen__elsewhere_is_lines() -> None:
    out = io.StringIO()
    with Screen(Path("runs/[b16]"), Console(file=out, width=80, highlight=False)) as screen:
        for text in ("starting", "reading weights and data", "reading weights and data"):
            screen.report({"kind": "now", "text": text})
        screen.report({"kind": "now", "step": 0, "total_steps": 20})
        screen.report(TRAIN)
        screen.report({"kind": "warning", "text": "[float] torn"})
    first = ["run folder: runs/[b16]", "reading weights and data ..."]
    assert out.getvalue().splitlines() == [*first, _line(TRAIN), "warning: [float] torn"]


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False, legacy_windows=False)


def seen(screen: Screen) -> list[str]:
    """The lines of the view as a terminal of 80 columns shows them."""
    paper = Console(file=io.StringIO(), record=True, width=80, highlight=False, color_system=None)
    paper.print(screen.view.get_renderable())
    lines = [line.rstrip() for line in paper.export_text().splitlines()]
    assert max(map(len, lines), default=0) <= 80
    return lines


BIG = {
    **TRAIN,
    "step": 123_456,
    "total_steps": 517_822,
    "samples": 123_456 * 4096,
    "loss": 6.789012,
    "lr": 0.000812345,
    "images_per_second": 12_345.6,
}


def test_screen__at_80_columns_everything_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    screen = Screen(Path("runs/a"), terminal())
    monkeypatch.setattr(screen.view, "get_time", lambda: now[0])
    screen.report({"kind": "now", "text": "reading weights and data"})
    now[0] += 3
    (waiting,) = seen(screen)
    assert waiting.startswith("reading weights and data") and "0:00:03" in waiting
    screen.report({"kind": "now", "step": 0, "total_steps": 517_822})
    now[0] += 1
    (bar,) = seen(screen)
    assert bar.split()[0] == "training" and bar.endswith("0/517,822 0:00:01 -:--:--")

    for step in (1, 3):  # two steps a minute
        now[0] += 60
        screen.report({**TRAIN, "kind": "now", "step": step, "total_steps": 517_822})
    assert " 3/517,822 0:02:01 4315:09:30" in seen(screen)[0]
    screen.report({"kind": "evaluate", "step": 3, "accuracy": 0.45678, "correct": 1, "total": 2})
    screen.report({**BIG, "kind": "now", "slowest": {"rank": 511, "what": "data", "share": 0.415}})
    _, numbers, accuracy = seen(screen)
    assert numbers == "lr 0.000812  loss 6.7890  12,346 images/s  data-wait 25%  slowest: process 511,…"
    assert accuracy == "accuracy 45.68% at 3"


def test_screen__accuracy_and_final_loss_stay() -> None:
    console = terminal()
    with Screen(Path("runs/a"), console) as screen:
        screen.report(TRAIN)
        screen.report({"kind": "evaluate", "step": 5, "accuracy": 0.5, "correct": 1, "total": 2})
        screen.report({**TRAIN, "step": 9})
        assert seen(screen)[2] == "accuracy 50.00% at 5"
        screen.report({**TRAIN, "step": 20})
        assert seen(screen) == []
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "step 5  accuracy 50.00% (1 of 2)" in said
    assert "step 20/20  epoch 1.14  lr 0.01  loss 0.1235" in said


def test_screen__what_the_log_has_overtaken_is_not_shown() -> None:
    screen = Screen(Path("runs/a"), terminal())
    screen.report({**TRAIN, "time": 2.0})
    screen.report({**TRAIN, "kind": "now", "step": 4, "time": 1.0})
    assert "5/20" in seen(screen)[0]


PROGRESS = {"kind": "progress", "step": 0, "what": "scoring", "done": 1280, "total": 50000}


def test_screen__a_pass_has_a_bar_until_its_result_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    screen = Screen(Path("runs/a"), terminal())
    monkeypatch.setattr(screen.view, "get_time", lambda: now[0])
    screen.report(TRAIN)
    screen.report({**PROGRESS, "done": 0})
    now[0] += 10
    screen.report(PROGRESS)
    screen.report({**PROGRESS, "kind": "now", "done": 2500})
    training, scoring, numbers = seen(screen)
    assert (training.split()[0], scoring.split()[0], numbers.split()[0]) == ("training", "scoring", "lr")
    assert " 2,500/50,000 0:00:10 " in scoring
    screen.report({"kind": "evaluate", "step": 5, "accuracy": 0.5, "correct": 1, "total": 2})
    assert [line.split()[0] for line in seen(screen)] == ["training", "lr", "accuracy"]


def test_screen__a_line_of_a_signal_handler_goes_above_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left the two lines of the view on the screen, and was itself overwritten."""
    monkeypatch.setitem(VIEW, "lines", 0)
    assert above_view("stopping") == "\nstopping\n"
    with Screen(Path("a"), terminal()) as screen:
        screen.report(TRAIN)
        screen.view.refresh()
        assert above_view("stopping") == "\r\x1b[2K\x1b[1A\x1b[2Kstopping\n\n"
    assert above_view("stopping") == "\nstopping\n"


def test_waiting__is_a_line_that_goes_and_nothing_elsewhere() -> None:
    for console, expected in (
        (terminal(), "looking [b16] ...\r\x1b[2Kdone\n"),
        (Console(file=io.StringIO(), width=80), "done\n"),
    ):
        with waiting("looking [b16]", console):
            pass
        console.print("done")
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue() == expected


def test_screen__elsewhere_shows_the_first_step_and_one_every_30_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With log.every_steps = 50 a slow training was silent for minutes; the log itself does not change."""
    clock = [1000.0]
    monkeypatch.setattr("vitctl.cli.show.render.time.monotonic", lambda: clock[0])
    out = io.StringIO()
    now = {name: value for name, value in TRAIN.items() if name != "epoch"} | {"kind": "now"}
    with Screen(Path("a"), Console(file=out, width=80, highlight=False)) as screen:
        for step in range(1, 11):
            screen.report({**now, "step": step})
            clock[0] += 8
    shown = [line.split("/")[0] for line in out.getvalue().splitlines()[1:]]
    assert shown == ["step 1", "step 5", "step 9"]


def test_result__names_the_split_of_every_number_and_what_to_type_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def counts(correct: int) -> dict[str, object]:
        return {"accuracy": correct / 10, "correct": correct, "total": 10, "chance": 1 / 3}

    metrics = {**counts(9), "top5_accuracy": 1.0, "test": {**counts(8), "accuracy_interval": [0.4, 0.9]}}
    used = {"split": "val", "test": {"split": "test"}}
    result = {"job": "finetune", "metrics": metrics, "provenance": used, "files": {"model": "m"}}
    show_result(result, Path("runs/a b"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Scores on val, test accuracy on test"
    assert [line.split("  ")[0] for line in lines[2:4]] == ["accuracy", "test accuracy"]
    assert not any("top-5" in line for line in lines)  # of three classes
    assert lines[-1] == "next: vitctl predict IMAGES --from 'runs/a b'"
    show_result({**result, "metrics": counts(9), "provenance": {"split": "val"}}, Path("a"))
    assert capsys.readouterr().out.splitlines()[1] == "Scores on val"
