"""Requests a second of `vitctl serve` beside the same ONNX file in a plain FastAPI loop and in LitServe.

`python benchmarks/serve.py --litserve PYTHON` (needs vitctl[serve]; PYTHON: an interpreter with vitctl and
LitServe; without it those sides are left out). All sides get the same form, decode and resize with the same
function of vitctl, and run the same file in the same onnxruntime. The plain side is an `async def` that does
so for each request, as tutorials have it. A client in a process of its own sends a JPEG in a loop over each
connection, in turns of a few seconds, all sides one after the other in each round. Other work on the machine
disturbs the clock, so the CPU seconds of the server's processes are told beside it.
"""

import asyncio
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from inference import write_weights
from measure import Machine, script_options

LIBRARIES = ("torch", "onnxruntime", "fastapi", "uvicorn")
# What the two others share: the session as onnxruntime makes it, and the functions of vitctl around it.
SHARED = """
import os, sys, torch, onnxruntime
from vitctl import load_recipe
from vitctl.data.images.transforms import open_for
from vitctl.jobs.inputs.classifier import open_classifier

class Classifier:
    def __init__(self, path):
        self.opened = open_classifier(load_recipe("evaluate", [("weights.source", path)]).recipe)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("THREADS", torch.get_num_threads()))
        self.session = onnxruntime.InferenceSession(path, options)
        self.input = self.session.get_inputs()[0].name

    def pixels(self, data):
        return self.opened.shown(open_for(self.opened.transform, data))

    def logits(self, pixels):
        return torch.from_numpy(self.session.run(["logits"], {self.input: torch.stack(pixels).numpy()})[0])

    def answer(self, logits):
        ranking = self.opened.rankings(logits[None], 5)[0]
        return {"classes": [{"class": name, "probability": p} for name, p in ranking]}
"""
PLAIN = (
    SHARED
    + """
import uvicorn
from fastapi import FastAPI, UploadFile
own, app = Classifier(sys.argv[1]), FastAPI()

@app.post("/predict")
async def predict(image: UploadFile):
    return own.answer(own.logits([own.pixels(await image.read())])[0])

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
)
LITSERVE = (
    SHARED
    + """
import litserve

class Api(litserve.LitAPI):
    def setup(self, device):
        self.own = Classifier(sys.argv[1])

    def decode_request(self, request):
        return self.own.pixels(request["image"].file.read())

    def predict(self, pixels):
        several = isinstance(pixels, list)
        logits = self.own.logits(pixels if several else [pixels])
        return logits if several else logits[0]

    def batch(self, inputs):
        return inputs

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return self.own.answer(output)

if __name__ == "__main__":
    batch, workers = int(sys.argv[3]), int(sys.argv[4])
    api = Api(max_batch_size=batch, batch_timeout=0.002 if batch > 1 else 0.0)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="error", generate_client_file=False)
"""
)
FIRST_PORT, BOUNDARY = 8741, "b"
Turn = tuple[list[float], float, float]  # seconds of each request, seconds, CPU seconds


async def load(port: int, image: bytes, clients: int, seconds: float) -> tuple[list[float], float]:
    """Send requests over kept connections and return the seconds of each, and of all."""
    part = 'Content-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg'
    body = f"--{BOUNDARY}\r\n{part}\r\n\r\n".encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()
    kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}"
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    taken: list[float] = []
    start = time.perf_counter()
    end = start + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (begin := time.perf_counter()) < end:
            writer.write(head.encode() + body)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b" 200 " in answer, answer
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", answer)[1]))
            taken.append(time.perf_counter() - begin)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return taken, time.perf_counter() - start


def main() -> None:
    """Measure, print a table, and write results/serve.json."""
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--litserve", default="", help="an interpreter that has it and vitctl")
    given = parser.parse_args()
    import numpy as np
    from PIL import Image

    machine = Machine()
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_weights(given.model, 224, folder, in_int8=False)
        onnx = str(folder / "ours" / "model.onnx")
        (folder / "plain.py").write_text(PLAIN)
        (folder / "lit.py").write_text(LITSERVE)
        serve = [sys.executable, "-m", "vitctl", "serve", "--from", onnx, "--port", "PORT"]
        lines = {
            "plain FastAPI": [sys.executable, str(folder / "plain.py"), onnx, "PORT"],
            "serve": serve,
            "serve --batch 8": [*serve, "--batch", "8"],
        }
        if given.litserve:
            lit, workers = [given.litserve, str(folder / "lit.py"), onnx, "PORT"], os.cpu_count() or 1
            lines["LitServe"] = [*lit, "1", "1"]
            lines["LitServe, batches of 8"] = [*lit, "8", "1"]
            lines[f"LitServe, {workers} workers of 1 thread"] = [*lit, "1", str(workers)]
        ports = {side: FIRST_PORT + number for number, side in enumerate(lines)}
        processes: dict[str, psutil.Popen] = {}
        try:
            for side, line in lines.items():
                words = [str(ports[side]) if word == "PORT" else word for word in line]
                threads = {"THREADS": "1"} if side.endswith("1 thread") else {}
                env = {**os.environ, **threads}
                processes[side] = psutil.Popen(words, stderr=subprocess.DEVNULL, cwd=folder, env=env)
                wait_for(ports[side])
            for clients in given.clients:  # warm up
                for port in ports.values():
                    asyncio.run(load(port, file.getvalue(), clients, 0.5))
            turns: dict[tuple[int, str], list[Turn]] = {}
            for _ in range(given.rounds):
                for clients in given.clients:
                    for side, port in ports.items():
                        before = cpu_seconds(processes[side])
                        taken, lasted = asyncio.run(load(port, file.getvalue(), clients, given.seconds))
                        used = cpu_seconds(processes[side]) - before
                        turns.setdefault((clients, side), []).append((taken, lasted, used))
        finally:
            for process in processes.values():
                for one in [*process.children(recursive=True), process]:
                    one.terminate()
                process.wait()  # so that its time is not counted as other work
    rows = [row(*key, found, turns[key[0], "plain FastAPI"]) for key, found in turns.items()]
    print("| clients | side | requests/s | beside plain | p50 | p99 | CPU a request |")
    print("|---|---|---|---|---|---|---|")
    for one in rows:
        spread = f"{one['ratio']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})"
        print(
            f"| {one['clients']} | {one['side']} | {one['requests_per_second']:.1f} | {spread} "
            f"| {one['p50_ms']:.0f} ms | {one['p99_ms']:.0f} ms | {one['cpu_ms']:.0f} ms |"
        )
    about = {"model": given.model, "machine": machine.record(LIBRARIES), "rows": rows}
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "serve.json").write_text(json.dumps(about, indent=1) + "\n")


def cpu_seconds(process: psutil.Popen) -> float:
    """Return the seconds that a server and the processes that it started have computed."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def row(clients: int, side: str, turns: list[Turn], plain: list[Turn]) -> dict[str, object]:
    """Return the numbers of a side: medians over rounds, quantiles over all requests.

    The ratio to the plain loop is taken within each round.
    """
    times = sorted(one for taken, _, _ in turns for one in taken)
    rates, others = ([len(taken) / lasted for taken, lasted, _ in some] for some in (turns, plain))
    ratios = [own / other for own, other in zip(rates, others, strict=True)]
    return {
        "clients": clients,
        "side": side,
        "requests_per_second": statistics.median(rates),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(len(times) * 0.99)],
        "cpu_ms": 1000 * statistics.median(used / len(taken) for taken, _, used in turns),
    }


def wait_for(port: int) -> None:
    """Wait until a server listens."""
    import socket

    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"no server on port {port}")


if __name__ == "__main__":
    main()
