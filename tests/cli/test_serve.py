"""`vitctl serve` under real clients: it answers as `predict` does; hostile requests leave it as it was."""

import asyncio
import base64
import hashlib
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests import warm
from tests.cli.conftest import Vitctl
from tests.matrix import slow
from vitctl import open_split
from vitctl.jobs.http_server import listen

FAST = ("--device", "cpu", "--precision", "float32")
MIB = 2**20
LIMITS = {
    "REQUEST": 2 * MIB,
    "REQUESTS": 16 * MIB,
    "IMAGE_FILE": MIB,
    "REQUEST_IMAGES": 8,
    "REQUEST_SECONDS": 2,
    "CONNECTIONS": 40,
    "PIXELS": 4_000_000,
    "REQUEST_PIXELS": 16_000_000,
    "ANSWER_CLASSES": 40,
}
MOST_GROWTH = 200 * MIB  # of memory, over all hostile requests


@contextmanager
def served(
    *arguments: object, before: str = "pass", **limits: int
) -> Iterator[tuple["subprocess.Popen[str]", str, int]]:
    """A server process, its address and its port."""
    code = "; ".join(
        [
            "from vitctl.cli.app import main",
            "from vitctl.system import limits",
            before,
            *(f"limits.{name} = {value}" for name, value in limits.items()),
            "main()",
        ]
    )
    line = [sys.executable, "-c", code, "serve", "--port", "0", *map(str, arguments), *FAST]
    process = warm.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while "serving on" not in said:
            line_read = process.stderr.readline()
            assert line_read, said
            said += line_read
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", said)[1])  # type: ignore[index]
        yield process, f"http://127.0.0.1:{port}", port
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(pretrained: Path) -> Iterator[tuple[Any, str, int]]:
    with served("--from", pretrained, **LIMITS) as found:
        yield found


@pytest.fixture
def photos(tmp_path: Path, tiny_data: Path) -> Path:
    """Ten images of different sizes and formats, and a text."""
    source, folder = open_split("test", path=tiny_data), tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        image = Image.open(io.BytesIO(source.read(number)))
        image.resize((16 + 9 * number, 40)).save(folder / f"{number}.{'jpg' if number % 2 else 'png'}")
    (folder / "notes.txt").write_text("no image")
    return folder


def test_answers__are_the_records_of_predict(
    vitctl: Vitctl, pretrained: Path, photos: Path, server: tuple[Any, str, int]
) -> None:
    """Byte for byte, whether images come alone, in one form, or from many clients at once."""
    address, names = server[1], sorted(path.name for path in photos.iterdir())
    lines = []
    for name in names:
        line = ("predict", f"photos/{name}", "--from", pretrained, "--top", 4, "--threshold", 0.01, *FAST)
        lines.append(vitctl(*line, "--format", "jsonl").out.replace("photos/", "").rstrip())
    where, files = (
        f"{address}/predict?top=4&threshold=0.01",
        [("image", (name, (photos / name).read_bytes())) for name in names],
    )
    assert len(files) == 11 and '"error": "not an image"' in lines[-1]
    for part in (slice(0, 8), slice(5, 11)):
        together = httpx.post(where, files=files[part])
        assert (together.status_code, together.headers["content-type"]) == (200, "application/json")
        assert together.text == f'{{"predictions": [{", ".join(lines[part])}]}}\n'

    def alone(number: int) -> str:
        found = httpx.post(where, files=[files[number % 10]], timeout=60).text
        return found.removeprefix('{"predictions": [').removesuffix("]}\n")

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(alone, range(40))] == lines[:10] * 4
    raw = httpx.post(where, content=(photos / "3.jpg").read_bytes()).json()["predictions"]
    assert raw == [{**json.loads(lines[3]), "image": ""}]


