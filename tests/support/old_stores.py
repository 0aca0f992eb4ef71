"""Stores that earlier releases made, in archives next to the tests."""

import tarfile
from pathlib import Path


def unpack_store(archive: Path, folder: Path) -> None:
    """Unpack an archive of this repository; Python knows filters since 3.11.4, and warns without one since 3.12."""
    with tarfile.open(archive) as members:
        if hasattr(tarfile, "data_filter"):
            members.extractall(folder, filter="data")
        else:
            members.extractall(folder)
