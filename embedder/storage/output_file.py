"""Output files that a user names: checked before the work whose result they get."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote

from embedder.errors import ConfigError


def check_output_file(path: Path, formats: Collection[str], name: str) -> str:
    """Return a writable file's suffix in lower case; ConfigError if its format, folder or type is wrong."""
    suffix = path.suffix.lower()
    if suffix not in formats:
        found = f"its suffix is {path.suffix}" if path.suffix else "it has no suffix"
        raise ConfigError(f"{name} {path}: {found}, which names no format; known are {', '.join(formats)}")
    check_parent_folder(path, name)
    with unreachable_refused(path, name):
        if path.is_dir():
            raise ConfigError(f"{name} {path}: it is a folder; name a file")
    return suffix


def check_parent_folder(path: Path, name: str) -> None:
    """Raise ConfigError if the parent folder of a file or folder to be written is missing or is a file."""
    with unreachable_refused(path, name):
        if path.parent.is_dir():
            return
        is_there = path.parent.exists()
    found = f"{path.parent} is no folder" if is_there else f"there is no folder {path.parent}"
    cure = "name another place" if is_there else f"make it first: mkdir -p {quote(str(path.parent))}"
    raise ConfigError(f"{name} {path}: {found}; {cure}")


@contextmanager
def unreachable_refused(path: Path, name: str) -> Iterator[None]:
    """Raise ConfigError where the block can't look at a path: it is too long, or a folder of it may not be entered."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}; name a place that can be written") from None
