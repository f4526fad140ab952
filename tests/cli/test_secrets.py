"""A run whose weights and data lie behind signed addresses: the signature is in no file, on no screen and in
no command line.
"""

import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.cli.conftest import Said, Vitctl, words
from tests.data.server import listening
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
    with listening(partial(Signed, directory=str(root))) as url:
        yield url


@pytest.mark.slow
def test_a_signature_is_in_no_record(
    site: str, vitctl: Vitctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, data, run = f"{site}/w/model.safetensors", f"{site}/tiny", tmp_path / "run"
    monkeypatch.setenv("VITCTL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    printed: list[str] = []

    def run_without_queries(*words: object, query: str = "") -> Said:
        monkeypatch.setenv(VARIABLE, query)  # an earlier command in this process has set it
        said = vitctl(*words)
        printed.extend((said.out, said.err))
        return said

    small = words("--res 16 --batch-size 8 --set machine.device=cpu --set machine.workers=1 --lr 0.01")
    signed = ("--from", f"{weights}?{SECRET}", "--data", f"{data}?{SECRET}")
    first = run_without_queries("finetune", *signed, "--steps", 2, *small, "--processes", 2, "--out", run)
    assert first.code == 0, first.err
    assert f'source = "{weights}"' in (run / "recipe.toml").read_text()
    assert f'path = "{data}"' in (run / "recipe.toml").read_text()

    longer = ("--set", "schedule.total_steps=3", "--allow", "schedule")
    unsigned = run_without_queries("resume", run, *longer)
    assert unsigned.code == 2
    assert "answers 403 Forbidden" in unsigned.err and VARIABLE in unsigned.err
    assert unsigned.err.count("\n") == 1
    user = run_without_queries("evaluate", "--from", site.replace("//", f"//me:{SECRET}@"), "--data", data)
    assert (user.code, user.err.count("\n")) == (2, 1)
    alone = ("--processes", 1)  # in this process: what several are started with is seen above
    again = run_without_queries("resume", run, *longer, *alone, "--set", f"data.path={data}?{SECRET}")
    assert again.code == 0, again.err
    signature = f"{data}?{SECRET}"
    report = run_without_queries("report", run, "-o", tmp_path / "report.html", query=signature)
    assert report.code == 0, report.err
    checked = run_without_queries("verify", run, "--data", data, query=signature)
    assert "403 Forbidden" not in checked.out + checked.err
    scored = run_without_queries(
        *f"evaluate --from {run} --data {data} --set machine.device=cpu --out".split(),
        tmp_path / "scored",
        query=signature,
    )
    assert scored.code == 0, scored.err

    assert not any("5ecre7" in text for text in printed)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"launch.txt", "env.json", "result.json", "log.jsonl", "report.html"} <= {
        path.name for path in files
    }
    assert [path for path in files if b"5ecre7" in path.read_bytes()] == []
    assert [path for path in tmp_path.rglob("*") if "5ecre7" in str(path)] == []
    assert fetch(weights, cache=tmp_path / "cache").exists()  # the cache knows it by its text
