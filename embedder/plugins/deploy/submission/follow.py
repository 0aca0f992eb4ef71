"""Following of a job's log until the job has ended."""

import time
from collections.abc import Iterator

from embedder.errors import RunFailedError
from embedder.plugins.deploy.submission.job_server import JobInfo, JobServer

INTERVAL_S = 1.0
MAX_INTERVAL_S = 10.0
BYTES_PER_S = 1 << 20  # Ray's interface only gives whole logs, so a long one is fetched less often


def follow_log(server: JobServer, job_id: str) -> Iterator[str]:
    """Yield pieces of a job's log as they come, each of whole lines, to its end.

    Raises `ConfigError` if there is no such job; `RunFailedError` if it failed or was stopped, or the head doesn't
    answer any more.
    """
    num_shown = 0
    while True:
        info = server.job(job_id)  # before the log, so that nothing that an ended job wrote is missed
        log = server.log(job_id)
        if len(log) < num_shown:  # started again
            num_shown = 0
        end = len(log) if info.is_over else log.rfind("\n") + 1  # a line may still be written
        if piece := log[num_shown:end]:
            num_shown = end
            yield piece
        if info.is_over:
            check_ended(info, log)
            return
        time.sleep(min(max(INTERVAL_S, len(log) / BYTES_PER_S), MAX_INTERVAL_S))


def check_ended(info: JobInfo, log: str = "") -> None:
    """Raise a RunFailedError if a job that has ended failed or was stopped."""
    if info.status == "SUCCEEDED":
        return
    if info.status == "STOPPED":
        raise RunFailedError(
            f"job {info.job_id} was stopped; what is finished is kept, and the same submission continues it"
        )
    code = f" with exit code {info.exit_code}" if info.exit_code is not None else ""
    last = (log.strip() or info.message.strip() or "it left no log").rpartition("\n")[2]
    raise RunFailedError(f"job {info.job_id} failed{code}: {last}")
