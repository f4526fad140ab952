"""An HTTP server of predictions: images in a request become the records that `vitctl predict` writes.

Images are bytes of the request. A client's file name is only echoed; no path or address from a client is
opened. The cost of a request is limited before memory or time is spent: see docs/bounds.md.
"""

import asyncio
import json
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, TypeVar, cast
from urllib.parse import unquote_to_bytes

import h11
import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitctl.data.images.decode import BadSample, num_pixels
from vitctl.data.images.transforms import open_for
from vitctl.engine.runtime import num_workers
from vitctl.errors import LaunchError, explained
from vitctl.jobs.inputs.classifier import OnnxNetwork, OpenClassifier, check_finite
from vitctl.jobs.photo_page import photo_page, policy
from vitctl.jobs.predict import Prediction
from vitctl.recipe.schema import Evaluate
from vitctl.system import limits
from vitctl.system.text import escaped_json, one_line

_LINGER_SECONDS = 1
_ASK_SECONDS = 0.1  # between looks whether a client that stopped sending is still there
GRACE_SECONDS = 30  # for requests in progress when a signal arrives
_NAME_LETTERS = 255
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # buckets of the histogram
_STOPPING = "this server is stopping"
_CLOSED = 499  # nginx's code for a client that went away; nobody receives it
Asgi = Callable[[Any, Any, Any], Awaitable[None]]
_Result = TypeVar("_Result")


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        of: Any = {"registry": self.registry, "namespace": "vitctl"}
        self.requests = Counter("requests", "Answered requests", ["path", "code"], **of)
        self.seconds = Histogram("request_seconds", "From head to answer", buckets=_SECONDS, **of)
        self.images = Counter("images", "Images by outcome", ["outcome"], **of)
        self.batches = Counter("batches", "Forward passes", **of)
        self.waiting = Gauge("waiting_images", "Images between request and answer", **of)
        self.held = Gauge("held_bytes", "Request bodies in memory", **of)


@dataclass
class _Row:
    pixels: Tensor
    logits: "asyncio.Future[Tensor]"


class Batcher:
    """Groups waiting images into batches.

    Images that arrive while a batch is computed form the next one.

    Args:
        batch_size: maximum number of images in a forward pass. With 1 an answer has the same bits as `vitctl
            predict` of that image alone. In larger batches its last digits depend on the batch.
        wait: seconds that a partial batch waits for more images.
        decoders: threads that decode images; each may hold `limits.PICTURE` bytes. If the network resizes
            photographs they keep their size, so only one is in memory at a time.
        passes: number of batches that are computed at once.
    """

    def __init__(
        self, opened: OpenClassifier, batch_size: int, wait: float, decoders: int, passes: int = 1
    ) -> None:
        self.opened, self.metrics, self._wait = opened, Metrics(), wait
        self._size = 1 if opened.network.resizes else batch_size  # photographs differ in size
        self._rows: asyncio.Queue[_Row] = asyncio.Queue()
        self._passes, self._computing = passes, ThreadPoolExecutor(passes, "network")
        decoders = 1 if opened.network.resizes else max(1, decoders)
        self._decoding = ThreadPoolExecutor(decoders, "decoder")
        self.turns = max(decoders, 2 * self._size * passes)  # of one request: these keep the network busy
        self._room = asyncio.Semaphore(decoders if opened.network.resizes else limits.WAITING_IMAGES)

    async def logits(self, data: bytes) -> Tensor:
        """Return the logits `[K]` of an encoded image. Raises BadSample if it cannot be used."""
        loop = asyncio.get_running_loop()
        async with self._room:
            row = _Row(await loop.run_in_executor(self._decoding, self._shown, data), loop.create_future())
            self._rows.put_nowait(row)
            return await row.logits

    def _shown(self, data: bytes) -> Tensor:
        if not data:
            raise BadSample("empty file")
        return self.opened.shown(open_for(self.opened.transform, data))

    def compute(self, pixels: list[Tensor]) -> Tensor:
        """Return the logits `[B, K]` of pre-processed images."""
        images = torch.stack(pixels).contiguous(memory_format=torch.channels_last)  # as in the loader
        logits = check_finite(self.opened.network(images)).logits
        assert logits is not None
        return logits

    async def run(self) -> None:
        await asyncio.gather(*(self._run() for _ in range(self._passes)))

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            rows = [await self._rows.get()]
            if self._rows.qsize() < self._size - 1:
                await asyncio.sleep(self._wait)
            while len(rows) < self._size and not self._rows.empty():
                rows.append(self._rows.get_nowait())
            if not (rows := [row for row in rows if not row.logits.done()]):  # their clients went away
                continue
            try:
                pixels = [row.pixels for row in rows]
                found = await loop.run_in_executor(self._computing, self.compute, pixels)
            except Exception as error:  # only these requests fail
                for row in rows:
                    if not row.logits.done():
                        row.logits.set_exception(error)
                continue
            self.metrics.batches.inc()
            for row, logits in zip(rows, found, strict=True):
                if not row.logits.done():  # done if its client went away
                    row.logits.set_result(logits)


