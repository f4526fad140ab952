"""Everyday flags of the commands that read a recipe.

A row of `FLAGS` gives a recipe key a short name and lists the commands that take it. To add such a flag, add
a row. Options that set no recipe key follow below the table.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, get_type_hints

import typer

from vitctl.recipe.export_formats import GRAPHS, OPSET, OPSETS, RESIZING, formats_in_words

if TYPE_CHECKING:
    from vitctl.recipe.load import Loaded, Override

Flags = dict[str, tuple[str, Any]]  # flags that were given: flag -> (dotted key, value)
# Help panels, the same for all commands. `--help` shows the options without one, `--help all` these too.
MORE, WEIGHTS, MACHINE, EVERY_RUN = "More", "Weights", "Machine", "Every run"
SYNTHETIC_IMAGES = 1_281_167  # as many as ImageNet has


@dataclass(frozen=True)
class Flag:
    """A flag that sets a recipe key.

    Args:
        key: dotted recipe key.
        type: `list[str]` for a repeatable flag.
        commands: the commands that take the flag.
        panel: of `--help`.
        short: one letter.
        switch: value that a flag without a value sets.
        also: another key that is set with this one, and its value.
        several: key that several values set, with commas between them; the same key takes one as a list.
    """

    option: str
    key: str
    type: Any
    help: str
    commands: str
    panel: str | None = None
    short: str = ""
    switch: Any = True
    also: tuple[str, Any] | None = None
    several: str = ""

    @property
    def name(self) -> str:
        name = self.option.lstrip("-").replace("-", "_")
        return f"{name}_" if iskeyword(name) else name

    def parameter(self) -> inspect.Parameter:
        kind = bool if self.type is bool else (str if self.several else self.type) | None
        names = [self.option, *([self.short] if self.short else [])]
        option = typer.Option(
            *names,
            help=self.help,
            rich_help_panel=self.panel,
            metavar=("TEXT,..." if self.type is str else "N,...") if self.several else None,
        )
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if self.type is bool else None,
            annotation=Annotated[kind, option],
        )

    def values(self, given: Any) -> Flags:
        """Return what a given value sets; empty if the flag was not given."""
        if given is None or given is False or given == []:
            return {}
        key = self.key
        if self.several and isinstance(given, str | list | tuple):
            values = self._parsed(given)
            is_list = len(values) > 1 or self.several == key
            given, key = (values, self.several) if is_list else (values[0], key)
        flags: Flags = {self.option: (key, self.switch if given is True else given)}
        if self.also and (self.several in ("", self.key) or key == self.key):
            flags[f"{self.option} alone"] = self.also
        return flags

    def _parsed(self, given: str | Sequence[Any]) -> tuple[Any, ...]:
        from vitctl.errors import RecipeError

        try:
            return tuple(self.type(one) for one in (given.split(",") if isinstance(given, str) else given))
        except (TypeError, ValueError):
            what = {int: "whole numbers", float: "numbers"}[self.type]
            raise RecipeError(f"{self.option} {given}", f"write {what} with commas between them") from None


_TRAIN = "pretrain finetune"
_SCORE = "fewshot probe vtab evaluate"
_BENCH = "bench_model bench_data"
_LENGTH = "; a shorter run gets a shorter warm-up"
COLUMNS = (
    "Columns of a table, image=FILE,label=CLASS, also split= and labels=, or the label of WebDataset "
    "samples, label=caption; default: by their usual names"
)

FLAGS = (
    Flag(
        "--from",
        "weights.source",
        str,
        "Run folder, checkpoint, weights file or address (https, hf, gs); default: newest suitable run",
        f"finetune {_SCORE} export predict serve bench_model resume",
    ),
    Flag(
        "--weights",
        "weights.which",
        str,
        "Weights of a run: last, best or a step; ema (averaged) or model (not averaged), also of a file with "
        "both; default: last (best with evaluation.select_best), averaged if available",
        f"finetune {_SCORE} export predict serve inspect",
        panel=WEIGHTS,
    ),
    Flag(
        "--preprocess",
        "weights.preprocess",
        str,
        "Mean and std of the colours: imagenet, clip, half; a warning says if the weights record others",
        f"finetune {_SCORE} export predict serve inspect",
        panel=WEIGHTS,
    ),
    Flag(
        "--model",
        "weights.model",
        str,
        "Model name such as B/16, if the weights file does not record it",
        f"finetune {_SCORE} export predict serve inspect",
        panel=WEIGHTS,
    ),
    Flag(
        "--shots",
        "fewshot.shots",
        int,
        "Training images per class, e.g. 5 or 1,5,10,25",
        "fewshot",
        several="fewshot.shots",
    ),
    Flag(
        "--method",
        "probe.method",
        str,
        "knn: nearest neighbours as in DINO; logistic: logistic regression; linear: SGD as in DINOv2",
        "probe",
    ),
    Flag("--suite", "vtab.suite", str, "vtab: all 19 tasks; mini: tasks that need no download", "vtab"),
    Flag(
        "--task",
        "vtab.tasks",
        list[str],
        "Run only this task; repeatable",
        "vtab",
    ),
    Flag(
        "--to",
        "export.to",
        list[str],
        f"Format: {formats_in_words()}; repeatable",
        "export",
    ),
    Flag(
        "--include-preprocess",
        "export.include_preprocess",
        bool,
        f"{RESIZING}: resize and crop inside the graph; the input is uint8 [B, H, W, 3]",
        "export",
        panel=MORE,
    ),
    Flag(
        "--features",
        "export.features",
        bool,
        f"{GRAPHS}: also output the representation before the head",
        "export",
        panel=MORE,
    ),
    Flag(
        "--flip-average",
        "export.flip_average",
        bool,
        f"{GRAPHS}: average the logits of an image and its mirror image inside the graph",
        "export",
        panel=MORE,
    ),
    Flag(
        "--opset",
        "export.opset",
        int,
        f"onnx: operator set, {min(OPSETS)} to {max(OPSETS)}; {OPSET} unless given",
        "export",
    ),
    Flag(
        "--web",
        "export.web",
        bool,
        "onnx: also a page, model.html, that classifies a dropped photograph in the browser",
        "export",
    ),
    Flag(
        "--push",
        "export.push",
        str,
        "hf, timm, peft: also upload the folder to ORGANISATION/NAME on Hugging Face's hub, private",
        "export",
    ),
    Flag("--public", "export.public", bool, "A repository that --push makes is public", "export"),
    Flag(
        "--flip-average",
        "evaluation.flip_average",
        bool,
        "Average the logits of each image and its mirror image",
        "evaluate predict",
        panel=MORE,
    ),
    Flag(
        "--data",
        "data.path",
        str,
        "Folder of photos (one folder per class), or folder or address of shards",
        f"{_TRAIN} fewshot probe evaluate",
    ),
    Flag("--data", "data.path", str, "Folder with a folder of shards per task", "vtab"),
    Flag(
        "--data",
        "data.path",
        str,
        "Folder or address of shards, see `vitctl data shards`",
        f"inspect resume {_BENCH}",
    ),
    Flag(
        "--columns",
        "data.columns",
        str,
        COLUMNS,
        f"{_TRAIN} fewshot probe evaluate export predict inspect {_BENCH}",
        panel=MORE,
    ),
    Flag(
        "--group-by",
        "data.group_by",
        str,
        "Keep groups of images on one side of the split: pattern of their names, e.g. '^(.*)_[0-9]+', or "
        "TABLE.csv:COLUMN",
        f"{_TRAIN} fewshot evaluate export",
        panel=MORE,
    ),
    Flag(
        "--check-data",
        "data.path",
        str,
        "Shards for verifying the accuracy of exported files",
        "export",
        panel=MORE,
    ),
    Flag(
        "--dataset",
        "data.dataset",
        str,
        "Known data set: digits, shapes, cifar10, pets, ...; see `vitctl data list`",
        f"{_TRAIN} evaluate inspect {_BENCH}",
    ),
    Flag(
        "--dataset",
        "data.dataset",
        str,
        "Known data sets, comma-separated: pets,dtd,uc_merced",
        "fewshot probe",
        several="data.datasets",
    ),
    Flag(
        "--split",
        "data.eval_split",
        str,
        "Split to score, e.g. test or train[:10%]",
        "evaluate",
    ),
    Flag(
        "--split",
        "data.eval_split",
        str,
        "Split to draw images from",
        "inspect",
    ),
    Flag(
        "--split",
        "data.eval_split",
        str,
        "Split of --check-data, e.g. test or 'test[:500]'",
        "export",
        panel=MORE,
    ),
    Flag(
        "--fit-temperature",
        "evaluation.fit_temperature",
        bool,
        "Also fit a temperature to the images of --split and write it beside the weights",
        "evaluate",
        panel=MORE,
    ),
    Flag(
        "--answers",
        "evaluation.answers",
        str,
        "Also write the answer to each image to this .csv or .parquet, and suspected labels to "
        "RUN/suspects.csv",
        "evaluate",
    ),
    Flag(
        "--labels",
        "evaluation.labels",
        str,
        "original, real, objectnet or objectnet_restricted; default: the data set's labels",
        "evaluate",
        panel=MORE,
    ),
    Flag(
        "--res",
        "data.image_size",
        int,
        "Image size in pixels",
        f"{_TRAIN} {_SCORE} predict serve inspect {_BENCH}",
    ),
    Flag(
        "--freeze",
        "finetune.freeze",
        str,
        "Keep the start weights of: embedding, '6 blocks' (with the embedding), backbone (all but the head)",
        "finetune",
    ),
    Flag(
        "--teacher",
        "distillation.teacher",
        str,
        "Learn from this network too: run folder, checkpoint, weights file or address",
        "finetune",
        panel=MORE,
    ),
    Flag("--lr", "optimizer.lr", float, "Base learning rate", "pretrain"),
    Flag(
        "--lr",
        "optimizer.lr",
        float,
        "Base learning rate; of several, 1e-4,3e-4,1e-3, the best on images that are held out is chosen",
        "finetune",
        also=("sweep.lrs", ()),
        several="sweep.lrs",
    ),
    Flag(
        "--steps",
        "schedule.total_steps",
        int,
        f"Number of updates{_LENGTH}",
        _TRAIN,
        also=("schedule.total_epochs", 0.0),
    ),
    Flag(
        "--steps",
        "schedule.total_steps",
        int,
        "Number of updates per run; disables the schedule sweep",
        "vtab",
        also=("schedule.total_epochs", 0.0),
    ),
    Flag(
        "--epochs",
        "schedule.total_epochs",
        float,
        f"Number of epochs{_LENGTH}",
        _TRAIN,
        also=("schedule.total_steps", 0),
    ),
    Flag("--batch-size", "schedule.batch_size", int, "Global batch size, over all processes", _TRAIN),
    Flag("--batch", "evaluation.batch_size", int, "Images per forward pass", "predict", panel=MORE),
    Flag("--seed", "seed", int, "Random seed of weights, sample order, augmentation and dropout", _TRAIN),
    Flag(
        "--synthetic",
        "data.synthetic",
        bool,
        "Train on random noise, to measure speed without data",
        "pretrain bench_model",
        switch=SYNTHETIC_IMAGES,
        panel=MORE,
    ),
    Flag("--device", "machine.device", str, "auto, cpu or cuda", "predict serve", panel=MORE),
    Flag("--workers", "machine.workers", int, "Loader workers; default: the recipe's", "bench_data"),
    Flag(
        "--processes",
        "machine.processes",
        int,
        "Total number of processes on all machines, one per GPU",
        f"{_TRAIN} resume {_SCORE} bench_model",
        panel=MACHINE,
        short="-n",
    ),
    Flag(
        "--profile",
        "log.profile",
        str,
        "Write a trace of these steps to RUN/profile: 20, 20-24, or 20-24@3 for process 3",
        f"{_TRAIN} resume",
        panel=MACHINE,
    ),
    Flag(
        "--precision",
        "machine.precision",
        str,
        "auto (bf16 if the device is fast at it), bf16, tf32 (NVIDIA GPUs), float32 or float64",
        f"{_TRAIN} {_SCORE} predict serve inspect {_BENCH}",
        panel=MACHINE,
    ),
)


def rows_of(command: str) -> dict[str, Flag]:
    """Return the rows of a command by the names of their parameters. `sweep` takes those of all trainings,
    with several values of a number.
    """
    if command != "sweep":
        return {row.name: row for row in FLAGS if command in row.commands.split()}
    return {
        name: replace(
            row,
            panel=row.panel or EVERY_RUN,
            several=row.key if row.type in (int, float) and row.key != "machine.processes" else "",
        )
        for training in _TRAIN.split()
        for name, row in rows_of(training).items()
    }


def takes_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `flags` by its rows of `FLAGS`; `flags` then gets those given, checked.

    `**options` become the fields of `RunOptions`.
    """
    rows = rows_of(function.__name__)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "flags":
            parameters += [row.parameter() for row in rows.values()]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            parameters += _run_options()
        else:
            parameters.append(parameter)

    @functools.wraps(function)
    def command(**values: Any) -> None:
        flags: Flags = {}
        for name, row in rows.items():
            flags |= row.values(values.pop(name))
        check_flags(flags)
        function(flags=flags, **values)

    vars(command)["__signature__"] = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def value_of(flags: Flags, flag: str) -> Any:
    """Return the value of a flag; None if it was not given."""
    return flags[flag][1] if flag in flags else None