@pytest.mark.slow
def test_answers__of_an_onnx_file_in_batches(vitctl: Vitctl, pretrained: Path, photos: Path) -> None:
    """With its preprocessing in the graph and without; a batch groups what came at once."""
    for name, more in (("plain", ()), ("photographs", ("--include-preprocess",))):
        assert vitctl("export", "--from", pretrained, "--to", "onnx", "-o", name, *more).code == 0
        model = Path(name).resolve() / "model.onnx"
        (photos / "notes.txt").unlink(missing_ok=True)
        names = sorted(path.name for path in photos.iterdir())
        told = vitctl(
            "predict", "photos", "--from", model, "--batch", 1, "--format", "jsonl", "--device", "cpu"
        )
        expected = [json.loads(line)["classes"] for line in told.out.splitlines()]
        line = ("--from", model, "--batch", 8, "--max-wait", 50, "--set", "machine.precision=auto")
        with served(*line[:-2], "--precision", "auto") as (_, address, _):
            files = [("x", (name, (photos / name).read_bytes())) for name in names]
            found = httpx.post(f"{address}/predict", files=files, timeout=60).json()["predictions"]
            batches = httpx.get(f"{address}/metrics").text
        with served("--from", model, "--precision", "auto") as (_, address, _), ThreadPoolExecutor(8) as pool:
            posts = [
                pool.submit(httpx.post, f"{address}/predict", content=data, timeout=60)
                for _, (_, data) in files * 4
            ]
            alone = [post.result().json()["predictions"][0]["classes"] for post in posts]
        assert alone == expected * 4  # the same bits, though computed side by side
        for one, likely in zip(found, expected, strict=True):
            assert [c["class"] for c in one["classes"]] == [c["class"] for c in likely]
            np.testing.assert_allclose(
                [c["probability"] for c in one["classes"]], [c["probability"] for c in likely], rtol=1e-5
            )
        count = float(re.search(r"^vitctl_batches_total (\S+)", batches, re.M)[1])  # type: ignore[index]
        assert count <= 4 if name == "plain" else count == 10


