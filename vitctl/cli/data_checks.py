"""`vitctl data check | stats | show | dedup`: commands that look into shards."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitctl.cli.data_commands import DATA, Columns, Root, app, number_of_workers, shards_of
from vitctl.cli.flags import Set, Workers, overrides_of
from vitctl.cli.run_job import beside_given
from vitctl.system.screen import ignore_output_errors
from vitctl.system.text import bytes_text, count_text, one_line, typed

if TYPE_CHECKING:
    from vitctl.data.datasets.vtab import VtabTask
    from vitctl.data.inspect.check_shards import Report
    from vitctl.data.inspect.duplicates import Found
    from vitctl.data.inspect.overview import Stats
    from vitctl.data.shards.index import Index
    from vitctl.data.source.views import Source

Place = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="What --data takes: shards, class folders, a table, an archive, or an address"
    ),
]
_SHOWN_CLASSES, _SHOWN_PROBLEMS, _SHOWN_LABELS, _SHOWN_PAIRS = 12, 100, 100, 20
# Keys of augmentations of a whole batch, and their names.
_OF_BATCHES = {"mixup_alpha": "MixUp", "cutmix_alpha": "CutMix", "random_erasing": "random erasing"}
_SCHEME = re.compile(r"\w+:/")


@app.command()
def check(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="What --data takes, of photographs the shards are made; or a known data set, or vtab",
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Decode 1,000 images of each split instead of reading everything")
    ] = False,
    root: Root = DATA,
    columns: Columns = "",
    workers: Workers = None,
    accept_labels: Annotated[
        bool, typer.Option("--accept-labels", help="Accept different labels for the same image")
    ] = False,
) -> None:
    """Check shards: decode every image; find damaged, missing, extra and duplicate data.

    The same image with different labels is an error, except in a known data set or with --accept-labels.

    For example: vitctl data check shards/
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.console import say
    from vitctl.data.datasets.catalog import is_photographs
    from vitctl.data.inspect.check_shards import missing_images, unused_files
    from vitctl.data.shards.index import find_splits
    from vitctl.data.source.stores import ShardSource
    from vitctl.data.source.views import class_zero_note, unlabelled_note
    from vitctl.errors import DataError, refuse
    from vitctl.system.remote import is_remote

    photographs = is_photographs(folder)
    is_name = not (photographs or is_remote(folder) or Path(folder).exists())
    text = str(_check_known(folder, root)) if is_name else folder
    if photographs:
        text = str(shards_of(folder, Path("runs"), columns))
    is_far = is_remote(text)
    problems, notes = ([], []) if is_far else unused_files(Path(text))
    if problems and not find_splits(Path(text)):
        raise DataError("; ".join(problems))
    reports, errors = _verify_splits(folder, text, quick=quick, workers=number_of_workers(workers))
    indexes = {split: index for split, (_, index) in reports.items()}
    unlabelled = {split: unlabelled_note(ShardSource(index)) for split, index in indexes.items()}
    problems += errors
    for split, (report, index) in reports.items():
        problems += [problem.line for problem in report.problems[:_SHOWN_PROBLEMS]]
        notes += [f"{split}: {note}" for note in report.notes]
        notes += filter(None, [unlabelled[split], class_zero_note(ShardSource(index))])
    if is_name:
        missing, partial_splits = missing_images(folder, indexes)
        problems, notes = problems + missing, notes + partial_splits
    duplicates, contradictions = _duplicates(reports, reads_excluded=not problems)
    notes += duplicates
    if not (quick or is_name or problems or is_far):  # published data sets are never changed
        notes += _near_duplicates(indexes, number_of_workers(workers))
    for line in (*problems, *contradictions, *notes):
        say(line)
    hidden = sum(max(0, len(report.problems) - _SHOWN_PROBLEMS) for report, _ in reports.values())
    some = f", {len(problems)} of them" if hidden else ""
    refuse(
        DataError,
        (
            problems,
            folder,
            f"{count_text(len(problems) + hidden, 'problem')}{some} listed above",
            "make the shards again or copy the damaged ones",
        ),
        (
            contradictions and not (accept_labels or is_name),
            folder,
            "the same image has different labels, listed above",
            "correct the labels and make the shards again, or accept them with --accept-labels",
        ),
    )
    untrainable = [f"'{split}'" for split, note in unlabelled.items() if note]
    but = f", but {' and '.join(untrainable)} cannot be trained on or scored" if untrainable else ""
    verdict = "all is well"
    if quick:
        num_decoded = sum(report.num_decoded for report, _ in reports.values())
        num_samples = sum(report.num_samples for report, _ in reports.values())
        verdict = (
            f"no problem found in {num_decoded:,} of {num_samples:,} images{but}; without --quick every byte "
            f"is read and every image decoded"
        )
    elif num_notes := len(notes) + len(contradictions):
        verdict = f"nothing is damaged or missing{but}; {count_text(num_notes, 'note')}, see above"
    say(verdict)


