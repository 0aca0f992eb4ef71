"""`embedder serve`: the query service over one store, until a signal."""

import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from embedder.cli.options import AllowStoreCode, ModelUri, ReadConfig, StoreUri, command
from embedder.cli.results import PIPE_WIDTH, Result
from embedder.cli.terminal import Terminal
from embedder.config import RunConfig
from embedder.errors import ConfigError
from embedder.installation import require
from shards.model_settings import split_address

if TYPE_CHECKING:
    from pydantic import ValidationError

    from embedder.plugins.serve.serve_settings import ServeSettings

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8765


@dataclass(frozen=True)
class HttpOptions:
    """Options of the HTTP server: where it listens, whom it lets in, what it keeps and shows."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")] = DEFAULT_HOST
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = DEFAULT_PORT
    token_file: Annotated[Path | None, typer.Option(help="File of tokens, one a line; clients need one.")] = None
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Let others in without a token, from other machines.")] = (
        False
    )
    cache_dir: Annotated[Path | None, typer.Option(help="Folder of thumbnails; default: in the user's cache.")] = None
    cache_bytes: Annotated[int | None, typer.Option(min=0, help="Bytes of thumbnails on disk; 1 GiB.")] = None
    show_uris: Annotated[bool, typer.Option("--show-uris", help="Show clients where the items' files lie.")] = False
    allowed_hosts: Annotated[
        list[str] | None, typer.Option("--allowed-host", help="Name that clients call this server by; repeatable.")
    ] = None
    trusted_proxies: Annotated[
        list[str] | None, typer.Option("--trusted-proxy", help="Address of a reverse proxy before it; repeatable.")
    ] = None
    limits: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=VALUE", help="Set any limit, as rate_per_s=20; repeatable."),
    ] = None

    def settings(self, served: dict[str, Any], configured: dict[str, Any]) -> "ServeSettings":
        """Return the settings for what is `served`; `--limit` overrides what is configured.

        ConfigError if one breaks a rule, or is a limit that an option sets, too: it would not count.
        """
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("no_auth", "limits")}
        given = {name: value for name, value in (served | own).items() if value is not None}
        limits = _limits(self.limits or ())
        if doubled := sorted(limits.keys() & given.keys()):
            raise ConfigError(f"--limit {doubled[0]}: an option sets it, as --help says; give only that")
        settings = _settings(configured | limits, given)
        _check_open(settings, no_auth=self.no_auth)
        return settings


@dataclass(frozen=True)
class RayOptions:
    """Options of a service whose replicas run on Ray Serve."""

    on_ray: Annotated[bool, typer.Option("--ray", help="Run replicas on Ray Serve.")] = False
    replicas: Annotated[int, typer.Option(min=1, help="With --ray: replicas that always run.")] = 1
    max_replicas: Annotated[int, typer.Option(min=1, help="With --ray: replicas that run under load.")] = 1


@command
def serve(
    read: ReadConfig,
    store: StoreUri = None,
    *,
    http: HttpOptions,
    model: ModelUri = None,
    allow_store_code: AllowStoreCode = False,
    ray: RayOptions,
) -> Result:
    """Serve searches, items and the search page over HTTP."""
    run = read({"store": store, "model": model})
    served = {
        "store": run.required_store,
        "model": run.main_model if model is not None or _has_instruction(run) else None,
        "servables": run.model_sections,
        "allow_store_code": allow_store_code,
    }
    settings = http.settings(served, run.serve.given)
    require("serve", "embedder serve")
    if ray.on_ray:
        require("ray-serve", "embedder serve --ray")
    elif max(ray.replicas, ray.max_replicas) > 1:
        raise ConfigError("--replicas and --max-replicas are for --ray; add it, or start the command several times")

    from embedder.plugins.serve.run_server import run_server

    def tell(url: str) -> None:
        Terminal(width=PIPE_WIDTH).print(f"serving {settings.store} at {url}", soft_wrap=True)

    if ray.on_ray:
        from embedder.executors.cluster_address import find_cluster
        from embedder.plugins.serve.ray_serve import ServeReplicas, serve_on_ray

        address = find_cluster(run.ray_address, run.engine)
        serve_on_ray(settings, ServeReplicas(ray.replicas, ray.max_replicas), address, tell)
    else:
        run_server(settings, tell)
    return Result({"store": settings.store}, ["stopped"])


def _has_instruction(run: RunConfig) -> bool:
    """Whether the configuration says what queries are asked with."""
    return run.main_model is not None and split_address(run.main_model)[1].query_instruction is not None


def serve_store(store: str, tell: Callable[[str], None]) -> None:
    """Serve a store on a free port of localhost until a signal; `tell` gets the address of the search page."""
    from embedder.plugins.serve.run_server import run_server
    from embedder.plugins.serve.serve_settings import ServeSettings

    run_server(ServeSettings(store=store, port=0), tell)


def _limits(given: Iterable[str]) -> dict[str, Any]:
    """Limits by name; a value that is not TOML is taken as text. ConfigError if one is not written `name=value`."""
    pairs = [(text, *text.partition("=")) for text in given]
    for text, name, equals, _ in pairs:
        if not (name and equals):
            raise ConfigError(f"--limit {text}: it is not written name=value; write it as rate_per_s=20")
    return {name.strip(): _value(text) for _, name, _, text in pairs}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _settings(limits: dict[str, Any], options: dict[str, Any]) -> "ServeSettings":
    """Settings from limits, and from options, which override them; ConfigError if one is unknown or breaks a rule."""
    from pydantic import ValidationError

    from embedder.plugins.serve.serve_settings import ServeSettings

    try:
        return ServeSettings.model_validate(limits | options)
    except ValidationError as error:
        raise _explain_limit(error, limits) from None


def _explain_limit(error: "ValidationError", limits: dict[str, Any]) -> ConfigError:
    """Explain the first limit that is unknown or breaks a rule, in the words of a configuration."""
    from embedder.config_toml.mistakes import mistakes_of
    from embedder.plugins.serve.serve_settings import ServeSettings

    first = error.errors()[0]
    name, names = str(first["loc"][0]), ServeSettings.model_fields
    if name not in names:
        near = get_close_matches(name, names, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        return ConfigError(f"--limit {name}: there is no such limit; {meant}limits are {', '.join(names)}")
    found = mistakes_of(ServeSettings, {"store": "", name: limits.get(name, first["input"])}, error)
    texts = [each.text for each in found if name in each.path]
    return ConfigError(f"--limit {texts[0] if texts else f'{name}: this value is not valid'}")


def _check_open(settings: "ServeSettings", *, no_auth: bool) -> None:
    """Refuse (ConfigError) to let other machines in by accident: a non-local address without tokens."""
    from embedder.plugins.serve.serve_settings import LOOPBACK

    if settings.host not in LOOPBACK and settings.token_file is None and not no_auth:
        raise ConfigError(
            f"--host {settings.host} lets other machines in, and no token is asked for; give --token-file FILE, "
            "or --no-auth if they may all search and see the items"
        )
