"""Pushes to a hub on this machine, which stores what huggingface_hub sends it, and gives it back."""

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.data.server import listening
from tests.export.conftest import Saved
from tests.matrix import slow
from vitctl.models.weights.weights_file import read_weights
from vitctl.recipe.export_formats import check_push

TOKEN, COMMIT = "hf_S3CR3T", "d" * 40


@dataclass
class Hub:
    """Repositories and what they hold; `refuses` is a status for whatever begins with this path."""

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)  # by ORGANISATION/NAME/FILE
    large: dict[str, bytes] = field(default_factory=dict)  # by SHA-256
    sent: list[str] = field(default_factory=list)  # digests, as they came
    refuses: dict[str, int] = field(default_factory=dict)
    role: str = "write"  # of the token

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON for a POST, or a GET of /api/."""
        status = next((code for start, code in self.refuses.items() if path.startswith(start)), 200)
        if status != 200:
            return status, {"error": "refused"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            status = 409 if name in self.private else 200
            self.private.setdefault(name, asked["visibility"] == "private")
            return status, {"url": f"{self.url}/{name}"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "auth": {"accessToken": {"role": self.role}}}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/objects/batch"):
            return 200, {"transfer": "basic", "objects": list(map(self.place, json.loads(body)["objects"]))}
        name = "/".join(path.split("/")[3:5])
        if path.endswith("/preupload/main"):
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = {one: "lfs" if one.endswith(".safetensors") else "regular" for one in names}
            files = [{"path": one, "uploadMode": mode, "shouldIgnore": False} for one, mode in modes.items()]
            return 200, {"files": files}
        if path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                one = line["value"]
                if line["key"] == "file":
                    self.files[f"{name}/{one['path']}"] = base64.b64decode(one["content"])
                elif line["key"] == "lfsFile":
                    self.files[f"{name}/{one['path']}"] = self.large[one["oid"]]
            return 200, {"commitUrl": f"{self.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT}
        if path == f"/api/models/{name}" and name in self.private:
            return 200, {"id": name, "private": self.private[name], "sha": COMMIT, "siblings": []}
        return 404, {"error": "nothing here"}

    def place(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Say where a large file goes; one that is here needs no sending."""
        is_here = wanted["oid"] in self.large
        actions = {"actions": {"upload": {"href": f"{self.url}/large/{wanted['oid']}"}}}
        return {"oid": wanted["oid"], "size": wanted["size"], **({} if is_here else actions)}


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def reply(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content if self.command != "HEAD" else b"")

        def do_POST(self) -> None:
            status, value = found.answer(self.path, self.body())
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                status, value = 401, {"error": "no such token"}
            self.reply(status, json.dumps(value).encode(), Content_Type="application/json")

        def do_PUT(self) -> None:
            content, name = self.body(), self.path.rpartition("/")[2]
            assert hashlib.sha256(content).hexdigest() == name
            found.large[name] = content
            found.sent.append(name)
            self.reply(200, b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            if self.path.startswith("/api/"):
                self.do_POST()
                return
            served = found.files.get(self.path.strip("/").replace("/resolve/main", ""))
            if served is None:
                self.reply(404, b"", X_Error_Code="EntryNotFound")
                return
            digest = hashlib.sha256(served).hexdigest()
            self.reply(200, served, X_Repo_Commit=COMMIT, X_Linked_Etag=f'"{digest}"', ETag='"x"')

    with listening(Handler) as found.url:
        yield found


def typed(hub: Hub, tmp_path: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    # The protocol of xet's own servers is not spoken here: the other way of huggingface_hub is taken.
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "CUDA_VISIBLE_DEVICES": "", **more}
    line = [sys.executable, "-m", "vitctl", *words]
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert TOKEN not in done.stdout + done.stderr
    return done


def test_push__is_private_listed_first_and_read_back_to_equal_bits(
    hub: Hub, saved: Saved, tmp_path: Path
) -> None:
    path = saved(licence="cc-by-4.0")
    line = ("export", "--from", str(path), "--to", "hf", "--push", "me/nano", "--out", "run")
    done = typed(hub, tmp_path, *line)
    assert done.returncode == 0, done.stderr
    assert hub.private == {"me/nano": True}
    folder = tmp_path / "run" / "hf"
    written = {f"me/nano/{file.name}": file.read_bytes() for file in folder.iterdir()}
    assert hub.files == written and len(written) == 4
    assert b"license: cc-by-4.0" in hub.files["me/nano/README.md"]
    said = done.stdout + done.stderr
    assert f"uploading to {hub.url}/me/nano, private: README.md (" in said
    assert f"{hub.url}/me/nano is complete (private); read it with --from hf:me/nano" in said
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["provenance"]["pushed_to"] == f"{hub.url}/me/nano"
    records = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert [file for file in records if TOKEN.encode() in file.read_bytes()] == []

    back = typed(hub, tmp_path, "export", "--from", "hf:me/nano", "--to", "safetensors", "--out", "back")
    assert back.returncode == 0, back.stderr
    here, there = (read_weights(one) for one in (path, tmp_path / "back" / "model.safetensors"))
    assert here.digest == there.digest and here.meta["class_names"] == there.meta["class_names"]


PUSH = """
import sys
from pathlib import Path
from vitctl.engine.journal import Journal
from vitctl.errors import VitctlError
from vitctl.export.push import check_hub, push
files = sorted(Path(sys.argv[1]).iterdir())
for name in sys.argv[2:]:
    try:
        check_hub(name)
        push(files, name.strip("+"), name.endswith("+"), Journal(None))
        print("done", name)
    except VitctlError as error:
        print(error)
"""


def pushed(hub: Hub, tmp_path: Path, *names: str, **more: str) -> list[str]:
    """The lines for a push of a small folder to each name; one that ends in + is public."""
    folder = tmp_path / "folder"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(bytes(1000))
    (folder / "README.md").write_text("hello\n")
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **more}
    line = [sys.executable, "-c", PUSH, str(folder), *names]
    done = subprocess.run(line, capture_output=True, text=True, env={k: v for k, v in env.items() if v})
    assert done.returncode == 0, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return done.stdout.splitlines()


