"""A process that a test harms from within: `python -m tests.harmed HARM RUN`, on a prepared folder.

Harms are done where nothing from outside could hit the moment: between two writes of one save, on one of two
processes.
"""

import errno
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitctl.engine import checkpoint as files
from vitctl.engine import losses
from vitctl.engine.preemption import exit_on_signals
from vitctl.engine.sharding import local
from vitctl.engine.update import TrainStep
from vitctl.errors import VitctlError
from vitctl.launch.worker import leave_group, redirect_output, work

NEWEST = "step_00000006"
CLASSIFY = losses.classify
NAN_SAMPLE = 4  # with two processes the first has it in step 3, the second in step 6


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def stuck_save(run_dir: Path) -> dict[str, Any]:
    """The save of step 4 never ends, once the weights are written; says so."""
    write = files.save_tensors

    def stuck(tensors: Any, path: Path, *more: Any) -> None:
        if "step_00000004" in str(path) and not path.name.startswith("model"):
            say("saving")
            time.sleep(600)
        write(tensors, path, *more)

    files.save_tensors = stuck
    return work(run_dir)


def compiling(run_dir: Path) -> dict[str, Any]:
    """No harm; says when all is about to be compiled."""
    warm_up = TrainStep.warm_up

    def told(trainer: TrainStep, micro_batches: Any) -> None:
        say("compiling")
        warm_up(trainer, micro_batches)

    TrainStep.warm_up = told
    return work(run_dir)


def forbidden_save(run_dir: Path) -> dict[str, Any]:
    """After step 5 nothing may be written into the folder of the checkpoints."""

    def report(record: dict[str, Any]) -> None:
        if (record["kind"], record.get("step")) == ("train", 5):
            (run_dir / "checkpoints").chmod(0o555)

    return work(run_dir, report)


def nan_on_one_rank(run_dir: Path) -> dict[str, Any]:
    """The loss of one image is not a number whenever it comes, on whatever process."""
    from vitctl.engine import losses

    losses.classify = poisoned
    return work(run_dir)


def poisoned(model: Any, batch: Any, step: int, **named: Any) -> Any:
    """The loss of a classifier, not a number where a certain image is in the batch."""
    loss = CLASSIFY(model, batch, step, **named)
    return loss * float("nan") if (batch.samples == NAN_SAMPLE).any() else loss


def hide_newest() -> None:
    """An old state of a network disk: the folder of the newest checkpoint is not listed yet."""
    listed = files.step_folders
    files.step_folders = lambda root: sorted(listed(root))[:-1]


def old_listing(run_dir: Path) -> dict[str, Any]:
    """The second process does not see the newest checkpoint in the folder, and could read it."""
    if is_second():
        hide_newest()
    return work(run_dir)


def old_listing_at_first(run_dir: Path) -> dict[str, Any]:
    """The same for the first process."""
    if not is_second():
        hide_newest()
    return work(run_dir)


def unreadable(run_dir: Path) -> dict[str, Any]:
    """The second process gets a read error in the newest checkpoint."""
    digest = files._sha256

    def failing(path: Path) -> str:
        if path.parent.name == NEWEST:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return digest(path)

    if is_second():
        files._sha256 = failing
    return work(run_dir)


def other_numbers_read(run_dir: Path) -> dict[str, Any]:
    """The second process reads one other bit after it has verified the file."""
    tensors = files.SavedCheckpoint.tensors

    def flipped(saved: files.SavedCheckpoint, name: str, *more: Any) -> Any:
        read = tensors(saved, name, *more)
        if name == "model":
            flip_last_bit(local(read["blocks.0.mlp.fc1.weight"]))
        return read

    if is_second():
        files.SavedCheckpoint.tensors = flipped  # type: ignore[method-assign]
    return work(run_dir)


def other_start_weights(run_dir: Path) -> dict[str, Any]:
    """The second process starts from weights in which one bit differs."""
    from vitctl.jobs import evaluate, fewshot, finetune, pretrain, vtab_suite

    def flipped(found: Any) -> Any:
        state = found.state_dict() if hasattr(found, "state_dict") else found.weights.state
        flip_last_bit(state["blocks.0.mlp.fc1.weight"])
        return found

    if is_second():
        for job, name in (
            (pretrain, "build"),
            (finetune, "weights_of"),
            (fewshot, "weights_of"),
            (evaluate, "scored_weights"),
            (vtab_suite, "weights_of"),
        ):
            given = getattr(job, name)
            setattr(job, name, lambda *a, given=given, **named: flipped(given(*a, **named)))
    return work(run_dir)


def other_recipe(run_dir: Path) -> dict[str, Any]:
    """The second process reads a recipe with another seed."""
    from vitctl.recipe import load

    given = load.load_recipe

    def changed(source: str) -> Any:
        loaded = given(source)
        return replace(loaded, recipe=loaded.recipe.model_copy(update={"seed": loaded.recipe.seed + 1}))

    if is_second():
        load.load_recipe = changed
    return work(run_dir)


def other_index(run_dir: Path) -> dict[str, Any]:
    """The second process opens a data set with another index."""
    from vitctl.data.source.stores import ShardSource

    if is_second():
        ShardSource.digest = "0" * 64  # type: ignore[assignment, method-assign]
    return work(run_dir)


def blind_to_choices(run_dir: Path) -> dict[str, Any]:
    """The second process does not see the micro-batch that the run began with."""
    exists = Path.exists
    if is_second():
        Path.exists = lambda path, **given: path.name != "micro_batch.json" and exists(path, **given)
    return work(run_dir)


def slow_images(run_dir: Path) -> dict[str, Any]:
    """The images of the second process come late."""
    from vitctl.engine import assemble

    batches = assemble.train_batches

    def late(*given: Any, **named: Any) -> Iterator[Any]:
        for batch in batches(*given, **named):
            time.sleep(0.5)
            yield batch

    if is_second():
        assemble.train_batches = late
    return work(run_dir)


def slow_passes(run_dir: Path) -> dict[str, Any]:
    """The first process computes slowly."""
    from vitctl.engine import losses

    def slow(*given: Any, **named: Any) -> Any:
        time.sleep(0.5)
        return CLASSIFY(*given, **named)

    if not is_second():
        losses.classify = slow
    return work(run_dir)


def is_second() -> bool:
    return os.environ["RANK"] == "1"


def flip_last_bit(tensor: Any) -> None:
    """Of one number, in place."""
    import torch

    words = tensor.view(torch.int64 if tensor.element_size() == 8 else torch.int32)
    words.view(-1)[3] ^= 1


HARMS = {
    harm.__name__: harm
    for harm in (
        stuck_save,
        compiling,
        forbidden_save,
        nan_on_one_rank,
        old_listing,
        old_listing_at_first,
        unreadable,
        other_numbers_read,
        other_start_weights,
        other_recipe,
        other_index,
        blind_to_choices,
        slow_images,
        slow_passes,
    )
}


def main() -> None:
    """Do the harm; exit codes and the last line are those of the command."""
    exit_on_signals()
    harm, run_dir = HARMS[sys.argv[1]], Path(sys.argv[2])
    if "RANK" in os.environ:
        redirect_output(run_dir)
    try:
        result = harm(run_dir)
    except VitctlError as error:
        print(f"vitctl: {error}", file=sys.stderr, flush=True)
        os._exit(2)  # as a worker does: gloo's threads may abort a process that ends while its peer goes away
    leave_group()
    sys.exit(3 if result["status"] == "stopped" else 0)


if __name__ == "__main__":
    main()
