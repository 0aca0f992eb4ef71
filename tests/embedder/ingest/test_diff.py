"""What is embedded again and what is not."""

import pyarrow as pa

from embedder.ingest.diff import KNOWN, MODEL_CHANGED, diff, find_gone


def listing(**items):
    """Listed items as id = (size, modified)."""
    sizes = pa.array([size for size, _ in items.values()], pa.int64())
    times = pa.array([when for _, when in items.values()], pa.string())
    return pa.table({"item_id": pa.array(list(items), pa.string()), "size_bytes": sizes, "modified": times})


def known(**items):
    """Known items as id = (size, modified, attempts), and why they are embedded again, where they are."""
    rows = [
        {"item_id": name, "size_bytes": size, "modified": when, "attempts": attempts, "why": next(iter(why), None)}
        | {"known_version": f"version of {name}", "known_vectors": 1}
        for name, (size, when, attempts, *why) in items.items()
    ]
    return pa.Table.from_pylist(rows, KNOWN)


def done(difference):
    """What is embedded: id = (reason, attempts, known version)."""
    columns = ["item_id", "reason", "attempts", "known_version"]
    return {row["item_id"]: tuple(row.values())[1:] for row in difference.to_embed.select(columns).to_pylist()}


def test_everything_is_new_to_an_empty_store():
    found = diff(listing(a=(1, "t0"), b=(2, "t0")), known())
    assert found.to_embed["item_id"].to_pylist() == ["a", "b"]
    assert found.to_embed["attempts"].to_pylist() == [1, 1]
    assert (found.reasons, found.num_unchanged) == ({"new": 2}, 0)


def test_only_items_of_another_size_or_time_are_embedded_again():
    same = {"same": (1, "t0", 1), "unknown": (None, "t0", 1)}
    other = {"larger": (1, "t0", 1), "touched": (1, "t0", 3), "sized": (5, "t0", 1)}
    listed = {name: found[:2] for name, found in same.items()}
    listed |= {"larger": (9, "t0"), "touched": (1, "t1"), "sized": (None, "t0"), "new": (1, "t0")}
    found = diff(listing(**listed), known(**same, **other, gone=(1, "t0", 1)))
    assert done(found) == {name: ("content changed", 1, f"version of {name}") for name in other} | {
        "new": ("new", 1, None)
    }
    assert found.num_unchanged == 2
    assert found.reasons == {"content changed": 3, "new": 1}


def test_attempts_are_counted_until_the_file_changes():
    listed = listing(again=(1, "t0"), mended=(2, "t1"))
    found = diff(listed, known(again=(1, "t0", 3, "rejected before"), mended=(1, "t0", 3, "rejected before")))
    assert done(found) == {
        "again": ("rejected before", 4, "version of again"),
        "mended": ("content changed", 1, "version of mended"),
    }


def test_a_change_of_the_model_counts_before_any_change_of_the_file():
    found = diff(listing(a=(1, "t0"), b=(9, "t9")), known(a=(1, "t0", 1, MODEL_CHANGED), b=(1, "t0", 1, MODEL_CHANGED)))
    assert found.reasons == {"model changed": 2}


def test_a_limit_takes_what_is_new_before_what_was_rejected():
    listed = listing(bad=(1, "t0"), a=(1, "t0"), b=(1, "t0"))
    found = diff(listed, known(bad=(1, "t0", 1, "rejected before")))
    assert found.first(2).to_embed["item_id"].to_pylist() == ["a", "b"]
    assert found.first(3).to_embed.num_rows == found.first(None).to_embed.num_rows == 3


def test_what_is_held_and_not_listed_is_gone():
    held = pa.table({"item_id": ["a", "b", "c"], "source": ["", "", "x"]})
    assert find_gone(listing(b=(1, "t0")), held).sort_by("item_id").to_pylist() == [
        {"item_id": "a", "source": ""},
        {"item_id": "c", "source": "x"},
    ]
    assert find_gone(listing(), held).num_rows == 3


def test_the_order_of_a_long_listing_is_kept():
    names = [f"{number:05d}" for number in range(20_000)]
    found = diff(listing(**dict.fromkeys(names, (1, "t0"))), known(**dict.fromkeys(names[::2], (1, "t0", 1))))
    assert found.to_embed["item_id"].to_pylist() == names[1::2]