def test_push__what_the_hub_refuses_is_one_line(hub: Hub, tmp_path: Path) -> None:
    hub.private["me/open"] = False
    hub.refuses = {"/api/models/other/": 403, "/api/models/none/": 404}
    hub.private |= {"other/a": True, "none/a": True}
    closed, missing, public = pushed(hub, tmp_path, "other/a", "none/a", "me/open")
    kept = f"the files are in {tmp_path / 'folder'}"
    assert closed.startswith(f"other/a: this token may not write to other; {kept}; give the token that right")
    assert missing.startswith(f"none/a: the hub has no organisation or account none; {kept}; make it there")
    assert public.startswith("me/open: is public already, so nothing was uploaded; add --public")
    [unknown] = pushed(hub, tmp_path, "me/a", HF_TOKEN="hf_wrong")
    assert unknown.startswith("me/a: the hub does not know this token; run `hf auth login`")
    [nobody] = pushed(hub, tmp_path, "me/a", HF_TOKEN="")
    assert nobody.startswith("me/a: huggingface_hub has no token here; run `hf auth login`")
    hub.role = "read"
    assert pushed(hub, tmp_path, "me/a") == [f"me/a: this token may only read; {unknown.partition('; ')[2]}"]
    assert hub.files == {} and hub.sent == []


@pytest.mark.parametrize("way", slow("unreachable", "offline"))
def test_push__without_a_network_is_one_line(hub: Hub, tmp_path: Path, way: str) -> None:
    more = {"HF_HUB_OFFLINE": "1"} if way == "offline" else {"HF_ENDPOINT": "http://127.0.0.1:9"}
    [line] = pushed(hub, tmp_path, "me/a", **more)
    text = "HF_HUB_OFFLINE is set" if way == "offline" else "the hub cannot be reached"
    fix = "unset it" if way == "offline" else "connect this machine, or leave out --push and add it later"
    assert line == f"me/a: {text}; {fix}"


def test_push__a_hub_out_of_reach_is_said_before_there_is_a_folder(
    hub: Hub, saved: Saved, tmp_path: Path
) -> None:
    line = ("export", "--from", str(saved()), "--to", "hf", "--push", "me/nano")
    there = {path.name for path in tmp_path.iterdir()}
    done = typed(hub, tmp_path, *line, HF_ENDPOINT="http://127.0.0.1:9")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("vitctl: me/nano: the hub cannot be reached; connect this machine")
    assert {path.name for path in tmp_path.iterdir()} - there <= {"home"}


@pytest.mark.slow
def test_push__the_line_after_a_broken_upload_works(hub: Hub, saved: Saved, tmp_path: Path) -> None:
    line = ("export", "--from", str(saved()), "--to", "hf", "--push", "me/nano")
    hub.refuses = {"/api/models/me/nano/commit": 400}
    done = typed(hub, tmp_path, *line)
    [folder] = (tmp_path / "runs").iterdir()
    again = f"--out runs/{folder.name}"
    assert done.returncode == 2 and f"type the same with {again}: what is uploaded stays" in done.stderr
    hub.refuses, sent = {}, [*hub.sent]
    done = typed(hub, tmp_path, *line, *again.split())
    assert done.returncode == 0 and hub.sent == sent and len(hub.files) == 4


@pytest.mark.slow
def test_push__public_again_and_after_an_interruption(hub: Hub, tmp_path: Path) -> None:
    """What was sent before the commit failed is not sent again, nor is what did not change."""
    hub.refuses = {"/api/models/me/a/commit": 400}
    [line] = pushed(hub, tmp_path, "me/a+")
    assert line.endswith(": what is uploaded stays") and hub.files == {} and len(hub.sent) == 1
    hub.refuses = {}
    assert pushed(hub, tmp_path, "me/a+", "me/a+") == ["done me/a+"] * 2
    assert hub.private == {"me/a": False} and len(hub.sent) == 1


@pytest.mark.parametrize("name", ["me/a--b", "-x/y", "me/a..b", "me/.a", "me", "a/b/c", "ü/x"])
def test_push__a_name_that_the_hub_refuses_is_refused_before_any_work(name: str) -> None:
    with pytest.raises(ValueError, match="should be ORGANISATION/NAME"):
        check_push(["hf"], name, public=False)
