"""Identity of a training - images, start weights, recipe - stored in its checkpoints, so that no other
training resumes from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vitctl.data.source.views import Source
from vitctl.engine.journal import json_digest
from vitctl.engine.run_files import RECIPE
from vitctl.engine.trace.steps import MadeOf
from vitctl.errors import CheckpointError
from vitctl.recipe.neutral import deciding_values
from vitctl.recipe.schema import TrainRecipe
from vitctl.system.files import read_json, write_json
from vitctl.system.text import typed

KEY = "made_of"  # in state.json
ALLOWED = "allowed.json"
_MOST_BYTES = 2**20
_IMAGES = {"train": "training images", "score": "images that are scored"}


@dataclass(frozen=True)
class Identity:
    """Identity of the training in a folder.

    Args:
        folder: that holds its checkpoints.
        made_of: see `identity`.
    """

    folder: Path
    made_of: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """The field that checkpoints store."""
        return {KEY: self.made_of}

    def check(self, name: str, state: Mapping[str, Any]) -> str:
        """Compare it with a checkpoint, on the main process.

        Args:
            name: of the checkpoint.
            state: its state.json.

        Returns:
            a message: what differs and was allowed; "" where nothing differs.

        Raises:
            CheckpointError: something differs and is not allowed, or the checkpoint does not record it.
        """
        try:
            before = MadeOf.model_validate(state.get(KEY)).model_dump()
        except ValidationError:
            raise CheckpointError(
                f"{self.folder}: {name} does not record its data and recipe; it was changed: delete it to "
                f"resume from the one before"
            ) from None
        differing = identity_differences(before, self.made_of)
        root = run_of(self.folder)
        allowed = _read_allowed(root)
        if not differing or json_digest(self.made_of) in allowed["before"]:
            return ""
        words = "; ".join(text for _, text in differing)
        refused = dict.fromkeys(key for key, _ in differing if not _covers(allowed["now"], key))
        if refused:
            keys = " ".join(f"--allow {key}" for key in refused)
            raise CheckpointError(
                f"{self.folder}: {name} was not trained with this: {words}; undo that, choose another folder "
                f"with --out, or resume "
                f"anyway with: vitctl resume {typed(root)} {keys}"
            )
        said = [*allowed["said"], *(text for _, text in differing)]
        write_json(
            root / ALLOWED,
            allowed | {"before": [*allowed["before"], json_digest(self.made_of)], "said": said},
        )
        return f"resuming from {name} with a change on purpose: {words}"


def identity(
    recipe: TrainRecipe,
    folder: Path,
    train_on: Source,
    score_on: Source | None,
    start_weights_sha256: str,
    computation: Mapping[str, Any],
) -> Identity:
    """Identity of a training: digest, number and classes of its images, digest of its start weights, and its
    recipe.

    Args:
        recipe: of the training.
        folder: that holds its checkpoints.
        train_on, score_on: images.
        start_weights_sha256: digest of the pre-trained weights; empty without any.
        computation: what else decides the last bits, for a run that promises them; else empty.
    """
    images = {"train": train_on, "score": score_on}
    made_of = {
        "images": {what: _description(source) for what, source in images.items() if source is not None},
        "weights": start_weights_sha256,
        "recipe": deciding_values(recipe),
        **({"computation": dict(computation)} if computation else {}),
    }
    return Identity(folder, made_of)


def allow(run_dir: Path, keys: Sequence[str]) -> None:
    """Record in RUN/allowed.json what may differ when the next launch resumes: `data`, `weights`, keys of the
    recipe.

    A change that was allowed once needs no --allow when the run resumes from the same checkpoint again.
    """
    if keys or (run_dir / ALLOWED).exists():
        write_json(run_dir / ALLOWED, _read_allowed(run_dir) | {"now": list(keys)})


def changed_on_purpose(run_dir: Path) -> dict[str, Any]:
    """For the provenance of a run that was resumed with a change: its digests and recipe are the final ones."""
    allowed = _read_allowed(run_dir)
    return {"changed_on_purpose": allowed["said"] or True} if allowed["before"] else {}


def identity_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What differs between two trainings: the key that allows it, and a description."""
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
    was, made_by = before.get("computation", {}), now.get("computation", {})
    found += [
        (
            "computation",
            f"computed with {name} {_shown(was[name])}, now {_shown(made_by[name])}, which may change the "
            f"last bits",
        )
        for name in was
        if name in made_by and was[name] != made_by[name]
    ]
    recipes = before["recipe"], now["recipe"]  # another release may have other keys
    common = [key for key in recipes[0] if key in recipes[1]]
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


def run_of(folder: Path) -> Path:
    """The run folder that a training lies in; it may hold several."""
    return next((path for path in (folder, *folder.parents) if (path / RECIPE).is_file()), folder)


def _covers(allowed: Sequence[str], key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in allowed)


def _read_allowed(run_dir: Path) -> dict[str, list[str]]:
    if not (run_dir / ALLOWED).exists():
        return {"now": [], "before": [], "said": []}
    fields = read_json(run_dir / ALLOWED, _MOST_BYTES, error=CheckpointError)
    if not isinstance(fields, dict) or not all(
        isinstance(fields.get(name), list) for name in ("now", "before")
    ):
        raise CheckpointError(f"{run_dir / ALLOWED}: not a file that --allow wrote; remove it")
    return {"said": [], **fields}
