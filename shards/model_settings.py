"""Settings of a model outside its folder: the instruction of items, that of queries, and how many dimensions are kept.

A model with settings has its own address, `FOLDER#dimensions=512&item_instruction=...`, so that a stage on
another node, a later run and a search find the same one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qsl, quote

from pydantic import Field, ValidationError, model_validator

from shards.file_schema import ModelSection, describe
from shards.model_errors import ModelError
from shards.preprocess import INSTRUCTION_PLACE, PreprocessConfig

if TYPE_CHECKING:
    from shards.model_config import ModelConfig

# Prompts of sentence-transformers around an instruction: of Qwen3-Embedding and E5-instruct, and of EmbeddingGemma.
_INSTRUCTED = (r"(Instruct: ).+(\nQuery: ?)", r"(task: ).+( \| query: )")


class ModelSettings(ModelSection):
    """Settings of a model; None leaves what the model folder says."""

    query_instruction: str | None = Field(None, description="instruction of queries; stored vectors don't depend on it")
    item_instruction: str | None = Field(None, description="instruction of items, pictures and captions")
    dimensions: int | None = Field(None, ge=1, description="first values of the vectors that are kept")
    force_dimensions: bool = Field(False, description="also of a model that isn't known to be trained for it")

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        for key in ("query_instruction", "item_instruction"):
            if (text := getattr(self, key)) is not None and not text.strip():
                raise ValueError(f"{key} is empty; write one, or leave it out for the model's own")
        if self.force_dimensions and self.dimensions is None:
            raise ValueError("force_dimensions goes with dimensions; write how many are kept")
        return self

    @property
    def changes_vectors(self) -> bool:
        """Whether stored vectors depend on them."""
        return self.dimensions is not None or self.item_instruction is not None


_ADDRESS = re.compile(rf"(.+)#((?:{'|'.join(ModelSettings.model_fields)})=.*)", re.DOTALL)


def join_address(uri: str, settings: ModelSettings) -> str:
    """Return the address of a model with settings; `uri` itself where there are none."""
    given = settings.model_dump(mode="json", exclude_defaults=True)
    text = "&".join(f"{key}={quote(str(value), safe=' ')}" for key, value in given.items())
    return f"{uri}#{text}" if text else uri


def split_address(uri: str) -> tuple[str, ModelSettings]:
    """Return address and settings of a model; raises a ModelError for settings that there are none of."""
    found = _ADDRESS.fullmatch(uri)
    if found is None:
        return uri, ModelSettings()
    try:
        settings = ModelSettings.model_validate_strings(dict(parse_qsl(found[2].replace("+", "%2B"), True)))
    except ValidationError as error:
        raise ModelError(f"model {uri}: {describe(error)}") from None
    return found[1], settings


def address_as_recorded(given: str | None, recorded: str) -> str:
    """Return the address of a model that has moved to `given`, if it has, with the settings that a store recorded.

    Settings of `given` that change vectors stand; the instruction of queries is its own in any case.
    """
    if given is None:
        return recorded
    place, settings = split_address(given)
    if settings.changes_vectors:
        return given
    known = split_address(recorded)[1]
    asked = settings.query_instruction
    return join_address(place, known if asked is None else known.model_copy(update={"query_instruction": asked}))


def apply_settings(config: ModelConfig, settings: ModelSettings, folder: Path) -> ModelConfig:
    """Return a model's configuration with settings that change its vectors; raises a ModelError if it allows none."""
    where = f"model {config.name!r}"
    if settings.dimensions is not None:
        _check_dimensions(config, settings.dimensions, is_forced=settings.force_dimensions)
        config = config.model_copy(update={"dimensions": settings.dimensions})
    if settings.item_instruction is None:
        return config
    prompt = instructed_prompt(config.preprocess, settings.item_instruction, where, of_items=True)
    _check_room(config, folder, prompt, f"{where}: item_instruction")
    preprocess = config.preprocess.model_copy(update={"caption_prompt": prompt})
    update: dict[str, object] = {"preprocess": preprocess}
    if config.vision is not None and config.vision.takes_text and config.vision.prompts_pictures:
        vision = config.vision.model_dump()
        ids = ids_before_pictures(folder, tuple(vision["ids_before"]), config.preprocess.caption_prompt, prompt)
        update["vision"] = config.vision.model_validate(vision | {"ids_before": ids})
    return config.model_copy(update=update)


