"""Model folder as runs and queries open it: configuration, tokeniser and fingerprint; no weights."""

from dataclasses import dataclass, replace
from pathlib import Path

from embedder.config import RowSettings
from embedder.errors import ConfigError
from embedder.media.resize import Colour, ResizeSpec
from embedder.storage.model_download import resolve_model
from shards.fingerprint import model_fingerprint
from shards.model_config import TOKENIZER_FILE, ModelConfig, load_model_config
from shards.model_settings import join_address, split_address
from shards.tokenizer import read_tokenizer


@dataclass(frozen=True)
class Model:
    """Model folder, read as far as planning needs; without a text tower it needs no tokeniser."""

    uri: str
    folder: Path
    config: ModelConfig
    tokenizer_json: str | None
    fingerprint: str


def open_model(uri: str) -> Model:
    """Fetch the folder if it is remote, and read its configuration and tokeniser.

    Raises:
        shards.ModelError: the model folder is missing or incomplete, or its tokeniser is no text.
        ConfigError: its tokeniser is missing.
    """
    folder = resolve_model(uri)
    config = load_model_config(folder)
    tokenizer = folder / TOKENIZER_FILE
    has_text = config.text is not None
    if has_text and not tokenizer.is_file():
        raise ConfigError(f"model {folder}: no {TOKENIZER_FILE}; import the model again with `embedder model import`")
    place, settings = split_address(uri)
    uri = join_address(str(Path(place).absolute()), settings) if Path(place).exists() else uri
    tokenizer_json = read_tokenizer(tokenizer) if has_text else None
    return Model(uri, folder, config, tokenizer_json, model_fingerprint(folder))


def resize_spec(model: Model, colour: Colour = "srgb", frames_per_segment: int = 0) -> ResizeSpec:
    """Return how the model's images are read and resized; for a store, `colour` must be that it was made with.

    `frames_per_segment` is for the frames of clips, if the model takes them as one sequence.
    """
    return ResizeSpec.of(model.config.preprocess, model.config.required_vision, colour, frames_per_segment)


def rows_of_clips(rows: RowSettings, model: Model) -> RowSettings:
    """Return the settings with the number of frames of a segment that a model of clips takes; else unchanged."""
    num_frames = model.config.clip_frames
    if num_frames is None:
        return rows
    return replace(rows, frames_per_segment=num_frames, frames_from_start=True)
