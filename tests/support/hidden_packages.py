"""Packages that are installed and can't be imported, as in an installation without them."""

from pathlib import Path

import pytest


def hide(folder: Path, patch: pytest.MonkeyPatch, *packages: str) -> None:
    """Put a folder first where modules are looked for, here and in sandboxes that start from now on."""
    folder.mkdir(exist_ok=True)
    for package in packages:
        text = f'raise ModuleNotFoundError("No module named {package!r}", name={package!r})\n'
        (folder / f"{package}.py").write_text(text)
    patch.syspath_prepend(folder)
