"""The choice is arithmetic: exact while a query is quick, a graph while it builds in time, lists above."""

import pytest

from index.choose import choose_kind, count_lists
from index.errors import RetrievalError


@pytest.mark.parametrize(
    ("num_vectors", "dim", "kind"),
    [
        (1, 256, "flat"),
        (131_072, 256, "flat"),
        (131_073, 256, "hnsw"),
        (32_769, 1024, "hnsw"),
        (4_000_000, 256, "hnsw"),
        (4_000_001, 256, "ivf"),
        (5_000_000, 4, "flat"),
    ],
)
def test_kind_follows_from_size(num_vectors: int, dim: int, kind: str) -> None:
    assert choose_kind(num_vectors, dim).kind == kind


@pytest.mark.parametrize("kind", ["flat", "hnsw", "ivf"])
def test_a_wish_goes_before_size(kind: str) -> None:
    for num_vectors in (1, 10_000_000):
        assert choose_kind(num_vectors, 256, kind=kind).kind == kind


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(RetrievalError, match="'HNSW' is unknown"):
        choose_kind(10, 4, kind="HNSW")


@pytest.mark.parametrize(
    ("num_vectors", "num_lists"),
    [(1, 1), (63, 1), (128, 2), (10_000, 156), (100_000, 1024), (1_000_000, 4096), (10_000_000, 16_384)],
)
def test_lists_grow_with_the_root_and_have_vectors_to_train_on(num_vectors: int, num_lists: int) -> None:
    assert count_lists(num_vectors) == num_lists
    assert num_lists == 1 or num_vectors >= 64 * num_lists


def test_candidates_go_from_fast_to_thorough() -> None:
    assert [c["ef_search"] for c in choose_kind(10**6, 256).candidates] == [64, 128, 256, 512, 1024]
    assert [c["nprobe"] for c in choose_kind(10**7, 256).candidates] == [1024, 2048, 4096, 8192, 16_384]
    assert choose_kind(10, 256, kind="ivf").candidates == ({"nprobe": 1},)
    assert choose_kind(10, 256).candidates == ({},)