def flags_of(command: str, given: Mapping[str, Any]) -> Flags:
    """Return the flags for keyword arguments from Python. Raises RecipeError on an unknown flag."""
    from vitctl.errors import RecipeError
    from vitctl.recipe.load import as_python
    from vitctl.system.text import did_you_mean, nearest

    rows = rows_of(command)
    flags: Flags = {}
    for name, value in given.items():
        if name not in rows:
            near = nearest(name, rows)
            hint = did_you_mean(near) if near else f"it takes {', '.join(rows)}"
            raise RecipeError(f"{command}({name}=...)", "unknown", f"{hint}; recipe keys go into overrides")
        flags |= rows[name].values(as_python(value))
    check_flags(flags)
    return flags


def overrides_of(
    flags: Mapping[str, tuple[str, Any]], sets: "Sequence[str | Override] | None"
) -> "list[Override]":
    """Return the overrides of --set, as typed or parsed, and of the flags.

    With --steps or --epochs the warm-up is scaled with the length, unless --set gives it. A warm-up in steps
    replaces the recipe's in epochs, and vice versa. Raises RecipeError if a flag and --set contradict each
    other.
    """
    from vitctl.engine.schedule import IN_PROPORTION
    from vitctl.errors import RecipeError
    from vitctl.recipe.load import Override, as_python, parse_override

    overrides = [parse_override(given) if isinstance(given, str) else given for given in sets or ()]
    given = {override.key: as_python(override.value) for override in overrides}
    for flag, (key, value) in flags.items():
        value = list(value) if isinstance(value, tuple) else value
        if value is not None and given.get(key, value) != value:
            raise RecipeError(
                f"{flag.removesuffix(' alone')} sets {key} = {value!r}, and --set {key} = {given[key]!r}",
                fix="leave one of them out",
            )
    overrides += [Override(key, value, flag) for flag, (key, value) in flags.items() if value is not None]
    warmup = {"schedule.warmup_steps": 0, "schedule.warmup_epochs": 0.0}
    of_warmup = [key for key in warmup if key in given]
    if not of_warmup:
        lengths = [flag for flag in ("--steps", "--epochs") if flag in flags]
        overrides += [Override("schedule.warmup_steps", -1, flag + IN_PROPORTION) for flag in lengths]
    elif len(of_warmup) == 1 and given[of_warmup[0]]:
        del warmup[of_warmup[0]]
        overrides += [Override(key, value) for key, value in warmup.items()]
    return overrides


