"""Servables in another interpreter: a child process for a framework that can't share this environment.

Batches and tables travel as Arrow IPC. The child (`embedder.process`) serves `program.py`. It gets only a few named
environment variables, none of which holds a secret.
"""

import json
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from embedder.process.child import ChildDiedError, ChildError, ChildProcess, module_search_path
from embedder.process.child_main import FAILED
from embedder.servables import program as program_file
from embedder.servables.program import BATCH, READY, TABLE, ServableProgram
from embedder.servables.servable_errors import ServableError, shorten_line

MIN_PYTHON = (3, 9)
MIN_PYARROW = (14,)
"""Oldest pyarrow with fixed-shape tensor arrays and the IPC format that this one writes."""
CALL_S = LOAD_S = 3600.0
"""Default limit, in seconds, for a call and for loading."""

PASSED = {
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
    *("XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
}
PASSED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_", "VLLM_")
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)


@dataclass(frozen=True)
class InterpreterLimits:
    """Limits on a child process; `start_s` lasts until its first message, before `load_s`; `call_s` is for one batch.

    It is restarted until it has died or hung `max_deaths` times within the last `calls` batches. To find one row that
    kills it takes about log2 of the batch size.
    """

    start_s: float = 120.0
    load_s: float = LOAD_S
    call_s: float = CALL_S
    max_deaths: int = 16
    calls: int = 200
    memory_bytes: int | None = None


class ChildProgram:
    """Program in a child process, as `embedder.servables.servable.Computation`; only one thread calls it at a time."""

    def __init__(
        self,
        command: list[str],
        start: Mapping[str, Any],
        where: str,
        limits: InterpreterLimits,
        sys_path: Sequence[str] | None = None,
    ) -> None:
        """Start the child with the arguments `start` of `program.serve` and wait; ServableError if it fails."""
        self._sys_path = sys_path
        self._command, self._start, self._where, self._limits = command, start, where, limits
        self._deaths: deque[bool] = deque(maxlen=limits.calls)
        self.versions: dict[str, Any] = {}
        self._child: ChildProcess | None = self._start_child()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None from its death until the next batch."""
        return self._child.pid if self._child else None

    def __call__(self, batch: pa.RecordBatch) -> pa.Table:
        """Compute a batch; ChildError for this batch (the next one restarts it), ServableError if it is given up."""
        child = self._child or self._start_child()
        self._child = child
        try:
            child.send(BATCH, _stream(batch), self._limits.call_s)
            kind, payload = child.receive(self._limits.call_s)
            if kind not in (TABLE, FAILED):
                raise ChildDiedError(f"its process sent a message {kind!r} in the place of a table")
        except ChildDiedError as error:
            self._note_loss(error)
        except BaseException:  # Ctrl-C: what this call is answered later would be taken for the next one's answer
            self._child = None
            child.kill()
            raise
        self._deaths.append(False)
        if kind == FAILED:
            raise ChildError(_describe_error(payload))
        table = pa.ipc.open_stream(payload).read_all()
        table.validate(full=True)  # of another version, or of code that wrote past an array
        return table

    def close(self) -> None:
        """End the child, after a moment to release what it holds."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _note_loss(self, error: ChildDiedError) -> None:
        """Clean up after a dead child; raise `ServableError` if it has died too often, else `ChildDiedError`."""
        if self._child is not None:
            self._child.kill()
        self._child = None
        self._deaths.append(True)
        if sum(self._deaths) > self._limits.max_deaths:
            raise ServableError(
                f"{self._where}: {error}; that was death {sum(self._deaths)} in {len(self._deaths)} batches, and "
                f"{self._limits.max_deaths} are allowed; check memory, device and the program"
            ) from None
        raise error

    def _start_child(self) -> ChildProcess:
        try:
            child = ChildProcess(
                self._command,
                program_file.__file__,
                self._start,
                env=child_environment(os.environ, self._start["num_threads"]),
                sys_path=self._sys_path,
                memory_bytes=self._limits.memory_bytes,
            )
        except OSError as error:
            python = f"python = {self._command[0]!r}"
            raise ServableError(
                f"{self._where}: {python} can't be started ({error.strerror}); name a Python's executable"
            ) from None
        try:
            self.versions = self._greet(child)
            kind, payload = child.receive(self._limits.load_s)
        except ChildDiedError as error:
            child.kill()
            raise ServableError(f"{self._where}: can't be loaded: {error}; check that interpreter") from None
        except BaseException:
            child.kill()
            raise
        if kind == READY:
            return child
        child.kill()
        raise self._unloadable(payload)

    def _greet(self, child: ChildProcess) -> dict[str, Any]:
        """Read the child's first message, else raise `ChildDiedError`; raise `ServableError` if versions differ."""
        kind, payload = child.receive(self._limits.start_s)
        found: dict[str, Any] = json.loads(bytes(payload))
        if kind == FAILED:  # only pyarrow is imported by the program's file
            found |= {"pyarrow": None, "error": found["message"]}
        for name, least in (("python", MIN_PYTHON), ("pyarrow", MIN_PYARROW)):
            version = found[name]
            if version is None or _numbers(version) < least:
                rule = ".".join(map(str, least))
                said = f"version {version}" if version else f"none ({found.get('error')})"
                cure = "name a newer one" if name == "python" else f"{self._command[0]} -m pip install -U pyarrow"
                raise ServableError(
                    f"{self._where}: python = {self._command[0]!r}: of {name}, found {said}; {rule} or later is "
                    f"needed; {cure}"
                )
        return found

    def _unloadable(self, payload: bytearray) -> ServableError:
        missing = json.loads(bytes(payload)).get("missing")
        interpreter = f"python = {self._command[0]!r}"
        if missing:
            return ServableError(
                f"{self._where}: it imports {missing!r}, which {interpreter} doesn't have; install it there"
            )
        return ServableError(
            f"{self._where}: can't be loaded by {interpreter} ({_describe_error(payload)}); check the file and "
            "the framework's version there"
        )


