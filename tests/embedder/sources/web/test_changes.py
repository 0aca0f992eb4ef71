"""States of addresses: what counts as a change, with and without asking the server."""

import pyarrow as pa
import pytest
from web_server import image, status

from embedder.batch_schema import CARRIED
from embedder.config_toml.run_sections import WebConfig
from embedder.sources.web.changes import with_states

ASKING = WebConfig(revalidate=True, allow_private=True, max_tries=1, timeout_s=5)


def states(uris, settings, captions=None, prices=None, errors=None):
    """`modified` of rows."""
    number = len(uris)
    listing = pa.table(
        {
            "uri": uris,
            "modified": ["as it was"] * number,
            "caption": pa.array(captions or [None] * number, pa.string()),
            "error_type": pa.array(errors or [None] * number, pa.string()),
            CARRIED + "price": prices or [1.5] * number,
        }
    )
    found = with_states(listing, settings)
    assert found.schema == listing.schema
    assert found.drop_columns(["modified"]) == listing.drop_columns(["modified"])
    return found["modified"].to_pylist()


def test_a_row_changes_with_its_address_caption_and_carried_columns_and_nothing_else():
    plain = WebConfig()
    address = "http://no-such-host.invalid/a.png"  # nobody asks for it
    (before,) = states([address], plain)
    assert states([address], plain) == [before]
    changed = {
        *states([address + "?v=2"], plain),
        *states([address], plain, captions=["a car"]),
        *states([address], plain, prices=[2.0]),
    }
    assert len(changed - {before}) == 3


def test_files_cells_and_refused_rows_stay_as_they_are():
    uris = ["/a.png", "s3://team/a.png", "/t.parquet#column=a&row_group=0&row=1", "http://h.example/a.png"]
    assert states(uris, ASKING, errors=[None, None, None, "NullId"]) == ["as it was"] * 4
    assert states([], ASKING) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ETag": '"1"'}, {"ETag": '"2"'}),
        ({"Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}, {"Last-Modified": "Mon, 08 Jan 2024 00:00:00 GMT"}),
        ({"ETag": '"1"'}, {}),
    ],
)
def test_a_server_that_says_so_is_a_change_and_no_image_is_sent(server, before, after):
    address = f"{server.url}/a.png"
    server.routes["/a.png"] = image(0, **before)
    first, again = states([address], ASKING), states([address], ASKING)
    server.routes["/a.png"] = image(0, **after)
    assert first == again != states([address], ASKING)
    assert {method for method, _, _ in server.requests} == {"HEAD"}


def test_many_addresses_are_asked_over_few_connections(server):
    addresses = server.add_images(40)
    assert len(set(states(addresses, ASKING))) == 40
    assert (len(server.requests), server.most_at_once <= 4, server.num_connections <= 4) == (40, True, True)


def test_a_server_that_tells_nothing_leaves_the_row_to_be_compared(server):
    server.routes["/a.png"] = lambda handler: handler.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert states([f"{server.url}/a.png"], ASKING) == states([f"{server.url}/a.png"], WebConfig())


def test_an_address_that_does_not_answer_any_more_is_a_change(server):
    address = f"{server.url}/a.png"
    server.routes["/a.png"] = image(0, ETag='"1"')
    before = states([address], ASKING)
    server.routes["/a.png"] = status(404)
    gone = states([address], ASKING)
    assert before != gone == states([address], ASKING)
