"""The page `/docs`: the API's routes, bodies and answers as plain HTML; no script, and nothing of a foreign host."""

import json
from html import escape
from typing import Any

METHODS = ("get", "post")


def docs_page(document: dict[str, Any]) -> str:
    """Write the page of an OpenAPI document."""
    info = document["info"]
    routes = [
        _route(method, path, operations[method])
        for path, operations in document["paths"].items()
        for method in METHODS
        if method in operations
    ]
    models = [
        f'<section id="{escape(name)}"><h3>{escape(name)}</h3><pre>{_json(schema)}</pre></section>'
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    title = escape(f"{info['title']} {info['version']}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{title}</title><link rel="stylesheet" href="/page/docs.css"></head><body><main>'
        f"<h1>{title}</h1><p>{escape(info['description'])} "
        'As a document for programs: <a href="/openapi.json">/openapi.json</a>.</p>'
        f"<h2>Routes</h2>{''.join(routes)}<h2>Models</h2>{''.join(models)}</main></body></html>"
    )


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    about = escape(operation.get("description", "")).replace("\n", " ")
    rows = [
        (each["name"], each["in"], _type(each["schema"]), each.get("description", ""))
        for each in operation.get("parameters", ())
    ]
    rows += [
        ("body", kind, _type(content["schema"]), "")
        for kind, content in operation.get("requestBody", {}).get("content", {}).items()
    ]
    rows += [
        ("answer", status, ", ".join(_types(answer)), answer.get("description", ""))
        for status, answer in sorted(operation["responses"].items())
    ]
    cells = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code></summary><p>{about}</p>"
        f"<table>{cells}</table></details>"
    )


def _types(answer: dict[str, Any]) -> list[str]:
    return [_type(content.get("schema", {})) or kind for kind, content in answer.get("content", {}).items()]


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(str(each) for each in schema["enum"])
    return str(schema.get("type", ""))


def _json(schema: dict[str, Any]) -> str:
    return escape(json.dumps(schema, indent=2, ensure_ascii=False))
