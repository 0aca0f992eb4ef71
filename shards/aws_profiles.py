"""What the profile files of `~/.aws` say, for clients that read only the environment.

Static keys, region and endpoint are read here. What needs a conversation (single sign-on, assumed roles, a credential
process) is left to boto3 where it is installed.

Source: the AWS SDKs' shared `config` and `credentials` files and their order of precedence: variables first.
"""

import importlib.util
import os
from collections.abc import Mapping
from configparser import ConfigParser, Error
from pathlib import Path
from typing import Any

_FILES = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
_GIVES_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SKIP_SIGNATURE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_KEYS = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_BY_CONVERSATION = ("sso_session", "sso_start_url", "role_arn", "credential_process", "login_session")


def profile_settings() -> tuple[dict[str, str], Any]:
    """What the chosen profile adds to the environment.

    Returns:
        Settings for obstore's S3 client, and a credential provider or None; nothing of what a variable already gives.
    """
    profile = _read_profile()
    settings = {}
    if region := profile.get("region"):
        settings["region"] = region
    if endpoint := profile.get("endpoint_url"):
        settings["endpoint"] = endpoint
    if "AWS_REGION" in os.environ or "AWS_DEFAULT_REGION" in os.environ:
        settings.pop("region", None)
    if "AWS_ENDPOINT_URL" in os.environ or "AWS_ENDPOINT_URL_S3" in os.environ:
        settings.pop("endpoint", None)
    if any(name in os.environ for name in _GIVES_CREDENTIALS):
        return settings, None
    if "aws_access_key_id" in profile:
        return settings | {ours: profile[theirs] for theirs, ours in _KEYS.items() if theirs in profile}, None
    if any(key in profile for key in _BY_CONVERSATION):
        return settings, _boto3_provider()
    return settings, None


def _read_profile() -> dict[str, str]:
    """The chosen profile's keys; credentials win over config where both files name one."""
    name = os.environ.get("AWS_PROFILE") or "default"
    found: dict[str, str] = {}
    for variable, file_name in reversed(_FILES.items()):
        path = Path(os.environ.get(variable) or f"~/.aws/{file_name}").expanduser()
        parser = ConfigParser(interpolation=None)
        try:
            parser.read(path, encoding="utf-8")
        except (Error, UnicodeDecodeError):
            continue  # a file that no SDK could read gives nothing; the message would quote its lines
        found |= _section(parser, name) or _section(parser, f"profile {name}")
    return found


def _section(parser: ConfigParser, name: str) -> Mapping[str, str]:
    return dict(parser[name]) if parser.has_section(name) else {}


def _boto3_provider() -> Any:
    """Let boto3 hold the conversation; None where it is not installed or gets nothing."""
    if importlib.util.find_spec("boto3") is None:
        return None
    import boto3

    if boto3.session.Session().get_credentials() is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider()
