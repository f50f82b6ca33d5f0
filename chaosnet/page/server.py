"""The page over HTTP: its files, what is new as server-sent events, the status as JSON, /metrics for Prometheus.

It only tells: no request changes anything, but where it was made with actions (actions.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..identity import is_loopback
from ..protocols.errors import CannotListen
from ..protocols.status import to_json
from . import metrics, model
from .actions import Actions
from .feed import Feed

STATIC = Path(__file__).parent / "static"
MAX_VIEWERS = 50  # At once; each is sent some kilobytes a second.
SCRAPE_PATIENCE_S = 4.0  # Less than the ten seconds after which Prometheus gives up.
KEEP_ALIVE_S = 15.0  # A viewer hears something at least so often: else proxies close.
SHUTDOWN_S = 2.0
# A browser asks whether it is still the same: else a page would be drawn by scripts of an older release.
CHECKED = "no-cache"
# Scripts and styles come from here alone. It asks other members' pages whether they are there.
POLICY = "default-src 'self'; connect-src 'self' http: https:; img-src 'self' data:; frame-ancestors 'none'"


class PageServer:
    """Serves one feed at one place.

    Args:
        host, port: Where it listens; port 0 is any free one.
        what: What people call that place.
        with_actions: May who has its token change something? On loopback only.
    Raises: CannotListen, when it is made, if it cannot listen there; ConfigError for actions elsewhere.
    """

    def __init__(self, feed: Feed, host: str, port: int, what: str, with_actions: bool = False) -> None:
        self.feed, self._host = feed, host
        self._actions = Actions(feed, host, what) if with_actions else None
        self._socket = _listening(host, port, what)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            log_level="error",  # A line for each request that is none would be a stranger's to write.
            access_log=False,
            lifespan="off",
            limit_concurrency=MAX_VIEWERS + 20,
            timeout_graceful_shutdown=int(SHUTDOWN_S),
            server_header=False,
        )
        self._server = _Server(config, feed)
        self._thread: threading.Thread | None = None

    def url(self, host: str = "") -> str:
        """Where a browser finds it; `host`: if not under the name that it listens at."""
        name = host or self._host
        return f"http://{f'[{name}]' if ':' in name else name}:{self.port}"

    @property
    def url_with_token(self) -> str:
        """With which the page may change something, if it may at all."""
        return f"{self.url()}/#token={self._actions.token}" if self._actions else self.url()

    def run(self) -> None:
        """Until Ctrl+C."""
        self.feed.start()
        self._server.run(sockets=[self._socket])

    def start(self) -> None:
        """In a thread of its own, until `stop`."""
        self._thread = threading.Thread(target=self.run, name="chaosnet-page", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """From any thread."""
        self._server.should_exit = True
        self.feed.close()
        if self._thread is not None:
            self._thread.join(SHUTDOWN_S + 1.0)
        elif not self._server.started:
            self._socket.close()

    def _app(self) -> Starlette:
        # Else a page of somebody else could have this browser read it, by a name that leads to 127.0.0.1.
        hosts = ["127.0.0.1", "localhost", "[::1]", self._host] if is_loopback(self._host) else ["*"]
        return Starlette(
            routes=[
                Route("/", self._index),
                Route("/events", self._events),
                Route("/status.json", self._status),
                Route("/metrics", self._metrics),
                Route("/health", self._health),
                *([Route("/actions", self._actions.handle, methods=["POST"])] if self._actions else []),
                Mount("/static", _Static(directory=STATIC)),
            ],
            middleware=[
                Middleware(TrustedHostMiddleware, allowed_hosts=hosts),
                Middleware(GZipMiddleware, minimum_size=2000),
            ],
        )

    async def _index(self, request: Request) -> Response:
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": CHECKED}
        return FileResponse(STATIC / "index.html", headers=headers)

    async def _health(self, request: Request) -> Response:
        """For other members' pages, in browsers, that look for one to move to: is it one of this cluster?"""
        if self.feed.picture.status is None:
            await self._fresh()
        status = self.feed.picture.status
        text = f"chaosnet {status.cluster if status else ''}\n"
        return Response(text, media_type="text/plain", headers={"Access-Control-Allow-Origin": "*"})

    async def _status(self, request: Request) -> Response:
        await self._fresh()
        with self.feed.lock:
            picture = self.feed.picture
            found = picture.whole() if picture.silent_s is None else None
            trouble = picture.trouble
        if found is None:
            return Response(trouble + "\n", 503, media_type="text/plain")
        return Response(to_json(found), media_type="application/json")

    async def _metrics(self, request: Request) -> Response:
        await self._fresh()
        with self.feed.lock:
            text = metrics.exposition(self.feed.picture)
        return Response(text, headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _fresh(self) -> None:
        """Wait for the next answer of the cluster, if it comes in time."""
        if self.feed.picture.source:
            return
        news, loop = asyncio.Event(), asyncio.get_running_loop()
        with self.feed.listening(lambda: _call(loop, news)), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SCRAPE_PATIENCE_S):
                while not self.feed.closed:
                    await news.wait()
                    news.clear()
                    if self.feed.picture.silent_s is None:  # Else another member may answer in a moment.
                        return

    async def _events(self, request: Request) -> Response:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers=headers)

    async def _stream(self) -> AsyncIterator[bytes]:
        news, loop, viewer = (
            asyncio.Event(),
            asyncio.get_running_loop(),
            _Viewer(self.feed, self._actions is not None),
        )
        async with AsyncExitStack() as stack:
            stack.enter_context(self.feed.listening(lambda: _call(loop, news)))
            yield viewer.told(time.time())
            while not self.feed.closed:
                try:
                    await asyncio.wait_for(news.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                news.clear()
                yield viewer.told(time.time())


class _Static(StaticFiles):
    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = CHECKED
        return response


class _Viewer:
    """What one browser has been told."""

    def __init__(self, feed: Feed, may_act: bool) -> None:
        self._feed, self._may_act = feed, may_act
        self._generation = -1
        self._events_version = -1
        self._step = -1

    def told(self, now_s: float) -> bytes:
        """All that is new to it, as one event."""
        with self._feed.lock:
            picture = self._feed.picture
            found: dict[str, Any] = {**model.page(picture, now_s), "may_act": self._may_act}
            if self._generation != picture.generation:
                self._generation, self._events_version, self._step = picture.generation, -1, -1
                found["anew"] = True
            if new := [row for row in picture.steps if row.step > self._step]:
                self._step = new[-1].step
                found["curves"] = model.curves(new)
            if self._events_version != picture.events_version:
                self._events_version = picture.events_version
                found["events"] = model.story(picture.events)
        return b"data: " + msgspec.json.encode(found) + b"\n\n"


class _Server(uvicorn.Server):
    """Viewers' streams have no end of their own: they end with the feed, before all else is closed."""

    def __init__(self, config: uvicorn.Config, feed: Feed) -> None:
        super().__init__(config)
        self._feed = feed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._feed.close()
        await super().shutdown(sockets)


def _call(loop: asyncio.AbstractEventLoop, news: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(news.set)
    except RuntimeError:
        return  # The server has ended.


def _listening(host: str, port: int, what: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(64)
    except OSError as error:
        made.close()
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        raise CannotListen(
            f"{what}: {place!r}: {error.strerror or error} (expected a free port of this machine, or 0 for any)"
        ) from None
    return made
