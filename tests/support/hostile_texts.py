"""Names and captions as attackers, accidents and the world's scripts make them; seeded."""

import random
import unicodedata

PIECES = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "\x1b[2J\x1b[1;1H",
    "\x9b31m",
    "\n2026-01-01T00:00:00Z exit 0: published (1.0 s)",
    "\r\n",
    "\t",
    "\x00",
    "\x7f",
    "\x08\x08\x08",
    "\u202egnp.exe\u202c",
    "\u2066iso\u2069",
    "\u200e\u200f",
    "\u200b\ufeff\u2060",
    "\u2028line\u2029paragraph",
    "\xad",
    "\x85",
    "\U000e0041\U000e0042",
    "[red]markup[/red]",
    "[/]",
    ":smile:",
    "👩‍❤️‍👨",
    "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",
    "🧑🏽‍🚀",
    "Åland Größe",
    "Привет, мир",
    "中文字幕",
    "안녕하세요",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते",
    "สวัสดี",
    "می\u200cخواهم",
    "Z\u0351\u0343algo",
    "</figcaption><script>alert(1)</script>",
    "$(touch pwned) `id` 'q' \"d\" \\n %s {x}",
    "plain words",
]
NUM_LONG = 10
LONG_CHARACTERS = 10_000


def texts(num, seed=0):
    """As many different strings, whole at both ends; ten of them have 10,000 characters or more."""
    rng = random.Random(seed)
    made = [f"{number}{''.join(rng.choices(PIECES, k=rng.randint(1, 4)))}." for number in range(num - NUM_LONG)]
    for number in range(NUM_LONG):
        unit = rng.choice(PIECES)
        made.append(f"long {number}{unit * (LONG_CHARACTERS // len(unit) + 1)}.")
    return made


def raw_characters(text):
    """What may not reach a terminal: controls, marks of direction and lone surrogates; line ends are the printer's."""
    bad = {"Cc", "Cs", "Zl", "Zp"}
    marks = "\u061c\u200b\u200e\u200f\u2060\ufeff\xad"
    return [
        character
        for character in text
        if character != "\n"
        and (
            unicodedata.category(character) in bad
            or "\u202a" <= character <= "\u202e"
            or "\u2066" <= character <= "\u2069"
            or character in marks
        )
    ]