class _InMemory(MultiPartParser):
    spool_max_size = 0  # no temporary files: the limit on bodies bounds memory

    def on_headers_finished(self) -> None:
        head, _, coded = (self._current_part.content_disposition or b"").partition(b"filename*=")
        if coded and b"filename=" not in head + coded:  # a name as RFC 5987 codes it; the parser drops it
            value, semicolon, tail = coded.partition(b";")
            name = unquote_to_bytes(value.rpartition(b"'")[2]).replace(b"\\", b"\\\\").replace(b'"', b'\\"')
            self._current_part.content_disposition = head + b'filename="%b"' % name + semicolon + tail
        super().on_headers_finished()


class Application:
    """The endpoints and their shared state; `top` is the default number of classes per image."""

    def __init__(self, batcher: Batcher, top: int) -> None:
        self.batcher, self.opened, self.metrics = batcher, batcher.opened, batcher.metrics
        self._top, self._held, self._waiting = top, 0, 0
        self._aside = ThreadPoolExecutor(1, "answers")  # so that connections do not wait for large ones
        self.stops_at, self.open_requests = math.inf, 0  # by the monotonic clock
        note = "The photograph is sent to this server, which does not keep it."
        self._page = photo_page({"address": "predict"}, note=note)

    async def predict(
        self,
        request: Request,
        top: Annotated[int | None, Query(ge=1, description="classes of each image")] = None,
        threshold: Annotated[float, Query(ge=0, le=1, description="hide classes below it")] = 0.0,
    ) -> Response:
        """Predict the classes of images: the body is one image, or a form (`multipart/form-data`) with a file
        part for each. Each record is that of `vitctl predict --format jsonl`.
        """
        if other := sorted(set(request.query_params) - {"top", "threshold"}):
            raise HTTPException(422, f"unknown option '{one_line(other[0])[:100]}'; see /openapi.json")
        received, late, top = [0], time.monotonic() > self.stops_at, top or self._top
        run = asyncio.get_running_loop().run_in_executor
        try:
            async with asyncio.timeout(limits.REQUEST_SECONDS):
                images = await self._images(request, self._received(request, received))
            if late:  # with its body read, so that the client reads the answer
                raise busy(_STOPPING)
            classes = len(images) * min(top, self.opened.network.num_classes)
            if classes > limits.ANSWER_CLASSES:
                raise HTTPException(
                    422,
                    f"{classes:,} classes in the answer, at most {limits.ANSWER_CLASSES:,}; "
                    "send fewer images, or ask for fewer classes with ?top=5",
                )
            may_be_many = len(images) * limits.PIXELS > limits.REQUEST_PIXELS  # else no header is read
            if may_be_many:
                pixels = await run(self._aside, lambda: sum(num_pixels(data) for _, data in images))
                if pixels > limits.REQUEST_PIXELS:
                    raise HTTPException(
                        413,
                        f"the images have {pixels:,} pixels together, at most {limits.REQUEST_PIXELS:,}; "
                        "send fewer or smaller images",
                    )
            waiting = self._waiting + len(images)
            if waiting > limits.WAITING_IMAGES:
                raise busy(f"{self._waiting} images wait already, at most {limits.WAITING_IMAGES:,}")
            self._count(len(images))
            try:
                turns = asyncio.Semaphore(self.batcher.turns)  # images of other requests come between
                wanted = (self._logits(data, turns) for _, data in images)
                found = await unless_left(request, asyncio.gather(*wanted))
                named = [(name, one) for (name, _), one in zip(images, found, strict=True)]
                answered = await run(self._aside, self._answer, named, top, threshold)
            finally:
                self._count(-len(images))
        except TimeoutError:
            raise HTTPException(408, f"the body took longer than {limits.REQUEST_SECONDS:,} s") from None
        except ClientDisconnect:
            return Response(status_code=_CLOSED)
        finally:
            self.hold(-received[0])
        if self._held + len(answered.body) > limits.REQUESTS:
            raise busy(f"requests and answers hold more bytes than {limits.REQUESTS:,}")
        return answered

    def _answer(
        self, found: Iterable[tuple[str, Tensor | BadSample]], top: int, threshold: float
    ) -> Response:
        records = [self._record(name, one, top, threshold) for name, one in found]
        text = ", ".join(record.json() for record in records)
        errors = sorted({record.error for record in records if record.error})
        if not all(record.error for record in records):
            return answer(200, f'{{"predictions": [{text}]}}')
        error = json.dumps(one_line(f"no image can be used: {', '.join(errors)}"), ensure_ascii=False)
        return answer(422, f'{{"error": {error}, "predictions": [{text}]}}')

    async def _images(self, request: Request, body: AsyncGenerator[bytes, None]) -> list[tuple[str, bytes]]:
        if int(request.headers.get("content-length", "0")) > limits.REQUEST:
            raise HTTPException(
                413, f"the body has more bytes than {limits.REQUEST:,}; send fewer or smaller images"
            )
        if not request.headers.get("content-type", "").lower().startswith("multipart/"):
            return [("", self._checked(b"".join([chunk async for chunk in body])))]
        try:
            most = {"max_files": limits.REQUEST_IMAGES, "max_fields": limits.REQUEST_IMAGES}
            form = await _InMemory(request.headers, body, **most).parse()
        except MultiPartException as error:
            raise HTTPException(400, error.message.rstrip(".")) from None
        if name := next(filter(form.__contains__, ("top", "threshold")), ""):
            raise HTTPException(422, f"{name} is an option of the address, /predict?{name}=VALUE")
        files = [file for _, file in form.multi_items() if isinstance(file, UploadFile)]
        if not files:
            raise HTTPException(400, "the form has no file; send each image as a part with a file name")
        found = [((file.filename or "")[:_NAME_LETTERS], self._checked(await file.read())) for file in files]
        await form.close()
        return found

    @staticmethod
    def _checked(data: bytes) -> bytes:
        if len(data) > limits.IMAGE_FILE:
            raise HTTPException(413, f"an image of {len(data):,} bytes, at most {limits.IMAGE_FILE:,}")
        return data

    async def _received(self, request: Request, count: list[int]) -> AsyncGenerator[bytes, None]:
        """Yield the body while it and all bodies in memory stay within their limits."""
        async for chunk in request.stream():
            count[0] += len(chunk)
            self.hold(len(chunk))
            if count[0] > limits.REQUEST:
                raise HTTPException(
                    413, f"the body has more bytes than {limits.REQUEST:,}; send fewer or smaller images"
                )
            if self._held > limits.REQUESTS:
                raise busy(f"requests hold more bytes than {limits.REQUESTS:,}")
            yield chunk

    async def _logits(self, data: bytes, turns: asyncio.Semaphore) -> Tensor | BadSample:
        async with turns:
            try:
                return await self.batcher.logits(data)
            except BadSample as error:
                return error

    def _record(self, name: str, found: Tensor | BadSample, top: int, threshold: float) -> Prediction:
        if isinstance(found, BadSample):
            self.metrics.images.labels(found.reason).inc()
            return Prediction(name, [], found.reason)
        self.metrics.images.labels("predicted").inc()
        return Prediction(name, self.opened.rankings(found[None], top, threshold)[0])

    def hold(self, num_bytes: int) -> None:
        self._held += num_bytes
        self.metrics.held.set(self._held)

    def _count(self, images: int) -> None:
        self._waiting += images
        self.metrics.waiting.set(self._waiting)

    async def health(self) -> Response:
        """Return which weights answer; the server is ready once it answers at all. 503: it is stopping."""
        code, status = (200, "ok") if self.stops_at == math.inf else (503, "draining")
        about = {"status": status, **self.opened.digests, "classes": list(self.opened.class_names) or None}
        return answer(code, json.dumps(about, ensure_ascii=False))

    async def page(self) -> Response:
        """Return a page that shows the classes of a photograph."""
        return Response(self._page, 200, {"content-security-policy": policy(self._page)}, "text/html")

    async def shown_metrics(self) -> Response:
        """Return the counters, in the text format of Prometheus."""
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def unless_left(request: Request, work: "asyncio.Future[_Result]") -> _Result:
    """Return the result of work on a request. If its client goes away the work is cancelled.

    Raises ClientDisconnect.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.create_task(left())
    watch.add_done_callback(lambda _: work.cancel())
    try:
        return await work
    except asyncio.CancelledError:
        if watch.done():
            raise ClientDisconnect from None
        raise
    finally:
        watch.cancel()


def answer(code: int, text: str, **headers: str) -> Response:
    return Response(f"{escaped_json(text)}\n", code, headers, "application/json")


def refusal(code: int, text: str, **headers: str) -> Response:
    """Return an error as one line of JSON."""
    return answer(code, json.dumps({"error": one_line(text)}, ensure_ascii=False), **headers)


def busy(text: str) -> HTTPException:
    """Return the error of an overloaded server."""
    return HTTPException(503, f"busy: {text}; try again", {"Retry-After": "1"})


async def _on_http(request: Request, error: Any) -> Response:
    ways = {
        404: "no such page; see /openapi.json",
        405: f"{request.method} is not allowed here; see /openapi.json",
    }
    text = ways.get(error.status_code, str(error.detail))
    return refusal(error.status_code, text, **(error.headers or {}))


async def _on_value(_: Request, error: Any) -> Response:
    found = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
    return refusal(422, "; ".join(found)[:1000])


async def _on_bug(_: Request, error: Exception) -> Response:
    return refusal(500, f"the server failed ({type(error).__name__}); its log says more")


class _Counted:
    def __init__(self, app: Asgi, own: Application, paths: set[str]) -> None:
        self._app, self._own, self._metrics, self._paths = app, own, own.metrics, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        begin, code = time.perf_counter(), [500]

        async def noting(message: Any) -> None:
            if message["type"] == "http.response.start":
                code[0] = message["status"]
                closes = [(b"connection", b"close")] * (self._own.stops_at < math.inf)
                message = {**message, "headers": [*message["headers"], *_SAFE, *closes]}
            elif size := len(message.get("body", b"")):
                self._own.hold(size)
                try:  # the message after this one waits until the client has read
                    await send({**message, "more_body": True})
                    await send({**message, "body": b""})
                finally:
                    self._own.hold(-size)
                return
            await send(message)

        self._own.open_requests += 1
        try:
            await self._app(scope, receive, noting)
        finally:
            self._own.open_requests -= 1
            if scope["type"] == "http":
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.requests.labels(path, str(code[0])).inc()
                self._metrics.seconds.observe(time.perf_counter() - begin)


_SAFE = [(b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")]
_BODY_SCHEMA = {
    "required": True,
    "content": {
        "image/*": {"schema": {"type": "string", "format": "binary"}},
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
            }
        },
    },
}
_RECORD = {
    "type": "object",
    "required": ["image", "classes"],
    "properties": {
        "image": {"type": "string"},
        "classes": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["class", "probability"],
                "properties": {"class": {"type": "string"}, "probability": {"type": "number"}},
            },
        },
        "error": {"type": "string", "description": "why the image cannot be used"},
    },
}
_ANSWER = {
    "type": "object",
    "required": ["predictions"],
    "properties": {"predictions": {"type": "array", "items": _RECORD}},
}
_CLASSES = [{"class": "cat", "probability": 0.97}, {"class": "dog", "probability": 0.03}]
_EXAMPLE = {"predictions": [{"image": "photo.jpg", "classes": _CLASSES}]}
_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "predictions",
        "content": {"application/json": {"schema": _ANSWER, "example": _EXAMPLE}},
    },
    **{code: {"description": '{"error": "..."}'} for code in (400, 408, 413, 422, 503)},
}


def application(own: Application, version: str) -> FastAPI:
    """Return the ASGI application: a page, /predict, /health, /metrics and /openapi.json."""
    handlers: Any = {StarletteHTTPException: _on_http, RequestValidationError: _on_value, Exception: _on_bug}
    app = FastAPI(
        title="vitctl serve",
        version=version,
        docs_url=None,  # it and redoc load scripts from another host
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=handlers,
    )
    about: dict[str, Any] = {"openapi_extra": {"requestBody": _BODY_SCHEMA}, "responses": _RESPONSES}
    app.add_api_route("/predict", own.predict, methods=["POST"], response_class=Response, **about)
    for path, shown in (("/", own.page), ("/health", own.health), ("/metrics", own.shown_metrics)):
        app.add_api_route(path, shown, include_in_schema=path != "/", response_model=None)
        app.add_api_route(path, shown, methods=["HEAD"], include_in_schema=False, response_model=None)
    paths = {"/", "/predict", "/health", "/metrics", "/openapi.json"}
    app.add_middleware(_Counted, own=own, paths=paths)
    return app


class _Connection(H11Protocol):
    """A connection whose errors are JSON. It closes if its client is too slow to send or to read."""

    _seen: Any = None
    _refused = _half_closed = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > limits.CONNECTIONS:
            self._refuse(503, f"busy: more than {limits.CONNECTIONS:,} connections; try again")
        else:
            self._watch()

    @property
    def waits(self) -> bool:
        """Return whether an answer is due, or the first request may be on its way."""
        return not (self._refused or (self.cycle is not None and self.cycle.response_complete))

    def _watch(self) -> None:
        done = self.cycle is None or self.cycle.response_complete
        if self.cycle is not None and self.cycle is self._seen and (done or self.flow.write_paused):
            self._abort()
        elif self.cycle is None and self._seen is self:
            self._refuse(408, f"no request within {limits.REQUEST_SECONDS:,} s")
        elif self in self.connections:
            self._seen = self.cycle or self
            self.loop.call_later(limits.REQUEST_SECONDS, self._watch)

    def _abort(self) -> None:
        if self in self.connections:  # a lost one has no transport any more
            self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in self.headers or ()}:
            # A proxy before this server may have taken the other for the end of the request.
            self._refuse(400, "Content-Length and Transfer-Encoding together; send one of them")

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio takes it
        """Answer the complete request of a client that only stopped sending.

        One that went away looks the same until something is sent to it: an interim response, which every
        client of HTTP/1.1 has to expect.
        """
        cycle = self.cycle
        if self._refused or cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if self._half_closed:
            return True
        if self.conn.our_state is h11.SEND_RESPONSE and cycle.scope["http_version"] != "1.0":
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self._half_closed = True
        self._ask()
        return True

    def _ask(self) -> None:
        if self in self.connections:
            if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._abort()
            self.loop.call_later(_ASK_SECONDS, self._ask)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed and (self.cycle.response_complete or self.cycle.more_body):
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _refuse(self, code: int, text: str, **more: str) -> None:
        """Send an error unless a response has begun, and close the connection.

        What the client still sends is read and dropped for a moment: a connection that is closed with unread
        data is reset, and the client might not see the answer.
        """
        if self._refused:
            return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._abort()
            return
        body = bytes(refusal(code, text).body)
        if self.cycle is not None:  # so that the handler does not answer, too
            self.cycle.disconnected, self.cycle.waiting_for_100_continue = True, False
            self.cycle.message_event.set()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), *more.items()]
        head = h11.Response(status_code=code, headers=[*headers, ("connection", "close")], reason=b"refused")
        events = (head, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self._end()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def shutdown(self) -> None:
        """Say that no answer comes any more. An idle client that sends at this moment is not reset."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._refuse(503, f"busy: {_STOPPING}; try again", **{"retry-after": "1"})
        elif not self._refused:
            self._end()

    def _end(self) -> None:
        self._refused = True
        with suppress(OSError):  # the client has left
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self._abort)


