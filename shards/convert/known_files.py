"""Known files of a checkpoint that alter its vectors: which an import reads, which have no influence, which it refuses.

`embedder model info` shows the record that an import leaves in the model folder.
"""

import json
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shards.convert.checkpoint_hints import OPEN_CLIP_FILE
from shards.convert.preprocessing import (
    COMBINED_PROCESSOR_FILE,
    PROCESSOR_FILE,
    TOKENIZER_CONFIG_FILE,
    VIDEO_PROCESSOR_FILE,
    read_processor,
)
from shards.convert.sentence_transformers import LIMIT_FILES, MODULES_FILE, SETTINGS_FILE, SentenceModel
from shards.file_schema import read_json
from shards.model_config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig
from shards.model_errors import ModelError
from shards.model_summary import IMPORT_FILE
from shards.weights import WEIGHTS_FILE, stored_names

ADAPTER_FILE = "adapter_config.json"
CHAT_FILES = "chat_template*"
VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "*.model")

Library = Literal["transformers", "open_clip", "timm"]


class KnownFile(NamedTuple):
    """A kind of file by the pattern of its name: what it holds, and who reads it.

    `libraries` are the kinds of checkpoints in which it counts, `side` the tower that it belongs to ("" for both).
    """

    pattern: str
    holds: str
    libraries: tuple[Library, ...] = ()
    side: str = ""


_BOTH: tuple[Library, ...] = ("transformers", "open_clip")
KNOWN_FILES = (
    KnownFile(CONFIG_FILE, "towers", ("transformers", "timm")),
    KnownFile(OPEN_CLIP_FILE, "towers and image processing", ("open_clip",)),
    KnownFile("open_clip_*.safetensors*", "weights", ("open_clip",)),
    KnownFile("*.safetensors*", "weights", ("transformers", "open_clip", "timm")),
    KnownFile("*pytorch_model*.bin*", "weights", ("transformers", "open_clip", "timm")),
    KnownFile(PROCESSOR_FILE, "image processing", ("transformers",), "vision"),
    KnownFile(COMBINED_PROCESSOR_FILE, "image processing", ("transformers",), "vision"),
    *(
        KnownFile(name, "tokeniser", _BOTH, "text")
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "added_tokens.json")
    ),
    *(KnownFile(name, "tokeniser", _BOTH, "text") for name in VOCABULARIES),
    *(KnownFile(name, f"sentence-transformers' settings, but no {MODULES_FILE}") for name in LIMIT_FILES),
    KnownFile(SETTINGS_FILE, f"sentence-transformers' settings, but no {MODULES_FILE}"),
    KnownFile("generation_config.json", "how text is generated"),
    KnownFile(CHAT_FILES, "how chats become text"),
    KnownFile(VIDEO_PROCESSOR_FILE, "video processing", ("transformers",), "vision"),
    KnownFile("feature_extractor_config.json", "audio processing"),
    KnownFile("*.json", "a file that is not known here"),
)
"""The first pattern that a file's name fits counts; other files hold nothing that a library reads."""


def check_known_files(folder: Path) -> None:
    """Raise a ModelError for a checkpoint whose files say that the model is more than its weights."""
    adapter = folder / ADAPTER_FILE
    if adapter.is_file():
        tree = read_json(adapter, "fetch it again")
        kind, base = tree.get("peft_type") or "PEFT", tree.get("base_model_name_or_path") or "BASE"
        raise ModelError(
            f"{adapter}: this is a {kind} adapter over {base}, which an import doesn't merge; merge it with PEFT: "
            f"PeftModel.from_pretrained(AutoModel.from_pretrained({base!r}), {str(folder)!r}).merge_and_unload()"
            ".save_pretrained(DIR), put the base's tokeniser and image processor next to it, and give DIR"
        )
    path = folder / CONFIG_FILE
    tree = read_json(path, "") if path.is_file() else {}
    if isinstance(found := tree.get("quantization_config"), dict):
        raise ModelError(
            f"{path}: quantization_config says that the weights are quantised "
            f"({found.get('quant_method', 'by an unnamed method')}); give the model that it was made of, or save "
            "AutoModel.from_pretrained(...).dequantize() where that method can"
        )
    if {"sentence_transformers", "sbert_ce_default_activation_function"} & tree.keys():
        raise ModelError(
            f"{path}: this is a CrossEncoder of sentence-transformers: it scores pairs of texts and has no vectors; "
            "give a SentenceTransformer"
        )


def write_record(out: Path, record: dict[str, Any]) -> None:
    """Write what an import did with each file into a model folder."""
    (out / IMPORT_FILE).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def describe_import(
    folder: Path, library: Library, config: ModelConfig, sentence: SentenceModel | None
) -> dict[str, Any]:
    """Return what an import does with each file of a checkpoint, and which won where they disagree.

    `folder` is the checkpoint's own folder; `sentence` are the modules of sentence-transformers around it.
    """
    uses = dict(sentence.uses) if sentence is not None else {}
    files = [{"file": name, "use": "read", "what": what} for name, what in uses.items()]
    for path in sorted(folder.iterdir()):
        known = next((each for each in KNOWN_FILES if fnmatch(path.name, each.pattern)), None)
        named = str(path.relative_to(sentence.root)) if sentence is not None else path.name
        if known is not None and path.is_file() and named not in uses:
            use, why = _use_of(known, path, library, config)
            files.append({"file": named, "use": use, "what": known.holds + why})
    return {"files": files, "decisions": list(_decisions(folder, library, config, sentence))}


