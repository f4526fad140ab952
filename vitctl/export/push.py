"""An exported folder on Hugging Face's hub, by huggingface_hub and with its token."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from vitctl.engine.journal import Journal
from vitctl.errors import CheckpointError
from vitctl.models.weights.download import LOST, OFFLINE, hub_facts
from vitctl.system.text import bytes_text, one_line, typed

T = TypeVar("T")
_LATER = "connect this machine, or leave out --push and add it later"
_LOGIN = "run `hf auth login` with a token that may write, or set HF_TOKEN"


def check_hub(repository: str) -> None:
    """Raise CheckpointError without a hub, or a token that it lets write, before any work."""
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise CheckpointError(repository, "huggingface_hub has no token here", _LOGIN)
    told = _asked(repository, None, HfApi().whoami)
    if told.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise CheckpointError(repository, "this token may only read", _LOGIN)


def push(files: Sequence[Path], repository: str, public: bool, journal: Journal) -> str:
    """Upload the files of one folder to a repository, and return its address; it is made if there is none.

    What is uploaded is listed first. If the upload is interrupted, another call sends only what is missing.

    Raises CheckpointError: the token may not do that, the repository is public and `public` is not set, or
    the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    api, folder = HfApi(), files[0].parent
    page = f"{api.endpoint}/{repository}"
    shown = ", ".join(f"{path.name} ({bytes_text(path.stat().st_size)})" for path in files)
    journal.say("push", f"uploading to {page}, {'public' if public else 'private'}: {shown}")
    _asked(repository, folder, lambda: api.create_repo(repository, private=not public, exist_ok=True))
    is_private = _asked(repository, folder, lambda: api.repo_info(repository).private)
    if not (is_private or public):
        raise CheckpointError(
            repository, "is public already, so nothing was uploaded", "add --public, or choose another name"
        )
    names = [path.name for path in files]
    _asked(
        repository,
        folder,
        lambda: api.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=names, commit_message="Weights by vitctl"
        ),
    )
    kind = "private" if is_private else "public"
    journal.say("push", f"{page} is complete ({kind}); read it with --from hf:{repository}")
    return page


def _asked(repository: str, folder: Path | None, call: Callable[[], T]) -> T:
    try:
        return call()
    except Exception as error:  # of huggingface_hub and of its HTTP library
        status, names = hub_facts(error)
        owner, kept = repository.partition("/")[0], f"; the files are in {folder}" if folder else ""
        if OFFLINE in names:
            raise CheckpointError(repository, f"HF_HUB_OFFLINE is set{kept}", "unset it") from None
        if status == 401:
            raise CheckpointError(repository, f"the hub does not know this token{kept}", _LOGIN) from None
        if status == 403:
            what = f"this token may not write to {owner}{kept}"
            raise CheckpointError(
                repository, what, "give the token that right on its page, or name your own account"
            ) from None
        if status == 404 and folder:
            what = f"the hub has no organisation or account {owner}{kept}"
            raise CheckpointError(repository, what, "make it there, or correct the name") from None
        lost = not status and names & LOST
        text = "the hub cannot be reached" if lost else one_line(str(error).strip().partition("\n")[0])
        fix = f"type the same with --out {typed(folder.parent)}: what is uploaded stays" if folder else _LATER
        raise CheckpointError(repository, f"{text}{kept}", fix) from None
