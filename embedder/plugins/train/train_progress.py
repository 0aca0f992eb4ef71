"""Progress of a training run, saved with its weights, so that `--resume` continues exactly there."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from embedder.config_toml.values import toml
from embedder.errors import ConfigError
from embedder.plugins.train.batches import ExampleCounts
from embedder.plugins.train.items import Items, TeacherVectors
from embedder.plugins.train.train_config import TrainConfig

# Keys that may differ between a run and its resumption: none changes a weight, unless a file exceeds a decoding limit.
# Workers, threads and device change rounding; workers also change what a convolutional stem's BatchNorm sees together.
FREE_KEYS = {
    "out", "engine", "num_workers", "device", "num_threads", "cache_bytes", "log_every_steps", "checkpoint_every_s",
    "max_reject_fraction", "no_progress_timeout_s", "tracker", "ray_address", "decode", "web",
}  # fmt: skip

COUNTED_SETS = ("unpaired", "stale")
HASHED_ROWS = 1 << 16  # at a time


@dataclass
class TrainProgress:
    """Position in the data, what was counted, and the best model so far."""

    epoch: int = 0
    next_batch: int = 0
    elapsed_s: float = 0.0
    best: dict[str, Any] | None = None
    latest: dict[str, Any] | None = None
    counts: ExampleCounts = field(default_factory=lambda: ExampleCounts(0))


def to_plain(progress: TrainProgress) -> dict[str, Any]:
    """Convert the progress to values for a checkpoint, in which the counts are named `tally`."""
    values = asdict(progress)
    counts = values.pop("counts")
    sets = {name: sorted(counts[name]) for name in COUNTED_SETS}
    return {"json": json.dumps({**values, "tally": {**counts, **sets}})}


def from_plain(values: dict[str, Any]) -> TrainProgress:
    """Read the progress from a checkpoint's values."""
    tree = json.loads(values["json"])
    counts = tree.pop("tally")
    rejects = {item_id: tuple(problem) for item_id, problem in counts["rejects"].items()}
    sets = {name: set(counts.get(name, ())) for name in COUNTED_SETS}  # earlier versions have no `stale`
    return TrainProgress(**tree, counts=ExampleCounts(**{**counts, "rejects": rejects, **sets}))


def identity_of(config: TrainConfig, train: Items, validation: Items) -> dict[str, Any]:
    """Settings and items that a run and its resumption must have in common, as JSON values by key."""
    values = dict(_flat(config.model_dump(mode="json", exclude=FREE_KEYS)))
    values |= {"the items to train on": _items_hash(train), "the items held out": _items_hash(validation)}
    return values if train.teacher is None else values | {"the teacher's vectors": _teacher_hash(train, train.teacher)}


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key, as `--set` takes them."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _items_hash(items: Items) -> str:
    rows = np.sort(np.stack([items.keys, items.concepts], 1).view("i8,i8"), axis=0)
    return f"{len(items)} items, {hashlib.sha256(rows.tobytes()).hexdigest()[:12]}"


def _teacher_hash(items: Items, teacher: TeacherVectors) -> str:
    rows, digest = teacher.rows[np.argsort(items.keys)], hashlib.sha256()
    for start in range(0, len(rows), HASHED_ROWS):
        some = rows[start : start + HASHED_ROWS]
        digest.update(teacher.images[some].tobytes() + teacher.captions[some].tobytes())
    return f"{len(rows)} of {teacher.dim} values, {digest.hexdigest()[:12]}"


def with_warm_up_of(config: TrainConfig, state: dict[str, Any]) -> TrainConfig:
    """Take the warm-up that a run began with if the configuration sets none, since its default used to differ."""
    began = state.get("identity", {}).get("train.warmup_steps")
    if began is None or "warmup_steps" in config.train.model_fields_set:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"warmup_steps": began})})


def check_identity(began: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Refuse (ConfigError) to resume a run that began with other settings or other listed items."""
    for key in {**now, **began}:
        if began.get(key) != now.get(key):
            raise ConfigError(
                f"{where}: this run began with {key} = {_short(began.get(key))}, and now it is {_short(now.get(key))}; "
                "resume with what it began with, or train into another folder"
            )


def _short(value: object) -> str:
    """A value as a configuration file has it."""
    text = "nothing" if value is None else toml(value)
    return text if len(text) <= 160 else text[:157] + "..."
