"""Agreement of all processes on a checkpoint, its training, and the state before the first step."""

import hashlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from vitctl.data.source.views import Source
from vitctl.engine.checkpoint import (
    WORDS,
    SavedCheckpoint,
    newest_checkpoint,
    newest_name,
    read_checkpoint,
    read_state,
)
from vitctl.engine.journal import (
    ALLOWED,
    BEFORE,
    MODEL,
    OPTIMIZER,
    RECIPE,
    TENSOR_FILES,
    json_digest,
    read_allowed,
    run_of,
)
from vitctl.engine.runtime import Runtime, check_same, gather_texts, raised_on_all
from vitctl.engine.sharding import held, is_part, is_sharded, place_of, sum_of_words, word_sum
from vitctl.errors import CheckpointError, LaunchError
from vitctl.models.weights.header import own_header
from vitctl.models.weights.later import now
from vitctl.recipe.load import load_recipe
from vitctl.recipe.neutral_keys import FREE_TO_CHANGE, PLACES, deciding_values, with_added
from vitctl.recipe.schema import TrainRecipe
from vitctl.recipe.write import as_flags, differences
from vitctl.system.files import write_json
from vitctl.system.text import typed

CheckpointTensors = Mapping[str, dict[str, Tensor]]  # file of a checkpoint -> its tensors by name

_FAILING = (
    "resume; if this happens again, remove that machine from the run: its memory or disk may be failing"
)
FIX = (
    "make sure that all nodes read the same files (a network disk may show one of them an old state; a run "
    "that is active writes "
    "new checkpoints: name one of them with --from), then start again"
)


def check_inputs(
    runtime: Runtime,
    state: Mapping[str, Tensor],
    config: Any,
    meta: Mapping[str, Any],
    sources: Iterable[Source | None],
) -> None:
    """Check that all processes, which must call this, have read the same start weights, model and splits.

    Raises:
        LaunchError: they differ; the same message on every process.
    """
    if runtime.num_processes == 1:
        return
    facts = {
        "start weights": checksum(sorted(state.items())),
        "model": f"{config!r} {json.dumps(meta, sort_keys=True, default=str)}",
        "data index": " ".join(source.digest if source is not None else "none" for source in sources),
    }
    check_same(facts, FIX)


def agreed_checkpoint(runtime: Runtime, root: Path) -> tuple[SavedCheckpoint | None, list[str]]:
    """Return the newest complete checkpoint that rank 0 sees, after every process has read and verified it.

    All processes call this; the parts of a sharded checkpoint are divided among them. Returns None without
    checkpoints; on rank 0 also one line for each newer, incomplete one.

    Raises:
        CheckpointError: there are checkpoints but none is complete, or a process cannot read the chosen one,
            or sees a newer one; the same line on every process.
    """
    saved, problems = _agreed(runtime, root, runtime.num_processes)
    wrong = [text for text in gather_texts(_problem_of(runtime, saved)) if text]
    if saved is None or not wrong:
        return saved, problems
    other, problems = _agreed(runtime, root, 1)  # rank 0 verifies all parts and falls back
    if other is not None and other.folder == saved.folder:
        raise CheckpointError(wrong[0])
    return other, problems


def _problem_of(runtime: Runtime, saved: SavedCheckpoint | None) -> str:
    """Return which of this process's parts is damaged; "" if none is."""
    try:
        if saved is not None and saved.is_in_parts and not runtime.is_main:
            read_checkpoint(saved.folder, share=(runtime.rank, runtime.num_processes))
    except (CheckpointError, OSError) as error:
        return str(error)
    return ""


def _agreed(runtime: Runtime, root: Path, verifiers: int) -> tuple[SavedCheckpoint | None, list[str]]:
    saved: SavedCheckpoint | None = None
    problems: list[str] = []
    chosen: dict[str, str] = {}
    with raised_on_all():
        if runtime.is_main:
            saved, problems = newest_checkpoint(root, share=(0, verifiers))
            if saved is None and problems:
                raise CheckpointError(
                    f"{problems[0]}; no other checkpoint is complete: copy it back, or delete {root} to "
                    f"start again at step 0"
                )
            name, digest = (saved.folder.name, saved.digest) if saved else ("", "")
            chosen = {"name": name, "digest": digest, "newest": newest_name(root)}
    chosen = json.loads(runtime.broadcast(json.dumps(chosen)))
    with raised_on_all():
        if not runtime.is_main:
            saved = _read_chosen(runtime, root, chosen)
    return saved, problems


