r"""Text made visible for display: control and invisible characters become escapes (`\x1b`, `\u202e`)."""

import base64
import math
import re
from typing import Any

# Unicode categories Cc, Cs, Zl, Zp, and Cf except the Arabic and Kaithi signs that are drawn around digits.
_UNSEEN = (
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
_EMOJI = r"\u2190-\u2bff\U0001f000-\U0001faff"
_JOINING_LETTERS, _INDIC_LETTERS = r"\u0620-\u08ff\u0900-\u1cff", r"\u0900-\u0dff"
# Joiners are spelling in Persian and Indic words and hold emoji families together; tags encode a region's flag.
_SPELLING = "|".join(
    (
        rf"(?<=[{_EMOJI}\ufe0f])\u200d(?=[{_EMOJI}])",
        rf"(?<=[{_JOINING_LETTERS}])[\u200c\u200d](?=[{_JOINING_LETTERS}])",
        rf"(?<=[{_INDIC_LETTERS}])\u200d",
        r"(?<=\U0001f3f4)[\U000e0030-\U000e0039\U000e0061-\U000e007a]{3,6}\U000e007f",
    )
)
_ESCAPED = re.compile(f"(?P<spelling>{_SPELLING})|{_UNSEEN}")
_NAMES = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def printable(text: str, max_characters: int | None = None) -> str:
    r"""Return a text as one line that shows everything in it.

    Control characters, direction marks, invisible characters and line breaks become escapes, and bytes of a name that
    isn't UTF-8 become `\xff`. A text longer than `max_characters` loses its middle to an ellipsis.
    """
    if not (text.isascii() and text.isprintable()):
        text = _ESCAPED.sub(_escape, text)
    return text if max_characters is None else shorten(text, max_characters)


def shorten(text: str, max_characters: int) -> str:
    """Cut the middle out of a long text: names differ at their ends, messages end with the remedy."""
    if len(text) <= max_characters:
        return text
    num_last = max_characters // 4
    return f"{text[: max_characters - num_last - 1]}…{text[len(text) - num_last :]}"


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if match["spelling"]:
        return character
    code = ord(character)
    if code < 0x80:
        return _NAMES.get(character, f"\\x{code:02x}")
    if 0xDC80 <= code <= 0xDCFF:  # a byte that Python could not decode
        return f"\\x{code - 0xDC00:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def is_text(name: str) -> bool:
    """Return whether a name can be stored as UTF-8; file systems also hold names that can't."""
    if name.isascii():
        return True
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def readable(name: str) -> str:
    r"""Return a name that isn't UTF-8 in readable form: stray bytes become escapes (`caf\xe9.jpg`)."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # lone surrogates that represent no byte, as JSON can contain them
        return name.encode("utf-8", "backslashreplace").decode("utf-8")


def plain_json(value: Any) -> Any:
    """Convert a value to JSON: bytes to Base64, times to ISO 8601, NaN and infinity to null, others to text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {name: plain_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(each) for each in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