def _check_room(config: ModelConfig, folder: Path, prompt: str, where: str) -> None:
    """Raise a ModelError where a prompt leaves no token to the text behind it."""
    from shards.model_config import TOKENIZER_FILE
    from shards.tokenizer import parse_tokenizer

    path, limit = folder / TOKENIZER_FILE, config.preprocess.max_caption_tokens
    if not path.is_file():
        return
    tokenizer = parse_tokenizer(path.read_text(encoding="utf-8"), str(folder))
    tokenizer.no_truncation()
    num_tokens = len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    num_tokens += int(tokenizer.num_special_tokens_to_add(False))
    if num_tokens >= limit:
        raise ModelError(
            f"{where}: with what stands around it, it fills the {limit:,} tokens that the model reads; shorten it, so "
            "that a text has room behind it"
        )


def _check_dimensions(config: ModelConfig, dimensions: int, *, is_forced: bool) -> None:
    where = f"model {config.name!r}: dimensions = {dimensions}"
    if dimensions >= config.vector_dim:
        raise ModelError(f"{where}: its vectors have {config.vector_dim} values; ask for fewer, or leave it out")
    known = config.matryoshka
    if is_forced or known == "any" or (known is not None and dimensions in known):
        return
    if known is not None:
        raise ModelError(f"{where}: it is trained to be cut to {', '.join(map(str, known))}; write one of them")
    raise ModelError(
        f"{where}: its checkpoint doesn't say that it is trained to be cut (Matryoshka), so its first values may "
        "find other items; leave it out, or write force_dimensions = true and measure what is lost with "
        "`embedder evaluate`"
    )


def instructed_prompt(preprocess: PreprocessConfig, instruction: str, where: str, *, of_items: bool = False) -> str:
    """Return the prompt with an instruction in it, of queries or of items; raises a ModelError if it has no place."""
    form = instruction_form(preprocess, of_items=of_items)
    if form is None:
        who = "items" if of_items else "queries"
        raise ModelError(
            f"{where} takes no instruction of {who}: its prompts have no place for one; leave it out, or import its "
            "checkpoint again if an earlier version made the folder"
        )
    return form.replace(INSTRUCTION_PLACE, instruction.strip())


def instruction_form(preprocess: PreprocessConfig, *, of_items: bool = False) -> str | None:
    """Return the prompt of queries, or of items, with a mark in the place of the instruction; None without one."""
    if preprocess.instruction_form:
        return preprocess.instruction_form
    prompt = preprocess.caption_prompt if of_items else preprocess.query_prompt
    found = next((found for form in _INSTRUCTED if (found := re.fullmatch(form, prompt, re.DOTALL))), None)
    return None if found is None else f"{found[1]}{INSTRUCTION_PLACE}{found[2]}"


def default_instruction(preprocess: PreprocessConfig) -> str | None:
    """Return the instruction of queries in the model's own prompt; None if it takes none."""
    form = instruction_form(preprocess)
    if form is None:
        return None
    before, _, after = form.partition(INSTRUCTION_PLACE)
    return preprocess.query_prompt.removeprefix(before).removesuffix(after)


def ids_before_pictures(folder: Path, ids: tuple[int, ...], prompt: str, wanted: str) -> tuple[int, ...]:
    """Return the token ids in front of a picture, with another prompt; a ModelError if they don't begin with it."""
    from shards.model_config import TOKENIZER_FILE
    from shards.tokenizer import parse_tokenizer

    tokenizer = parse_tokenizer((folder / TOKENIZER_FILE).read_text(encoding="utf-8"), str(folder))
    tokenizer.no_truncation()
    before, after = (tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (prompt, wanted))
    if ids[: len(before)] != before:
        raise ModelError(f"{folder}: what stands before a picture is not its caption_prompt; import the model again")
    return (*after, *ids[len(before) :])
