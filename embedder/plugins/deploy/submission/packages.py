"""Packages that a job's nodes unpack: this project's code, and a run's files; each named by its content."""

import hashlib
import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from embedder.compat import NOT_SENT
from embedder.errors import ConfigError
from embedder.placement.node_probe import PACKAGES, package_folder

MAX_BYTES = 100 << 20  # Ray keeps packages in the memory of its head, and refuses 512 MiB
EARLIEST = (1980, 1, 1, 0, 0, 0)  # date of every file, so that equal contents make equal packages
READABLE = 0o644 << 16


@dataclass(frozen=True)
class JobPackage:
    """ZIP file that a cluster keeps, under its name, while jobs need it."""

    name: str
    content: bytes

    @property
    def uri(self) -> str:
        """Address for `runtime_env`."""
        return f"gcs://{self.name}"


def code_package() -> JobPackage:
    """Pack the three packages of this project as they are imported here, without the demo's data.

    Raises `ConfigError` if one of them is in no folder, as in a ZIP application.
    """
    contents: dict[str, bytes] = {}
    for package in PACKAGES:
        folder = package_folder(package)
        if folder is None or not folder.is_dir():
            raise ConfigError(f"package {package} is in no folder here, and can't be sent; install embedder by pip")
        for path in sorted(folder.rglob("*")):
            inner = path.relative_to(folder)
            if path.is_file() and not {*inner.parts, path.suffix} & {*NOT_SENT, ".pyc"}:
                contents[f"{package}/{inner.as_posix()}"] = path.read_bytes()
    return package_of(contents)


def package_of(contents: Mapping[str, bytes]) -> JobPackage:
    """Pack files, by their names; ConfigError if they are too large to be sent."""
    if (num_bytes := sum(map(len, contents.values()))) > MAX_BYTES:
        largest = max(contents, key=lambda path: len(contents[path]))
        raise ConfigError(
            f"the files to send have {num_bytes:,} bytes, and a cluster's head keeps at most {MAX_BYTES:,} of a job; "
            f"the largest is {largest}: put it where all nodes can read it"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for path, content in sorted(contents.items()):
            entry = zipfile.ZipInfo(path, EARLIEST)
            entry.external_attr = READABLE
            entry.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(entry, content)
    content = buffer.getvalue()
    # Named by what is packed, which doesn't depend on the version of a compressor.
    digest = hashlib.sha256()
    for path, packed in sorted(contents.items()):
        digest.update(f"{path}\0{len(packed)}\0".encode() + packed)
    return JobPackage(f"_ray_pkg_{digest.hexdigest()[:40]}.zip", content)


def read_to_send(path: str, key: str) -> bytes:
    """Read a file that a configuration names, to send it along; ConfigError if it can't be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{key} {path}: it can't be read here, to be sent ({error.strerror}); check the path"
        ) from None
