"""A run whose weights and data lie behind signed addresses: the signature is in no file, on no screen and in
no command line.
"""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from vitctl.models.weights.download import fetch
from vitctl.system.address import VARIABLE

SECRET = "X-Amz-Signature=5ecre7"


class Signed(SimpleHTTPRequestHandler):
    """Serves a folder to requests that carry the signature."""

    def do_GET(self) -> None:
        if self.path.partition("?")[2] == SECRET:
            super().do_GET()
        else:
            self.send_error(403)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def site(tmp_path: Path, tiny_data: Path, pretrained: Path) -> Iterator[str]:
    """The address of a server with w/model.safetensors and tiny/{train,test}."""
    root = tmp_path / "site"
    (weights,) = (pretrained / "checkpoints").glob("*20/model.safetensors")
    (root / "w").mkdir(parents=True)
    shutil.copy(weights, root / "w")
    (root / "tiny").symlink_to(tiny_data)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Signed, directory=str(root)))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def test_a_signature_is_in_no_record(site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, data, run = f"{site}/w/model.safetensors", f"{site}/tiny", tmp_path / "run"
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    printed: list[str] = []

    def vitctl(*words: object) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "vitctl", *map(str, words)]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
        printed.extend((done.stdout, done.stderr))
        return done

    small = (
        "--res",
        16,
        "--batch-size",
        8,
        "--set",
        "machine.device=cpu",
        "--set",
        "machine.workers=1",
        "--lr",
        0.01,
    )
    signed = ("--from", f"{weights}?{SECRET}", "--data", f"{data}?{SECRET}")
    first = vitctl("finetune", *signed, "--steps", 2, *small, "--processes", 2, "--out", run)
    assert first.returncode == 0, first.stderr
    assert f'source = "{weights}"' in (run / "recipe.toml").read_text()
    assert f'path = "{data}"' in (run / "recipe.toml").read_text()

    longer = ("--set", "schedule.total_steps=3", "--allow", "schedule")
    unsigned = vitctl("resume", run, *longer)
    assert unsigned.returncode == 2
    assert "answers 403 Forbidden" in unsigned.stderr and VARIABLE in unsigned.stderr
    assert unsigned.stderr.count("\n") == 1
    user = vitctl("evaluate", "--from", site.replace("//", f"//me:{SECRET}@"), "--data", data)
    assert (user.returncode, user.stderr.count("\n")) == (2, 1)
    again = vitctl("resume", run, *longer, "--set", f"data.path={data}?{SECRET}")
    assert again.returncode == 0, again.stderr
    monkeypatch.setenv(VARIABLE, f"{data}?{SECRET}")
    report = vitctl("report", run, "-o", tmp_path / "report.html")
    assert report.returncode == 0, report.stderr
    checked = vitctl("verify", run, "--data", data)
    assert "403" not in checked.stdout + checked.stderr
    scored = vitctl(
        "evaluate", "--from", run, "--data", data, "--set", "machine.device=cpu", "--out", tmp_path / "scored"
    )
    assert scored.returncode == 0, scored.stderr

    assert not any("5ecre7" in text for text in printed)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"launch.txt", "env.json", "result.json", "log.jsonl", "report.html"} <= {
        path.name for path in files
    }
    assert [path for path in files if b"5ecre7" in path.read_bytes()] == []
    assert [path for path in tmp_path.rglob("*") if "5ecre7" in str(path)] == []
    assert fetch(weights, cache=tmp_path / "cache").exists()  # the cache knows it by its text