def check_resumable(
    runtime: Runtime,
    saved: SavedCheckpoint,
    total_steps: int,
    own: "Identity | None",
    *,
    can_go_on: bool = True,
) -> str:
    """Check that a training may resume from a checkpoint; return, on rank 0, a message for the user or "".

    All processes call this. An unknown identity is None. Without `can_go_on` the training is finished, which
    allows no changes.

    Raises:
        CheckpointError: it may not; the same message on every process.
    """
    with raised_on_all():
        if saved.step > total_steps:
            raise CheckpointError(
                saved.folder,
                f"checkpoint of step {saved.step}, but this run ends at step {total_steps}",
                f"set schedule.total_steps to {saved.step} or more, or choose another folder with --out",
            )
        if own is not None and runtime.is_main:
            return own.check(saved, can_go_on=can_go_on)
    return ""


def _read_chosen(runtime: Runtime, root: Path, chosen: dict[str, str]) -> SavedCheckpoint | None:
    """Read the checkpoint that rank 0 chose, or raise CheckpointError if this process sees other files."""
    who = f"process {runtime.rank} on {socket.gethostname()}"
    fix = "make sure that all nodes see the same folder, then resume"
    folder = root / chosen["name"]
    try:
        if (newest := newest_name(root)) > chosen["newest"]:
            raise CheckpointError(
                root / newest,
                f"seen by {who} but not by process 0, which would start from an earlier step",
                fix,
            )
        if not chosen["name"]:
            return None
        saved = _read_as(who, folder, fix)
    except PermissionError as error:
        raise CheckpointError(
            error.filename, f"permission denied for {who}", "fix its permissions, then resume"
        ) from None
    if saved.digest != chosen["digest"]:
        raise CheckpointError(folder, f"{who} reads a different checkpoint there than process 0", fix)
    return saved


def _read_as(who: str, folder: Path, fix: str) -> SavedCheckpoint:
    try:
        # Parts are verified after all have agreed on the checkpoint.
        return read_checkpoint(folder, by_size=SavedCheckpoint(folder, read_state(folder)).is_in_parts)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}, when {who} reads it; process 0 reads it without an error", fix=fix
        ) from None


def agreed_tensors(
    runtime: Runtime, saved: SavedCheckpoint, weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]
) -> CheckpointTensors:
    """Return a checkpoint's tensors, read by every process; of sharded tensors, the rows that it holds.

    `trained` are those of `weights` that the optimizer updates.

    Raises:
        CheckpointError: a process could not read them after verifying them; the same on every process.
    """
    read: CheckpointTensors = {}
    with raised_on_all():
        try:
            read = {
                name: saved.tensors(name, trained if name == OPTIMIZER else weights) for name in TENSOR_FILES
            }
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                saved.folder,
                f"process {runtime.rank} on {socket.gethostname()} could not read it ({error})",
                "check its disk, then resume",
            ) from error
    return read


def check_same_state(
    runtime: Runtime,
    step: int,
    model: nn.Module,
    everything: Iterable[tuple[str, str, Tensor]],
    saved: SavedCheckpoint | None,
) -> None:
    """Check that step, weights, average and optimizer state are the same on all processes.

    With a sharded model each process holds different parts; their sum is compared with the one recorded in
    the checkpoint `saved`. `everything` yields (part, name, tensor) of all training state.

    Raises:
        LaunchError: they differ; the same line on every process.
    """
    if runtime.num_processes == 1:
        return
    named = [(f"{part} {name}", tensor) for part, name, tensor in everything]
    said = "" if is_sharded(model) else checksum(one for one in named if not is_part(one[1]))
    check_same({"step": str(step), "weights or optimizer state": said}, _FAILING)
    if not any(is_part(tensor) for _, tensor in named):
        return
    total, copies = _words_held(runtime, named)
    words = sum(file.get(WORDS, 0) for file in saved.state["files"].values()) if saved is not None else 0
    if saved is not None and saved.is_in_parts and total != words * copies % 2**64:
        raise LaunchError(
            saved.folder, "the processes hold other weights or optimizer state than were saved", _FAILING
        )


