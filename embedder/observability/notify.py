"""Notifications that a run failed: a command, a webhook. They are time-limited, and never cause a second failure."""

import json
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from http.client import HTTPException
from typing import Any, BinaryIO

from embedder.config_toml.run_sections import OnFailure
from embedder.redaction import mask
from embedder.storage.http import Connections, Limits
from embedder.storage.web_address import WebAddressError, parse_address

LOG = logging.getLogger(__name__)

MAX_OUTPUT_CHARACTERS = 300
MAX_OUTPUT_BYTES = 1 << 14  # more than is shown, as secrets are masked before it is cut
MAX_VARIABLE = 30_000  # characters; the system takes 128 KiB
REAP_S = 2.0


def notify_failure(on_failure: OnFailure, summary: Mapping[str, Any]) -> None:
    """Run the command and call the webhook with a summary of `embedder.observability.run_summary`; log any problem."""
    if on_failure.command:
        LOG.info(f"on_failure.command: {run_command(on_failure.command, summary, on_failure.timeout_s) or 'done'}")
    if on_failure.webhook:
        LOG.info(
            f"on_failure.webhook: {call_webhook(on_failure.webhook, summary, on_failure.timeout_s) or 'delivered'}"
        )


def run_command(command: tuple[str, ...], summary: Mapping[str, Any], timeout_s: float) -> str | None:
    """Run a command with the summary as JSON on standard input, for at most `timeout_s` seconds.

    Returns the problem in one line; None if there was none.
    """
    given = {"EMBEDDER_EXIT_CODE": str(summary["exit_code"]), "EMBEDDER_MESSAGE": summary["message"][:MAX_VARIABLE]}
    try:
        # Output goes to a file: what the command leaves behind may hold a pipe open, or print without end.
        with tempfile.TemporaryFile() as output:
            # A separate session, so that a hanging command is killed with all its children.
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | given,
            )
            return _wait(process, command[0], summary, timeout_s) or _describe_end(process, command[0], output)
    except (OSError, ValueError) as error:
        return f"{command[0]} can't be started ({getattr(error, 'strerror', None) or error}); check its path and rights"


def _wait(process: "subprocess.Popen[bytes]", name: str, summary: Mapping[str, Any], timeout_s: float) -> str | None:
    try:
        process.communicate((json.dumps(summary) + "\n").encode(), timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return f"{name} took longer than timeout_s = {timeout_s:g} and was ended"
    return None


def _describe_end(process: "subprocess.Popen[bytes]", name: str, output: BinaryIO) -> str | None:
    if process.returncode == 0:
        return None
    output.seek(max(0, output.seek(0, os.SEEK_END) - MAX_OUTPUT_BYTES))
    said = mask(" ".join(output.read().decode(errors="replace").split()))[-MAX_OUTPUT_CHARACTERS:]
    return f"{name} ended with exit code {process.returncode}: {said or 'it said nothing'}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill the command and its children, and wait only a moment, because the kernel may block one."""
    with suppress(OSError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=REAP_S)


def call_webhook(url: str, summary: Mapping[str, Any], timeout_s: float) -> str | None:
    """POST the summary as JSON, with `text` for chats, and wait at most `timeout_s` seconds for the answer.

    Returns the problem, without the address, which is a secret; None if there was none.
    """
    answers: list[str | None] = []
    # In a thread, because no time limit applies to a name look-up.
    thread = threading.Thread(target=lambda: answers.append(_post(url, summary, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else f"no answer within timeout_s = {timeout_s:g}"


def _post(url: str, summary: Mapping[str, Any], timeout_s: float) -> str | None:
    text = f"embedder {summary['kind']} of {summary['store']}: {summary['message']}"
    body = json.dumps({"text": text, **summary}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "embedder"}
    limits = Limits(timeout_s, time.monotonic() + timeout_s)
    try:
        # Redirects aren't followed: they would send the summary to an address that nobody configured.
        with (
            closing(Connections()) as connections,
            connections.ask("POST", parse_address(url), limits, headers, body, use_proxy=True) as response,
        ):
            return None if response.status < 300 else f"the server answered {response.status}; check the address"
    except WebAddressError:
        reason = "it is no address of a web server"
    except TimeoutError:
        return f"no answer within timeout_s = {timeout_s:g}"
    except (OSError, HTTPException) as error:  # in the system's words, because those of a library may quote the address
        reason = (getattr(error, "strerror", None) or "").lower() or "its answer is not HTTP"
    return f"it can't be reached ({reason}); check the address and the network"
