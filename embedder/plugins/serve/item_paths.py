"""Paths of items: an id is one part of the path, percent-encoded, whatever characters it has."""

from urllib.parse import quote, unquote

from starlette.types import ASGIApp, Receive, Scope, Send

PREFIX = "/items/"
PARTS_OF_ITEMS = ("image", "clip", "file")


class WholeItemIds:
    """ASGI application in front of the routes; without it `a%2Fimage` would be the image of the item `a`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with an id that the routes take as one part."""
        if scope["type"] == "http" and PREFIX in scope["path"]:
            root = scope.get("root_path", "")
            raw = scope.get("raw_path", scope["path"].encode()).decode("ascii", "replace")
            if raw.startswith(root + PREFIX):
                scope["path"] = root + item_path(raw.removeprefix(root + PREFIX))
        await self._app(scope, receive, send)


def item_path(raw: str) -> str:
    """Return the path with the id as one part, from what follows `/items/` in the raw path.

    Slashes that a proxy has decoded belong to the id.
    """
    id_part, _, last = raw.rpartition("/")
    ending = f"/{last}" if id_part and last in PARTS_OF_ITEMS else ""
    return f"{PREFIX}{quote(unquote(raw.removesuffix(ending)), safe='')}{ending}"