def start_program(
    python: str,
    program: ServableProgram,
    *,
    where: str,
    device: str,
    num_threads: int,
    limits: InterpreterLimits | None = None,
    search_path: Sequence[str] = (),
) -> ChildProgram:
    """Start the interpreter `python` (path or name), which loads a program.

    `where` names the servable in messages; `device` is torch's name; `limits` None means the defaults; `search_path`
    follows that interpreter's own, of this one the path of this process: PYTHONPATH and the user's own packages count.
    Raises a ServableError if it can't start or load, or has incompatible versions.
    """
    found = shutil.which(Path(python).expanduser())
    if found is None:
        raise ServableError(f"{where}: python = {python!r}: there is no such executable; name a Python's path")
    start = {
        "program": {"place": program.place, "name": program.name, "settings": dict(program.settings)},
        "device": device,
        "num_threads": num_threads,
        "search_path": list(search_path),
    }
    # The path isn't resolved: a virtual environment's interpreter is a link, and finds the environment by its own path.
    command = [os.path.abspath(found), "-I", "-X", "utf8"]  # noqa: PTH100
    sys_path = module_search_path() if python == sys.executable else None
    return ChildProgram(command, start, where, limits or InterpreterLimits(), sys_path)


def child_environment(environment: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Return the environment variables for a child: those of the system and of devices, none with a secret's name."""
    passed = {
        name: value
        for name, value in environment.items()
        if (name in PASSED or name.startswith(PASSED_PREFIXES)) and not SECRET.search(name)
    }
    threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return passed | threads | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _stream(batch: pa.RecordBatch) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def _describe_error(payload: bytearray) -> str:
    found = json.loads(bytes(payload))
    return shorten_line(f"{found['type']}: {found['message']}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
