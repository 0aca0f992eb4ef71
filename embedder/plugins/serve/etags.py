"""ETags in requests."""

from starlette.requests import Request


def is_known(request: Request, etag: str) -> bool:
    """Whether the client has this content."""
    known = request.headers.get("if-none-match", "")
    return known == "*" or etag in {each.strip().removeprefix("W/") for each in known.split(",")}
