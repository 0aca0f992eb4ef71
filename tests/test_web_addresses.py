"""A CSV of web addresses, as docs/own-images.md shows it: two commands from nothing to a search, and what follows."""

import csv
import re
import shlex
import shutil
from pathlib import Path

import pyarrow.compute as pc
import pytest
import samples
from command_runs import run_here
from running_server import running
from served import Served
from tiny_models import tiny_config
from web_server import image, redirect, status, web_server

import embedder
from embedder.config import load_config
from embedder.store.files import StoreFiles
from embedder.store.tables.tables import RecordTable
from shards.fresh import init_model
from shards.train_tokenizer import train_tokenizer

PAGE = (Path(__file__).parents[1] / "docs/own-images.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("### Addresses of the web\n")[2].partition("\n## ")[0]
OPEN, PRIVATE = (
    [shlex.split(line) for line in block.replace("\\\n", " ").splitlines()]
    for block in re.findall(r"```\n(.*?)```", SECTION, re.DOTALL)
)
ALLOWED = ("--set", "web.allow_private=true")
NUM_IMAGES = 12
STORE = ("--store", "runs/web")
KEY, SECRET = "canary-key-id", "canary/secret+value"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return init_model(tiny_config(), folder / "mine", seed=0, tokenizer_json=train_tokenizer(samples.SENTENCES, 300))


@pytest.fixture
def server():
    with web_server() as server:
        yield server


@pytest.fixture
def folder(tmp_path, monkeypatch, model):
    """A working directory with the model where the page has it."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "EMBEDDER_ALLOW_PRIVATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "models/mine")
    return tmp_path


def write(addresses, titles=None):
    """Write the table of the page."""
    with Path("catalogue.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["sku", "photo", "title"])
        for number, address in enumerate(addresses):
            rows.writerow([f"s{number:02}", address, (titles or samples.SENTENCES)[number % len(samples.SENTENCES)]])


def run(arguments, *more):
    """Run a command of the page; gives the JSON of what it found."""
    ended = run_here(*arguments[1:], *more, "--json")
    assert ended.code == 0, ended.stderr
    return ended.found


def items():
    """Records of all items, by id."""
    return {row["item_id"]: row for row in RecordTable(StoreFiles("runs/web"), "items").read().to_pylist()}


@pytest.mark.medium
def test_the_two_commands_of_the_page_lead_from_a_table_to_a_search(folder, server):
    write(server.add_images(NUM_IMAGES))
    embed, search = PRIVATE
    assert [embed[: -len(ALLOWED)], search] == OPEN
    report = run(embed)
    assert (report["outcome"], report["num_items"]) == ("published", NUM_IMAGES)
    assert sorted(server.paths) == sorted(f"/{number}.png" for number in range(NUM_IMAGES))
    found = run(search)
    assert len(found["hits"]) == 10
    assert found["hits"][0]["uri"].startswith(server.url)
    (hits,) = embedder.open_store("runs/web").search(image=write_image(7), k=1)
    assert (hits[0].item_id, hits[0].uri) == ("s07", f"{server.url}/7.png")
    assert hits[0].score == pytest.approx(1, abs=1e-3)


def write_image(number):
    Path("query.png").write_bytes(samples.image_bytes(number))
    return [Path("query.png")]


@pytest.mark.medium
def test_images_are_drawn_later_within_the_same_limits(folder, server, monkeypatch):
    write(server.add_images(3))
    run(PRIVATE[0])
    hits = embedder.open_store("runs/web").search("a red car", k=3)
    assert hits.thumbnails() == [None] * 3  # refused: the store does not decide what may be reached
    monkeypatch.setenv("EMBEDDER_ALLOW_PRIVATE", "1")
    assert [pixels.shape for pixels in hits.thumbnails()] == [(160, 160, 3)] * 3


@pytest.mark.medium
def test_the_search_page_draws_and_plays_items_of_the_web(folder, server, tmp_path, monkeypatch):
    clip = samples.clip(tmp_path / "a.mp4").read_bytes()
    server.routes["/a.mp4"] = lambda handler: handler.send(clip, Content_Type="video/mp4")
    write([*server.add_images(2), f"{server.url}/a.mp4", f"{server.url}/0.png?X-Amz-Signature={SECRET}"])
    run(PRIVATE[0])
    with running("runs/web", show_uris=True, cache_dir=tmp_path / "thumbnails") as url:
        served = Served(url, None, None)
        assert served.item("s00", "/image").status == 404  # refused
        monkeypatch.setenv("EMBEDDER_ALLOW_PRIVATE", "1")
    with running("runs/web", show_uris=True, cache_dir=tmp_path / "thumbnails") as url:
        served = Served(url, None, None)
        for item in ("s00", "s02"):
            answer = served.item(item, "/image")
            assert (answer.status, answer.headers["Content-Type"]) == (200, "image/webp")
        answer = served.get("/items/s02/clip", Range="bytes=100-199")
        assert (answer.status, answer.body) == (206, clip[100:200])
        assert served.item("s03").json["item"]["uri"] == f"{server.url}/0.png?X-Amz-Signature=***"
        assert SECRET.encode() not in served.search("a red car").body


@pytest.mark.medium
def test_a_second_run_asks_nobody_and_a_changed_row_is_fetched_alone(folder, server):
    addresses = server.add_images(NUM_IMAGES + 1)
    write(addresses[:NUM_IMAGES])
    run(PRIVATE[0])
    server.requests.clear()
    assert run(PRIVATE[0])["outcome"] == "nothing to do"
    assert server.requests == []
    write([*addresses[: NUM_IMAGES - 1], addresses[NUM_IMAGES]])
    before = items()
    assert run(PRIVATE[0])["outcome"] == "published"
    assert server.paths == [f"/{NUM_IMAGES}.png"]
    changed = {item_id for item_id, row in items().items() if row != before[item_id]}
    assert changed == {f"s{NUM_IMAGES - 1:02}"}


@pytest.mark.medium
def test_revalidation_fetches_what_the_server_says_has_changed_and_nothing_else(folder, server):
    write(server.add_images(NUM_IMAGES))
    for number in range(NUM_IMAGES):
        server.routes[f"/{number}.png"] = image(number, ETag=f'"{number}"')
    asking = ("--set", "web.revalidate=true")
    run(PRIVATE[0], *asking)
    server.requests.clear()
    assert run(PRIVATE[0], *asking)["outcome"] == "nothing to do"
    assert {method for method, _, _ in server.requests} == {"HEAD"}
    server.requests.clear()
    server.routes["/3.png"] = image(100, ETag='"new"')
    before = items()["s03"]["content_version"]
    run(PRIVATE[0], *asking)
    assert [path for method, path, _ in server.requests if method == "GET"] == ["/3.png"]
    assert items()["s03"]["content_version"] != before


@pytest.mark.medium
def test_an_address_that_fails_costs_its_row_alone_and_has_its_reason(folder, server):
    good = server.add_images(NUM_IMAGES)
    server.routes["/busy.png"] = status(429, Retry_After="3600")
    server.routes["/page.jpg"] = lambda handler: handler.send(b"<!DOCTYPE html><p>no", Content_Type="text/html")
    server.routes["/away.png"] = redirect("file:///etc/passwd")
    server.routes["/cut.png"] = lambda handler: handler.write(
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + samples.image_bytes(0)
    )
    bad = {
        f"{server.url}/gone.png": ("NotFound", False),
        f"{server.url}/busy.png": ("ServerBusy", True),
        f"{server.url}/page.jpg": ("NotMedia", False),
        f"{server.url}/away.png": ("BadAddress", False),
        f"{server.url}/cut.png": ("Truncated", True),
        "ftp://127.0.0.1/a.png": ("UnsupportedUri", False),
    }
    write([*good, *bad])
    limits = ("--set", "max_reject_fraction=1", "--set", "web.max_tries=1", "--set", "web.timeout_s=2")
    run(PRIVATE[0], *limits)
    found = items()
    rejected = {row["uri"]: (row["error_type"], row["transient"]) for row in found.values() if row["error_type"]}
    assert rejected == bad
    assert len(found) - len(rejected) == NUM_IMAGES
    server.routes["/busy.png"] = image(100)
    report = run(PRIVATE[0], *limits)
    assert report["outcome"] == "published"  # what may pass was tried again
    states = {row["uri"]: row["state"] for row in items().values()}
    assert states[f"{server.url}/busy.png"] == "embedded"
    assert [path for path in server.paths if path == "/gone.png"] == ["/gone.png"]


@pytest.mark.medium
def test_without_leave_nothing_private_is_reached_and_the_cure_is_named(folder, server):
    write(server.add_images(3))
    ended = run_here(*OPEN[0][1:])
    assert ended.code != 0
    assert "PrivateAddress" in ended.stderr
    assert server.num_connections == 0
    listed = run_here("rejects", *STORE)
    assert listed.code == 0
    assert "web.allow_private = true" in " ".join(listed.stdout.split())


@pytest.mark.slow
def test_decode_tasks_of_ray_download_within_the_same_limits(folder, server, ray_cluster):
    addresses = server.add_images(NUM_IMAGES)
    server.routes["/large.png"] = lambda handler: handler.send(samples.image_bytes(0) + bytes(100_000))
    write([*addresses, f"{server.url}/large.png"])
    config = load_config(
        overrides={
            "model": "models/mine",
            "store": "runs/web",
            "source": [{"path": "catalogue.csv", "columns": {"id": "sku", "image": "photo", "caption": "title"}}],
            "engine": "ray",
            "num_stages": 1,
            "decode": {"max_file_bytes": 50_000},
            "max_reject_fraction": 1.0,
            "web": {"allow_private": True, "parallel_per_host": 2},
        }
    )
    report = embedder.embed(config)
    assert (report.engine, report.num_rejected) == ("ray", 1)
    (large,) = (row for row in items().values() if row["state"] == "rejected")
    assert (large["error_type"], "decode.max_file_bytes allows 50,000" in large["error"]) == ("TooLarge", True)
    assert sorted(server.paths) == sorted([*(f"/{number}.png" for number in range(NUM_IMAGES)), "/large.png"])


@pytest.mark.medium
def test_a_video_by_address_is_embedded_segment_by_segment(folder, server, tmp_path):
    clip = samples.clip(tmp_path / "a.mp4", seconds=3).read_bytes()
    server.routes["/a.mp4"] = lambda handler: handler.send(clip, Content_Type="video/mp4")
    write([f"{server.url}/a.mp4"])
    run(PRIVATE[0], "--set", "segment_s=1.0")
    rows = embedder.open_store("runs/web").to_arrow()
    assert (rows["modality"].unique().to_pylist(), rows["segment"].to_pylist()) == (["video"], [0, 1, 2])


@pytest.mark.medium
def test_no_secret_of_an_address_stands_in_any_file_or_in_what_is_said(folder, server, capfd):
    server.routes["/a.png"], server.routes["/b.png"] = image(0), image(1)
    signed = f"{server.url}/a.png?X-Amz-Credential={KEY}&X-Amz-Signature={SECRET}"
    gone = f"{server.url}/gone.png?sig={SECRET}"
    refused = f"https://{KEY}:{SECRET}@photos.example/c.png"
    host = server.url.removeprefix("http://")
    moved = f"{server.url}/moved.png"
    server.routes["/moved.png"] = redirect(f"http://{KEY}:{SECRET}@{host}/b.png")
    write([signed, f"{server.url}/b.png", gone, refused, moved])
    said = []
    limits = (*ALLOWED, "--set", "max_reject_fraction=1", "--set", "web.max_tries=1")
    columns = ("--image-column", "photo", "--caption-column", "title", "--model", "models/mine")
    for code, *arguments in (
        (0, "embed", "catalogue.csv", *columns, *STORE, *limits),  # ids are the addresses
        (0, "search", "a red car", *STORE),
        (0, "search", "a red car", *STORE, "--sheet", "sheet.png"),
        (0, "rejects", *STORE),
        (0, "rejects", *STORE, "--json"),
        (0, "history", *STORE),
    ):
        ended = run_here(*arguments)
        assert ended.code == code, (arguments, ended.stderr)
        said.append(ended.stdout + ended.stderr + "".join(capfd.readouterr()))
    found = {row["item_id"]: row for row in items().values()}
    assert {name.rpartition("/")[2]: row["error_type"] for name, row in found.items()} == {
        "a.png": None, "b.png": None, "gone.png": "NotFound", "c.png": "UnsupportedUri", "moved.png": "BadAddress",
    }  # fmt: skip
    for secret in (SECRET, KEY, SECRET.partition("/")[2]):
        assert [text for text in said if secret in text] == []
        texts = [row["error"] or "" for row in found.values()] + list(found)
        assert [text for text in texts if secret in text] == []
        files = [path for path in Path("runs/web").rglob("*") if path.is_file() and path.suffix != ".parquet"]
        assert len(files) > 5
        assert [str(path) for path in files if secret.encode() in path.read_bytes()] == []
    # Of part files, only the uri of an address that is signed keeps its signature: images are drawn by it.
    embeddings = RecordTable(StoreFiles("runs/web"), "embeddings").read()
    with_secret = [
        (name, value)
        for row in [*found.values(), *embeddings.to_pylist()]
        for name, value in row.items()
        if SECRET in str(value) or KEY in str(value)
    ]
    assert {(name, value) for name, value in with_secret} == {("uri", signed), ("uri", gone)}
    assert pc.any(pc.match_substring(embeddings["uri"], refused)).as_py() is False
