"""A delta: the trained layers of a model, relative to its base's model folder."""

from pathlib import Path

from shards.fingerprint import model_fingerprint
from shards.loading import read_tensors
from shards.model_config import TOKENIZER_FILE, load_model_config
from shards.model_errors import ModelError
from shards.model_summary import read_delta
from shards.saving import staged_model, write_weights
from shards.tensor_shapes import OPTIONAL_SHAPES, model_shapes
from shards.weights import WEIGHTS_FILE, find_weights, read_header


def apply_delta(base: str | Path, delta: str | Path, folder: str | Path) -> Path:
    """Write the model of a base and its delta to a new or empty folder; raises a ModelError if they don't fit."""
    base, delta = Path(base), Path(delta)
    name, expected = read_delta(delta)
    config = load_model_config(base).model_copy(update={"name": name, "trained": True})
    if (found := model_fingerprint(base)) != expected:
        raise ModelError(f"{delta}: made over the base {expected}, and {base} is {found}; name the right base")
    shapes = model_shapes(config) | OPTIONAL_SHAPES
    changed = dict.fromkeys(read_header(delta / WEIGHTS_FILE), delta / WEIGHTS_FILE)
    if unknown := sorted(changed.keys() - shapes.keys()):
        raise ModelError(f"{delta}: holds the tensor {unknown[0]}, which {base} doesn't have; name the right base")
    files = find_weights(base) | changed
    tokenizer = base / TOKENIZER_FILE
    tokenizer_json = tokenizer.read_bytes().decode() if tokenizer.is_file() else None
    with staged_model(Path(folder), config, tokenizer_json) as stage:
        write_weights(stage, read_tensors(files, {name: shapes[name] for name in files}))
    return Path(folder)
