"""Client of the job interface of a Ray cluster's dashboard, by plain HTTP; imports no Ray.

Source: Ray 2.60 `dashboard/modules/job/job_head.py` (routes), `dashboard/modules/job/pydantic_models.py` (answers),
`_private/authentication` (tokens).
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

from embedder.errors import ConfigError, RunFailedError
from embedder.retrieval.http_client import HttpClient
from embedder.storage.http import Response
from embedder.storage.printable import printable
from shards.file_schema import parse_json

TIMEOUT_S = 10.0  # of a connection, and of an answer
PATIENCE_S = 8.0  # in which a request is retried; with a last one that waits, 18 s in all
PAUSE_S = 0.5
MAX_SHOWN = 300  # characters of what an unknown server answers
TOKEN_FILE = Path("~/.ray/auth_token")
TOKEN_CURE = (
    "give the cluster's token in RAY_AUTH_TOKEN, in the file that RAY_AUTH_TOKEN_PATH names, or in ~/.ray/auth_token"
)
IS_OVER = frozenset(("SUCCEEDED", "FAILED", "STOPPED"))


@dataclass(frozen=True)
class JobInfo:
    """State of a job, as the cluster reports it.

    `status` is PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED, `message` is Ray's about it, `metadata` the submitter's.
    `exit_code` is None unless the command ended by itself.
    """

    job_id: str
    status: str
    message: str = ""
    entrypoint: str = ""
    started_at: datetime | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self.status in IS_OVER


class JobServer(HttpClient):
    """Client of a cluster's job interface; requests are retried for some seconds if nothing answers."""

    service, example = "a Ray dashboard", "http://10.0.0.1:8265"

    def __init__(self, address: str, token: str | None = None) -> None:
        """Make a client, without a request; `address` is of the dashboard, such as http://10.0.0.1:8265.

        A `token` of None stands for what Ray would take: its variables, then its file. Raises `ConfigError` if the
        address is invalid, or the token's file can't be read.
        """
        if "://" not in address:
            raise ConfigError(f"{address}: it is no address of a Ray dashboard; write http://{address}, or https://")
        super().__init__(address, find_token() if token is None else token, TIMEOUT_S)
        self._has_answered = False

    def ray_version(self) -> str:
        """Version of the cluster's Ray."""
        found = self._read_json("/api/version")
        if not isinstance(found, dict) or not isinstance(version := found.get("ray_version"), str):
            raise self._unknown(json.dumps(found))
        return version

    def has_package(self, name: str) -> bool:
        """Whether the cluster still has what was uploaded under a name; it then keeps it for at least ten minutes."""
        return self._answer("GET", f"/api/packages/gcs/{quote(name)}", allowed=(404,)).status != 404

    def upload(self, name: str, content: bytes) -> None:
        """Upload a package; its name identifies its content, so that a second upload does no harm."""
        self._answer("PUT", f"/api/packages/gcs/{quote(name)}", content)

    def submit(self, request: Mapping[str, Any]) -> str:
        """Submit a job under the id that the request names, and return that id."""
        job_id = str(request["submission_id"])
        # A request that was cut off may have arrived: the second one then finds the id in use.
        try:
            answer = self._answer("POST", "/api/jobs/", json.dumps(request).encode(), allowed=(400, 500))
        except RunFailedError:  # a busy head may take longer to answer than to begin
            if any(job.job_id == job_id for job in self.jobs()):
                return job_id
            raise
        if answer.status < 300 or "already exists" in answer.data.decode(errors="replace"):
            return job_id
        raise self._refusal(answer)

    def jobs(self) -> list[JobInfo]:
        """List the submitted jobs, the newest first."""
        found = self._read_json("/api/jobs/")
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self._unknown(json.dumps(found))
        infos = [_info(each) for each in found if each.get("submission_id")]
        return sorted(infos, key=lambda info: info.started_at or datetime.max.replace(tzinfo=UTC), reverse=True)

    def job(self, job_id: str) -> JobInfo:
        """Describe one job; ConfigError if the cluster has no job with this id."""
        found = self._of_job("GET", job_id)
        if not isinstance(found, dict) or "status" not in found:
            raise self._unknown(json.dumps(found))
        return _info(found)

    def log(self, job_id: str) -> str:
        """All that the job has printed so far."""
        found = self._of_job("GET", job_id, "/logs")
        return str(found.get("logs") or "") if isinstance(found, dict) else ""

    def stop(self, job_id: str) -> bool:
        """Ask a job to stop; return at once, and whether it was running."""
        found = self._of_job("POST", job_id, "/stop")
        return bool(isinstance(found, dict) and found.get("stopped"))

    def _of_job(self, method: str, job_id: str, path: str = "") -> Any:
        answer = self._answer(method, f"/api/jobs/{quote(job_id, safe='')}{path}", allowed=(404,))
        if answer.status == 404:
            raise ConfigError(f"{self.url}: it has no job {job_id}; `embedder jobs list` names those that it has")
        return self._parse(answer)

    def _read_json(self, path: str) -> Any:
        return self._parse(self._answer("GET", path))

    def _parse(self, answer: Response) -> Any:
        try:
            return parse_json(answer.data)
        except ValueError:
            raise self._unknown(answer.data.decode(errors="replace")) from None

    def _answer(self, method: str, path: str, body: bytes | None = None, allowed: tuple[int, ...] = ()) -> Response:
        """Ask until something answers, for `PATIENCE_S` at most.

        Raises `ConfigError` if nothing has ever answered, it is no dashboard, or the token is not the cluster's;
        `RunFailedError` if what answered before doesn't any more, or it refuses the request.
        """
        stop_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                answer = self._ask_once(method, path, body, {})
            except (OSError, HTTPException) as error:
                if self._has_answered and time.monotonic() < stop_s:
                    time.sleep(PAUSE_S)
                    continue
                raise self._unreachable(error) from None
            if answer.status < 300 or answer.status in allowed:
                self._has_answered = True
                return answer
            raise self._refusal(answer)

    def _unreachable(self, error: Exception) -> Exception:
        found = f"{type(error).__name__}: {error}"
        if self._has_answered:
            return RunFailedError(
                f"{self.url}: the cluster's head has not answered any more for {PATIENCE_S:g} s ({found}); the job may "
                "continue or have ended with it: what it finished is kept, and the same submission continues later"
            )
        return ConfigError(
            f"{self.url}: it can't be reached ({found}); give the address of the cluster's dashboard, as {self.example}"
        )

    def _refusal(self, answer: Response) -> Exception:
        """Error for an unexpected answer."""
        text = answer.data.decode(errors="replace").strip()
        if answer.status in (401, 403):
            found = "it wants a token" if self._token is None else "it wants another token"
            return ConfigError(f"{self.url}: {found} ({answer.status}); {TOKEN_CURE}")
        if not self._has_answered:
            return self._unknown(text, answer.status)
        last = text.rpartition("\n")[2]  # of a traceback, the line that says what is wrong
        return RunFailedError(f"{self.url}: the cluster refuses this ({answer.status}): {printable(last, MAX_SHOWN)}")

    def _unknown(self, text: str, status: int = 200) -> ConfigError:
        return ConfigError(
            f"{self.url}: something answers there ({status} {printable(text, 80)!r}), but it is no Ray dashboard with "
            "jobs; its port is 8265 unless Ray was started with another, and Ray needs `ray[default]` there"
        )


