"""What docs/serve.md says of systemd, reverse proxies and containers is run as it stands there.

Only names, ports and paths are other ones.
"""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from reverse_proxies import CLIENT, NAME, caddy, nginx, program, put
from served import Served, make_store

from embedder.plugins.serve.serve_settings import ServeSettings

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
TOKEN = "a-token-of-more-than-16-characters"
BEARER = f"Bearer {TOKEN}"
CLIP, IMAGE = "/items/clips%2F0.mp4/clip", "/items/pictures%2F0000.png/image?size=160"
EMBEDDER = [sys.executable, "-m", "embedder"]
TIMEOUT_S = 60.0
PROXIES = {"nginx": (nginx, 0), "caddy": (caddy, 1)}

pytestmark = pytest.mark.slow


def block(heading, number=0):
    """A block of a section, without the backslashes at the ends of its lines."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```\n(.*?)^```", section, re.MULTILINE | re.DOTALL)[number].replace("\\\n", " ")


@pytest.fixture(scope="module")
def made(tiny_model, tmp_path_factory):
    """A store of images and a clip: its configuration and its files."""
    return make_store(tmp_path_factory.mktemp("shop"), tiny_model)


@pytest.fixture
def tokens(tmp_path):
    """A file with one token, which only its owner can read."""
    path = tmp_path / "tokens"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o400)
    return path


@contextmanager
def serving(command, folder, **environment):
    """Run a command of the documentation on a free port; gives a client of the service itself, and its process."""
    name, *words = command
    assert Path(name).name == "embedder"
    log = folder / "serve.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            [*EMBEDDER, *words, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | environment,
        ) as process,
    ):
        try:
            line = process.stdout.readline()
            assert line.startswith("serving "), log.read_text()
            yield Served(line.split()[-1], None, folder, {"Authorization": BEARER}), process
        finally:
            process.kill()


def stop(process):
    """End a service as systemd and Docker do; returns its exit status."""
    process.terminate()
    return process.wait(TIMEOUT_S)


@pytest.fixture(params=PROXIES)
def proxied(request, made, tokens, tmp_path):
    """A proxy before the service, both as documented; clients of the two, and the service's log."""
    proxy, number = PROXIES[request.param]
    program(request.param)
    values = {"/srv/shop/store": made[0].store, " tokens ": f" {tokens} "}
    command = shlex.split(put(block("TLS: a reverse proxy", 2), values))
    (tmp_path / "proxy").mkdir()
    with serving(command, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache")) as (service, _):
        text, address = block("TLS: a reverse proxy", number), service.url.removeprefix("http://")
        with proxy(text, address, tmp_path / "proxy") as client:
            yield client, service, tmp_path / "serve.log"


def noise(side):
    """An image that can't be compressed, of 3 * side^2 bytes."""
    pixels = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=0)
    return file.getvalue()