def _verify_splits(
    folder: str, text: str, *, quick: bool, workers: int
) -> "tuple[dict[str, tuple[Report, Index]], list[str]]":
    """Check and print every split. Return the reports, and the errors of splits that cannot be opened."""
    from vitctl.cli.show.console import progress_bar
    from vitctl.data.inspect.check_shards import verify_index
    from vitctl.data.source.locate import locate_all_splits
    from vitctl.data.source.stores import open_index
    from vitctl.errors import DataError

    reports: dict[str, tuple[Report, Index]] = {}
    errors = list[str]()
    decoded: Literal["sample", "all"] = "sample" if quick else "all"
    for split, place in locate_all_splits(text).items():
        if place.shards:
            raise DataError(
                folder, "names some shards of a split", "give the folder of a split, or its address"
            )
        try:
            index = open_index(place.folder, place.base)
        except DataError as error:
            errors.append(str(error))
            continue
        with progress_bar(f"checking {split}") as progress:
            report = verify_index(index, decode_images=decoded, workers=workers, progress=progress)
        _print_split(split, report, index)
        reports[split] = report, index
    return reports, errors


def _print_split(split: str, report: "Report", index: "Index") -> None:
    from vitctl.cli.show.console import show_table

    counts = sorted(zip(report.class_counts, index.class_names, strict=True), reverse=True)
    name, half = "class", _SHOWN_CLASSES // 2
    if len(counts) > _SHOWN_CLASSES:
        name = f"class ({half} largest and {half} smallest of {len(counts):,})"
        counts = [*counts[:half], *counts[-half:]]
    decoded = f"{count_text(report.num_samples, 'image')}, {report.num_decoded:,} decoded"
    rows = [(class_name, f"{count:,}") for count, class_name in counts]
    show_table(
        (name, "images"), rows, title=f"{split}: {decoded}, {count_text(len(report.problems), 'problem')}"
    )
    if report.problems:
        kinds: dict[tuple[str, str], list[str]] = {}
        for problem in report.problems:
            kinds.setdefault((problem.file, problem.kind), []).append(problem.member)
        lines = [(*kind, f"{len(members):,}", members[0]) for kind, members in kinds.items()]
        show_table(("file", "problem", "how many", "first"), lines, left=("problem", "first"))


def _duplicates(
    reports: "Mapping[str, tuple[Report, Index]]", *, reads_excluded: bool
) -> tuple[list[str], list[str]]:
    """Return lines on duplicate images, and on those with different labels; excluded images do not count."""
    from vitctl.data.inspect.check_shards import shared
    from vitctl.data.inspect.overview import label_text
    from vitctl.data.source.splits import read_exclusion
    from vitctl.data.source.stores import ShardSource

    sources = {split: ShardSource(index) for split, (_, index) in reports.items()}
    repeated = [
        *((split, split, report.repeated) for split, (report, _) in reports.items()),
        *(
            (first, second, tuple(shared(reports[first][0].digests, reports[second][0].digests)))
            for first, second in combinations(reports, 2)
        ),
    ]
    notes, contradictions = list[str](), list[str]()
    excluded = {
        split: {*read_exclusion(index).tolist()} if reads_excluded else set[int]()
        for split, (_, index) in reports.items()
    }
    for first, second, found in repeated:
        pairs = [(a, b) for a, b in found if a not in excluded[first] and b not in excluded[second]]
        if not pairs:
            continue
        keys = f"first {sources[first].key(pairs[0][0])} and {sources[second].key(pairs[0][1])}"
        if first == second:
            notes.append(f"{first}: {count_text(len(pairs), 'duplicate image')}, {keys}")
        else:
            shares = f"share {count_text(len(pairs), 'image')}, {keys}"
            train, test = sorted((first, second), key=lambda name: not name.startswith("train"))
            places = [typed(reports[name][1].folder) for name in (train, test)]
            leave_out = f"`vitctl data dedup {places[0]} --against {places[1]} --apply` leaves them out"
            notes.append(f"{first} and {second}: {shares}; {leave_out}")
        wrong = []
        for a, b in pairs:
            left, right = label_text(sources[first], a), label_text(sources[second], b)
            if left and right and left != right:
                left = f"{first}/{sources[first].key(a)} is {left!r}"
                right = f"{second}/{sources[second].key(b)} is {right!r}"
                wrong.append(f"the same image has different labels: {left}, {right}")
        contradictions += wrong[:_SHOWN_LABELS]
        if len(wrong) > _SHOWN_LABELS:
            splits = " and ".join(dict.fromkeys((first, second)))
            contradictions.append(f"and {len(wrong) - _SHOWN_LABELS:,} more in {splits}")
    return notes, contradictions