def _use_of(known: KnownFile, path: Path, library: Library, config: ModelConfig) -> tuple[str, str]:
    """Return whether a file was read, and why not."""
    winner = _winner(path, config) if library in known.libraries else None
    if winner is not None:
        return "no influence", f"; {winner} wins"
    if config.is_one_tower and known.pattern == CHAT_FILES:
        return "read", " around an item"
    unread = {
        PROCESSOR_FILE: "; images are processed as clips" if config.clip_frames is not None else None,
        VIDEO_PROCESSOR_FILE: None if _takes_videos(config) else "; frames are processed as images",
    }.get(known.pattern)
    if unread is not None:
        return "no influence", unread
    if library not in known.libraries:
        return "no influence", f"; not read with {library}'s files" if known.libraries else ""
    if known.side and known.side not in config.towers:
        return "no influence", f"; the model has no {known.side} tower"
    return "read", ""


def _winner(path: Path, config: ModelConfig) -> str | None:
    """Return the file that is read in the place of another one that holds the same."""
    combined = path.with_name(COMBINED_PROCESSOR_FILE)
    kinds = {PROCESSOR_FILE: "image_processor"} if config.clip_frames is None else {}
    kinds |= {VIDEO_PROCESSOR_FILE: "video_processor"} if _takes_videos(config) else {}
    tree = read_json(combined, "") if config.vision is not None and combined.is_file() else {}
    if kinds.get(path.name) in tree:
        return combined.name
    own = PROCESSOR_FILE if config.clip_frames is None else VIDEO_PROCESSOR_FILE
    if path == combined and not (tree.keys() & kinds.values()) and path.with_name(own).is_file():
        return own
    if any(fnmatch(path.name, each) for each in VOCABULARIES) and path.with_name(TOKENIZER_FILE).is_file():
        return TOKENIZER_FILE
    if fnmatch(path.name, "*pytorch_model*.bin*"):
        safe = path.name.partition("pytorch_model")[0] + WEIGHTS_FILE
        return next((each for each in (safe, f"{safe}.index.json") if path.with_name(each).is_file()), None)
    return None


def _takes_videos(config: ModelConfig) -> bool:
    return config.clip_frames is not None or config.preprocess.clips is not None


def _decisions(folder: Path, library: Library, config: ModelConfig, sentence: SentenceModel | None) -> Iterator[str]:
    """Yield a line for each setting of which a checkpoint's files say different things."""
    path = folder / CONFIG_FILE
    tree: dict[str, Any] = read_json(path, "") if path.is_file() else {}
    if library == "transformers" and "AutoModel" in (tree.get("auto_map") or {}):
        code = tree["auto_map"]["AutoModel"]
        yield f"{CONFIG_FILE} names its own code ({code}), which isn't run: transformers' class wins"
    adapters = [path.parent.name for path in sorted(folder.glob(f"*/{ADAPTER_FILE}"))] or tree.get("lora_adaptations")
    if adapters:
        yield f"adapters for tasks ({', '.join(map(str, adapters))}) aren't applied: the vectors are only the base's"
    lost = [name for name in (*LIMIT_FILES, SETTINGS_FILE, "1_Pooling") if (folder / name).exists()]
    if sentence is None and lost:
        yield f"found {lost[0]} and no {MODULES_FILE}: the vectors are only those of {library}; fetch it for others"
    if config.text is not None and library != "timm":
        yield from _caption_decisions(folder, config, sentence)
    if config.vision is not None and library == "transformers":
        section = tree.get("vision_config", tree)
        stated, used = section.get("image_size"), config.preprocess.image_size
        if isinstance(stated, int) and stated != used:
            yield f"image size: {used} px of the image processor wins over {stated} of {CONFIG_FILE}"
    if config.clip_frames is not None:
        path, settings = read_processor(folder, "video")
        stated = {key: settings.get(key) for key in ("num_frames", "fps") if settings.get(key) is not None}
        if stated and stated != {"num_frames": config.clip_frames}:
            yield f"frames of a clip: {config.clip_frames} of {CONFIG_FILE} win over {stated} of {path.name}"
    if library == "open_clip" and (folder / PROCESSOR_FILE).is_file():
        yield f"image processing: {OPEN_CLIP_FILE} wins over {PROCESSOR_FILE}"
    if sentence is not None and sentence.pools and config.text is not None and _has_pooler(folder):
        yield f"pooling: {' + '.join(sentence.pools)} of {MODULES_FILE} wins over the checkpoint's pooler"


def _caption_decisions(folder: Path, config: ModelConfig, sentence: SentenceModel | None) -> Iterator[str]:
    path = folder / TOKENIZER_CONFIG_FILE
    settings = read_json(path, "") if path.is_file() else {}
    limit = settings.get("model_max_length")
    stated = [(path.name, int(limit))] if isinstance(limit, int | float) and limit < 1e15 else []
    stated += [sentence.limit] if sentence is not None and sentence.limit is not None else []
    used = config.preprocess.max_caption_tokens
    others = [f"{size} of {name}" for name, size in stated if size != used]
    if others:
        rule = "the tower's positions" if used == config.required_text.max_tokens else "--text's limit"
        winner = next((name for name, size in reversed(stated) if size == used), rule)
        yield f"captions up to {used} tokens: {winner} wins over {' and '.join(others)}"
    if settings.get("truncation_side") == "left":
        yield f"longer captions lose their end: truncation_side = left of {path.name} isn't followed"
    if settings.get("split_special_tokens") is True:
        yield f"a special token's name in a caption is that token: split_special_tokens of {path.name} isn't followed"
    if sentence is not None and sentence.lowers_case:
        yield "lower case: do_lower_case of sentence-transformers' settings wins over the tokeniser"


def _has_pooler(folder: Path) -> bool:
    return any("pooler." in name for name in stored_names(folder))
