"""The emoji that ship with the package as a source: for the demo, and where a run's own items are out of reach."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files

from embedder.config_toml.run_sections import SourceConfig


@contextmanager
def shipped_source(carryover: tuple[str, ...] = ()) -> Iterator[SourceConfig]:
    """Provide the shipped images with their captions as a source while the block runs."""
    with as_file(files("embedder") / "demo_data" / "noto.tar") as tar:
        yield SourceConfig(path=str(tar), kind="webdataset", carryover=carryover)
