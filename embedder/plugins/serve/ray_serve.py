"""The query service on Ray Serve: replicas of the same application behind Ray's proxies.

Replicas share nothing. Each follows the store itself, so two of them may name different publications for some seconds;
every answer is from one. Limits on clients or requests apply at each replica. Ray's proxies replace what guards
connections in the server itself.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

from starlette.types import ASGIApp, Message

from embedder.errors import RunFailedError
from embedder.executors.interrupts import handling
from embedder.executors.ray_session import start_ray
from embedder.plugins.serve.hit_reranker import whole_address
from embedder.plugins.serve.serve_settings import ServeSettings, server_url
from embedder.plugins.serve.web_app import create_app
from embedder.store.files import StoreFiles
from embedder.store.store_info import read_published

APPLICATION = "embedder"
REQUESTS_PER_REPLICA = 16.0  # at once; beyond this, another replica is started: half of a batch waits
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 15.0


@dataclass(frozen=True)
class ServeReplicas:
    """Replicas of the service: `least` always run, `most` under load, and each reserves `num_cpus`."""

    least: int = 1
    most: int = 1
    num_cpus: float = 1.0


def application(settings: ServeSettings, replicas: ServeReplicas) -> Any:
    """Make the application of Ray Serve, for `ray.serve.run`; host and port are those of the proxies."""
    from ray import serve

    def build() -> ASGIApp:
        return create_app(settings)

    @serve.deployment(
        ray_actor_options={"num_cpus": replicas.num_cpus},
        max_ongoing_requests=settings.max_concurrency,
        max_queued_requests=settings.max_queue,
        autoscaling_config={
            "min_replicas": replicas.least,
            "max_replicas": max(replicas.least, replicas.most),
            "target_ongoing_requests": REQUESTS_PER_REPLICA,
        },
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_wait_loop_s=max(settings.drain_s, 0.1),
        graceful_shutdown_timeout_s=float(settings.graceful_s),
        logging_config={"enable_access_log": False},
    )
    @serve.ingress(build)
    class QueryService:
        """Replica of the service."""

        async def check_health(self) -> None:
            """Ask the application whether requests should be sent here; if not, Ray replaces the replica."""
            status = await status_of(self, "/readyz")  # type: ignore[arg-type]  # Ray makes the class an application
            if status != 200:
                raise RuntimeError(f"/readyz answers {status}")

    return QueryService.bind()  # type: ignore[attr-defined]  # Ray makes the class a deployment


def application_of_manifest(arguments: dict[str, Any]) -> Any:
    """Make the application of a RayService, whose `serveConfigV2` names this function and gives the arguments.

    They are settings of `ServeSettings` by name, and `replicas`, `max_replicas` and `num_cpus`.
    """
    numbers = {"replicas": 1, "max_replicas": 1, "num_cpus": 1.0}
    settings = ServeSettings.model_validate({name: each for name, each in arguments.items() if name not in numbers})
    least, most, num_cpus = (arguments.get(name, default) for name, default in numbers.items())
    return application(settings, ServeReplicas(int(least), int(most), float(num_cpus)))


async def status_of(app: ASGIApp, path: str) -> int:
    """Request a path from an application, without a connection; return the status of its answer."""
    found = 0

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal found
        if message["type"] == "http.response.start":
            found = message["status"]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 80),
        "state": {},
    }
    await app(scope, receive, send)
    return found


def serve_on_ray(
    settings: ServeSettings, replicas: ServeReplicas, address: str | None, when_listening: Callable[[str], object]
) -> None:
    """Serve until SIGTERM or Ctrl-C; then the replicas drain.

    Host and port are those of the proxies. An `address` of None starts Ray on this machine. `when_listening` is called
    with the address of this machine's proxy once requests are answered. Raises `ConfigError` if no cluster answers at
    the address; `StoreError` if there is no store, or nothing is published yet; `RunFailedError` if no replica starts.
    """
    import ray
    from ray import serve

    files = StoreFiles(settings.store)
    read_published(files)  # before Ray starts, whose replicas would retry forever
    reranker = None if settings.reranker is None else whole_address(settings.reranker)
    settings = settings.model_copy(update={"store": files.address, "reranker": reranker})  # they run in other folders
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    stopped = Event()
    start_ray(address)
    try:
        serve.start(
            proxy_location="EveryNode",
            http_options={"host": settings.host, "port": settings.port},
            logging_config={"enable_access_log": False},
        )
        with handling(lambda *_: stopped.set()):
            try:
                serve.run(application(settings, replicas), name=APPLICATION, route_prefix="/")
            except RuntimeError as error:
                raise RunFailedError(f"no replica starts: {error} The replicas' logs in Ray's folder say why") from None
            when_listening(server_url(settings.host, settings.port))
            while not stopped.wait(1.0):  # a wait without a limit would block Python's signal handlers, too
                pass
            serve.delete(APPLICATION)
    finally:
        if address is None:
            serve.shutdown()
        ray.shutdown()
