"""Import of a checkpoint of any kind, recognised by its content."""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shards.convert.checkpoint_hints import OPEN_CLIP_FILE, WEIGHT_SUFFIXES, find_weight_file, weights_hint
from shards.convert.known_files import Library, check_known_files, describe_import, write_record
from shards.convert.sentence_transformers import SentenceModel, find_sentence_model
from shards.convert.single_tower import import_timm, import_tower, read_timm_config, read_tower_config
from shards.convert.transformers_model import import_transformers, read_transformers_config
from shards.file_schema import read_json
from shards.model_config import CONFIG_FILE, ModelConfig, find_model_folder
from shards.model_errors import ModelError
from shards.model_summary import DELTA_FILE, fresh_towers
from shards.saving import staged_model
from shards.tensor_shapes import LOGIT_SCALE
from shards.towers.registry import CLASSES, IMPORTS, ONE_TOWERS
from shards.weights import describe_foreign, find_weights, read_entries

MAX_LISTED = 5
JOINED_TYPE = "vision-text-dual-encoder"
FIRST_LOGIT_SCALE = 2.6592  # transformers' default of `logit_scale_init_value`


@dataclass(frozen=True)
class Importer:
    """Functions for one kind of checkpoint: `convert` makes a model folder of it.

    `read_config` returns what config.json would be, given the folder and the model's name; the weights may be missing.
    `takes_text` says whether a picture may come with a text.
    """

    convert: Callable[..., ModelConfig]
    read_config: Callable[[Path, str], ModelConfig]
    library: Library = "transformers"
    takes_text: bool = False

    def check_joined(self, folder: Path) -> None:
        """Raise a ModelError if the model takes no picture with its caption."""
        if not self.takes_text:
            types = sorted(ONE_TOWERS)
            raise ModelError(
                f"{folder}: --join-captions embeds a picture and its caption as one item, and this model's towers are "
                f"apart, or take them apart; leave it out, or import one of model_type {', '.join(types)}"
            )