def test_health_metrics_and_schema(pretrained: Path, server: tuple[Any, str, int]) -> None:
    address = server[1]
    health = httpx.get(f"{address}/health").json()
    result = json.loads((pretrained / "result.json").read_text())
    assert health["status"] == "ok" and len(health["classes"]) == 6 and len(health["weights_sha256"]) == 64
    assert str(pretrained) not in json.dumps(health) and result
    metrics = httpx.get(f"{address}/metrics").text
    assert 'vitctl_requests_total{code="200",path="/health"}' in metrics
    assert "vitctl_held_bytes 0.0" in metrics and "vitctl_waiting_images 0.0" in metrics
    for page in ("", "health", "metrics", "openapi.json"):
        head, body = httpx.head(f"{address}/{page}"), httpx.get(f"{address}/{page}")
        assert (head.status_code, head.content, body.status_code) == (200, b"", 200)
        assert head.headers["content-type"] == body.headers["content-type"]
        assert body.headers["x-content-type-options"] == "nosniff"
    schema = httpx.get(f"{address}/openapi.json").json()
    predicted = schema["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]
    for image in (png(), b"no image"):
        sent = {"files": [("image", ("a.png", png())), ("image", ("b.png", image))], "data": {"note": "text"}}
        answer = httpx.post(f"{address}/predict", **sent)
        assert answer.status_code == 200
        for record in answer.json()["predictions"]:
            described = predicted["schema"]["properties"]["predictions"]["items"]
            assert set(described["required"]) <= set(record) <= set(described["properties"])
            for one in record["classes"]:
                assert set(one) == set(described["properties"]["classes"]["items"]["properties"])
    assert set(schema["paths"]) == {"/predict", "/health", "/metrics"}
    assert "multipart/form-data" in schema["paths"]["/predict"]["post"]["requestBody"]["content"]
    for loads_from_others in ("docs", "redoc"):
        assert httpx.get(f"{address}/{loads_from_others}").status_code == 404


def test_page__asks_no_other_host_and_runs_only_its_own_script(server: tuple[Any, str, int]) -> None:
    found = httpx.get(f"{server[1]}/")
    assert found.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search("https?:|//[a-z]", found.text.replace("// ", ""))
    allowed = dict(part.split(" ", 1) for part in found.headers["content-security-policy"].split("; "))
    for kind, name in (("script", "script"), ("style", "style")):
        [text] = re.findall(f"<{name}>(.*?)</{name}>", found.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert allowed[f"{kind}-src"] == f"'sha256-{digest}'"
    assert allowed["default-src"] == allowed["base-uri"] == allowed["frame-ancestors"] == "'none'"


def test_64_clients_at_once__get_the_answer_of_one(pretrained: Path) -> None:
    with served("--from", pretrained) as (_, address, _):
        alone = httpx.post(f"{address}/predict", content=png(300, 200)).text
        with ThreadPoolExecutor(64) as pool:
            found = [
                pool.submit(httpx.post, f"{address}/predict", content=png(300, 200), timeout=60)
                for _ in range(192)
            ]
            assert {(one.result().status_code, one.result().text) for one in found} == {(200, alone)}


def computed(address: str) -> float:
    metrics = httpx.get(f"{address}/metrics").text
    return float(re.search(r"^vitctl_batches_total (\S+)", metrics, re.M)[1])  # type: ignore[index]


def test_images_of_clients_that_left__are_not_computed(server: tuple[Any, str, int]) -> None:
    _, address, port = server
    before, leaving = computed(address), 30
    body = form(*[(FILE, png(1200, 1200))] * 8)
    kind = f"Content-Type: {MULTIPART['content-type']}\r\nContent-Length: {len(body)}\r\n\r\n"
    clients = []
    for _ in range(leaving):
        clients.append(socket.create_connection(("127.0.0.1", port)))
        clients[-1].sendall(HEAD + kind.encode() + body)
    for client in clients:
        client.close()
    until = time.monotonic() + 20
    while not re.search("^vitctl_waiting_images 0.0", httpx.get(f"{address}/metrics").text, re.M):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert computed(address) - before < 8 * leaving / 2
    assert httpx.post(f"{address}/predict", content=png()).status_code == 200


def png(width: int = 8, height: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def bomb() -> bytes:
    """A PNG of a few kilobytes that says it has 60,000 x 60,000 pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    side = (60_000).to_bytes(4, "big")
    head = chunk(b"IHDR", side + side + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(MIB))) + chunk(b"IEND", b"")


def form(*parts: tuple[str, bytes], boundary: str = "b") -> bytes:
    body = b"".join(
        f"--{boundary}\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + data + b"\r\n"
        for head, data in parts
    )
    return body + f"--{boundary}--\r\n".encode()


MULTIPART = {"content-type": "multipart/form-data; boundary=b"}
FILE = 'name="x"; filename="x.png"'
WEBP_BOMB = b"RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\xff\xff" * 2
GIF_BOMB = b"GIF89a\xff\xff\xff\xff\x00\x00\x00,\0\0\0\0\xff\xff\xff\xff\x00\x02\x02D\x01\x00;"
# What a client sends: method, path, headers, body, and the codes that may answer.
REQUESTS: dict[str, tuple[str, str, dict[str, str], bytes, tuple[int, ...]]] = {
    "empty body": ("POST", "/predict", {}, b"", (422,)),
    "text": ("POST", "/predict", {"content-type": "text/plain"}, b"hello", (422,)),
    "JSON": ("POST", "/predict", {"content-type": "application/json"}, b'{"image": "/etc/passwd"}', (422,)),
    "form of text": ("POST", "/predict", {}, b"image=http%3A%2F%2Fexample.org%2Fa.png", (422,)),
    "a path": ("POST", "/predict", {"content-type": "image/png"}, b"/etc/passwd", (422,)),
    "an address": ("POST", "/predict", {"content-type": "image/png"}, b"http://169.254.169.254/", (422,)),
    "SVG": ("POST", "/predict", {}, b'<svg xmlns="http://www.w3.org/2000/svg"/>', (422,)),
    "PostScript": ("POST", "/predict", {}, b"%!PS-Adobe-3.0 EPSF-3.0\n(x) run", (422,)),
    "pickle": ("POST", "/predict", {}, b"\x80\x04cos\nsystem\n(S'touch x'\ntR.", (422,)),
    "truncated PNG": ("POST", "/predict", {}, png()[:40], (422,)),
    "truncated JPEG": ("POST", "/predict", {}, b"\xff\xd8\xff\xe0\x00\x10JFIF", (422,)),
    "PNG of zeros": ("POST", "/predict", {}, b"\x89PNG\r\n\x1a\n" + bytes(9999), (422,)),
    "PNG bomb": ("POST", "/predict", {}, bomb(), (422,)),
    "WEBP bomb": ("POST", "/predict", {}, WEBP_BOMB, (422,)),
    "GIF bomb": ("POST", "/predict", {}, GIF_BOMB, (422,)),
    "thin image": ("POST", "/predict", {}, png(60_000, 1), (200, 422)),
    "noise": ("POST", "/predict", {}, np.random.default_rng(0).bytes(MIB - 1), (422,)),
    "too large": ("POST", "/predict", {}, bytes(2 * MIB + 1), (413,)),
    "too large image": ("POST", "/predict", MULTIPART, form((FILE, bytes(MIB + 1))), (413,)),
    "gzip": ("POST", "/predict", {"content-encoding": "gzip"}, zlib.compress(png()), (422,)),
    "GET": ("GET", "/predict", {}, b"", (405,)),
    "PUT": ("PUT", "/predict", {}, png(), (405,)),
    "DELETE": ("DELETE", "/predict", {}, b"", (405,)),
    "OPTIONS": ("OPTIONS", "/predict", {"origin": "http://example.org"}, b"", (405,)),
    "TRACE": ("TRACE", "/predict", {}, b"", (405,)),
    "odd method": ("BREW", "/predict", {}, b"", (405,)),
    "POST health": ("POST", "/health", {}, png(), (405,)),
    "other page": ("GET", "/admin", {}, b"", (404,)),
    "slash": ("POST", "/predict/", {"host": "example.org"}, png(), (404,)),
    "dots": ("GET", "/../../etc/passwd", {}, b"", (404,)),
    "coded dots": ("GET", "/%2e%2e/%2e%2e/etc/passwd%00", {}, b"", (404,)),
    "not UTF-8": ("GET", "/%ff%fe", {}, b"", (404,)),
    "top of zero": ("POST", "/predict?top=0", {}, png(), (422,)),
    "an option mistyped": ("POST", "/predict?topp=2", {}, png(), (422,)),
    "top of text": ("POST", "/predict?top=a%0d%0ab", {}, png(), (422,)),
    "large top": ("POST", "/predict?top=999999999999999999999999", {}, png(), (200, 422)),
    "long top": ("POST", "/predict?top=" + "9" * 5000, {}, png(), (422,)),
    "threshold": ("POST", "/predict?threshold=nan", {}, png(), (422,)),
    "no boundary": ("POST", "/predict", {"content-type": "multipart/form-data"}, b"x", (400,)),
    "other boundary": ("POST", "/predict", MULTIPART, form((FILE, png()), boundary="c"), (400,)),
    "odd charset": (
        "POST",
        "/predict",
        {"content-type": "multipart/form-data; boundary=b; charset=hex"},
        form((FILE, b"x")),
        (400, 422),
    ),
    "no parts": ("POST", "/predict", MULTIPART, b"--b--\r\n", (400,)),
    "open part": ("POST", "/predict", MULTIPART, form((FILE, png()))[:-30], (400, 422)),
    "no name": ("POST", "/predict", MULTIPART, form(('filename="x"', png())), (400,)),
    "a field": ("POST", "/predict", MULTIPART, form(('name="image"', b"/etc/passwd")), (400,)),
    "an option as a field": (
        "POST",
        "/predict",
        MULTIPART,
        form((FILE, png()), ('name="top"', b"1")),
        (422,),
    ),
    "many fields": ("POST", "/predict", MULTIPART, form(*[('name="x"', b"1")] * 2000), (400,)),
    "many files": ("POST", "/predict", MULTIPART, form(*[(FILE, png())] * 9), (400,)),
    "many empty files": ("POST", "/predict", MULTIPART, form(*[(FILE, b"")] * 20_000), (400,)),
    "many pixels": ("POST", "/predict", MULTIPART, form(*[(FILE, png(1900, 1900))] * 5), (413,)),
    "many classes": ("POST", "/predict?top=6", MULTIPART, form(*[(FILE, png())] * 7), (422,)),
    "empty files": ("POST", "/predict", MULTIPART, form(*[(FILE, b"")] * 8), (422,)),
    "long part head": ("POST", "/predict", MULTIPART, form((f'{FILE}; y="{"y" * MIB}"', b"x")), (400, 422)),
    "long boundary": (
        "POST",
        "/predict",
        {"content-type": f"multipart/form-data; boundary={'b' * 9000}"},
        b"x",
        (400,),
    ),
    "file name is a path": (
        "POST",
        "/predict",
        MULTIPART,
        form(('name="x"; filename="/etc/passwd"', b"")),
        (422,),
    ),
    "file name is an address": (
        "POST",
        "/predict",
        MULTIPART,
        form(('name="x"; filename="https://example.org/a.png"', b"x")),
        (422,),
    ),
    "file name of escapes": (
        "POST",
        "/predict",
        MULTIPART,
        form(('name="x"; filename="\x1b[31m\u202e\u732b\U0001f431%00.png"', b"x")),
        (422,),
    ),
}
HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\n"
# Bytes that are not HTTP as a library sends it, and the codes that may answer; 0: the connection is closed.
BYTES: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
    "no version": (b"GET /\r\n\r\n", (400,)),
    "HTTP/9": (b"GET /x HTTP/9.9\r\n\r\n", (400, 404)),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n", (400,)),
    "long head": (HEAD + b"X: " + b"x" * 200_000 + b"\r\n\r\n", (400,)),
    "many heads": (HEAD + b"X: y\r\n" * 20_000 + b"\r\n", (400, 422)),
    "line break in a head": (HEAD + b"X\r\n: y\r\n\r\n", (400,)),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", (400,)),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", (400,)),
    "long length": (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", (400, 413)),
    "huge length": (HEAD + b"Content-Length: 99999999999999\r\n\r\n", (413,)),
    "both lengths": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (400,)),
    "bad chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nab\r\n", (400,)),
    "odd coding": (HEAD + b"Transfer-Encoding: gzip\r\n\r\nab", (400, 501)),
    "huge chunks": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + bytes(MIB) + b"\r\n") * 5,
        (413,),
    ),
    "WebSocket": (HEAD + b"Upgrade: websocket\r\nConnection: upgrade\r\nContent-Length: 0\r\n\r\n", (422,)),
    "no body comes": (HEAD + b"Content-Length: 99\r\n\r\nabc", (408,)),
    "no end of the head": (HEAD, (408,)),
    "nothing": (b"", (408,)),
    "expects": (HEAD + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n", (413,)),
}


def first_answer(port: int, data: bytes, trickle: float = 0) -> tuple[int, bytes]:
    """Send bytes, and return code and body of the first answer; 0 where there is none."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            for part in [data[n : n + 1] for n in range(len(data))] if trickle else [data]:
                client.sendall(part)
                time.sleep(trickle)
        except OSError:
            pass  # it was closed while we sent
        text = b""
        try:
            while not text.partition(b"\r\n\r\n")[2].endswith(b"\n"):
                if not (more := client.recv(65_536)):
                    break
                text += more
        except OSError:
            pass
    code = re.match(rb"HTTP/1.1 (\d{3})", text)
    return int(code[1]) if code else 0, text.partition(b"\r\n\r\n")[2]


def check_error(body: bytes) -> None:
    """One line of JSON with a text under "error", and nothing that moves a cursor."""
    text = body.decode()
    assert text.endswith("\n") and text.count("\n") == 1 and text[:-1].isprintable(), text
    assert isinstance(json.loads(text)["error"], str)
    assert "Traceback" not in text and "root:" not in text and "/vitctl/" not in text


def test_hostile_requests__are_answered_in_a_line_and_cost_little(server: tuple[Any, str, int]) -> None:
    process, address, port = server
    memory = psutil.Process(process.pid)
    good = httpx.post(f"{address}/predict", content=png()).text
    files = set(memory.cwd() and os.listdir(memory.cwd()))
    before = memory.memory_info().rss
    wrong = []
    with httpx.Client(base_url=address, timeout=60) as client:
        for name, (method, path, headers, body, codes) in REQUESTS.items():
            found = client.request(method, path, headers=headers, content=body)
            if found.status_code >= 400:
                check_error(found.content)
            if found.status_code not in codes:
                wrong.append((name, found.status_code, found.text[:200]))

    def raw(name: str) -> tuple[str, int, bytes]:
        return name, *first_answer(port, BYTES[name][0])

    with ThreadPoolExecutor(8) as pool:
        for name, code, content in pool.map(raw, BYTES):
            if code:
                check_error(content)
            if code not in BYTES[name][1]:
                wrong.append((name, code, content[:200].decode(errors="replace")))
    assert wrong == []
    assert len(REQUESTS) + len(BYTES) > 50
    assert httpx.post(f"{address}/predict", content=png()).text == good
    assert memory.memory_info().rss - before < MOST_GROWTH
    assert set(os.listdir(memory.cwd())) == files


def test_form__a_coded_file_name_is_a_file(server: tuple[Any, str, int]) -> None:
    body = form(("filename*=UTF-8''%e7%8c%ab%22.png; name=\"x\"", png()))
    found = httpx.post(f"{server[1]}/predict", content=body, headers=MULTIPART).json()
    assert found["predictions"][0]["image"] == '\u732b".png'


def test_one_image__does_not_wait_for_all_of_a_large_request(pretrained: Path) -> None:
    """Images of different requests take turns."""
    with served("--from", pretrained) as (_, address, _), ThreadPoolExecutor(2) as pool:
        files = [("x", ("x.png", png(2000, 2000)))] * 64
        large = pool.submit(httpx.post, f"{address}/predict", files=files, timeout=120)
        while "vitctl_waiting_images 64.0" not in httpx.get(f"{address}/metrics").text:
            assert not large.done()
        assert httpx.post(f"{address}/predict", content=png(), timeout=60).status_code == 200
        text = httpx.get(f"{address}/metrics").text
        assert float(re.search(r"^vitctl_batches_total (\S+)", text, re.M)[1]) < 32  # type: ignore[index]
        assert large.result().status_code == 200


def test_client_that_stopped_sending__is_answered(server: tuple[Any, str, int]) -> None:
    body = png(900, 900)
    for version, count in ((b"1.1", 1), (b"1.1", 3), (b"1.0", 1)):
        head = HEAD.replace(b"1.1", version) + f"Content-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", server[2]), timeout=20) as client:
            client.sendall((head + body) * count)
            client.shutdown(socket.SHUT_WR)
            text = b"".join(iter(lambda: client.recv(65_536), b""))
        assert text.count(b"HTTP/1.1 200") == text.count(b'{"predictions": [{') == count


def test_refused_and_unread__are_no_lines_in_the_log(pretrained: Path) -> None:
    """Clients that leave while they are refused, and one that never reads its answers."""
    with served("--from", pretrained, **{**LIMITS, "REQUEST_SECONDS": 1}) as (process, address, port):
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 4000
        deaf = socket.create_connection(("127.0.0.1", port))
        deaf.settimeout(1)
        with suppress(OSError):
            deaf.sendall(asked)
        for number in range(60):
            with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
                client.sendall(
                    (b"\x16\x03\x01\r\n\r\n", HEAD, HEAD + b"Content-Length: 9999999999\r\n\r\n")[number % 3]
                )
                time.sleep(0.002 * (number % 4))
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        time.sleep(3.5)
        text = httpx.get(f"{address}/metrics").text
        assert "vitctl_held_bytes 0.0" in text  # the unread answers were dropped with their connection
        deaf.close()
        process.kill()
        assert process.stderr is not None
        assert [one for one in process.stderr.read().splitlines() if not one.startswith("try: ")] == []


def test_sigterm__what_takes_longer_than_its_grace_is_told(pretrained: Path) -> None:
    """In a line of JSON, and without a line in the log."""
    grace = "import vitctl.jobs.http_server as server; server.GRACE_SECONDS = 0.2"
    with served("--from", pretrained, "--drain", 0, before=grace) as (process, address, _):
        files = [("x", ("x.png", png(2500, 2500)))] * 55
        with ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(httpx.post, f"{address}/predict", files=files, timeout=60) for _ in range(2)]
            while "vitctl_waiting_images 110.0" not in httpx.get(f"{address}/metrics").text:
                assert not any(one.done() for one in sent)
            process.send_signal(signal.SIGTERM)
            for one in sent:
                assert one.result().status_code == 503 and one.result().headers["retry-after"] == "1"
                check_error(one.result().content)
        assert process.wait(20) == 0 and process.stderr is not None
        assert [one for one in process.stderr.read().splitlines() if not one.startswith("try: ")] == [
            "stopped"
        ]


