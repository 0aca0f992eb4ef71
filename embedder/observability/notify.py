"""Tell somebody that a run failed: a command, a webhook. Time-limited, and never a second failure."""

import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from embedder.config import OnFailure
from embedder.observability.redaction import mask

Say = Callable[[str], None]

MAX_OUTPUT_CHARACTERS = 300
REAP_S = 2.0


def notify_failure(wish: OnFailure, summary: Mapping[str, Any], say: Say) -> None:
    """Run the command and call the webhook, each for at most `timeout_s`; what goes wrong is said, not raised."""
    if wish.command:
        problem = run_command(wish.command, summary, wish.timeout_s)
        say(f"on_failure.command: {problem}" if problem else "on_failure.command: done")
    if wish.webhook:
        problem = call_webhook(wish.webhook, summary, wish.timeout_s)
        say(f"on_failure.webhook: {problem}" if problem else "on_failure.webhook: delivered")


def run_command(command: tuple[str, ...], summary: Mapping[str, Any], timeout_s: float) -> str | None:
    """Run a command with the summary as JSON on standard input; says what went wrong, or nothing."""
    try:
        # A session of its own, so that a command which hangs is ended with all that it started.
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"EMBEDDER_EXIT_CODE": str(summary["exit_code"]), "EMBEDDER_MESSAGE": summary["message"]},
        )
    except (OSError, ValueError) as error:
        return f"{command[0]} can't be started ({getattr(error, 'strerror', None) or error}); check its path and rights"
    try:
        output, _ = process.communicate((json.dumps(summary) + "\n").encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"{command[0]} took longer than timeout_s = {timeout_s:g} and was ended"
    if process.returncode == 0:
        return None
    said = mask(" ".join(output.decode(errors="replace").split()))[-MAX_OUTPUT_CHARACTERS:]
    return f"{command[0]} ended with exit code {process.returncode}: {said or 'it said nothing'}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the command and its children; not waited for where the kernel holds one fast."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=REAP_S)
    except (OSError, subprocess.TimeoutExpired):
        return


def call_webhook(url: str, summary: Mapping[str, Any], timeout_s: float) -> str | None:
    """POST the summary as JSON, with `text` for chats; says what went wrong, without the address, which is a secret."""
    answers: list[str | None] = []
    # In a thread: a server that sends a byte now and then would outlast the time limit of each single read.
    thread = threading.Thread(target=lambda: answers.append(_post(url, summary, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else f"no answer within timeout_s = {timeout_s:g}"


def _post(url: str, summary: Mapping[str, Any], timeout_s: float) -> str | None:
    text = f"embedder {summary['kind']} of {summary['store']}: {summary['message']}"
    body = json.dumps({"text": text, **summary}).encode()
    try:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        with _opener.open(request, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered {error.code}; check the address"
    except (OSError, HTTPException, ValueError) as error:
        return f"it can't be reached ({type(error).__name__}); check the address and the network"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A webhook that points elsewhere would carry the summary to a place that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)