def _words_held(runtime: Runtime, tensors: Sequence[tuple[str, Tensor]]) -> tuple[int, int]:
    """Return the `word_sum` over all processes' tensors, and how many copies of each tensor they hold."""
    _, number, count = place_of(one for _, one in tensors) or (0, runtime.rank, runtime.num_processes)
    own = word_sum((name, *held(one)) for name, one in tensors if is_part(one) or not number)  # the rest once
    total = int(runtime.sum_words(np.array([own], dtype=np.uint64))[0])
    return total, runtime.num_processes // count


def words_of_start(runtime: Runtime, model: nn.Module, start: Mapping[str, Tensor]) -> str:
    """Return, for `check_same`, the `word_sum` of the start weights held; on rank 0 the expected one.

    Rank 0 reads every tensor, one at a time, as for the digest of the weights.
    """
    if not start:
        return ""
    own = model.state_dict()
    total, copies = _words_held(runtime, [(name, own[name]) for name in start])
    if runtime.is_main:
        read = ((name, now(one).to(own[name].dtype), 0) for name, one in start.items())
        total = copies * word_sum(read) % 2**64
    return str(total)


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a digest of named tensors, computed on their device: equal bits, equal digest on any device.

    A change of a single number always changes it. It detects accidents; it is not cryptographic.
    """
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {sum_of_words(tensor)}\n".encode())
    return digest.hexdigest()


KEY = "made_of"  # in state.json
_IMAGES = {"train": "training images", "score": "images that are scored"}


class ImagesLine(BaseModel):
    model_config = ConfigDict(strict=True)

    sha256: str = Field(max_length=100)
    num_images: int = Field(ge=0, le=10**15)
    class_names: str = Field(max_length=100)


class MadeOf(BaseModel):
    """The inputs of a training; see `Identity`."""

    model_config = ConfigDict(strict=True)

    images: dict[str, ImagesLine] = Field(default_factory=dict, max_length=10)
    weights: str = Field("", max_length=100)
    teacher: str = Field("", max_length=100)
    recipe: dict[str, str] = Field(default_factory=dict, max_length=10_000)
    computation: dict[str, str | int | bool | dict[str, str]] = Field(default_factory=dict, max_length=100)


@dataclass(frozen=True)
class Identity:
    """Identity of the training in a folder; `made_of` is that of `identity`, `network` its configuration."""

    folder: Path
    made_of: dict[str, Any]
    network: Mapping[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        return {KEY: self.made_of}

    def check(self, saved: SavedCheckpoint, *, can_go_on: bool) -> str:
        """Compare the identity with a checkpoint's, on the main process.

        Returns:
            a message about differences that were allowed; "" without differences.

        Raises:
            CheckpointError: a difference is not allowed, or the checkpoint does not record its identity.
        """
        name = saved.folder.name
        try:
            before = MadeOf.model_validate(saved.state.get(KEY)).model_dump()
        except ValidationError:
            raise CheckpointError(
                self.folder,
                f"{name} does not record its data and recipe; it was modified: delete it to "
                "resume from the previous one",
            ) from None
        differing = identity_differences(before, self.made_of)
        root = run_of(self.folder)
        allowed = read_allowed(root)
        if not differing or json_digest(self.made_of) in allowed["before"]:
            return ""
        words = "; ".join(text for _, text in differing)
        covered = tuple(f"{key}." for key in allowed["now"])
        refused = dict.fromkeys(
            key
            for key, _ in differing
            if not f"{key}.".startswith(covered) or not (can_go_on or key == "computation")
        )
        if refused:
            keys = " ".join(f"--allow {key}" for key in dict.fromkeys(key for key, _ in differing))
            fix = "undo the change, or choose another folder with --out"
            if not can_go_on:
                fix += "; it is finished, so that nothing of it would be trained with these"
            elif self._fits(saved):
                fix += f", or resume anyway with: vitctl resume {typed(root)}{_flags(root)} {keys}"
            raise CheckpointError(self.folder, f"{name} was trained with other inputs: {words}", fix)
        said = [*allowed["said"], *(text for _, text in differing)]
        write_json(
            root / ALLOWED,
            allowed | {"before": [*allowed["before"], json_digest(self.made_of)], "said": said},
        )
        return f"resuming from {name} with a change on purpose: {words}"

    def _fits(self, saved: SavedCheckpoint) -> bool:
        """Return whether the checkpoint's network has these sizes."""
        header = own_header(saved.files(MODEL)[0]) or {"config": {}}
        return all(self.network.get(key, value) == value for key, value in header["config"].items())