def test_sigterm__no_connection_that_was_accepted_is_lost(pretrained: Path) -> None:
    """One connection a request: each is answered or refused when it connects, none is cut."""
    lost, ends = [], list[int]()

    def client(port: int) -> None:
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=20)
            except ConnectionRefusedError:
                return
            with connection:
                try:
                    connection.sendall(HEAD + f"Content-Length: {len(image)}\r\n\r\n".encode() + image)
                    answer = connection.recv(99)
                except OSError as error:
                    answer = repr(error).encode()
            ends.append(1)
            if not answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")):
                lost.append(answer)

    image = png(300, 300)
    with served("--from", pretrained, "--drain", 0.3) as (process, _, port), ThreadPoolExecutor(48) as pool:
        clients = [pool.submit(client, port) for _ in range(48)]
        while len(ends) < 100:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        for one in clients:
            one.result()
        assert lost == [] and process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reset", *slow("closed", "half closed")])
def test_clients_that_hang_up__are_no_lines_in_the_log(pretrained: Path, how: str) -> None:
    """Nor are those whose request breaks off while its answer is computed, as in a bad chunk."""
    body = png(300, 300)
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n%s\r\n" + b"%x\r\n" % len(body) + body + b"\r\n"
    plain = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    sent = [
        plain,
        plain[:-9],
        plain * 9,
        b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 9,
        b"\x16\x03\x01",
        HEAD,
    ]
    for more in (b"", b"Expect: 100-continue\r\n"):
        sent += [chunked.replace(b"%s", more) + end for end in (b"", b"zz\r\n", b"0\r\n\r\n", b"5\r\nab")]
        sent.append(
            HEAD + more + b"Content-Length: 9\r\nContent-Type: multipart/form-data; boundary=b\r\n\r\n--x\r\n"
        )
    with served("--from", pretrained, **LIMITS) as (process, address, port):
        for number in range(len(sent) * 9):
            with socket.create_connection(("127.0.0.1", port)) as client, suppress(OSError):
                client.sendall(sent[number % len(sent)])
                time.sleep(0.003 * (number % 4))
                if how == "reset":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif how == "half closed":
                    client.shutdown(socket.SHUT_WR)
                    client.settimeout(0.05)
                    client.recv(99)
        time.sleep(1.5)
        assert httpx.post(f"{address}/predict", content=png()).status_code == 200
        process.kill()
        assert process.stderr is not None
        lines = process.stderr.read().splitlines()
        assert [line for line in lines if not line.startswith("try: ")] == []


