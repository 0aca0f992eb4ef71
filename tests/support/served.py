"""Requests to a running query service, and stores of images and clips made in code for it to serve."""

import json
import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from urllib.parse import quote

import samples

import embedder
from embedder.config import load_config
from embedder.ingest.embed import embed

FOLLOW_S = 0.05


@dataclass
class Answer:
    """Answer of the server."""

    status: int
    headers: Message
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        return self.json["error"]


@dataclass
class Served:
    """A running server: its address, and the configuration of its store."""

    url: str
    config: embedder.config.RunConfig
    source: Path
    headers: dict = field(default_factory=dict)

    @property
    def store(self):
        """The published snapshot, opened in this process."""
        return embedder.open_store(self.config.store)

    def get(self, path, *, method="GET", **headers) -> Answer:
        return self.send(urllib.request.Request(self.url + path, method=method), headers)

    def post(self, path, body, kind="application/json", **headers) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(urllib.request.Request(self.url + path, data), {"Content-Type": kind} | headers)

    def search(self, *queries, **options) -> Answer:
        return self.post("/search", {"queries": list(queries)} | options)

    def item(self, item_id, rest="") -> Answer:
        return self.get(f"/items/{quote(item_id, safe='')}{rest}")

    def send(self, request, headers) -> Answer:
        for name, value in (self.headers | headers).items():
            request.add_header(name.replace("_", "-"), value)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())


def make_store(folder: Path, model: Path, settings=None, **source):
    """Embed images and clips made in code; gives the configuration and the folder of the files."""
    files = samples.folder(folder / "in", **({"num_clips": 1} | source))
    given = {"model": str(model), "store": str(folder / "store"), "source": [{"path": str(files)}], "engine": "local"}
    config = load_config(overrides=given | {"no_progress_timeout_s": 60} | (settings or {}))
    embed(config)
    return config, files


def make_instructed_store(folder: Path, tiny_model: Path, instruction: str):
    """`make_store` of a model whose prompt of queries has a place for an instruction, and this one in it."""
    model = shutil.copytree(tiny_model, folder / "model")
    config = json.loads((model / "config.json").read_text())
    config["preprocess"]["query_prompt"] = f"Instruct: {instruction}\nQuery: "
    (model / "config.json").write_text(json.dumps(config))
    return make_store(folder, model)


def form(request: dict, **files: bytes) -> tuple[bytes, str]:
    """Body and type of a form as browsers send it: the request as JSON, and files by their names."""
    parts = [("request", "", json.dumps(request).encode())]
    parts += [(name, '; filename="../../x"', content) for name, content in files.items()]
    lines = [
        f'--b0undary\r\nContent-Disposition: form-data; name="{name}"{rest}\r\n\r\n'.encode() + content + b"\r\n"
        for name, rest, content in parts
    ]
    return b"".join(lines) + b"--b0undary--\r\n", "multipart/form-data; boundary=b0undary"
