"""Check by manifests that a version is good enough to be published."""

from dataclasses import dataclass

from index.index_errors import GateRefusedError, RetrievalError
from index.manifest import Manifest

_ROUNDING = 1e-9  # 0.92 - 0.9 is a little more than 0.02


@dataclass(frozen=True)
class Gate:
    """Recall@10 that a version must reach on its own queries, and the largest drop from the previous version's.

    A value outside [0, 1] raises a RetrievalError.
    """

    min_recall: float = 0.9
    max_drop: float = 0.02

    def __post_init__(self) -> None:
        for name in ("min_recall", "max_drop"):
            if not 0 <= getattr(self, name) <= 1:
                raise RetrievalError(f"index gate: {name} is {getattr(self, name)}; give a share from 0 to 1")


def check_gate(manifest: Manifest, previous: Manifest | None, gate: Gate, where: str) -> None:
    """Raise a GateRefusedError if a version's recall is below the floor, or too far below the published one's.

    The drop is only checked between versions of one model whose recall was measured on the same kind of queries;
    `previous` is None if none is published. `where` names the store in the message.
    """
    found = f"{where}: the new index ({manifest.design}) has recall@10 {manifest.recall_at_10:.3f}"
    cure = "build another with `embedder index build`, or lower the limit in the configuration"
    if manifest.recall_at_10 < gate.min_recall - _ROUNDING:
        raise GateRefusedError(f"{found}, less than min_recall = {gate.min_recall:g} allows; {cure}")
    kinds = (manifest.recall_query_kind, manifest.model_fingerprint)
    if previous is None or kinds != (previous.recall_query_kind, previous.model_fingerprint):
        return
    drop = previous.recall_at_10 - manifest.recall_at_10
    if drop > gate.max_drop + _ROUNDING:
        raise GateRefusedError(
            f"{found}, {drop:.3f} below the {previous.recall_at_10:.3f} of the one that is published, more than "
            f"max_drop = {gate.max_drop:g} allows; {cure}"
        )
