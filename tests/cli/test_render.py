"""What a terminal sees, and that nothing typed by a person is taken for markup."""

import io
from pathlib import Path

from rich.console import Console

from vitctl.cli.render import Screen, _line, bytes_text

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
    assert _line({**TRAIN, "num_bad": 3}) == expected.replace("25%", "25%  bad 3")


def test_line__of_a_record_that_nobody_needs_to_see() -> None:
    assert _line({"kind": "checkpoint", "step": 1}) == ""


def test_screen__on_a_terminal_is_a_bar_and_elsewhere_lines() -> None:
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=160, highlight=False)
        with Screen(Path("runs/[b16]"), console) as screen:
            screen.report(TRAIN)
            if screen.progress is not None:
                screen.progress.refresh()
            screen.report({**TRAIN, "step": 20})
            screen.report({"kind": "warning", "text": "[float] torn"})
        assert "run folder: runs/[b16]" in out.getvalue()
        assert "warning: [float] torn" in out.getvalue()
        assert ("step 5/20" in out.getvalue()) is not terminal
        assert "40 images/s" in out.getvalue()
        assert "data-wait 25%" in out.getvalue()


PROGRESS = {"kind": "progress", "step": 0, "what": "scoring", "done": 1280, "total": 50000}


def test_line__of_a_pass_over_images() -> None:
    assert _line(PROGRESS) == "scoring: 1,280 of 50,000 images"


def test_screen__a_pass_has_a_bar_until_its_result_comes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160, highlight=False)
    with Screen(Path("runs/a"), console) as screen:
        assert screen.progress is not None
        screen.report(TRAIN)
        screen.report(PROGRESS)
        screen.report({**PROGRESS, "done": 2560})
        assert [(task.description, task.completed) for task in screen.progress.tasks] == [
            ("training", 5),
            ("scoring", 2560),
        ]
        screen.report({"kind": "evaluate", "step": 5, "accuracy": 0.5, "correct": 1, "total": 2})
        assert [task.description for task in screen.progress.tasks] == ["training"]


def test_bytes_text() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 3 * 2**30, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.00 TiB",
    ]
