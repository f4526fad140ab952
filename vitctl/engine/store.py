"""A copy of a run in a store or on another disk, from which another machine resumes. Imports no torch.

Files have the same names there as in RUN. A checkpoint is complete there once it has state.json, which is
sent last, after the records that it names. What the run's folder deletes is deleted there.
"""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from vitctl.engine.journal import (
    CHECKPOINTS,
    LOG,
    LOG_HEAD,
    RECIPE,
    STARTED,
    STATE,
    TORN,
    Journal,
    allow,
    begins,
    step_folder,
)
from vitctl.errors import LaunchError, VitctlError
from vitctl.system import limits, remote
from vitctl.system.files import atomic_write, file_state, read_json, read_toml

_NAME = re.compile(r"(?:\w[\w=+.-]*/)*\w[\w=+.-]*")  # no hidden file, no way out of the folder
_STEP = re.compile(rf"((?:.+/)?{CHECKPOINTS}/step_[0-9]+)/(?:[\w-]+\.safetensors|{re.escape(STATE)})")
_LEFT_HERE = (CHECKPOINTS, "logs", "data")  # what holds for one start, or on one machine
_FETCHED = "fetched"  # marks a checkpoint that came from the store


@dataclass
class Store:
    """The copy of a run at `address`, as one process sees it.

    Args:
        address: s3://, gs:// or az://, or a folder on another disk.
        folder: RUN on this machine.
    """

    address: str
    folder: Path
    _sent: dict[str, tuple[int, ...]] = field(default_factory=dict)  # name -> state of the file sent

    def __post_init__(self) -> None:
        here, there = self.folder.resolve(), Path(self.address)
        if there.is_absolute() and (
            {here, *here.parents} & {there.resolve()} or here in there.resolve().parents
        ):
            raise LaunchError(
                self.address,
                "is the run's folder, or one of the two is inside the other",
                "name another disk",
            )

    @property
    def has_run(self) -> bool:
        """Whether a run was sent there."""
        return RECIPE in self._list()

    def send(self, path: Path, name: str = "") -> None:
        """Copy a file of the run, unless it was sent as it is. Raises as `remote.put`."""
        name, state = name or path.relative_to(self.folder).as_posix(), file_state(path)
        if self._sent.get(name) != state:
            remote.put(path, f"{self.address}/{name}")
            self._sent[name] = state

    def send_records(self) -> None:
        """Copy all files of the run but its checkpoints. Raises as `remote.put`."""
        for path in sorted(self.folder.rglob("*")):
            name = path.relative_to(self.folder).as_posix()
            if path.is_file() and _is_record(name):
                self.send(path)

    def send_missing(self) -> None:
        """Copy what the store lacks of complete checkpoints, oldest first, and all records."""
        there = self._list()
        self.remove_gone(later=True)
        for step in sorted(filter(_is_whole, self.folder.glob(f"**/{CHECKPOINTS}/step_*"))):
            paths = [*step.glob("*.safetensors"), step / STATE]
            names = [path.relative_to(self.folder).as_posix() for path in paths]
            if any(there.get(name) != path.stat().st_size for name, path in zip(names, paths, strict=True)):
                self.send_records()
                for path in paths:
                    self.send(path)
        self.send_records()
        self.remove_gone()

    def remove_gone(self, *, later: bool = False) -> None:
        """Remove the checkpoints that the run's folder has no more; `later`: only those after its newest,
        which a run that went back leaves: its records will be others.
        """
        there = self._list()
        for step in sorted({found[1] for name in there if (found := _STEP.fullmatch(name))}):
            if not (self.folder / step).is_dir() and (not later or step > self._newest(step, there)):
                names = [name for name in there if name.startswith(f"{step}/")]
                for name in sorted(names, reverse=True):  # state.json first: the rest is no checkpoint
                    remote.remove(f"{self.address}/{name}")
                with suppress(OSError):  # a folder on another disk
                    Path(f"{self.address}/{step}").rmdir()

    def get(self, name: str, size: int | None = None) -> None:
        """Fetch one file of the run. Raises as `remote.fetch`."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as aside:
            remote.fetch(f"{self.address}/{name}", aside, size)

    def fetch(self) -> None:
        """Bring the run's folder to the newest checkpoint of the store, unless it has that or a newer one.

        Checkpoints appear in the folder after the records that they name, the newest last.

        Raises:
            LaunchError: the folder holds a run that is kept elsewhere.
            VitctlError: as `remote.fetch`.
        """
        there, local = self._list(), self.folder / RECIPE
        if RECIPE not in there:
            return
        if local.is_file() and kept_in(self.folder) != self.address:
            raise LaunchError(
                self.folder,
                f"holds a run that is not the one in {self.address}",
                "choose another folder with --out, or another checkpoint.store",
            )
        whole = sorted(
            name.removesuffix(f"/{STATE}") for name in there if _STEP.fullmatch(name) and STATE in name
        )
        newest = {step.rpartition("/")[0]: step for step in whole}  # of each training
        for mark in self.folder.glob(f"**/{CHECKPOINTS}/step_*/{_FETCHED}"):
            step = mark.parent.relative_to(self.folder).as_posix()
            if step not in whole and step < newest.get(step.rpartition("/")[0], ""):  # deleted there
                shutil.rmtree(mark.parent)
        others: set[str] = set()  # trainings that have other records here
        if local.is_file() and all(step <= self._newest(step, there) for step in whole):
            others = {root for root, step in newest.items() if not self._continues(step)}
            if not others:
                return
            if any(newest[root] < self._newest(newest[root], there) for root in others):
                raise LaunchError(
                    self.address,
                    f"another machine went on with this run, and so did {self.folder}",
                    "remove that folder to take the other's steps, or name another checkpoint.store",
                )
        asides = []
        for step in whole:
            if step.rpartition("/")[0] in others or not self._has(step, there):
                final = self.folder / step
                asides.append((aside := final.with_name(f".{final.name}.fetched"), final))
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
                (aside / _FETCHED).touch()
                for name, size in there.items():
                    if name.startswith(f"{step}/"):
                        remote.fetch(f"{self.address}/{name}", aside / name.rpartition("/")[2], size)
        for name in filter(_is_record, there):
            self.get(name, there[name])
        allow(self.folder, ())  # what --allow permitted there was for that start; what it changed stays said
        for root in newest:
            for path in (self.folder / root).glob("step_*"):
                if root in others or path.relative_to(self.folder).as_posix() not in whole:
                    self._leave(path)
        for aside, final in asides:
            shutil.rmtree(final, ignore_errors=True)  # incomplete
            aside.rename(final)

    def _continues(self, step: str) -> bool:
        """Whether the log here goes on from the one that a checkpoint in the store was saved with."""
        with tempfile.TemporaryDirectory() as aside:
            remote.fetch(f"{self.address}/{step}/{STATE}", Path(aside, STATE))
            head = _log_head(Path(aside))
        return not head or begins((self.folder / step).parent.parent / LOG, head)

    def _leave(self, step: Path) -> None:
        """Take a checkpoint out of a run that was fetched: it is older, or of other records."""
        head, log = _log_head(step), step.parent.parent / LOG
        if not (step / STARTED).exists():
            is_older = bool(head) and begins(log, head)
            aside = step.with_name(f".{step.name}.old" if is_older else f"{TORN}{step.name}")
            shutil.rmtree(aside, ignore_errors=True)
            step.rename(aside)
            if is_older:
                shutil.rmtree(aside, ignore_errors=True)

    def _newest(self, step: str, there: Mapping[str, int]) -> str:
        """Return the newest complete checkpoint here beside that of a step; "" if there is none."""
        names = (
            path.relative_to(self.folder).as_posix() for path in (self.folder / step).parent.glob("step_*")
        )
        return max((name for name in names if self._has(name, there)), default="")

    def _has(self, step: str, there: Mapping[str, int]) -> bool:
        """Whether a checkpoint is complete here, or all that the store has of it, which may be damaged."""
        sizes = {name: size for name, size in there.items() if name.startswith(f"{step}/")}
        return _is_whole(self.folder / step) or (
            f"{step}/{STATE}" in sizes
            and all(file_state(self.folder / name)[-1:] == (size,) for name, size in sizes.items())
        )

    def complete(self, final: Path) -> None:
        """Fetch the parts of a checkpoint that other machines have written. Raises as `remote.fetch`."""
        step = final.relative_to(self.folder).as_posix()
        for name, size in self._list().items():
            if name.startswith(f"{step}/") and not (self.folder / name).is_file():
                self.get(name, size)

    def _list(self) -> dict[str, int]:
        """Return the size of each file in the store by name; names that no run writes are left out."""
        return {name: size for name, size in remote.list_files(self.address).items() if _NAME.fullmatch(name)}


@dataclass(frozen=True)
class Peers:
    """The processes that write a checkpoint together, one part each; by default a single process.

    Parts count from 0; `count` 0 means not in parts. `exchange` gathers a text from each process, in the
    order of the parts; no other thread may use it.
    """

    part: int = 0
    count: int = 0
    exchange: Callable[[str], list[str]] = field(default=lambda text: [text])


ALONE = Peers()


class Sender:
    """Sends each saved checkpoint in the background, in the order of steps; training never waits for it.

    Args:
        store: the copy of the run.
        root: folder of the checkpoints.
        peers: that write them, with an `exchange` of their own.
        journal: of the first peer; a checkpoint that could not be sent is a warning.
    """

    def __init__(self, store: Store, root: Path, peers: Peers, journal: Journal) -> None:
        self._store, self._root, self._peers, self._journal = store, root, peers, journal
        self._queue, self._last = ThreadPoolExecutor(1, thread_name_prefix="store"), -1

    def add(self, step: int, *, is_written: bool) -> None:
        """Send the checkpoint of a step, if all peers have written it."""
        self._last = step
        with suppress(RuntimeError):  # a save by the thread that ends the process
            self._queue.submit(self._send, step, is_written)

    def finish(self) -> None:
        """Wait for what is being sent; an outage is waited out as any other, but not after a signal. Then the
        run's folder has the last checkpoint complete.
        """
        self._journal.show_progress(at_once=True, text=f"copying the run to {self._store.address}")
        self._queue.shutdown()
        final = step_folder(self._root, self._last)
        if self._peers.count and self._peers.part == 0 and final.is_dir() and not _is_whole(final):
            with suppress(VitctlError):  # who reads the checkpoint says what is missing
                self._store.complete(final)

    def _send(self, step: int, is_written: bool) -> None:
        final, problem, own = step_folder(self._root, step), "", list[Path]()
        if not all(self._peers.exchange("written" * is_written)):
            return
        try:
            if self._peers.part == 0:
                self._store.remove_gone(later=True)
            own = list(self._own(final))
            for path in own:
                self._store.send(path, (final / path.name).relative_to(self._store.folder).as_posix())
        except Exception as error:  # any error: the others wait for this process
            problem = str(error) or type(error).__name__
        problem = next(filter(None, self._peers.exchange(problem[:500])), "")
        if self._peers.part:
            if not final.is_dir():  # the first part is on another machine, which names the checkpoint
                for path in own:
                    path.unlink(missing_ok=True)
                with suppress(OSError):  # another process here has its part in it
                    final.with_name(f".{final.name}.new").rmdir()
            return
        try:
            if not problem:
                self._store.send_records()
                self._store.send(final / STATE)
                self._store.remove_gone()
        except Exception as error:
            problem = str(error) or type(error).__name__
        if problem and final.is_dir():  # else it was deleted meanwhile
            text = f"step {step} is not in {self._store.address} yet ({problem})"
            with suppress(OSError):
                self._journal.write("warning", step=step, text=text)

    def _own(self, final: Path) -> Iterator[Path]:
        """Yield this process's files of a checkpoint; on a machine without the first part it has no name."""
        aside, part = final.with_name(f".{final.name}.new"), f"-{self._peers.part + 1:05d}-of-"
        for path in (final if final.is_dir() else aside).glob("*.safetensors"):
            if not self._peers.count or part in path.name:
                yield path


def _is_record(name: str) -> bool:
    parts = name.split("/")
    return bool(_NAME.fullmatch(name)) and not {*parts} & {*_LEFT_HERE}


def _log_head(step: Path) -> str:
    """Return how the log ended when a checkpoint was saved; "" if its state is damaged."""
    with suppress(LaunchError, OSError, AttributeError):
        return str(read_json(step / STATE, limits.RUN_FILE, error=LaunchError).get(LOG_HEAD, ""))
    return ""


def _is_whole(step: Path) -> bool:
    """Return whether a checkpoint has all files that its state names, with their sizes."""
    try:
        files = read_json(step / STATE, limits.RUN_FILE, error=LaunchError)["files"].items()
        return all((step / name).stat().st_size == recorded["bytes"] for name, recorded in files)
    except (LaunchError, OSError, KeyError, TypeError, AttributeError):
        return False


def kept_in(folder: Path) -> str:
    """Return the store that the recipe of a run folder names; "" without one. Raises LaunchError."""
    file = folder / RECIPE
    table = read_toml(file, error=LaunchError)[0].get("checkpoint") if file.is_file() else None
    return str(table.get("store", "")) if isinstance(table, dict) else ""
