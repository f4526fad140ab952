"""One process of a run of benchmarks/resume_conformance.py, in the virtual environment of the peer.

    python consume.py PEER:VARIANT '{"data": ..., "rank": 0, ...}' '{"log": ..., "states": ...}'

Writes a line of JSON for every step, and one for every state. Then it waits to be killed, as a run that goes
on would be.
"""

import importlib
import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from job import Job, NotOfferedError

STEP_SECONDS = 0.01  # of training; meanwhile loader workers run ahead
NOT_OFFERED = 64


def main() -> None:
    """Prepare the data of a peer, and print its versions; or consume it."""
    peer, _, variant = sys.argv[1].partition(":")
    module = importlib.import_module(f"peer_{peer}")
    fields = json.loads(sys.argv[2])
    job = Job(**{**fields, "data": Path(fields["data"])})
    if len(sys.argv) == 3:
        if hasattr(module, "prepare"):
            module.prepare(job)
        print(json.dumps({name: version(name) for name in module.PACKAGES}), file=sys.__stdout__)
        return
    try:
        consume(module, job, variant, **json.loads(sys.argv[3]))
    except NotOfferedError as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_OFFERED)


def consume(
    module: Any,
    job: Job,
    variant: str,
    *,
    log: str,
    states: str,
    save_every: int,
    stop: int,
    resume: str,
    finished: int,
) -> None:
    """Read every step to the end, or to step `stop`.

    Args:
        module: of the peer.
        job: of this process.
        variant: of the peer's use.
        log: file of this process.
        states: folder of the states, one folder for each saved step.
        save_every: steps between two states; peers that save at the end of an epoch do it there.
        stop: the step after which to wait for the kill, 0 for none.
        resume: folder of the state to go on from, "" for none.
        finished: steps before it.
    """
    loader = module.Loader(job, variant)
    if resume:
        loader.restore(Path(resume))
    by_epoch = variant in getattr(module, "SAVES_AT_EPOCHS", ())
    with open(log, "a", encoding="utf-8") as file:

        def tell(**fields: Any) -> None:
            file.write(json.dumps(fields) + "\n")
            file.flush()

        for step, (epoch, samples) in enumerate(loader.steps(), start=finished + 1):
            time.sleep(STEP_SECONDS)
            tell(step=step, epoch=epoch, samples=samples)
            if step % (job.steps_per_epoch if by_epoch else save_every) == 0:
                folder = Path(states) / f"{step:06d}"
                folder.mkdir(parents=True, exist_ok=True)
                loader.save(folder)
                tell(saved=step)
            if step == stop:
                break
        tell(done=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    sys.stdout = sys.stderr
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
