#!/usr/bin/env python3
"""Write docs/configuration.md from the fields of the two configurations: every key with its type, default and meaning.

python scripts/generate_configuration_docs.py
"""

import re
from collections.abc import Iterator
from pathlib import Path

from embedder.config import RunConfig
from embedder.config_toml.config_reference import Section, kinds_of, sections_of
from embedder.plugins.train.train_config import TrainConfig

PAGE = Path(__file__).parents[1] / "docs/configuration.md"
HEAD = Path(__file__).with_name("configuration_head.md").read_text(encoding="utf-8")
RUN = "## A run\n\nRead by all commands but `embedder train`.\n"
KEYS_OF_A_RUN = "`[[source]]`, `[source.columns]` and `[decode]` have the keys of a run."
TRAINING = f"## A training run\n\nRead by `embedder train`. {KEYS_OF_A_RUN}\n"


def page() -> str:
    parts = [HEAD]
    training = sections_of(TrainConfig, known=kinds_of(RunConfig))
    for head, (top, *others) in ((RUN, sections_of(RunConfig)), (TRAINING, training)):
        parts += [head, "\n".join(_table(top))]
        by_heading: dict[str, list[Section]] = {}
        for section in others:  # a family's own tables may stand between two families
            by_heading.setdefault(section.heading, []).append(section)
        for heading, families in by_heading.items():
            if len(families) > 1:
                default = next(section.family for section in families if section.is_default)
                parts.append(f"### `{heading}`\n\nIts key `family` names one; without it: `{default}`.\n")
            for section in families:
                title = f"#### `{heading}` of `{section.family}`" if section.family else f"### `{heading}`"
                parts.append(f"{title}\n\n{section.summary}\n")
                parts.append("\n".join(_table(section)))
    return "\n".join(parts)


def _table(section: Section) -> Iterator[str]:
    yield "| key | type | default | unit | meaning |"
    yield "|---|---|---|---|---|"
    for key in section.keys:
        anchor = re.sub(r"[\[\].]", "", key.table)
        meaning = f"{key.meaning}; see [below](#{anchor})" if key.table else key.meaning
        cells = (f"`{key.name}`", _marked(key.type), _default(key.default), key.unit, meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _marked(text: str) -> str:
    return re.sub(r'"[^"]*"', r"`\g<0>`", text)


def _default(default: str) -> str:
    is_words = default == "required" or (" " in default and default[0] not in '["')
    return default if not default or is_words else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
