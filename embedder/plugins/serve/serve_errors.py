"""Errors as answers: one JSON shape with where, what was found, the rule and the cure."""

import logging
import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from embedder.errors import StoreError
from embedder.redaction import mask
from embedder.storage.printable import printable
from embedder.store.store_errors import TRANSIENT_ERRORS, StoreUnavailableError
from index.index_errors import RetrievalError

LOG = logging.getLogger(__name__)

MAX_SHOWN_CHARACTERS = 200
STORE_RETRY_S = 5
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_SHORT.maxlist = _SHORT.maxdict = 3
RULES_OF_STATUS = {
    400: ("the request is not valid", "a request as /docs describes it", "see /docs"),
    404: ("there is nothing at this address", "one of those that /docs lists", "check the address"),
    405: ("this address has no such method", "a method that /docs lists", "use GET or POST as /docs says"),
    416: ("the range lies beyond the end", "a range within the file", "ask for bytes that it has"),
    500: ("the service failed", "none: this is a fault of the service", "tell its operator; the log has the reason"),
}


class RequestError(Exception):
    """Refusal of a request, with status and headers of the answer.

    `where` is the part of the request at fault, such as `body.k`; `what` was found there, `rule` says what is allowed
    there, and `cure` what to do.
    """

    def __init__(self, status: int, where: str, what: str, rule: str, cure: str, **headers: str) -> None:
        super().__init__(f"{where}: {what}; {cure}")
        self.status, self.where, self.what, self.rule, self.cure = status, where, what, rule, cure
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> Response:
        """Make the answer."""
        error = {"where": self.where, "what": self.what, "rule": self.rule, "cure": self.cure}
        shown = {name: printable(text, 4 * MAX_SHOWN_CHARACTERS) for name, text in error.items()}
        return Response(to_json({"error": shown}), self.status, self.headers, "application/json")


def refusal_of(status: int, headers: Mapping[str, str] | None = None) -> RequestError:
    """Refuse where only the status is known, with these headers."""
    rules = RULES_OF_STATUS.get(status, RULES_OF_STATUS[400 if status < 500 else 500])
    return RequestError(status, "request", *rules, **(headers or {}))


def busy(what: str, retry_after_s: int = 1) -> RequestError:
    """Refuse because too many requests are waiting already."""
    return RequestError(
        503, "server", what, "a bounded number of requests waits", "try again later", retry_after=str(retry_after_s)
    )


def mistake(error: Exception, where: str) -> RequestError:
    """Refuse with one of the product's messages, `what; the cure`."""
    what, _, cure = str(error).rpartition("; ")
    return RequestError(422, where, what or cure, "what the store can answer", cure)


def invalid(error: ValidationError | RequestValidationError, where: str) -> RequestError:
    """Refuse a request that violates the schema, with its first mistake."""
    first = error.errors()[0]
    if first["type"] in ("json_invalid", "json_type"):
        return RequestError(400, where, first["msg"], "one JSON document in UTF-8", "send valid JSON")
    place = ".".join([where, *(str(part) for part in first["loc"] if part != where)])
    found = _SHORT.repr(first.get("input"))[:MAX_SHOWN_CHARACTERS]  # of megabytes, only the ends
    rule = str(first["msg"]).removeprefix("Value error, ")
    return RequestError(422, place, f"found {found}", rule, "send what /docs describes")


async def answer_refusal(_: Request, error: RequestError) -> Response:
    """Answer with the refusal."""
    return error.response()


async def answer_invalid(_: Request, error: RequestValidationError) -> Response:
    """Answer a request whose path or query string FastAPI found invalid."""
    place, *names = (str(part) for part in error.errors()[0]["loc"])
    return invalid(error, place if names else "request").response()


async def answer_http_error(_: Request, error: HTTPException) -> Response:
    """Answer an address or a method that does not exist."""
    return refusal_of(error.status_code, error.headers).response()


def refuse_version(run_id: str) -> RequestError:
    """Refuse a publication that can't be read any more."""
    return RequestError(
        410,
        "version",
        f"{run_id} can't be read any more",
        "a publication whose files are all there",
        "choose one of /versions, or leave it out",
    )


async def answer_unavailable(request: Request, error: Exception) -> Response:
    """Answer where a file of the store can't be read: of an earlier publication, which a vacuum may take, for good.

    The reason names its place, so it goes only to the log.
    """
    LOG.error(f"the store can't be read: {mask(str(error))}")
    publication = getattr(request.state, "publication", None)
    if not (isinstance(error, TRANSIENT_ERRORS) or publication is None or publication.is_current):
        request.app.state.service.publications.forget(publication)
        return refuse_version(publication.run_id).response()
    return busy("the store can't be read now", STORE_RETRY_S).response()


HANDLERS: dict[int | type[Exception], Any] = {
    RequestError: answer_refusal,
    RequestValidationError: answer_invalid,
    HTTPException: answer_http_error,
    StoreError: answer_unavailable,
    RetrievalError: answer_unavailable,
    StoreUnavailableError: answer_unavailable,
}
