"""Contract of servables: their inputs and outputs, what determines their results, and what computes them.

A `Servable` is a section of a configuration. It imports no framework, because a plan, a dry run and a submission need
none. `load` returns what computes, in the process that runs it.
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

from embedder.config_toml.run_sections import NumGpus
from embedder.config_toml.sections import ConfigSection
from embedder.servables.program import LoadedProgram, ServableProgram
from embedder.servables.servable_columns import InputColumn, OutputColumn
from embedder.servables.servable_errors import ServableError, one_line
from shards.fingerprint import short_hash
from shards.model_settings import join_address, split_address

LONGEST_S = 1_000_000.0
"""Longest time limit, eleven days: poll(2) counts milliseconds in 31 bits."""


class Computation(Protocol):
    """Loaded servable; only one thread calls it at a time."""

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """Compute the outputs of the batch's rows: as many rows, in the same order.

        The batch holds the declared inputs by name, as described in `embedder.servables.servable_columns`; only
        optional ones may be null.

        Raises:
            ServableError: its process or device is gone, so it can't compute anything any more.
            Exception: rows of the batch are at fault; the caller retries them separately.
        """

    def close(self) -> None:
        """Release its memory and child process."""


class Servable(ConfigSection):
    """Model or function of a run, of any framework; frozen, and cheap to send to another process.

    A kind is a subclass in its own file. It adds `kind` and its own keys, and implements the inputs, outputs, files
    that determine its results, and program. Methods that need a file raise `ServableError` where it can't be used.
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
        description="seconds of one call in its own process, which is ended then, and another computes its rows "
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
    num_gpus: NumGpus = Field(0.0, ge=0, description="GPUs that it is given; a fraction shares one")
    replicas: int = Field(1, ge=1, description="processes that compute it")
    allow_pickle: bool = Field(False, description="whether its weights may be a pickle, which can run any code")

    UNHASHED: ClassVar[frozenset[str]] = frozenset(
        {"name", "uri", "python", "timeout_s", "load_timeout_s", "batch_size", "memory_bytes"}
        | {"num_cpus", "num_gpus", "replicas", "allow_pickle"}
    )
    """Keys that don't change results; files count by their content."""

    is_part: ClassVar[bool] = False
    """Whether it computes one part of a servable that has been split."""

    @property
    def clip_frames(self) -> int | None:
        """Frames of a segment that it takes as one input, from its start on; None if it takes each by itself."""
        return None

    @abstractmethod
    def input_columns(self) -> Mapping[str, InputColumn]:
        """Declared inputs by name, in the order in which a graph takes them."""

    @abstractmethod
    def output_columns(self) -> Mapping[str, OutputColumn]:
        """Declared outputs by name."""

    @abstractmethod
    def files(self) -> list[Path]:
        """Local files whose content determines the results.

        Raises:
            ServableError: a file is missing, of another framework, or a pickle that isn't allowed.
        """

    @abstractmethod
    def program(self) -> ServableProgram:
        """Class that computes it; its settings name local files."""

    def parts(self) -> "tuple[Servable, ...]":
        """Servables that compute it one after the other, each in its own actors; only itself if it isn't split.

        The last one has its name and its outputs. Raises `ServableError` if it can't be split as requested.
        """
        return (self,)

    def ended_columns(self) -> tuple[str, ...]:
        """Columns of other servables that aren't passed on after it."""
        return ()

    def absolute(self) -> Self:
        """Return it with absolute paths, because processes of a cluster have other working directories."""
        python = absolute_path(self.python) if self.python is not None else None
        return self.model_copy(update={"uri": absolute_path(self.uri), "python": python})

    def where(self) -> str:
        """Name of the servable for messages."""
        return f"servable {self.name} ({getattr(self, 'kind', 'python')}, {self.uri})"

    def fingerprint(self) -> str:
        """Hash everything that determines its results, files by content; returns 16 hexadecimal digits."""
        settings = json.dumps([getattr(self, "kind", ""), self.hashed_settings()], sort_keys=True)
        return short_hash([settings.encode(), *map(file_digest, self.files())])

    def hashed_settings(self) -> dict[str, Any]:
        """Return the keys that determine the results, without those at their defaults."""
        return self.model_dump(mode="json", exclude=set(self.UNHASHED), exclude_defaults=True)

    def size_bytes(self) -> int:
        """Memory that it takes, as declared or as estimated from its files."""
        return self.memory_bytes or 2 * sum(path.stat().st_size for path in self.files())

    @property
    def has_own_process(self) -> bool:
        """Whether it computes in a child process, which can be killed; of this or another interpreter."""
        return not (self.python is None and self.timeout_s is None and self.load_timeout_s is None)

    def load(self, device: str = "cpu", num_threads: int = 1) -> Computation:
        """Load it in this process, or start the interpreter that runs it; raises `ServableError` on failure."""
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
            )
        try:
            return LoadedProgram(program, device, num_threads)
        except ServableError:
            raise
        except (Exception, SystemExit) as error:  # of any framework, or of the user's own code
            raise unloadable(self.where(), error) from error


def absolute_path(path: str) -> str:
    """Return the absolute path of an existing file or folder; anything else, such as a hub id, is returned as it is.

    The settings of a model stay behind it.
    """
    place, settings = split_address(path)
    found = Path(place).expanduser()
    return join_address(str(found.absolute()), settings) if found.exists() else path


def unloadable(where: str, error: BaseException) -> ServableError:
    """Describe in one line why the servable `where` (`Servable.where`) can't be loaded."""
    cause = one_line(error)
    if isinstance(error, ModuleNotFoundError):
        return ServableError(
            f"{where}: it imports {error.name!r}, which is not installed here; install it, or name an interpreter that "
            'has it (python = "...")'
        )
    return ServableError(f"{where}: can't be loaded ({cause}); check the file, its framework and that one's version")


def file_digest(path: Path) -> bytes:
    """Hash a file's content; this process reads it again only if its size or time has changed."""
    stamp = path.stat()
    return _digest(path, stamp.st_size, stamp.st_mtime_ns)


@lru_cache(maxsize=256)
def _digest(path: Path, size: int, modified_ns: int) -> bytes:
    del size, modified_ns
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
