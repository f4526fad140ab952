"""The situation of a message is made, what it proposes is taken from what is printed, and typed: it works."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Said, Vitctl
from tests.docs.conftest import photo, write_photos
from tests.matrix import slow

Make = Callable[[Path], None]


def typed(vitctl: Vitctl, line: str) -> Said:
    return vitctl(*shlex.split(line))


def after(said: Said, words: str, end: str = "") -> str:
    """What stands after some words, to the end of the line or to `end`."""
    text = (said.err + said.out).partition(words)[2].partition("\n")[0]
    assert text, said
    return text.partition(end)[0] if end else text


def nothing(_: Path) -> None:
    pass


def empty_class(here: Path) -> None:
    (here / "PHOTOS" / "bat").mkdir()


def broken_photo(here: Path) -> None:
    (here / "PHOTOS" / "cat" / "broken.jpg").write_bytes(photo("cat", 0)[:300])


def only_test(here: Path) -> None:
    shutil.rmtree(here / "data" / "mine" / "train")


LONGER = "--set schedule.total_steps=22"
SPLIT = "data.train_split=train[:50%]"
FINETUNE = "finetune --from RUN --data data/mine --steps 2 --out new"
SMOKE = "pretrain --recipe smoke --data data/mine --dry-run"
CASES: list[tuple[Make, str, str, str, str]] = [  # the proposal begins after, ends before, and is typed after
    (nothing, f"resume RUN --set optimizer.lr=0.5 {LONGER}", "with: vitctl ", "", ""),
    (empty_class, "data shards PHOTOS out", "or type: vitctl ", "", ""),
    (only_test, FINETUNE, "a part of it: ", "", f"{FINETUNE} "),
    (nothing, f"{SMOKE} --log-every-steps 2", "did you mean ", "?", f"{SMOKE} "),
    (nothing, f"resume RUN {LONGER}", "with: vitctl ", "", ""),
    (nothing, f"resume RUN --set {SPLIT} {LONGER}", "with: vitctl ", "", ""),
    (nothing, "resume RUN --steps 22", "did you mean ", "?", "resume RUN "),
    (broken_photo, "data shards PHOTOS out", "or type: vitctl ", "", ""),
    (empty_class, "finetune --from RUN --data PHOTOS", "or type: vitctl ", ";", ""),
    (broken_photo, "finetune --from RUN --data PHOTOS", "or type: vitctl ", ";", ""),
    (
        nothing,
        "probe --from RUN --data data/mine --set probe.k=99",
        "fewer: ",
        "",
        "probe --from RUN --data data/mine ",
    ),
    (nothing, f"{SMOKE} --set schedule.total_steps=20", "or give ", ",", f"{SMOKE} "),
]


@pytest.mark.parametrize(
    ("make", "line", "begin", "end", "before"),
    [*CASES[:2], *slow(*CASES[2:])],
    ids=[case[1] for case in CASES],
)
def test_proposal__works_as_typed(
    home: Path,
    vitctl: Vitctl,
    make: Make,
    line: str,
    begin: str,
    end: str,
    before: str,
) -> None:
    make(home)
    said = typed(vitctl, line)
    assert said.code == 2
    again = typed(vitctl, before + after(said, begin, end).replace("VALUE", "22"))
    assert again.code == 0, (said.err, again.err)


@pytest.mark.slow
def test_predict__proposes_an_evaluation_that_runs(home: Path, vitctl: Vitctl) -> None:
    """Not of a folder with an unknown class or a broken image, which is refused."""
    made = typed(vitctl, "finetune --from RUN --data PHOTOS --steps 2 --out runs/photos")
    assert made.code == 0, made.err
    write_photos(home / "some", ("cat", "owl"), 2)
    said = typed(vitctl, "predict some --from runs/photos")
    scored = typed(vitctl, after(said, "next: vitctl "))
    assert scored.code == 0, scored.err
    assert "1 of the 3 classes of the weights have no image here: dog" in scored.out + scored.err
    (home / "some" / "owl" / "broken.jpg").write_bytes(b"")
    write_photos(home / "more", ("bat", "cat"), 2)
    for place in ("some", "more"):
        said = typed(vitctl, f"predict {place} --from runs/photos")
        assert "accuracy" in said.err and "vitctl evaluate" not in said.err


@pytest.mark.parametrize("change", ["model.depth=3", "data.image_size=32", "machine.precision=float32"])
@pytest.mark.usefixtures("home")
def test_resume__what_a_checkpoint_holds_is_not_proposed_to_change(vitctl: Vitctl, change: str) -> None:
    said = typed(vitctl, f"resume RUN --set {change}")
    assert (said.code, "anyway" in said.err) == (2, False)
    line = f"resume RUN --set {change} --allow {change.partition('=')[0]} --set schedule.total_steps=22"
    said = typed(vitctl, f"{line} --allow schedule.total_steps")
    assert (said.code, said.err.count("\n")) == (2, 1), said.err


@pytest.mark.parametrize("change", ["optimizer.lr=0.5", SPLIT])
@pytest.mark.usefixtures("home")
def test_resume__of_a_finished_run_no_change_without_more_steps_is_proposed(
    vitctl: Vitctl, change: str
) -> None:
    said = typed(vitctl, f"resume RUN --set {change}")
    assert (said.code, "anyway" in said.err) == (2, False)
