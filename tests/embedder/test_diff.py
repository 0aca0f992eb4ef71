"""What is embedded again and what is not."""

import pyarrow as pa

from embedder.run.diff import KNOWN, diff


def listing(**items):
    """Listed items as id = (size, modified)."""
    sizes = pa.array([size for size, _ in items.values()], pa.int64())
    return pa.table({"item_id": list(items), "size_bytes": sizes, "modified": [when for _, when in items.values()]})


def known(**items):
    """Known items as id = (size, modified, attempts)."""
    rows = [
        {"item_id": name, "size_bytes": size, "modified": when, "attempts": attempts}
        for name, (size, when, attempts) in items.items()
    ]
    return pa.Table.from_pylist(rows, KNOWN)


def test_everything_is_new_to_an_empty_store():
    found = diff(listing(a=(1, "t0"), b=(2, "t0")), known())
    assert found.to_embed["item_id"].to_pylist() == ["a", "b"]
    assert found.to_embed["attempts"].to_pylist() == [1, 1]
    assert (found.num_new, found.num_changed, found.num_unchanged) == (2, 0, 0)


def test_only_items_of_another_size_or_time_are_embedded_again():
    listed = listing(same=(1, "t0"), larger=(9, "t0"), touched=(1, "t1"), new=(1, "t0"))
    found = diff(listed, known(same=(1, "t0", 1), larger=(1, "t0", 1), touched=(1, "t0", 3), gone=(1, "t0", 1)))
    assert found.to_embed["item_id"].to_pylist() == ["larger", "touched", "new"]
    assert found.to_embed["attempts"].to_pylist() == [2, 4, 1]
    assert (found.num_new, found.num_changed, found.num_unchanged) == (1, 2, 1)


def test_an_unknown_size_is_equal_to_an_unknown_size():
    found = diff(listing(cell=(None, "t0"), other=(None, "t0")), known(cell=(None, "t0", 1), other=(5, "t0", 1)))
    assert found.to_embed["item_id"].to_pylist() == ["other"]


def test_the_order_of_a_long_listing_is_kept():
    names = [f"{number:05d}" for number in range(20_000)]
    found = diff(listing(**dict.fromkeys(names, (1, "t0"))), known(**dict.fromkeys(names[::2], (1, "t0", 1))))
    assert found.to_embed["item_id"].to_pylist() == names[1::2]