def _near_duplicates(indexes: "Mapping[str, Index]", workers: int) -> list[str]:
    """Return a line for each split, and each pair of splits, with near-duplicates.

    A single split is divided as training divides it; identical images on both sides count, too.
    """
    from vitctl.cli.show.console import counting
    from vitctl.data.inspect.duplicates import NEAR_BITS, compare_within, describe, sides_of
    from vitctl.data.source.splits import without_excluded
    from vitctl.data.source.stores import ShardSource

    sides = sides_of({name: without_excluded(ShardSource(index)) for name, index in indexes.items()})
    with counting("looking for near-duplicates", sum(map(len, sides.values()))) as done:
        compared = compare_within(sides, max_bits=NEAR_BITS, workers=workers, done=done)
    return [
        f"{describe(found)}; see `vitctl data dedup`"
        for found in compared
        if len(found.matches) > (0 if len(indexes) == 1 and found.own_name != found.name else found.num_exact)
    ]


def _check_known(name: str, root: Path) -> Path:
    """Check a known data set, or all of VTAB, against the benchmark; return a folder to check further."""
    from vitctl.data.datasets.catalog import find_data_set
    from vitctl.data.datasets.vtab import VTAB
    from vitctl.data.source.locate import no_index, with_split
    from vitctl.errors import DataError

    if with_split(name):
        raise no_index(name)
    if "/" in name:
        raise DataError(
            name, "no such folder", "give a folder of shards or a known data set, see `vitctl data list`"
        )
    if name == "vtab":
        _check_tasks(VTAB, root)
        raise typer.Exit
    try:
        row = find_data_set(name)
    except DataError as error:
        raise DataError(name, f"no such folder; {error}") from None
    if tasks := [task for task in VTAB if task.data_set == row.name]:
        _check_tasks(tasks, root)
    return root / row.name


def _check_tasks(tasks: "Iterable[VtabTask]", root: Path) -> None:
    from vitctl.cli.show.console import progress_of_steps, show_table
    from vitctl.data.datasets.inventory import check_task
    from vitctl.errors import DataError

    rows, wrong = [], []
    with progress_of_steps(prints=False) as progress:
        for task in tasks:
            checked = check_task(task, root, partial(progress, f"checking {task.name}"))
            splits = [f"{n:,} {digest}" for n, digest in zip(checked.sizes, checked.digests, strict=True)]
            rows.append((task.name, str(task.num_classes), *(splits or [""] * 3), checked.verdict))
            wrong += [task.name] if checked.is_wrong else []
    header = ("task", "classes", "train800", "val200", "test", "verdict")
    show_table(header, rows, left=header[2:])
    if wrong:
        raise DataError(
            root, f"not the benchmark's images: {', '.join(wrong)}", "make them again from the original files"
        )