def find_token(environ: Mapping[str, str] = os.environ) -> str | None:
    """Find the token that Ray's own clients would send, or None; ConfigError if RAY_AUTH_TOKEN_PATH is unusable."""
    if environ.get("RAY_AUTH_MODE") == "disabled":
        return None
    if token := environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named or TOKEN_FILE).expanduser()
    if not named and not path.is_file():
        return None
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(f"{path}: the cluster's token can't be read from it ({reason})") from None
    if not token and named:
        raise ConfigError(f"RAY_AUTH_TOKEN_PATH {path}: the file is empty; write the cluster's token into it")
    return token or None


def _info(found: Mapping[str, Any]) -> JobInfo:
    metadata = found.get("metadata")
    exit_code = found.get("driver_exit_code")
    return JobInfo(
        job_id=str(found.get("submission_id") or found.get("job_id") or ""),
        status=str(found.get("status") or "UNKNOWN"),
        message=str(found.get("message") or ""),
        entrypoint=str(found.get("entrypoint") or ""),
        started_at=_moment(found.get("start_time")),
        ended_at=_moment(found.get("end_time")),
        exit_code=exit_code if isinstance(exit_code, int) else None,
        metadata={str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {},
    )


def _moment(milliseconds: object) -> datetime | None:
    if not isinstance(milliseconds, int | float) or not 0 < milliseconds < 1e14:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC)
