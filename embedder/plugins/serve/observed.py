"""Measurement and access log of every request: one JSON line each, without query strings, headers or bodies."""

import json
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from embedder.plugins.serve.metrics import Metrics
from embedder.storage.printable import printable
from embedder.store.layout import utc_now

ACCESS_LOG = logging.getLogger("embedder.serve.access")
MAX_PATH_CHARACTERS = 300
OTHER = "other"  # one route for all addresses that don't exist: clients make them up
QUIET = ("/healthz", "/readyz", "/metrics")


class ObservedApp:
    """ASGI application whose requests are measured; around all others, so that refusals count."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status, num_bytes = 0, 0
        path = scope["path"]

        async def noting(message: Message) -> None:
            nonlocal status, num_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._note(scope, path, status, num_bytes, time.perf_counter() - began)

    def _note(self, scope: Scope, path: str, status: int, num_bytes: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER)
        service = getattr(getattr(scope.get("app"), "state", None), "service", None)
        if service is not None:
            metrics: Metrics = service.metrics
            metrics.request_seconds.labels(route, str(status)).observe(seconds)
        if path in QUIET or not ACCESS_LOG.isEnabledFor(logging.INFO):
            return
        line = {
            "time": utc_now().isoformat(timespec="milliseconds"),
            "method": scope["method"],
            "path": printable(path, MAX_PATH_CHARACTERS),
            "route": route,
            "status": status,  # 0: the client went before there was an answer
            "ms": round(1000 * seconds, 2),
            "bytes": num_bytes,
            "client": (scope.get("client") or ("",))[0],
        }
        ACCESS_LOG.info(json.dumps(line))