@app.command()
def stats(
    folder: Place,
    columns: Columns = "",
    images: Annotated[
        int, typer.Option("--images", help="Number of images to decode per split; 0: all", min=0)
    ] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
    workers: Workers = None,
) -> None:
    """Print images per class, sizes, formats, bytes, mean and standard deviation of the colours.

    For example: vitctl data stats shards/
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.console import counting, say, show_table
    from vitctl.data.inspect.overview import measure
    from vitctl.engine.journal import json_text

    measured: dict[str, Stats] = {}
    for split, source in _opened(folder, columns).items():
        with counting(f"measuring {split}", min(images or len(source), len(source))) as done:
            measured[split] = measure(
                source, num_images=images, workers=number_of_workers(workers), done=done
            )
    if as_json:
        print(json_text({split: asdict(numbers) for split, numbers in measured.items()}, indent=1))
        return
    shown = list(map(_column, measured.values()))
    rows = [(name, *(column[name] for column in shown)) for name in shown[0]]
    show_table(("", *measured), rows)
    for split, numbers in measured.items():
        for note in numbers.notes:
            say(f"{split}: {note}")


def _opened(folder: str, columns: str) -> "Mapping[str, Source]":
    """Open every split of what --data takes: photographs where they are, and shards."""
    from vitctl.data.datasets.catalog import is_photographs, original_splits
    from vitctl.data.source.locate import locate_all_splits

    if is_photographs(folder):
        return original_splits(folder, columns)
    return {split: place.open(0) for split, place in locate_all_splits(folder, columns).items()}


def _column(numbers: "Stats") -> dict[str, str]:
    counts = sorted(numbers.images_per_class)
    share = 100 / max(1, numbers.num_sampled)
    return {
        "images": f"{numbers.num_images:,}",
        "classes": f"{numbers.num_classes:,}",
        "images per class: min, median, max": (
            f"{counts[0]:,}  {counts[len(counts) // 2]:,}  {counts[-1]:,}"
        ),
        "classes without images": f"{counts.count(0):,}",
        "images without a label": f"{numbers.num_unlabelled:,}",
        "measured": f"{numbers.num_sampled:,}",
        "  unreadable": f"{numbers.num_unreadable:,}",
        "  rotated by their EXIF orientation": f"{numbers.num_turned:,}",
        "  formats": ", ".join(f"{name} {count * share:.0f} %" for name, count in numbers.formats.items()),
        "  bytes, mean": bytes_text(numbers.mean_bytes),
        "  width: min, quartiles, max": "  ".join(f"{value:.0f}" for value in numbers.widths),
        "  height: min, quartiles, max": "  ".join(f"{value:.0f}" for value in numbers.heights),
        "  width / height": "  ".join(f"{value:.2f}" for value in numbers.aspects),
        "  mean of red, green, blue, 0 to 1": "  ".join(f"{value:.3f}" for value in numbers.mean),
        "  their standard deviation": "  ".join(f"{value:.3f}" for value in numbers.std),
    }


@app.command()
def show(
    folder: Place,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The .png to write")],
    split: Annotated[str, typer.Option("--split", help="Split to draw; default: the first")] = "",
    num_images: Annotated[
        int,
        typer.Option(
            "--num-images", help="Number of images; 0: 40, or 6 rows with --augmented", min=0, max=1000
        ),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of the sample and of --augmented")] = 0,
    columns: Columns = "",
    augmented: Annotated[
        bool,
        typer.Option("--augmented", help="Show beside each image what training sees of it in five epochs"),
    ] = False,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            "-r",
            help="--augmented: training recipe whose augmentation is shown, or RUN/recipe.toml",
        ),
    ] = "finetune",
    set_: Set = None,
    res: Annotated[
        int | None,
        typer.Option("--res", help="--augmented: image size; default: the recipe's, or 224", min=1),
    ] = None,
) -> None:
    """Draw a contact sheet of sample images with their classes.

    For example: vitctl data show shards/ sheet.png
                 vitctl data show shards/ sheet.png --augmented -r mae_b16
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.console import say
    from vitctl.data.inspect.overview import MARK, cell, choose, draw_sheet, save, show_augmented
    from vitctl.errors import DataError, RecipeError, refuse, writing
    from vitctl.jobs.inputs.data import train_transform
    from vitctl.recipe.load import load_recipe
    from vitctl.recipe.schema import Finetune, Pretrain
    from vitctl.system.files import check_free
    from vitctl.system.remote import is_remote

    splits = _opened(folder, columns)
    name = split or next(iter(splits))
    refuse(
        DataError,
        (name not in splits, folder, f"has no split '{name}'; found: {', '.join(splits)}"),
        (out.suffix.lower() != ".png", out, "should be the name of a .png file"),
    )
    check_free("OUT", out, [], MARK)
    source = splits[name]
    last = folder.rstrip("/").rpartition("/")[2] if is_remote(folder) else Path(folder).resolve().name
    title = f"{last}, {name}" if last != name else name
    classes = count_text(len(source.class_names), "class", "classes")
    about = f"{count_text(len(source), 'image')} of {classes}; seed {seed}"
    samples, hidden = choose(len(source), num_images or (6 if augmented else 40), seed), list[str]()
    if augmented:
        overrides = overrides_of({"--res": ("data.image_size", res)}, set_)
        training = load_recipe(recipe, [*overrides, *beside_given(recipe, overrides)]).recipe
        if not isinstance(training, Pretrain | Finetune):
            raise RecipeError(recipe, "has no augmentation", "name a recipe of pretrain or finetune")
        hidden = [name for key, name in _OF_BATCHES.items() if getattr(training.data, key)]
        sized = training.data.model_copy(update={"image_size": training.data.image_size or 224})
        page = show_augmented(source, samples, train_transform(sized), seed=seed, title=title, subtitle=about)
    else:
        cells = [cell(source, sample) for sample in samples]
        page = draw_sheet(cells, columns=min(8, len(cells)), title=title, subtitle=about)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        save(page, out)
    say(f"{count_text(len(samples), 'image')} in {out}")
    if hidden:
        say(f"not drawn, as training does it to whole batches: {', '.join(hidden)}")