def upload(image):
    """Body of a form that searches with an image, and its type."""
    request = json.dumps({"queries": [{"upload": "photo"}], "k": 3}).encode()
    parts = [b'name="request"\r\n\r\n' + request, b'name="photo"; filename="x"\r\n\r\n' + image]
    body = b"".join(b"--edge\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts)
    return body + b"--edge--\r\n", "multipart/form-data; boundary=edge"


def hits(body):
    return [[hit["item_id"] for hit in answer["hits"]] for answer in json.loads(body)["answers"]]


def test_a_search_an_image_and_a_clip_pass_the_proxy(proxied, made):
    client, service, log = proxied
    body = json.dumps({"queries": [{"text": "a red car"}], "k": 3})
    kind = {"Content_Type": "application/json", "Origin": f"https://{NAME}"}
    assert client.ask("POST", "/search", body, **kind)[0] == 401
    allowed = {"Authorization": BEARER, "X_Forwarded_For": "203.0.113.9"}
    status, _, found = client.ask("POST", "/search", body, **kind, **allowed)
    assert (status, hits(found)) == (200, hits(service.search({"text": "a red car"}, k=3).body))
    status, headers, _ = client.ask("POST", "/session", Authorization=BEARER)
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert (status, "Secure" in attributes) == (204, True), "the service knows that its client speaks TLS"
    status, headers, image = client.ask("GET", IMAGE, Cookie=cookie)
    assert (status, headers["Content-Type"]) == (200, "image/webp")
    assert image == service.get(IMAGE).body
    assert client.ask("GET", IMAGE, Cookie=cookie, If_None_Match=headers["ETag"])[0] == 304
    status, headers, part = client.ask("GET", CLIP, Cookie=cookie, Range="bytes=100-299")
    whole = (made[1] / "clips" / "0.mp4").read_bytes()
    assert (status, headers["Content-Range"]) == (206, f"bytes 100-299/{len(whole)}")
    assert part == whole[100:300]
    status, headers, _ = client.ask("GET", "/", Accept_Encoding="gzip")
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    assert client.ask("GET", "/", Accept_Encoding="gzip", If_None_Match=headers["ETag"])[0] == 304
    asked = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    by_proxy = [line["client"] for line in asked if line["path"] == "/session"]
    assert by_proxy == [CLIENT], "X-Forwarded-For has the client's address, and not what the client made up"
    assert {line["client"] for line in asked if line["path"] == "/search"} == {CLIENT, "127.0.0.1"}


def test_large_and_slow_uploads_pass_the_proxy(proxied):
    client, service, _ = proxied
    limits = ServeSettings(store="").model_dump()
    image = noise(1960)
    assert 0.9 < len(image) / limits["max_upload_bytes"] < 1
    body, kind = upload(image)
    allowed = {"Content_Type": kind, "Authorization": BEARER}
    status, _, found = client.ask("POST", "/search", body, **allowed)
    assert (status, hits(found)) == (200, hits(service.post("/search", body, kind).body))
    text = json.dumps({"queries": [{"text": "a red car"}]}).encode()
    padded = text.ljust(limits["max_body_bytes"] - 1000)
    json_kind = {"Content_Type": "application/json", "Authorization": BEARER}
    assert client.ask("POST", "/search", padded, **json_kind)[0] == 200
    small, kind = upload(noise(200))

    def slowly():
        for start in range(0, len(small), 20_000):
            yield small[start : start + 20_000]
            time.sleep(0.2)

    length = {"Content_Length": str(len(small))}
    status, _, found = client.ask("POST", "/search", slowly(), **allowed, **length)
    assert (status, hits(found)) == (200, hits(service.post("/search", small, kind).body))


def unit_values(name):
    """Values of a key of the unit."""
    return re.findall(rf"^{name}=(.*)$", block("systemd"), re.MULTILINE)


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path):
    if (verify := shutil.which("systemd-analyze")) is None:
        pytest.skip("no systemd-analyze: install Debian's package systemd to check the unit of docs/serve.md")
    script = Path(sys.executable).with_name("embedder")
    unit = tmp_path / "shop-search.service"
    unit.write_text(put(block("systemd"), {"/opt/embedder/bin/embedder": str(script)}))
    checked = subprocess.run([verify, "verify", unit], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHomes=yes"))
    checked = subprocess.run([verify, "verify", unit], capture_output=True, text=True, check=False)
    assert "ProtectHomes" in checked.stderr, "it would report a mistake"


def test_the_unit_s_command_serves_with_what_systemd_gives_it(made, tokens, tmp_path):
    (command,), (cache,) = unit_values("ExecStart"), unit_values("CacheDirectory")
    assert unit_values("LoadCredential") == [f"{tokens.name}:/etc/embedder/tokens"]
    environment = dict(pair.split("=", 1) for pair in unit_values("Environment")[0].split())
    assert environment["XDG_CACHE_HOME"] == f"/var/cache/{cache}"
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    values = {"/srv/shop/store": made[0].store, "${CREDENTIALS_DIRECTORY}": str(tmp_path)}
    with serving(shlex.split(put(command, values)), tmp_path, **environment) as (service, process):
        assert service.search({"text": "a red car"}).status == 200
        assert service.get(IMAGE).status == 200
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert stop(process) == 0
    limits = ServeSettings(store="")
    assert int(unit_values("TimeoutStopSec")[0]) > limits.drain_s + limits.graceful_s


def instructions():
    """Instructions of the Dockerfile, by name; each occurs once but for comments."""
    pairs = [line.split(" ", 1) for line in block("Container").splitlines()]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def test_the_container_installs_what_there_is():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    image = instructions()
    source = image["COPY"].split()[1]
    assert image["COPY"].split()[0] == "."
    (extra,) = re.findall(rf"'{source}\[(.*)\]'", image["RUN"])
    assert extra in project["optional-dependencies"]
    (python,) = re.findall(r"python:(3\.\d+)-slim", image["FROM"])
    least = re.findall(r"3\.(\d+)", project["requires-python"])[0]
    assert int(python.split(".")[1]) >= int(least)


def test_the_container_s_mounts_and_port_are_those_of_its_command():
    image, run = instructions(), shlex.split(block("Container", 1).splitlines()[1])
    given = {flag: [run[at + 1] for at, word in enumerate(run) if word == flag] for flag in ("-v", "--tmpfs", "-p")}
    command = json.loads(image["CMD"])
    targets = [volume.split(":")[1] for volume in given["-v"]]
    assert {command[command.index(option) + 1] for option in ("--store", "--token-file")} < set(targets)
    port = str(ServeSettings.model_fields["port"].default)
    assert [each.rsplit(":", 1)[1] for each in given["-p"]] == [image["EXPOSE"]] == [port]
    assert given["--tmpfs"] == [f"/home/{image['USER']}/.cache", "/tmp"]
    assert image["RUN"].endswith(f"useradd --create-home {image['USER']}")


def test_the_container_s_command_serves_is_healthy_and_writes_into_its_cache_alone(made, tokens, tmp_path):
    image, home = instructions(), tmp_path / "home"
    home.mkdir()
    command = shlex.join(json.loads(image["ENTRYPOINT"]) + json.loads(image["CMD"]))
    values = {"0.0.0.0": "127.0.0.1", "/store": made[0].store, "/run/secrets/tokens": str(tokens)}
    with serving(shlex.split(put(command, values)), tmp_path, HOME=str(home), XDG_CACHE_HOME="") as (service, process):
        check = image["HEALTHCHECK"].removeprefix("CMD ").replace("python ", f"{sys.executable} ", 1)
        check = put(check, {"127.0.0.1:8765": service.url.removeprefix("http://")})
        assert subprocess.run(check, shell=True, check=False).returncode == 0
        assert service.search({"text": "a red car"}).status == 200
        assert service.get(IMAGE).status == 200
        written = [path.relative_to(home).parts[0] for path in home.rglob("*") if path.is_file()]
        assert set(written) == {".cache"}
        assert stop(process) == 0
    assert subprocess.run(check, shell=True, check=False, stderr=subprocess.DEVNULL).returncode != 0
