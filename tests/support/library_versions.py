"""What older versions of libraries do otherwise, for tests that compare with the libraries themselves."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def is_older(package: str, than: str) -> bool:
    """Whether the installed package is older than a version."""
    return Version(version(package)) < Version(than)


def skip_where_torch_rounds_otherwise(interpolation: str = "bilinear") -> None:
    """Skip a comparison with torchvision's resizing on torch 2.8, whose bilinear weights are rounded otherwise.

    Stores get the pixels of newer versions there, too: `embedder.media.torch_kernel` uses no kernel that gives others.
    """
    if interpolation == "bilinear" and is_older("torch", "2.9"):
        pytest.skip("torch 2.8 rounds the weights of its bilinear filter otherwise")
