"""Removal of secrets from text that others read."""

import os
import re

MASK = "***"
SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL", re.IGNORECASE)
PLACE_NAME = re.compile(r"_(PATH|FILE|DIR|URI|URL)$", re.IGNORECASE)  # the place of a secret is no secret
MIN_SECRET_CHARACTERS = 8  # masking shorter values would blank out words

_USER_INFO = re.compile(r"(?<=://)[^/?#\s@]+@")
_QUERY_VALUE = re.compile(
    r"(?i)(?<=[?&;\s\"'])"
    r"((?:[\w-]*(?:signature|secret|token|password|credential|api[_-]?key|access[_-]?key)[\w-]*|sig|key|pwd))"
    r"=([^&\s\"']+)"
)
_AUTHORIZATION = re.compile(r"(?i)\b(authorization:\s*(?:\w+\s+)?|bearer\s+(?=\S{16}))[^\s\"',]+")


def mask(text: str) -> str:
    """Replace secrets: names and passwords in addresses, signatures and tokens, headers, and values of the environment.

    The variables of this process whose names mark them as secret have secret values.
    """
    for name, value in os.environ.items():
        is_secret = SECRET_NAME.search(name) and not PLACE_NAME.search(name)
        if is_secret and len(value) >= MIN_SECRET_CHARACTERS:
            text = text.replace(value, MASK)
    text = _USER_INFO.sub(f"{MASK}@", text)
    text = _AUTHORIZATION.sub(rf"\g<1>{MASK}", text)
    return _QUERY_VALUE.sub(rf"\1={MASK}", text)