def _flags(run_dir: Path) -> str:
    """Return the flags for what this launch changed in recipe.toml, which is about to be restored."""
    if not (run_dir / BEFORE / RECIPE).exists():
        return ""
    was, now_is = (load_recipe(str(folder / RECIPE)).recipe for folder in (run_dir / BEFORE, run_dir))
    return as_flags(one for one in differences(was, now_is) if not one[0].startswith(FREE_TO_CHANGE))


def identity(
    recipe: TrainRecipe,
    folder: Path,
    train_on: Source,
    score_on: Source | None,
    start_weights_sha256: str,
    computation: Mapping[str, Any],
    teacher_sha256: str = "",
    network: Mapping[str, Any] = MappingProxyType({}),
) -> Identity:
    """Return a training's identity: its images, start weights, and the recipe values that decide the result.

    The digests are empty without such weights. `computation` is what else decides the last bits, for a run
    that promises them.
    """
    images = {"train": train_on, "score": score_on}
    made_of = {
        "images": {what: _description(source) for what, source in images.items() if source is not None},
        "weights": start_weights_sha256,
        "recipe": deciding_values(recipe),
        **({"computation": dict(computation)} if computation else {}),
        **({"teacher": teacher_sha256} if teacher_sha256 else {}),
    }
    return Identity(folder, made_of, network)


def changed_on_purpose(run_dir: Path) -> dict[str, Any]:
    """Return the provenance field of a run resumed with a change; its other fields are the final ones."""
    allowed = read_allowed(run_dir)
    return {"changed_on_purpose": allowed["said"] or True} if allowed["before"] else {}


def identity_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return each difference between two trainings: the key that allows it, and a description."""
    found = []
    for what, name in _IMAGES.items():
        one, two = before["images"].get(what), now["images"].get(what)
        if one is None or two is None:
            found += [("data", f"there are {'' if two else 'no '}{name} now")] if one != two else []
            continue
        if one["num_images"] != two["num_images"]:
            found.append(("data", f"{one['num_images']:,} {name}, now {two['num_images']:,}"))
        if one["class_names"] != two["class_names"]:
            found.append(("data", f"the classes of the {name} differ, or their order"))
        elif one["sha256"] != two["sha256"] and one["num_images"] == two["num_images"]:
            digests = f"digest {one['sha256'][:12]}, now {two['sha256'][:12]}"
            text = f"the {name} or their labels differ, or their shards were written again ({digests})"
            found.append(("data", text))
    if before["weights"] != now["weights"]:
        found.append(("weights", f"start weights {before['weights'][:12]}, now {now['weights'][:12]}"))
    teachers = [one.get("teacher", "") for one in (before, now)]
    if all(teachers) and teachers[0] != teachers[1]:
        found.append(("distillation", f"the teacher {teachers[0][:12]}, now {teachers[1][:12]}"))
    was = before.get("computation", {})
    made_by = {"linear": "torch", **now.get("computation", {})}  # earlier releases also had oneDNN
    found += [
        (
            "computation",
            f"computed with {name} {_shown(was[name])}, now {_shown(made_by[name])}, which may change the "
            f"last bits",
        )
        for name in was
        if name in made_by and was[name] != made_by[name]
    ]
    # another release may have other keys
    recipes = with_added(before["recipe"]), with_added(now["recipe"])
    known = PLACES if all(teachers) else PLACES[:2]
    common = [key for key in recipes[0] if key in recipes[1] and key not in known]
    return found + [
        (key, f"{key} was {recipes[0][key] or 'unset'}, now {recipes[1][key] or 'unset'}")
        for key in common
        if recipes[0][key] != recipes[1][key]
    ]


def _shown(value: Any) -> str:
    return (
        ", ".join(f"{name} {one}" for name, one in value.items())
        if isinstance(value, Mapping)
        else str(value)
    )


def _description(source: Source) -> dict[str, Any]:
    return {
        "sha256": source.digest,
        "num_images": len(source),
        "class_names": json_digest(source.class_names),
    }
