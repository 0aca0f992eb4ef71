"""A sample of keys by their hashes."""

from embedder.store.journal.hash_sample import hash_of, lowest_keys


def test_the_lowest_keys_are_the_same_in_any_order_and_know_their_places():
    keys = [f"item {number}" for number in range(20_000)]
    in_order = lowest_keys([keys[:15_000], keys[10_000:]], 50)
    reversed_order = lowest_keys([keys[10_000:][::-1], keys[:15_000][::-1]], 50)
    assert list(in_order) == list(reversed_order) == sorted(keys, key=hash_of)[:50]
    for key, places in in_order.items():
        number = int(key.split()[1])
        assert places == {piece for piece, is_in in ((0, number < 15_000), (1, number >= 10_000)) if is_in}
