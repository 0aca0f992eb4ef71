"""`embedder search --server`: the same output as from a store."""

import json

import pytest
import samples
from running_server import running
from served import make_store
from typer.testing import CliRunner

from embedder.cli import app
from embedder.errors import ConfigError, StoreError

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def places(tiny_model, tmp_path_factory):
    """A store, a service over it that asks for a token, and the file with the token."""
    folder = tmp_path_factory.mktemp("server")
    config, _ = make_store(folder, tiny_model, {"segment_s": 1.0}, num_images=5)
    token = folder / "token"
    token.write_text(f"# of the service\n\n{TOKEN}\n")
    token.chmod(0o600)
    with running(config.store, show_uris=True, token_file=token) as url:
        yield {"store": ("--store", config.store), "server": ("--server", url, "--token-file", str(token))}


def search(*arguments):
    """Standard output of the command."""
    result = CliRunner().invoke(app, ["search", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.mark.medium
@pytest.mark.parametrize(
    "arguments",
    [
        ["a red car"],
        ["a red car", "two cats", "-k", "3", "--hybrid"],
        ["a red car", "--where", "modality = 'video'", "--all-segments"],
        ["a red car", "--min-score", "1"],
        ["a red car", "--fold", "0.5"],
        ["--image", "IMAGE", "-k", "2"],
        ["a red car", "--image", "IMAGE", "--text-weight", "0.3"],
        ["a red car", "two cats", "--not", "a bird", "--not-image", "IMAGE", "--not-weight", "0.4"],
    ],
)
def test_a_service_shows_what_a_store_shows(arguments, places, tmp_path):
    image = tmp_path / "query.png"
    image.write_bytes(samples.image_bytes(3))
    arguments = [str(image) if each == "IMAGE" else each for each in arguments]
    assert search(*arguments, *places["server"]) == search(*arguments, *places["store"])
    found, wanted = (json.loads(search(*arguments, *places[name], "--json")) for name in ("server", "store"))
    assert found == wanted


def test_tables_and_copies_are_written_of_the_hits_of_the_service(places, tmp_path):
    outputs = ("--out", tmp_path / "hits.csv", "--copy", tmp_path / "files")
    search("a red car", "-k", 3, *places["server"], *outputs)
    search("a red car", "-k", 3, *places["store"], "--out", tmp_path / "local.csv")
    assert (tmp_path / "hits.csv").read_bytes() == (tmp_path / "local.csv").read_bytes()
    assert len(list((tmp_path / "files").iterdir())) == 4


@pytest.mark.medium
def test_a_sheet_is_drawn_of_the_images_of_the_service(places, tmp_path):
    search("a red car", *places["server"], "--sheet", tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.medium
def test_options_that_exclude_each_other_and_files_without_a_token_are_refused(places, tmp_path):
    (tmp_path / "empty").write_text("# nothing\n")
    server, url, *_ = places["server"]
    for arguments, message in (
        ((*places["server"], *places["store"]), "leave out --store"),
        ((server, url, "--model", "./m"), "the name of a model"),
        (("--store", "s", "--token-file", "t"), "--token-file is for --server"),
        ((server, url, "--token-file", tmp_path / "none"), "No such file"),
        ((server, url, "--token-file", tmp_path / "empty"), "has no token"),
        ((server, url), "(?i)token"),
    ):
        with pytest.raises(ConfigError, match=message):
            search("a red car", *arguments)
    with pytest.raises(StoreError, match="can't be reached"):
        search("a red car", server, "http://127.0.0.1:1")
