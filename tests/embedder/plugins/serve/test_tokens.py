"""Tokens: who has one is let in, the file is read again when it changes, and the cookie is for images and clips."""

import os

import pytest
from small_server import running
from test_protection import ask, refusal

from embedder.errors import ConfigError
from embedder.plugins.serve.protection import TokenFile

TOKEN, OTHER = "first-token-0123456789", "second-token-987654321"


def write(path, *lines, mode=0o600):
    """Write a token file in one step, as a careful operator does."""
    new = path.with_name("new")
    new.write_text("\n".join(lines) + "\n")
    new.chmod(mode)
    new.rename(path)
    return path


@pytest.fixture(scope="module")
def token_file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tokens") / "tokens", "# of the page", TOKEN, "", f"  {OTHER}  ")


@pytest.fixture(scope="module")
def port(token_file):
    with running(token_file=token_file) as port:
        yield port


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("token", [TOKEN, OTHER])
def test_each_token_of_the_file_lets_in(port, scheme, token):
    assert ask(port, "/search", authorization=f"{scheme} {token}")[0] == 200


@pytest.mark.parametrize(
    "given",
    [
        *("", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer # of"),
        *(f"Bearer {TOKEN} {OTHER}", "Bearer \xe9\xff", f"Bearer {'a' * 10_000}", f"Bearer {TOKEN.upper()}"),
    ],
)
@pytest.mark.parametrize("path", ["/search", "/items/x", "/items/x/image", "/metrics", "/docs", "/nothing", "//"])
def test_nothing_else_lets_in(port, given, path):
    answer = ask(port, path, authorization=given.encode("latin-1"))
    assert "token" in refusal(answer, 401)["what"]
    assert answer[1]["www-authenticate"] == "Bearer"
    assert TOKEN not in str(answer)


def test_without_a_token_the_body_is_not_read(port):
    assert "missing" in refusal(ask(port, "/search", "POST", bytes(100)), 401)["what"]


@pytest.mark.parametrize("path", ["/", "/page/app.js", "/healthz", "/readyz"])
def test_the_page_and_probes_need_none(port, path):
    assert ask(port, path)[0] == 200


def session(port, token=TOKEN):
    """Cookie of a new session, and its attributes."""
    status, headers, _ = ask(port, "/session", "POST", authorization=f"Bearer {token}")
    assert status == 204
    pair, *attributes = headers["set-cookie"].split("; ")
    return pair, attributes


def test_the_cookie_lets_elements_of_the_page_read_images_and_clips_alone(port):
    cookie, attributes = session(port)
    assert set(attributes) == {"HttpOnly", "SameSite=Strict", "Path=/"}
    assert TOKEN not in cookie
    for path in ("/items/a%2Fb/image", "/items/a/clip", "/items/a/file"):
        assert ask(port, path, cookie=f"x=1; {cookie}; y=2")[0] == 200
    for path in ("/search", "/items/a", "/status", "/image", "/session"):
        refusal(ask(port, path, cookie=cookie), 401)
    refusal(ask(port, "/items/a/image", "POST", b"", cookie=cookie), 401)
    value = cookie.partition("=")[2]
    refusal(ask(port, "/search", authorization=f"Bearer {value}"), 401)
    for forged in (f"embedder_token={TOKEN}", f"embedder_token={value[:-1]}", "embedder_token=", f"other={value}"):
        refusal(ask(port, "/items/a/image", cookie=forged), 401)


def test_a_session_needs_a_token(port):
    refusal(ask(port, "/session", "POST"), 401)
    refusal(ask(port, "/session", "POST", cookie=session(port)[0]), 401)


def test_behind_tls_the_cookie_is_for_tls_alone(token_file):
    with running(token_file=token_file, trusted_proxies=("127.0.0.1",)) as port:
        headers = {"authorization": f"Bearer {TOKEN}", "x_forwarded_proto": "https"}
        assert ask(port, "/session", "POST", **headers)[1]["set-cookie"].endswith("; Secure")


def test_without_a_token_file_a_session_sets_no_cookie():
    with running() as port:
        status, headers, _ = ask(port, "/session", "POST")
        assert status == 204
        assert "set-cookie" not in headers


def test_the_file_is_read_again_when_it_changes(tmp_path, caplog):
    path = write(tmp_path / "tokens", TOKEN)
    with running(token_file=path) as port:
        cookie, _ = session(port)
        write(path, OTHER)
        refusal(ask(port, "/search", authorization=f"Bearer {TOKEN}"), 401)
        refusal(ask(port, "/items/a/image", cookie=cookie), 401)
        assert ask(port, "/search", authorization=f"Bearer {OTHER}")[0] == 200
        for spoil in (path.unlink, lambda: write(path, OTHER, mode=0o644), lambda: write(path, "short")):
            spoil()
            refusal(ask(port, "/search", authorization=f"Bearer {OTHER}"), 401)
            write(path, OTHER)
            assert ask(port, "/search", authorization=f"Bearer {OTHER}")[0] == 200
    assert OTHER not in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("mode", [0o644, 0o606, 0o620, 0o601, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match=f"mode is {mode:04o}.*chmod 600"):
        TokenFile(write(tmp_path / "tokens", TOKEN, mode=mode))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_file_of_the_owner_and_its_group_is_read(tmp_path, mode):
    assert TokenFile(write(tmp_path / "tokens", TOKEN, mode=mode)).allows(
        {b"authorization": f"Bearer {TOKEN}".encode()}, cookie=False
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no token"),
        (b"# only this\n\n", "no token"),
        (b"fifteen-letters\n", "token 1 has 15 characters"),
        (TOKEN.encode() + b"\nwith a space in the middle\n", "token 2 has 26 characters"),
        ("gr\u00fcne-token-0123456789".encode(), "ASCII"),
        (b"\xff\xfe\x00", "no text"),
    ],
)
def test_a_file_without_good_tokens_is_refused(tmp_path, content, message):
    path = tmp_path / "tokens"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message) as caught:
        TokenFile(path)
    assert TOKEN not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        TokenFile(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError):
            TokenFile(path)
