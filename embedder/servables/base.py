"""Contract of servables: what one is given, what it returns, what decides its results, and what computes it.

A `Servable` is a section of a configuration. It imports no framework: a plan, a dry run and a submission need none.
`load` gives what computes, in the process that runs it.
"""

import hashlib
import json
import sys
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import pyarrow as pa
from pydantic import Field

from embedder.config_toml.sections import ConfigSection
from embedder.servables.columns import InputColumn, OutputColumn
from embedder.servables.errors import ServableError, one_line
from embedder.servables.program import LoadedProgram, ServableProgram
from shards.fingerprint import short_hash

LONGEST_S = 1_000_000.0
"""Longest limit in time: eleven days; poll(2) counts milliseconds in 31 bits."""
"""Files of programs of this package; they import one another relatively, pyarrow, NumPy and their framework."""


class Computation(Protocol):
    """Loaded servable; one thread calls it at a time."""

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """Compute the outputs of some rows: as many rows, in their order.

        Args:
            batch: the declared inputs by their names, as `embedder.servables.columns` says of each; none is null but
                those that are optional.

        Raises:
            ServableError: it can compute nothing any more: its process or its device is gone.
            Exception: rows of the batch are at fault; they are tried again apart.
        """

    def close(self) -> None:
        """Free what it holds: memory, a child process."""


class Servable(ConfigSection):
    """Model or function of a run, of any framework; frozen, cheap to send to another process.

    A kind is a subclass in a file of its own. It adds `kind` and keys of its own, and gives inputs, outputs, the files
    that decide its results, and its program.
    """

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]*$", description="stands before its columns: NAME.COLUMN")
    uri: str = Field(min_length=1, description="model folder or file; of the kind python, FILE.py:Class")
    python: str | None = Field(
        None, description="another interpreter that runs it, in a child process: a path; left out: this one"
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=LONGEST_S,
        description="seconds of one call in a process of its own, which is ended then, and another computes its rows "
        "apart; left out: an hour, after which the run ends, unless python is set",
    )
    load_timeout_s: float | None = Field(
        None, gt=0, le=LONGEST_S, description="likewise: seconds in which it must be loaded; left out: an hour"
    )
    batch_size: int = Field(32, ge=1, description="most rows of one call")
    memory_bytes: int | None = Field(
        None, ge=1, description="memory that it takes once loaded; left out: twice the size of its files"
    )
    num_cpus: float = Field(1.0, gt=0, description="CPUs that it is given; as many threads, one at least")
    num_gpus: float = Field(0.0, ge=0, description="GPUs that it is given; a fraction shares one")
    replicas: int = Field(1, ge=1, description="processes that compute it")
    allow_pickle: bool = Field(False, description="whether its weights may be a pickle, which can run any code")

    UNHASHED: ClassVar[frozenset[str]] = frozenset(
        {"name", "uri", "python", "timeout_s", "load_timeout_s", "batch_size", "memory_bytes"}
        | {"num_cpus", "num_gpus", "replicas", "allow_pickle"}
    )
    """Keys that change no result; files count by their content."""

    is_part: ClassVar[bool] = False
    """Whether it computes some of what a servable does that is cut."""

    @abstractmethod
    def input_columns(self) -> Mapping[str, InputColumn]:
        """Declared inputs by name, in the order that a graph takes them.

        Raises:
            ServableError: they follow from a file that is missing or broken.
        """

    @abstractmethod
    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Declared outputs by name.

        Raises:
            ServableError: they follow from a file that is missing or broken.
        """

    @abstractmethod
    def files(self) -> list[Path]:
        """Local files whose content decides the results.

        Raises:
            ServableError: a file is missing, of another framework, or a pickle that isn't allowed.
        """

    @abstractmethod
    def program(self) -> ServableProgram:
        """Class that computes it; its settings name local files.

        Raises:
            ServableError: as `files`.
        """

    def parts(self) -> "tuple[Servable, ...]":
        """Servables that compute it one after the other, each in actors of its own; itself alone where it is whole.

        The last one has its name and its outputs.

        Raises:
            ServableError: it can't be cut as asked.
        """
        return (self,)

    def ended_columns(self) -> tuple[str, ...]:
        """Columns of other servables that end with it."""
        return ()

    def absolute(self) -> Self:
        """Return it with absolute paths: processes of a cluster have other working directories."""
        python = absolute_path(self.python) if self.python is not None else None
        return self.model_copy(update={"uri": absolute_path(self.uri), "python": python})

    def where(self) -> str:
        """Name of the servable for messages."""
        return f"servable {self.name} ({getattr(self, 'kind', 'python')}, {self.uri})"

    def fingerprint(self) -> str:
        """Hash what decides its results, files by their content; 16 hexadecimal digits.

        Raises:
            ServableError: as `files`.
        """
        settings = json.dumps([getattr(self, "kind", ""), self.hashed_settings()], sort_keys=True)
        return short_hash([settings.encode(), *map(file_digest, self.files())])

    def hashed_settings(self) -> dict[str, Any]:
        """Return the keys that decide the results, without those at their defaults."""
        return self.model_dump(mode="json", exclude=set(self.UNHASHED), exclude_defaults=True)

    def size_bytes(self) -> int:
        """Memory that it takes, as it is declared or estimated from its files.

        Raises:
            ServableError: as `files`.
        """
        return self.memory_bytes or 2 * sum(path.stat().st_size for path in self.files())

    @property
    def has_own_process(self) -> bool:
        """Whether it computes in a child process, of another interpreter or of this one, which can be ended."""
        return not (self.python is None and self.timeout_s is None and self.load_timeout_s is None)

    def load(self, device: str = "cpu", num_threads: int = 1) -> Computation:
        """Load it in this process, or start the interpreter that runs it.

        Raises:
            ServableError: it can't be loaded.
        """
        program = self.program()
        if self.has_own_process:
            from embedder.servables.interpreter import InterpreterLimits, start_program

            usual = InterpreterLimits()
            limits = replace(usual, load_s=self.load_timeout_s or usual.load_s, call_s=self.timeout_s or usual.call_s)
            return start_program(
                self.python or sys.executable,
                program,
                where=self.where(),
                device=device,
                num_threads=num_threads,
                limits=limits,
                search_path=sys.path if self.python is None else (),
            )
        try:
            return LoadedProgram(program, device, num_threads)
        except ServableError:
            raise
        except Exception as error:  # of any framework, or of the user's own code
            raise unloadable(self.where(), error) from error


def absolute_path(path: str) -> str:
    """Return the absolute path of what is there; anything else, as a hub id, stays."""
    found = Path(path).expanduser()
    return str(found.absolute()) if found.exists() else path


def unloadable(where: str, error: BaseException) -> ServableError:
    """Describe in one line why a servable can't be loaded.

    Args:
        where: `Servable.where`.
        error: as the framework raised it.
    """
    cause = one_line(error)
    if isinstance(error, ModuleNotFoundError):
        return ServableError(
            f"{where}: it imports {error.name!r}, which is not installed here; install it, or name an interpreter that "
            'has it (python = "...")'
        )
    return ServableError(f"{where}: can't be loaded ({cause}); check the file, its framework and that one's version")


def file_digest(path: Path) -> bytes:
    """Hash a file's content; read again in this process only if its size or time has changed."""
    stamp = path.stat()
    return _digest(path, stamp.st_size, stamp.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, modified_ns: int) -> bytes:
    del size, modified_ns
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