_UNREAD = ("data.path", "data.dataset", "data.eval_split", "machine.processes", "evaluation.answers",
           "evaluation.fit_temperature", "evaluation.thresholds")  # fmt: skip
# Commands that read the recipe of another.
RECIPE_OF = {"predict": "evaluate", "serve": "evaluate", "inspect": "evaluate"}
# Keys of `evaluate` that commands on single images do not read.
UNREAD = {"predict": _UNREAD, "serve": _UNREAD}


def image_recipe(command: str, flags: Flags, sets: "Sequence[str | Override] | None") -> "Loaded":
    """Load `evaluate` for a command on single images. Raises RecipeError on keys that it does not read."""
    from vitctl.errors import RecipeError
    from vitctl.recipe.load import load_recipe

    loaded = load_recipe("evaluate", overrides_of(flags, sets), job="evaluate")
    for key in UNREAD[command]:
        if not loaded.origin(key).startswith(("default", "evaluate.toml:")):
            raise RecipeError(f"{loaded.origin(key)} {key}", f"{command} does not read it", "leave it out")
    return loaded


_MAY_BE_EMPTY = ("--split", "--labels")


def check_flags(flags: Flags) -> None:
    """Refuse empty flags, e.g. from an unset shell variable, and contradictory flags. Raises RecipeError."""
    from vitctl.errors import RecipeError, refuse

    empty = next((flag for flag in flags if flag not in _MAY_BE_EMPTY and value_of(flags, flag) == ""), "")
    sources = [flag for flag in ("--data", "--dataset", "--synthetic") if flag in flags]
    steps, epochs = value_of(flags, "--steps"), value_of(flags, "--epochs")
    both = f"--steps {steps} and --epochs {str(epochs).removesuffix('.0')} both set the length"
    refuse(
        RecipeError,
        (empty, f"{empty} ''", "is empty", f"give a value, or leave {empty} out"),
        (
            len(sources) > 1 and sources != ["--dataset", "--synthetic"],
            " and ".join(sources[:2]),
            "both name the source of the images",
            "leave one of them out",
        ),
        (steps is not None and epochs is not None, both, "", "give one of them"),
    )
    for flag, length in (("--steps", steps), ("--epochs", epochs)):
        if isinstance(length, int | float) and length <= 0:
            raise RecipeError(
                f"{flag} {length:g}", "should be above 0", f"omit {flag} to use the recipe's length"
            )


