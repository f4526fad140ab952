"""Numbers of the pages that the code knows: a page that says another is wrong."""

import re
from pathlib import Path

import pytest

from tests.cli.test_help import MOST_OPTIONS
from tests.docs.conftest import PAGES, commands
from vitctl.data.images.decode import _MAX_TEXT
from vitctl.engine.schedule import EPOCHS, LEAST_STEPS, MOST_STEPS
from vitctl.errors import VitctlError
from vitctl.jobs.finetune import _COMPARING_SECONDS, _MOST_COMPARED
from vitctl.jobs.record.result import newest_run
from vitctl.models.variants import variant
from vitctl.models.weights.header import _MAX_PARTS
from vitctl.recipe.images import _MAX_PATTERN, TrainImages
from vitctl.recipe.load import Override, load_recipe
from vitctl.recipe.schema import JOBS, Evaluate, Finetune, Pretrain, frozen_places
from vitctl.system import remote

ROOT = Path(__file__).parents[2]
NUMBERS = {3: "three", 5: "five"}
MINUTES = TrainImages.model_fields["patience"].default / 60
CLAIMS = (
    ("docs/bounds.md", f"at least {NUMBERS[remote.LEAST_ATTEMPTS]} times"),
    ("docs/bounds.md", f"`data.patience` ({MINUTES:g} minutes)"),
    ("docs/bounds.md", f"for {remote.FIRST_SECONDS:g} seconds if the host never answered"),
    ("docs/bounds.md", f"At most {NUMBERS[remote._MAX_REDIRECTS]} redirects"),
    ("docs/bounds.md", f"`data.group_by` has at most {_MAX_PATTERN:,} characters"),
    ("docs/bounds.md", f"at most {_MOST_COMPARED:,} images and {_COMPARING_SECONDS:g} seconds"),
    ("docs/bounds.md", f"at most {_MAX_PARTS:,} parts"),
    ("docs/bounds.md", f"PNM files as text have at most {_MAX_TEXT // 2**20} MiB"),
    ("docs/data-sources.md", f"at most {remote.CONNECTIONS} connections"),
    ("docs/data-sources.md", f"`data.patience` ({MINUTES:g} minutes)"),
    ("docs/own-data.md", f"eight batches per epoch, about {EPOCHS} epochs"),
    ("docs/own-data.md", f"between {LEAST_STEPS} and {MOST_STEPS:,} updates"),
    (
        "docs/own-data.md",
        f"local sets of up to {_MOST_COMPARED:,} images and for at most {_COMPARING_SECONDS:g} seconds",
    ),
    ("docs/architecture.md", f"at most {MOST_OPTIONS} options without a help panel"),
)


@pytest.mark.parametrize(("page", "claim"), CLAIMS)
def test_claims__are_of_the_code(page: str, claim: str) -> None:
    assert claim in " ".join((ROOT / page).read_text().split())


def test_claims__which_runs_a_command_takes_without_from(tmp_path: Path) -> None:
    """docs/reproduce-the-paper.md lists the commands that take any training, and those that do not."""
    text = " ".join((ROOT / "docs/reproduce-the-paper.md").read_text().split())
    some, others = re.findall(r"((?:`\w+`(?:, | and )?)+) use (?:any |only pre-)training", text)
    for listed, wanted in ((some, "no finished training run"), (others, "no finished pre-training run")):
        for command in re.findall(r"\w+", listed.replace(" and ", " ")):
            job = command if command in JOBS else "evaluate"
            assert issubclass(JOBS[job], Evaluate) or command in JOBS
            with pytest.raises(VitctlError, match=wanted):
                newest_run(job, tmp_path)


def test_claims__the_first_line_of_fine_tuning_works_with_the_weights_of_the_readme() -> None:
    """The quickstart's network has few blocks, and README fine-tunes it."""
    start = next(words for words in commands("README.md") if words[0] == "finetune")
    assert "quickstart/pretrain" in start
    first = commands("docs/training.md")[0]
    freeze = Override("finetune.freeze", first[first.index("--freeze") + 1])
    recipe, network = load_recipe("finetune", [freeze]).recipe, load_recipe("quickstart").recipe
    assert isinstance(recipe, Finetune) and isinstance(network, Pretrain)
    config = variant(network.model.name, image_size=network.data.image_size)
    assert frozen_places(recipe, config) > 0  # raises if the network has fewer blocks


def test_claims__a_list_begins_after_an_empty_line() -> None:
    """Markdown takes a `- ` right below a sentence for more of the sentence."""
    swallowed = []
    for page in PAGES:
        lines = re.sub(r"(?ms)^```.*?^```", "", (ROOT / page).read_text()).splitlines()
        swallowed += [
            f"{page}: {line[:40]}"
            for before, line in zip(["", *lines], lines, strict=False)
            if re.match(r"([-*]|\d+\.) \S", line)
            and re.match(r"[A-Za-z`\[*(]", before)
            and not before.startswith("* ")
        ]
        swallowed += [f"{page}: {found}" for found in re.findall(r"[.;:] - [A-Z].{20}", "\n".join(lines))]
    assert swallowed == []


def test_claims__every_block_with_a_command_is_a_shell_block() -> None:
    """Only blocks marked sh are run by tests/docs/test_commands.py."""
    others = [
        f"{page}: {block[:40]}"
        for page in PAGES
        for kind, block in re.findall(r"(?ms)^```(\w*)\n(.*?)^```", (ROOT / page).read_text())
        if kind != "sh" and block.startswith("vitctl ")
    ]
    assert others == []
