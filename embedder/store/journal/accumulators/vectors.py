"""Accumulators of vectors: drift between two publications, and the sample of pairs for R@k."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from embedder.store.journal.accumulators.base import Accumulator, Figures, Floats, State, valid_rows
from embedder.store.journal.hash_sample import hash_of
from embedder.store.tables.arrow_tensors import unpack_vectors

SCALE = 2.0**30  # sums of vectors of length 1 are exact in these steps up to 2**33 rows
PAIR = ("image_embedding", "text_embedding")


class Drift(Accumulator):
    """Mean and spread of vectors, and how they differ from those of an earlier run."""

    def add(self, rows: pa.Table) -> State:
        """Sum the vectors and their squares in whole steps of 2**-30, to which each value is rounded by itself."""
        (column,), num_null = valid_rows(rows, self.columns)
        if not len(column):
            return {"num": 0, "num_null": num_null, "sums": [], "squares": []}
        vectors = unpack_vectors(column).astype(np.float64)
        sums, squares = (np.rint(each * SCALE).astype(np.int64).sum(0).tolist() for each in (vectors, vectors**2))
        return {"num": len(vectors), "num_null": num_null, "sums": sums, "squares": squares}

    def merge(self, first: State, second: State) -> State:
        """Add the sums; a part without vectors has none."""
        counts = {name: first[name] + second[name] for name in ("num", "num_null")}
        sums = {}
        for name in ("sums", "squares"):
            left, right = first[name] or [0] * len(second[name]), second[name] or [0] * len(first[name])
            sums[name] = [one + other for one, other in zip(left, right, strict=True)]
        return {**counts, **sums}

    def figures(self, state: State) -> Figures:
        """Counts, and the spread: the mean square distance from the mean vector, 0 to 1 of vectors of length 1."""
        found: Figures = {name: state[name] for name in ("num", "num_null")}
        if state["num"]:
            found["spread"] = float(_variances(state).sum())
        return found


def drift_between(state: State, before: State) -> Figures:
    """Compare the vectors of two states, of equal size; empty where one of them has none.

    Args:
        state: of `Drift`.
        before: of an earlier run, by the same model.
    """
    if not state["num"] or not before["num"] or len(state["sums"]) != len(before["sums"]):
        return {}
    means, earlier = _means(state), _means(before)
    deviations, others = (np.sqrt(np.maximum(_variances(each), 0)) for each in (state, before))
    distance = float(np.square(means - earlier).sum())
    lengths = float(np.linalg.norm(means) * np.linalg.norm(earlier))
    return {
        "mean_distance": distance**0.5,
        "cosine_of_means": float(means @ earlier) / lengths if lengths else None,
        # Of two normal distributions with independent dimensions. Source: Dowson and Landau 1982.
        "frechet_distance": distance + float(np.square(deviations - others).sum()),
    }


def _means(state: State) -> Floats:
    """Mean vector; float64 (E,)."""
    return np.asarray(np.array(state["sums"], np.float64) / (SCALE * state["num"]), np.float64)


def _variances(state: State) -> Floats:
    """Variance of each dimension; float64 (E,)."""
    return np.asarray(np.array(state["squares"], np.float64) / (SCALE * state["num"]) - _means(state) ** 2, np.float64)


class RecallSample(Accumulator):
    """Sample of the items that have both vectors: those with the lowest hashes of their ids.

    A state has hashes alone: no id that a purge would have to find, and no vector. R@k is computed at the end of the
    run, by `embedder.ingest.run_metrics`, which reads the vectors of the sample.
    """

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns by which a pair is known."""
        return ("item_id", "segment", *PAIR)

    def add(self, rows: pa.Table) -> State:
        """Hash the ids of the pairs, and keep the lowest."""
        ids = pairs_of(rows)["item_id"].to_pylist()
        return {"num": len(ids), "hashes": self._lowest(hash_of(item_id).hex() for item_id in ids)}

    def merge(self, first: State, second: State) -> State:
        """Keep the lowest of both."""
        return {"num": first["num"] + second["num"], "hashes": self._lowest([*first["hashes"], *second["hashes"]])}

    def figures(self, state: State) -> Figures:
        """Pairs, and those of the sample."""
        return {"num": state["num"], "num_pairs": len(state["hashes"])}

    def _lowest(self, hashes: Iterable[str]) -> list[str]:
        return sorted(set(hashes))[: self.config.sample]


def pairs_of(rows: pa.Table) -> pa.Table:
    """First rows of items that have both vectors."""
    is_pair = pc.equal(rows["segment"], 0)
    for name in PAIR:
        is_pair = pc.and_(is_pair, pc.is_valid(rows[name]))
    return rows.filter(is_pair)