class _Server(uvicorn.Server):
    """A server that stops in steps, see `run_server`."""

    def __init__(self, config: uvicorn.Config, own: Application, drain: float) -> None:
        super().__init__(config)
        self._own, self._drain = own, drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        wait = self._drain if sig == signal.SIGTERM else 0
        self._own.stops_at = min(self._own.stops_at, time.monotonic() + wait)
        super().handle_exit(sig, frame)

    def _connection(self) -> _Connection:
        return _Connection(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        own, connections = self._own, cast(set[_Connection], self.server_state.connections)
        while not self.force_exit and time.monotonic() < own.stops_at + GRACE_SECONDS * (
            own.open_requests > 0
        ):
            await asyncio.sleep(0.05)
        until = time.monotonic() + _LINGER_SECONDS
        connected = list[socket.socket]()
        for listener in sockets or []:  # closing it resets those who have connected: accept them all first
            with suppress(OSError):  # no other waits
                while True:
                    connected.append(listener.accept()[0])
        for server in self.servers:
            server.close()
        for one in connected:
            await asyncio.get_running_loop().connect_accepted_socket(self._connection, one)
        await asyncio.sleep(0.05)
        while any(client.waits for client in connections) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        await super().shutdown(sockets)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address. Raises LaunchError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        found = explained(error, f"{host}:{port}")
        text = (
            str(found)
            if found
            else f"--host {host}: {error.strerror or error}; give an address of this machine"
        )
        raise LaunchError(text) from None
    # Connections inherit TCP_NODELAY. Without it, the body of an answer waits 40 ms for the acknowledgement
    # of the head. asyncio sets it only on sockets made with an explicit TCP protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def run_server(own: Application, version: str, listener: socket.socket, drain: float) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then finish those in progress for at most GRACE_SECONDS.

    From SIGTERM on /health answers 503, and every answer closes its connection. New requests are answered for
    `drain` seconds more, then refused with 503 until no other is left. Then the listener closes. Requests
    that take longer get 503, too.
    """
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns about client input
    config = uvicorn.Config(
        application(own, version),
        http=_Connection,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2 * _LINGER_SECONDS,
    )
    asyncio.run(_serve(_Server(config, own, drain), own.batcher, listener))


async def _serve(server: uvicorn.Server, batcher: Batcher, listener: socket.socket) -> None:
    task = asyncio.create_task(batcher.run())
    try:
        await server.serve([listener])
    finally:
        task.cancel()
        if isinstance(batcher.opened.network, OnnxNetwork):
            batcher.opened.network.stop()  # the process cannot exit before its threads


def open_batcher(recipe: Evaluate, opened: OpenClassifier, batch_size: int, wait: float) -> Batcher:
    """Return a batcher that has computed once, so that the first request is not the slowest.

    On a CPU one thread decodes: more would take the cores that the network computes on. There onnxruntime
    computes single images faster side by side than on all threads together: one is left over to take a core
    whose thread waits. It gives the same bits either way.
    """
    on_gpu = opened.network.device.type == "cuda"
    decoders = num_workers(recipe.machine, opened.network.device, 1) if on_gpu else 1
    beside = isinstance(opened.network, OnnxNetwork) and batch_size == 1 and not on_gpu
    passes = torch.get_num_threads() + 1 if beside else 1
    batcher = Batcher(opened, batch_size, wait, decoders, passes)
    size = opened.transform.image_size
    batcher.compute([torch.zeros(3, size, size, dtype=torch.uint8)])
    return batcher