@app.command()
def dedup(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of shards or splits")],
    against: Annotated[
        list[Path] | None,
        typer.Option("--against", help="Folder of a test set's shards; repeatable; default: FOLDER itself"),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Split of FOLDER to exclude images from")] = "train",
    bits: Annotated[
        int,
        typer.Option(
            "--bits",
            help="Near-duplicates: perceptual hashes that differ in at most N of 64 bits; "
            "-1: identical files only",
            min=-1,
            max=15,
        ),
    ] = 6,
    report: Annotated[
        Path | None,
        typer.Option("--report", help="New folder for matches.csv and the pairs; default: beside the split"),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option("--apply", help="Exclude the matches from training (writes excluded.json)"),
    ] = False,
    workers: Workers = None,
) -> None:
    """Find duplicates and near-duplicates of test images in training data.

    Without --against, find near-duplicates within a data set: inside each split and across splits.

    For example: vitctl data dedup shards/ --against pets/test --apply
    Guide: docs/own-data.md
    """
    from vitctl.cli.show.console import counting, say, show_table
    from vitctl.data.inspect.duplicates import compare, free_folder, write_report
    from vitctl.data.source.splits import FILE, write_exclusion
    from vitctl.data.source.stores import ShardSource, open_index
    from vitctl.errors import DataError, writing
    from vitctl.system.files import check_free

    if apply:
        ignore_output_errors()
    splits = _splits(folder)
    if report:
        check_free("--report", report, splits.values())
    if not against:
        if apply:
            raise DataError(_no_test_set(folder, splits, split))
        _dedup_within(folder, splits, bits, report, number_of_workers(workers))
        return
    if len(splits) > 1 and split not in splits:
        raise DataError(folder, f"has no split '{split}'; found: {', '.join(splits)}")
    place = splits[split] if split in splits else next(iter(splits.values()))
    tests = _test_sets(against, place)
    source, name = ShardSource(open_index(place)), place.resolve().name
    total = len(source) + sum(open_index(test).num_samples for test in tests.values())
    with counting("reading images", total) as done:
        matches = compare(
            source, tests, max_bits=bits, own_name=name, workers=number_of_workers(workers), done=done
        )
    rows = [(test.name, f"{len(test.source):,}", *_counts(test)) for test in matches]
    show_table(("test set", "images", "identical", "near-duplicate"), rows)
    folder = free_folder(report or place.parent / f"{name}-dedup")
    with writing(folder):
        files = write_report(matches, folder)
    samples = sorted({match.sample for test in matches for match in test.matches})
    say(f"{len(samples):,} of {len(source):,} images of {place} are in a test set; report: {files[0].parent}")
    if apply and samples:
        reason = f"in {', '.join(tests)}; hashes within {bits} bits"
        with writing(place):
            number = write_exclusion(source.index, samples, reason=reason)
        say(
            f"excluded from now on: {count_text(number, 'image')}; "
            f"to include them again, remove {place / FILE}"
        )
    elif samples:
        say("nothing was excluded; check the pairs, then run the same command with --apply")


def _no_test_set(folder: Path, splits: dict[str, Path], split: str) -> str:
    """Return the error of --apply without --against: exclusions would shift a held-out fifth."""
    if tests := [str(place) for name, place in splits.items() if name != split and len(splits) > 1]:
        return f"--apply: give the test set: --against {typed(tests[0])}"
    return (
        f"--apply: {folder} has one split, and excluding images would change which fifth of them is held "
        f"out; move the test images to PHOTOS/test, write the shards again, and give --against FOLDER/test"
    )


def _counts(matches: "Found") -> tuple[str, str]:
    return f"{matches.num_exact:,}", f"{len(matches.matches) - matches.num_exact:,}"


def _dedup_within(
    folder: Path, splits: dict[str, Path], bits: int, report: Path | None, workers: int
) -> None:
    """Print and report duplicates within a data set, those on different sides of a split first."""
    from vitctl.cli.show.console import counting, say, show_table
    from vitctl.data.inspect.duplicates import compare_within, free_folder, sides_of, write_report
    from vitctl.data.source.splits import open_shards
    from vitctl.data.source.views import sample_key
    from vitctl.errors import writing

    sides = sides_of({name: open_shards(place) for name, place in splits.items()})
    with counting("reading images", sum(map(len, sides.values()))) as done:
        compared = compare_within(sides, max_bits=bits, workers=workers, done=done)
    rows = [
        (one.own_name, one.name, *_counts(one), f"{sum(map(one.has_other_label, one.matches)):,}")
        for one in compared
    ]
    header = ("split", "other split", "identical", "near-duplicate", "different labels")
    show_table(header, rows, left=("other split",))
    pairs = [(matches, match) for matches in compared for match in matches.matches]
    pairs.sort(key=lambda pair: (pair[0].own_name == pair[0].name, not pair[0].has_other_label(pair[1])))
    for matches, match in pairs[:_SHOWN_PAIRS]:
        left, right = (label or "no label" for label in matches.labels(match))
        keys = sample_key(matches.own, match.sample), sample_key(matches.source, match.other)
        about = [
            "identical" if match.is_exact else f"{match.bits} bits apart",
            *(["different labels"] if matches.has_other_label(match) else []),
            *(["on different sides of the split"] if matches.own_name != matches.name else []),
        ]
        names = one_line(f"{keys[0]} ({left}) and {keys[1]} ({right})")
        say(f"  {names}: {', '.join(about)}")
    target = free_folder(report or folder.parent / f"{folder.resolve().name}-dedup")
    with writing(target):
        files = write_report(compared, target)
    say(
        f"{count_text(len(pairs), 'pair')}, {min(len(pairs), _SHOWN_PAIRS):,} shown; "
        f"report: {files[0].parent}"
    )


def _test_sets(against: list[Path], place: Path) -> dict[str, Path]:
    """Return the splits to compare `place` with, by name; never `place` itself."""
    from vitctl.errors import DataError

    tests = {
        f"{test.name}/{name}" if test.resolve().name != name else str(test): folder
        for test in against
        for name, folder in _splits(test).items()
        if folder.resolve() != place.resolve()
    }
    if not tests:
        raise DataError(
            f"--against {against[0]}",
            "is the split itself",
            "leave --against out to look for duplicates in it",
        )
    return tests


def _splits(folder: Path) -> dict[str, Path]:
    from vitctl.data.shards.index import find_splits
    from vitctl.data.source.locate import no_index
    from vitctl.errors import DataError

    if _SCHEME.match(str(folder)):
        raise DataError(folder, "is an address; this command reads local folders only")
    splits = find_splits(folder)
    if not splits:
        raise no_index(str(folder))
    return splits
