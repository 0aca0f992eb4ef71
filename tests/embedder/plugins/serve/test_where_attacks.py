"""`where` of a running server: over a hundred attacks reach nothing, and what is allowed ends in time."""

import os
import socket
import threading
from pathlib import Path

import pytest
from where_attacks import ATTACKS

SECRET = "hidden-word-in-a-file"


class Listener:
    """Port that counts who connects."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port, self.num_connections = self._socket.getsockname()[1], 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        try:
            while True:
                self._socket.accept()[0].close()
                self.num_connections += 1
        except OSError:
            return

    def close(self):
        """Stop listening."""
        self._socket.close()


@pytest.fixture(scope="module")
def listener():
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    """A folder with a secret."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "secret.csv").write_text(f"word\n{SECRET}\n")
    return folder


def seen(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_there_are_more_than_a_hundred_attacks_and_no_two_are_the_same():
    assert len(set(ATTACKS)) == len(ATTACKS) > 100


@pytest.mark.medium
@pytest.mark.parametrize("address", ["search", "facets"])
def test_no_attack_reaches_anything_and_each_is_told_why(server, secrets, listener, address, monkeypatch):
    monkeypatch.setenv("EMBEDDER_TEST_SECRET", SECRET)
    before = [seen(secrets), sorted(Path().iterdir()), dict(os.environ)]
    vector = server.store.encode_text(["a car"])[0].tolist()
    for attack in ATTACKS:
        where = attack.format(tmp=secrets, port=listener.port) if "{tmp}" in attack or "{port}" in attack else attack
        answer = (
            server.search({"vector": vector}, where=where)
            if address == "search"
            else server.get(f"/facets?{urlencoded(where)}")
        )
        assert answer.status == 422, (where[:200], answer.body[:300])
        assert answer.error["where"] in ("body.where", "query.where"), where
        assert SECRET not in str(answer.body).replace(where, "")
        assert "\n" not in answer.error["what"]
    assert [seen(secrets), sorted(Path().iterdir()), dict(os.environ)] == before
    assert listener.num_connections == 0
    assert len(server.search({"vector": vector}, where="true", k=3).json["answers"][0]["hits"]) == 3


def urlencoded(where):
    from urllib.parse import urlencode

    return urlencode({"where": where})


@pytest.mark.parametrize(
    "where",
    [
        "modality = 'image'",
        "item_id LIKE '%.png' AND NOT (segment > 3)",
        "caption ILIKE '%a%' OR caption IS NULL",
        "start_s BETWEEN 0 AND 2.5",
        "modality IN ('image', 'video')",
        "lower(item_id) LIKE 'pictures/%' AND length(item_id) < 100",
        "CASE WHEN modality = 'video' THEN end_s > 1 ELSE true END",
        "coalesce(end_s - start_s, 0) * 2 >= 0",
        "embedded_at > TIMESTAMP '2020-01-01' AND year(embedded_at) >= 2020",
        "item_id = 'it''s' OR item_id <> '; DROP TABLE embeddings --'",
        "TRUE -- a comment",
    ],
)
def test_ordinary_conditions_find_what_they_find_in_process(server, where):
    vector = server.store.encode_text(["a car"])[0]
    found = server.search({"vector": vector.tolist()}, where=where, k=20)
    assert found.status == 200, found.body
    expected = [hit.item_id for hit in server.store.search(vector, k=20, where=where)]
    assert [hit["item_id"] for hit in found.json["answers"][0]["hits"]] == expected
    facets = server.get(f"/facets?{urlencoded(where)}")
    assert facets.status == 200, facets.body
    assert facets.json["num_rows"] >= len(expected)
