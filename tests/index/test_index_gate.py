"""A version that finds too little is not published."""

import pytest
from index_samples import Build

from index.gate import Gate, check_gate
from index.index_errors import GateRefusedError, RetrievalError


@pytest.mark.parametrize(
    ("recall", "before", "message"),
    [
        (0.90, 0.92, None),
        (0.899, 0.90, "recall@10 0.899, less than min_recall = 0.9 allows"),
        (0.97, 0.99, None),
        (0.95, 0.99, "0.040 below the 0.990 of the one that is published, more than max_drop = 0.02 allows"),
        (0.95, None, None),
        (0.99, 0.95, None),
    ],
)
def test_floor_and_drop(build: Build, recall: float, before: float | None, message: str | None) -> None:
    _, manifest = build()
    new = manifest.model_copy(update={"recall_at_10": recall})
    previous = None if before is None else manifest.model_copy(update={"recall_at_10": before})
    if message is None:
        check_gate(new, previous, Gate(), "store x")
    else:
        with pytest.raises(GateRefusedError, match=f"store x: .*{message}"):
            check_gate(new, previous, Gate(), "store x")


@pytest.mark.parametrize("other", [{"recall_query_kind": "text"}, {"model_fingerprint": "model-b"}])
def test_recalls_of_other_queries_are_not_compared(build: Build, other: dict[str, str]) -> None:
    _, manifest = build()
    previous = manifest.model_copy(update={"recall_at_10": 1.0} | other)
    check_gate(manifest.model_copy(update={"recall_at_10": 0.91}), previous, Gate(), "store x")


@pytest.mark.parametrize("limits", [{"min_recall": 1.1}, {"max_drop": -0.1}])
def test_a_limit_that_is_no_share_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(RetrievalError, match="give a share from 0 to 1"):
        Gate(**limits)
