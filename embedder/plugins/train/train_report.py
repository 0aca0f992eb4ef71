"""Report of a training: its figures, as `report.json` holds them."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from embedder.plugins.train.teacher import TeacherReport


class TrainReport(BaseModel):
    """Content of `report.json`."""

    model_config = ConfigDict(frozen=True)

    model: str
    """Folder of the best model."""
    last: str
    base: str | None
    """Model that training began with."""
    delta: str | None
    loss: str
    what: str
    engine: str
    engine_reason: str
    device: str
    num_workers: int
    num_items: int
    """Listed items that are not held out."""
    num_held_out: int
    num_rejected: int
    """Items, held-out ones among them, that are broken."""
    teacher: TeacherReport | None = None
    num_unpaired: int
    """Items without an image, or without a caption; they are left out."""
    num_steps: int
    num_epochs: float
    best: dict[str, Any] | None
    """The best measurement on held-out items, and its step."""
    latest: dict[str, Any] | None
    num_cached: int
    cached_bytes: int
    wall_s: float
    """Of this process."""
    train_s: float
    """Inside the loop, sessions before a resumption included."""