def import_checkpoint(
    src: str | Path, out: str | Path, *, name: str | None = None, join_captions: bool = False
) -> ModelConfig:
    """Convert a checkpoint into a model folder.

    Supported are two-tower models and single towers of transformers, models of open_clip, and vision towers of timm.
    `out` must be missing or empty; `name` defaults to the name of the folder `src`. With `join_captions`, a picture
    that has a caption is embedded with it, as one item. Raises a ModelError if the folder is a file or none of these,
    contradicts its configuration, has something that can't be mapped, or can't join captions.
    """
    folder, sentence = find_modules(find_checkpoint(src))
    importer = _importer(folder)
    if sentence is not None and importer.library != "transformers":
        raise ModelError(
            f"{sentence.root}: sentence-transformers' modules stand around a checkpoint of {importer.library}, which "
            "it can't load; give only the folder of the checkpoint"
        )
    if join_captions:
        importer.check_joined(folder)
    config = importer.convert(folder, Path(out), name=name or Path(src).name)
    declared = _declared_dimensions(config, folder, sentence)
    write_record(Path(out), describe_import(folder, importer.library, config, sentence))
    # A library saves the random weights of a new model like any others.
    if config.trained and (fresh_towers(out) or _has_first_temperature(folder, Path(out))):
        declared["trained"] = False
    if join_captions:
        declared["preprocess"] = config.preprocess.model_copy(update={"joins_captions": True})
    if declared:
        config = config.model_copy(update=declared)
        (Path(out) / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
    return config


def _declared_dimensions(config: ModelConfig, folder: Path, sentence: SentenceModel | None) -> dict[str, Any]:
    """Return the keys of config.json on dimensions that a checkpoint declares.

    Source: `matryoshka_dimensions` and `is_matryoshka` as jina's models write and vLLM reads them; the cards of
    Qwen3-VL-Embedding, which allow any, and of EmbeddingGemma 2, as their files say nothing; `truncate_dim` of
    sentence-transformers.
    """
    path, found = folder / CONFIG_FILE, dict[str, Any]()
    tree = read_json(path, "") if path.is_file() else {}
    listed = tree.get("matryoshka_dimensions")
    if isinstance(listed, list):
        sizes = sorted({size for size in listed if isinstance(size, int) and 1 <= size < config.embedding_dim})
        found = {"matryoshka": tuple(sizes)} if sizes else {}
    elif tree.get("is_matryoshka") is True or config.name.lower().startswith("qwen3-vl-embedding"):
        found = {"matryoshka": "any"}
    elif config.name.lower().startswith("embeddinggemma-2"):
        found = {"matryoshka": (128, 256, 512)}
    cut = None if sentence is None else sentence.dimensions
    return found | ({"dimensions": cut} if cut is not None and cut < config.embedding_dim else {})


def import_config(src: str | Path, out: str | Path, *, name: str | None = None) -> ModelConfig:
    """Write a model folder that holds only a checkpoint's config.json: enough for planning.

    Only the checkpoint's own configuration is needed. Weights are not read; if there are any, the names of their
    tensors supply details that the configuration lacks. Arguments and errors are those of `import_checkpoint`.
    """
    folder, sentence = find_modules(find_checkpoint(src))
    config = _importer(folder).read_config(folder, name or Path(src).name)
    config = config.model_copy(update=_declared_dimensions(config, folder, sentence))
    with staged_model(Path(out), config, None):
        return config


def _has_first_temperature(folder: Path, out: Path) -> bool:
    """Whether two towers of any families were joined without training, as the initial temperature shows."""
    path = folder / CONFIG_FILE
    tree = read_json(path, "") if path.is_file() else {}
    entry = read_entries(out).get(LOGIT_SCALE)
    if tree.get("model_type") != JOINED_TYPE or entry is None or entry.dtype != "F32":
        return False
    first = tree.get("logit_scale_init_value")
    with entry.path.open("rb") as file:
        file.seek(entry.start)
        return file.read(4) == struct.pack("<f", first if isinstance(first, float) else FIRST_LOGIT_SCALE)


def find_checkpoint(path: str | Path) -> Path:
    """Return the local folder of a checkpoint, without checking its content.

    Raises a ModelError if there is none; for a file of weights, the message says what is missing next to it.
    """
    file = Path(path).expanduser()
    if file.is_file() and file.name.lower().endswith(WEIGHT_SUFFIXES):
        raise ModelError(f"{path}: {weights_hint(file)}")
    if file.is_file() and (foreign := describe_foreign(file)) is not None:
        raise ModelError(f"{path}: {foreign}")
    return find_model_folder(path)


def find_modules(folder: Path) -> tuple[Path, SentenceModel | None]:
    """Return the folder of the checkpoint itself, and the modules of sentence-transformers around it, if there are any.

    Raises a ModelError for a file that alters vectors and can't be imported.
    """
    sentence = find_sentence_model(folder)
    inner = folder if sentence is None else sentence.checkpoint
    check_known_files(inner)
    return inner, sentence


def _importer(folder: Path) -> Importer:
    path = folder / CONFIG_FILE
    tree = read_json(path, "") if path.is_file() else {}
    model_type = str(tree.get("model_type"))
    if (folder / OPEN_CLIP_FILE).is_file() and not (model_type in CLASSES and _is_of_transformers(folder)):
        from shards.convert.open_clip_model import import_open_clip, read_model_config

        return Importer(import_open_clip, read_model_config, "open_clip")
    if model_type in ONE_TOWERS:
        from shards.convert.one_tower import import_one_tower, read_one_tower_config

        return Importer(import_one_tower, read_one_tower_config, takes_text=tree.get("vision_config") is not None)
    if model_type in CLASSES:
        return Importer(import_transformers, read_transformers_config)
    if model_type in IMPORTS:
        return Importer(import_tower, read_tower_config)
    if "architecture" in tree:
        return Importer(import_timm, read_timm_config, "timm")
    raise ModelError(f"{folder}: {_describe_found(folder, tree)}; {_describe_taken()}")


def _is_of_transformers(folder: Path) -> bool:
    """Whether the weights have transformers' names; hubs keep a model in both forms, or in one of them."""
    try:
        return any(name.startswith("vision_model.") for name in find_weights(folder))
    except ModelError:
        return False


def _describe_found(folder: Path, tree: dict[str, Any]) -> str:
    if "format_version" in tree:
        return "this is a model folder already, which commands take as it is"
    if (folder / DELTA_FILE).is_file():
        return f"this is a delta; make a model of it with `embedder model apply-delta BASE {folder} --out DIR`"
    if "model_type" in tree:
        return f"{CONFIG_FILE} says model_type = {tree['model_type']!r}{_describe_own_code(tree)}"
    if tree:
        return f"{CONFIG_FILE} has neither model_type nor architecture"
    if (weights := find_weight_file(folder)) is not None:
        return f"found {weights.name} and no {CONFIG_FILE}: {weights_hint(weights)}"
    names = ", ".join(sorted(each.name for each in folder.iterdir())[:MAX_LISTED])
    return f"found no {CONFIG_FILE} and no {OPEN_CLIP_FILE}, but {describe_foreign(folder) or names or 'nothing'}"


def _describe_own_code(tree: dict[str, Any]) -> str:
    """Say that a model's code lies in its own repository, and what could run it; nothing for other models."""
    named = tree.get("auto_map")
    if not isinstance(named, dict) or not named:
        return ""
    return (
        f", a model of its own repository's code ({next(iter(named.values()))}), which is never run; it would need a "
        "class of transformers, timm or open_clip, or run it from a program of yours (docs/servables.md)"
    )


def _describe_taken() -> str:
    types = ", ".join(sorted({*CLASSES, *IMPORTS, *ONE_TOWERS}))
    return f"checkpoints with these are taken: model_type {types}; {OPEN_CLIP_FILE}; architecture, as timm saves it"
