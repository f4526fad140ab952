"""Requests a second of `vitctl serve` beside the same ONNX file in a plain FastAPI loop.

`python benchmarks/serve.py` (needs vitctl[serve]). Both sides decode and resize with the same function of
vitctl, and run the same file in the same onnxruntime with the same threads; the plain side is an `async def`
that does so for each request, as tutorials have it. A client of a process of its own sends a JPEG in a loop
over CLIENTS connections, in turns of a few seconds, all sides one after the other in each round.
"""

import asyncio
import io
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from inference import write_weights
from measure import Machine, script_options

LIBRARIES = ("torch", "onnxruntime", "fastapi", "uvicorn")
PLAIN = """
import sys, torch, uvicorn
from fastapi import FastAPI, Request
from vitctl import load_recipe
from vitctl.data.images.decode import open_picture
from vitctl.jobs.inputs.classifier import open_classifier
opened = open_classifier(load_recipe("evaluate", [("weights.source", sys.argv[1])]).recipe)
app = FastAPI()

@app.post("/predict")
async def predict(request: Request):
    image = opened.shown(open_picture(await request.body()))
    ranking = opened.rankings(opened.network(image[None]).logits, 5)[0]
    return {"classes": [{"class": name, "probability": p} for name, p in ranking]}

uvicorn.run(app, port=int(sys.argv[2]), log_level="error")
"""
PORTS = {"plain FastAPI": 8741, "serve": 8742, "serve --batch 8": 8743}


async def load(port: int, image: bytes, clients: int, seconds: float) -> list[float]:
    """Send requests over kept connections and return the seconds that each took."""
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(image)}\r\n\r\n"
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while (begin := time.perf_counter()) < end:
            writer.write(head.encode() + image)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert b" 200 " in answer, answer
            await reader.readexactly(int(re.search(rb"content-length: (\d+)", answer)[1]))
            taken.append(time.perf_counter() - begin)
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return taken


def main() -> None:
    """Measure, print a table, and write results/serve.json."""
    parser = script_options(__doc__, rounds=3)
    parser.add_argument("--model", default="S/16")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--seconds", type=float, default=10.0)
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
        serve = [sys.executable, "-m", "vitctl", "serve", "--from", onnx, "--port"]
        lines = {
            "plain FastAPI": [sys.executable, str(folder / "plain.py"), onnx, str(PORTS["plain FastAPI"])],
            "serve": [*serve, str(PORTS["serve"])],
            "serve --batch 8": [*serve, str(PORTS["serve --batch 8"]), "--batch", "8"],
        }
        processes = [subprocess.Popen(line, stderr=subprocess.DEVNULL) for line in lines.values()]
        try:
            for port in PORTS.values():
                wait_for(port)
            rounds: dict[tuple[int, str], list[list[float]]] = {}
            for _ in range(given.rounds):
                for clients in given.clients:
                    for side, port in PORTS.items():
                        taken = asyncio.run(load(port, file.getvalue(), clients, given.seconds))
                        rounds.setdefault((clients, side), []).append(taken)
        finally:
            for process in processes:
                process.terminate()
                process.wait()  # so that its time is not counted as other work
    rows = [row(*key, times, given.seconds) for key, times in rounds.items()]
    for one in rows:
        print(
            f"{one['clients']:3} clients  {one['side']:16} {one['requests_per_second']:6.1f} requests/s  "
            f"p50 {one['p50_ms']:6.0f} ms  p99 {one['p99_ms']:6.0f} ms"
        )
    about = {"model": given.model, "machine": machine.record(LIBRARIES), "rows": rows}
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "serve.json").write_text(json.dumps(about, indent=1) + "\n")


def row(clients: int, side: str, rounds: list[list[float]], seconds: float) -> dict[str, object]:
    """Return the numbers of a side: the median over rounds of the rate, quantiles over all requests."""
    times = sorted(one for taken in rounds for one in taken)
    rates = [len(taken) / seconds for taken in rounds]
    return {
        "clients": clients,
        "side": side,
        "requests_per_second": statistics.median(rates),
        "rates": rates,
        "p50_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[int(len(times) * 0.99)],
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
