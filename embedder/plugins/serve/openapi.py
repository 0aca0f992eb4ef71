"""OpenAPI documentation of bodies that the routes read themselves, and of errors."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from embedder.plugins.serve.api_schema import EmbedRequest, ErrorAnswer, ExportRequest, SearchRequest

REF = "#/components/schemas/{model}"
BODIES: tuple[type[BaseModel], ...] = (SearchRequest, EmbedRequest, ExportRequest)
MEANINGS = {
    400: "The body is no JSON, or no form",
    404: "There is no such item or publication",
    409: "The file of the item has changed since it was embedded",
    410: "That publication can't be read any more",
    413: "The request is too large",
    415: "The body is neither JSON nor a form",
    416: "The range lies beyond the end",
    422: "A value breaks a rule, or a file can't be decoded",
    503: "Too much is waiting; Retry-After says when to try again",
}


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Describe a body of a model, in JSON or as the part `request` of a form with uploaded images."""
    reference = {"$ref": REF.format(model=model.__name__)}
    form = {
        "type": "object",
        "required": ["request"],
        "properties": {"request": reference},
        "additionalProperties": {"type": "string", "format": "binary"},
    }
    content = {"application/json": {"schema": reference}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


def errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Describe the errors of a route."""
    return {status: {"model": ErrorAnswer, "description": MEANINGS[status]} for status in statuses}


def describe(app: FastAPI) -> dict[str, Any]:
    """Make the document, with the models of bodies that FastAPI does not read."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for model in BODIES:
        schema = model.model_json_schema(ref_template=REF)
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    return document
