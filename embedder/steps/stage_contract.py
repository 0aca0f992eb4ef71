"""Contract of what runs on rows; importing it loads nothing else, which keeps a step's process small."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self


class Stage:
    """What runs on rows: it is set up once in the process that runs it, then gets one batch after another.

    Write a subclass, and name it in a `[[step]]`:

        class Brightness(embedder.Stage):
            columns_in = ("image",)
            columns_out = {"brightness": "float32"}

            def process(self, rows):
                return {"brightness": [mean(image["pixels"]) for image in rows["image"].to_pylist()]}

    A class's declarations are read from its source without running it, so write them as literal names, numbers and
    texts. Its `settings` are the keyword arguments of `__init__`. The kind `python` of `[[model]]` also takes such a
    class.

    Attributes:
        columns_in: required columns; a row without one of them is skipped.
        columns_optional: further columns, which may be null.
        columns_out: columns that it returns, with their types.
        where: `after_decode`, before the model sees a row, or `before_write`, with its embeddings.
        one_to_many: whether a row may become several; rows are then passed one at a time.
        resources: keys of `[[step]]`: `num_cpus`, `memory_bytes`, `batch_size`, `timeout_s`, `max_side_px`, `max_rows`.
    """

    columns_in: ClassVar[tuple[str, ...]] = ()
    columns_optional: ClassVar[tuple[str, ...]] = ()
    columns_out: ClassVar[Mapping[str, str]] = {}
    where: ClassVar[str] = "after_decode"
    one_to_many: ClassVar[bool] = False
    resources: ClassVar[Mapping[str, float]] = {}
    device: str = "cpu"

    def setup(self) -> None:
        """Load what `process` needs, once; `self.device` is torch's name of the device."""

    def process(self, rows: Any) -> Any:
        """Compute the columns of some rows.

        Args:
            rows: a `pyarrow.RecordBatch` of `columns_in` and `columns_optional`.

        Returns:
            A `pyarrow.Table` or `RecordBatch`, or columns by name (lists, or NumPy arrays); as many rows, in the same
            order, unless `one_to_many`.

        Raises:
            Exception: these rows can't be processed; each is retried separately.
        """
        raise NotImplementedError(f"{type(self).__name__} has no process(rows)")

    def close(self) -> None:
        """Free what it holds."""

    def load(self, device: str | None = None) -> Self:
        """Set it up as the program of a `[[model]]` would be, and return it.

        Args:
            device: torch's name of a device; None means that of the class.
        """
        self.device = device or self.device
        self.setup()
        return self

    def __call__(self, rows: Any) -> Any:
        """Process some rows."""
        return self.process(rows)