@pytest.mark.slow
def test_hostile_clients__leave_the_server_as_it_was(server: tuple[Any, str, int]) -> None:
    """Trickles, clients that leave, that send on and do not read, bursts and pipelines."""
    process, address, port = server
    memory = psutil.Process(process.pid)
    good = httpx.post(f"{address}/predict", content=png()).text
    before = memory.memory_info().rss
    body = png(500, 500)
    whole = HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    # Of 50 bytes in 3 s a request is given up after 2 s, in its head and in its body.
    begin = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        slow = [pool.submit(first_answer, port, data, 0.06) for data in (whole[:50], b"G" * 50, HEAD)]
        assert {one.result()[0] for one in slow} <= {0, 400, 408}
    assert time.monotonic() - begin < 20
    for cut in range(1, len(whole), max(1, len(whole) // 50)):  # gone in the middle
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(whole[:cut])
    time.sleep(1)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:  # a pipeline
        client.sendall(whole * 30)
        text = b""
        while text.count(b"HTTP/1.1 200") < 30 and (more := client.recv(65_536)):
            text += more
        assert text.count(b"HTTP/1.1 200") == 30
    idle = []
    for number in range(120):  # more than may be open
        client = socket.create_connection(("127.0.0.1", port), timeout=20)
        idle.append(client)
        if number % 2:
            client.sendall(whole[:200])
    assert any(b" 503 " in one.recv(99) for one in idle[-3:])
    for one in idle:
        one.close()
    time.sleep(1.5)

    def burst(_: int) -> int:
        try:
            return httpx.post(f"{address}/predict", content=bytes(2 * MIB - 9), timeout=60).status_code
        except httpx.TransportError:
            return 0

    with ThreadPoolExecutor(30) as pool:
        codes = {*pool.map(burst, range(90))}
    assert codes <= {0, 408, 413, 503} and codes & {413, 503}  # 408: of a busy machine
    assert httpx.post(f"{address}/predict", content=png()).text == good
    assert memory.memory_info().rss - before < MOST_GROWTH
    metrics = httpx.get(f"{address}/metrics").text
    assert "vitctl_held_bytes 0.0" in metrics and "vitctl_waiting_images 0.0" in metrics


def test_sigterm__finishes_accepted_requests(pretrained: Path) -> None:
    with served("--from", pretrained) as (process, address, port):
        files = [("x", (f"{n}.png", png(900, 900 + n))) for n in range(30)]
        with ThreadPoolExecutor(4) as pool:
            answers = [
                pool.submit(httpx.post, f"{address}/predict", files=files, timeout=60) for _ in range(4)
            ]
            while "vitctl_waiting_images 0.0" in httpx.get(f"{address}/metrics").text:
                assert not all(one.done() for one in answers)
            process.send_signal(signal.SIGTERM)
            # A request that had not connected yet is refused.
            found = [one.result() for one in answers if not isinstance(one.exception(), httpx.ConnectError)]
        assert process.wait(30) == 0
        assert found and {one.status_code for one in found} == {200}
        assert len({one.text for one in found}) == 1
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


async def client_of_a_stopping_server(port: int, seen: list[tuple[str, bool]]) -> None:
    """Send images over kept connections until one is refused, and note how each request ended."""
    body, code = png(300, 300), "200"
    while code == "200":
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            return
        try:
            closes = False
            while not closes:
                writer.write(HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(re.search(r"content-length: (\d+)", head)[1])  # type: ignore[index]
                json.loads(await reader.readexactly(length))
                code, closes = head.split()[1], "connection: close" in head
                assert code == "200" or "retry-after: 1" in head
                seen.append((code, closes))
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            seen.append((code := repr(error), True))
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.mark.parametrize("drain", [0.5, *slow(0)])
def test_sigterm__of_hundreds_of_requests_none_is_lost(pretrained: Path, drain: float) -> None:
    """The server says that it drains, answers what it has, refuses what comes later, resets nobody, exits."""

    async def loaded(process: "subprocess.Popen[str]", port: int, seen: list[tuple[str, bool]]) -> None:
        clients = [asyncio.create_task(client_of_a_stopping_server(port, seen)) for _ in range(200)]
        while len(seen) < 250:
            assert not any(one.done() for one in clients)
            await asyncio.sleep(0.01)
        asked = await asyncio.open_connection("127.0.0.1", port)  # as a load balancer keeps one
        process.send_signal(signal.SIGTERM)
        while not any(closes for _, closes in seen):
            await asyncio.sleep(0.001)
        asked[1].write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = (await asked[0].read()).decode()
        asked[1].close()
        await asked[1].wait_closed()
        assert answer.startswith("HTTP/1.1 503") and '{"status": "draining"' in answer
        assert "connection: close" in answer.lower()
        await asyncio.wait_for(asyncio.gather(*clients), 60)

    with served("--from", pretrained, "--drain", drain) as (process, _, port):
        idle = socket.create_connection(("127.0.0.1", port), timeout=20)
        seen: list[tuple[str, bool]] = []
        asyncio.run(loaded(process, port, seen))
        with idle:
            assert idle.recv(99) == b""  # closed, not reset
        assert process.wait(30) == 0
    assert {code for code, _ in seen} == {"200", "503"}
    assert all(closes for code, closes in seen if code == "503")
    assert sum(code == "200" and closes for code, closes in seen) >= (100 if drain else 1)


def test_ctrl_c__of_an_idle_server_does_not_wait(pretrained: Path) -> None:
    with served("--from", pretrained, "--drain", 60) as (process, address, _):
        assert httpx.get(f"{address}/health").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_connections_send_small_answers_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted = listener.accept()[0]
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_serve__what_cannot_be_started(
    vitctl: Vitctl, pretrained: Path, server: tuple[Any, str, int]
) -> None:
    taken = vitctl("serve", "--from", pretrained, "--port", server[2])
    assert (taken.code, taken.out) == (2, "") and "another program listens there" in taken.err
    wrong = vitctl("serve", "--from", pretrained, "--host", "203.0.113.1")
    assert wrong.code == 2 and len(wrong.err.splitlines()) == 1 and "203.0.113.1" in wrong.err
    assert vitctl("serve", "--from", "missing.onnx", "--port", 0).code == 2