# Options of several commands that set no recipe key.
RecipeName = Annotated[
    str,
    typer.Option("--recipe", "-r", help="Shipped recipe or path of a .toml file"),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", help="Run folder; resumes an existing run; default: runs/NAME_TIME"),
]
OutOrStore = Annotated[
    str | None,
    typer.Option(
        "--out",
        "-o",
        metavar="PATH",
        help="Run folder, or s3://BUCKET/NAME for runs/NAME and a copy there; resumes an existing run; "
        "default: runs/NAME_TIME",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        help="Set any recipe value: section.key=value; repeatable",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and its cost without running it; needs no GPU")
]
All = Annotated[
    bool, typer.Option("--all", help="With --dry-run: also print default values", rich_help_panel=MORE)
]
Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm",
        help="Write a Slurm job instead of running: nodes=4,gpus=8,time=24:00:00; ,submit also submits it",
        rich_help_panel=MACHINE,
    ),
]
K8s = Annotated[
    str | None,
    typer.Option(
        "--k8s",
        help="Write a Kubernetes JobSet instead of running: nodes=4,gpus=8,image=IMAGE,claim=NAME:/PATH; "
        ",submit also submits it",
        rich_help_panel=MACHINE,
    ),
]
Nodes = Annotated[
    str | None,
    typer.Option(
        "--nodes",
        help="Number of machines and rendezvous address, e.g. 2@gpu01:29400; run the same command on each, "
        "with --out on a shared disk",
        rich_help_panel=MACHINE,
    ),
]
Restarts = Annotated[
    int,
    typer.Option(
        "--restarts",
        help="Number of restarts after a lost process",
        min=0,
        rich_help_panel=MACHINE,
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        help="Accept a change since the start of the run: a recipe key, data, weights or computation; "
        "repeatable",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="With --dry-run: memory, rate and time on this GPU, by arithmetic, e.g. A100, H100 or H200",
        rich_help_panel=MACHINE,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        help="Number of processes; 0: this one; default: one per core",
        min=0,
        rich_help_panel=MORE,
    ),
]


# Options of a training command, as `run_job` takes them.
class RunOptions(TypedDict, total=False):
    out: OutOrStore
    set_: Set
    dry_run: DryRun
    all_: All
    slurm: Slurm
    k8s: K8s
    nodes: Nodes
    restarts: Restarts
    allow: Allow
    device: Device


def _run_options() -> Iterator[inspect.Parameter]:
    """Yield the fields of `RunOptions` as parameters. A switch defaults to False, a number to 0."""
    defaults = {bool: False, int: 0}
    for name, annotation in get_type_hints(RunOptions, include_extras=True).items():
        default = defaults.get(annotation.__origin__)
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
