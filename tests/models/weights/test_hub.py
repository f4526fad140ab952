"""Weights of Hugging Face, through huggingface_hub, from a server on this machine that answers as it does."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.data.server import listening
from tests.matrix import slow
from vitctl.models.variants import ViTConfig
from vitctl.models.weights.weights_file import Weights, write_weights

CONTENT, COMMIT = bytes(range(256)) * 4000, "c" * 40
FETCH = """
import sys
from vitctl.models.weights.download import cached, fetch, hub_address
from vitctl.errors import VitctlError
from vitctl.system import remote
remote.PAUSE_SECONDS = 0.01
seen = []
for name in sys.argv[2:]:
    try:
        with remote.patient(float(sys.argv[1])):
            path = fetch(hub_address("o/n", name), progress=lambda done, total: seen.append((done, total)))
        assert cached(hub_address("o/n", name)) == path
        print("found", len(path.read_bytes()), seen[-1] if seen else None)
    except VitctlError as error:
        print(type(error).__name__, error.passes, error)
"""


@dataclass
class Hub:
    """The address, the digest that it states, and what it was asked for."""

    url: str = ""
    digest: str = hashlib.sha256(CONTENT).hexdigest()
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    away: int = 0  # for so many requests
    way: str = ""  # in which it is away
    files: dict[str, bytes] = field(default_factory=dict)  # by ORGANISATION/NAME/FILE


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, body: bool = True) -> None:
            found.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
            name = self.path.rpartition("/")[2]
            if found.way == "cut" and not body:
                pass
            elif found.away > 0:
                found.away -= 1
                if found.way == "503":
                    self.send_error(503)
                elif found.way == "cut":
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(CONTENT)))
                    self.end_headers()
                    self.wfile.write(CONTENT[:1000])
                self.close_connection = True
                return
            if name == "private.npz" or "/gated-" in self.path:
                self.send_response(403 if "/gated-403" in self.path else 401)
                self.send_header("X-Error-Code", "GatedRepo")
                self.end_headers()
                return
            served = found.files.get(self.path.strip("/").replace("/resolve/main", ""))
            content = CONTENT if name == "w.npz" else served
            digest = found.digest if served is None else hashlib.sha256(served).hexdigest()
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            headers = {"X-Repo-Commit": COMMIT, "X-Linked-Etag": f'"{digest}"', "ETag": '"x"'}
            for key, value in {**headers, "Content-Length": len(content or b"")}.items():
                self.send_header(key, str(value))
            self.end_headers()
            if body and content is not None:
                self.wfile.write(content)

    with listening(Handler) as found.url:
        yield found


def fetch(hub: Hub, home: Path, *names: str, patience: float = 0.0) -> list[str]:
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": "hf_S3CR3T"}
    env |= {"VITCTL_CACHE": str(home / "vitctl"), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FETCH, str(patience), *names], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "S3CR3T" not in done.stdout + done.stderr and "%|" not in done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_hub__files_are_fetched_once_into_the_cache_of_huggingface_hub(hub: Hub, tmp_path: Path) -> None:
    lines = fetch(hub, tmp_path, "w.npz", "none.json")
    assert lines[0] == f"found {len(CONTENT)} ({len(CONTENT)}, {len(CONTENT)})"
    assert lines[1].startswith("NotOnServerError") and lines[1].endswith("no such file on the server")
    assert {token for _, _, token in hub.asked} == {"Bearer hf_S3CR3T"}
    hub.asked.clear()
    again = fetch(hub, tmp_path, "w.npz", "none.json")
    assert [again[0].split()[:2], again[1]] == [lines[0].split()[:2], lines[1]]
    assert hub.asked == []
    [stored] = tmp_path.rglob("blobs/*")
    assert stored.name == hub.digest


@pytest.mark.slow
def test_hub__another_digest_and_a_closed_repository_are_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.digest = "0" * 64
    wrong, closed = fetch(hub, tmp_path, "w.npz", "private.npz", patience=600.0)
    assert json.dumps(wrong).count("\\n") == 0
    assert (
        wrong.startswith("CheckpointError False")
        and "the server says 0000000000000000...; run again" in wrong
    )
    assert closed.endswith(
        "accept its terms, if it has any, at https://huggingface.co/o/n, and set HF_TOKEN to a token of "
        "your account"
    )
    assert [*tmp_path.rglob("blobs/0*")] == []


READ = """
import sys
from vitctl.errors import VitctlError
from vitctl.jobs.inputs.checks import start_recipe
from vitctl.jobs.inputs.weights import find_weights
for name in sys.argv[1:]:
    try:
        found = find_weights(name)
        weights = found.weights
        print(start_recipe(name)[0], weights.config.depth, weights.meta["format"], weights.digest)
    except VitctlError as error:
        print(error)
"""


@pytest.mark.slow
def test_hub__names_of_timm_and_of_organisations_are_read_as_their_pages_hold_them(
    hub: Hub, tmp_path: Path, plain: ViTConfig, make_weights: Callable[..., Weights]
) -> None:
    weights = make_weights(plain)
    for layout, page in (("timm", "timm/vit_nano_patch8_32.mae"), ("hf", "someone/vit-mae-nano")):
        write_weights(weights, tmp_path / layout, layout)
        hub.files |= {f"{page}/{file.name}": file.read_bytes() for file in (tmp_path / layout).iterdir()}
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    names = ("timm:vit_nano_patch8_32.mae", "hf:someone/vit-mae-nano", "hf:me/gated-401", "hf:me/gated-403")
    done = subprocess.run([sys.executable, "-c", READ, *names], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    timms, hfs, *closed = done.stdout.splitlines()
    assert timms == f"mae_b16 2 timm {weights.digest}"
    assert hfs == f"mae_b16 2 hf {weights.digest}"
    for line, name in zip(closed, names[2:], strict=True):
        page = f"https://huggingface.co/{name.removeprefix('hf:')}"
        assert f"terms, if it has any, at {page}, and set HF_TOKEN" in line


@pytest.mark.parametrize(("way", "away"), [("503", 2), *slow(("drop", 6), ("cut", 2))])
def test_hub__an_outage_is_waited_out_by_the_rule_of_all_requests(
    hub: Hub, tmp_path: Path, way: str, away: int
) -> None:
    hub.way, hub.away = way, away
    [line] = fetch(hub, tmp_path, "w.npz", patience=60.0)
    assert line.startswith(f"found {len(CONTENT)} ") and hub.away == 0


@pytest.mark.slow
def test_hub__an_outage_that_lasts_passes_later(hub: Hub, tmp_path: Path) -> None:
    hub.way, hub.away = "drop", 10**9
    [line] = fetch(hub, tmp_path, "w.npz", patience=0.1)
    assert line.startswith("CheckpointError True https://huggingface.co/o/n/") and "gave up after" in line


@pytest.mark.slow
def test_hub__what_does_not_pass_is_not_waited_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    [line] = fetch(hub, tmp_path, "w.npz", patience=600.0)
    assert line.startswith("CheckpointError False") and "HF_HUB_OFFLINE is set" in line and hub.asked == []


def test_hub__without_an_address_is_refused_at_once(tmp_path: Path) -> None:
    """huggingface_hub would try for half a minute, and say so each time."""
    env = {**os.environ, "HF_ENDPOINT": "https://hub.invalid", "HF_HOME": str(tmp_path)}
    env = {name: value for name, value in env.items() if "proxy" not in name.lower()}
    words = ["-m", "vitctl", "export", "--from", "hf:o/n", "--to", "onnx", "--out", "out"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "hub.invalid has no address here; check the network" in done.stderr
