"""Import of a model whose pictures pass through the layers of its texts: towers, conversation, tokeniser, image sizes.

The checkpoint's own chat template makes the conversation around a text or a picture. What stands in front of a text is
its prompt; what follows it is added by the tokeniser, so that a text that is cut keeps it. Source: the script of
Qwen3-VL-Embedding (8ce3aab): an instruction as the system's message, the item as the user's, and a prompt to answer,
whose last token's vector counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from shards.convert.clip_form import read_clip_form
from shards.convert.pickled_weights import checkpoint_weights
from shards.convert.preprocessing import (
    TOKENIZER_CONFIG_FILE,
    import_processor,
    load_fast_tokenizer,
    max_caption_tokens,
    read_image_settings,
)
from shards.convert.sentence_transformers import MODULES_FILE, SentenceModel, find_sentence_model
from shards.convert.transformers_model import check_all_used, joined_tensor
from shards.file_schema import describe, read_json
from shards.model_config import CONFIG_FILE, TOKENIZER_FILE, ModelConfig
from shards.model_errors import ModelError
from shards.preprocess import INSTRUCTION_PLACE, PreprocessConfig
from shards.saving import staged_model, write_weights
from shards.tensor_shapes import model_shapes
from shards.tokenizer import check_tokenizer, parse_tokenizer
from shards.towers.base import OneTowerImport
from shards.towers.from_transformers import parse_config
from shards.towers.registry import ONE_TOWERS
from shards.towers.tower_kinds import TextTower, VisionTower

if TYPE_CHECKING:
    import torch

INSTRUCTION = "Represent the user's input."
CHAT_FILE, NEW_CHAT_FILE = "chat_template.json", "chat_template.jinja"  # of older and newer processors
MAX_TOKENS = 1800
"""Most tokens of a picture in the embedding model's own script; a chat model's processor allows nine times as many."""
_MARK = "\u2e28mark\u2e29"
_CURE = "save the model's own processor next to it, with the chat template of its embeddings"


@dataclass(frozen=True)
class Conversation:
    """What stands around an item: the prompts of captions and queries, and token ids around a picture.

    `instruction_form` is both prompts with a mark in the place of the instruction; empty if the template has no place.

    `tokenizer_json` adds `after` to each text. `clip` is what is written for a video, empty if nothing, and the token
    in it that stands for its frames.
    """

    caption_prompt: str
    query_prompt: str
    instruction_form: str
    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]
    tokenizer_json: str
    clip: tuple[str, str] = ("", "")


def import_one_tower(
    folder: Path,
    out: Path,
    name: str,
    pair: tuple[str, str] | None = None,
    heads: Callable[[Mapping[str, Path], int, int], Iterator[tuple[str, torch.Tensor]]] | None = None,
) -> ModelConfig:
    """Convert a checkpoint with its processor into a model folder.

    `pair` is as in `read_conversation`; `heads` makes the projections to two values, given the files of tensors, the
    decoder's width and its vocabulary. Raises a ModelError if the checkpoint has something that can't be mapped, or
    lacks something.
    """
    _read_tower(folder)  # before the tokeniser, which transformers reads by the same file
    with checkpoint_weights(folder, out) as files:
        conversation = read_conversation(folder, pair)
        config = _read_config(folder, name, conversation)
        tokenizer = parse_tokenizer(conversation.tokenizer_json, str(folder))
        check_tokenizer(tokenizer, config.required_text, str(folder))
        tensors = _tensors(files, config, folder)
        if heads is not None:
            tensors = chain(tensors, heads(files, config.embedding_dim, config.required_text.num_vocabulary))
            projected = {"vision_projection": "linear", "text_projection": "linear", "projection_bias": True}
            config = config.model_copy(update=projected | {"embedding_dim": 2})
        with staged_model(out, config, conversation.tokenizer_json) as stage:
            write_weights(stage, tensors)
    return config


def read_one_tower_config(folder: Path, name: str) -> ModelConfig:
    """Read the configuration, which needs no weights; without tokeniser or chat template, the conversation is left out.

    Raises a ModelError for what can't be mapped.
    """
    is_chat = _importer(read_json(folder / CONFIG_FILE, "")).is_chat
    has_both = (folder / TOKENIZER_FILE).is_file() and (_has_template(folder) or not is_chat)
    return _read_config(folder, name, read_conversation(folder) if has_both else None, is_complete=False)


def _read_config(
    folder: Path, name: str, conversation: Conversation | None, *, is_complete: bool = True
) -> ModelConfig:
    """Make the configuration; `is_complete` says whether the folder must have an image processor."""
    path, tower = folder / CONFIG_FILE, _read_tower(folder)
    vision = None if isinstance(tower, TextTower) else tower
    text: TextTower = tower if isinstance(tower, TextTower) else tower.shared_decoder  # type: ignore[assignment]
    _check_modules(find_sentence_model(folder), text)
    ids = {} if conversation is None else {f"ids_{key}": getattr(conversation, key) for key in _PARTS}
    limit = max_caption_tokens(folder, text)
    try:
        if vision is None:
            preprocess = PreprocessConfig(max_caption_tokens=limit)
        else:
            vision = vision.model_validate(vision.model_dump() | _budget(folder, vision, is_complete=is_complete) | ids)
            preprocess = import_processor(
                folder, vision.side_px, limit, is_required=is_complete, patch_px=vision.patch_px
            )
            if conversation is not None and is_complete:
                tree = read_json(path, "")
                found = _importer(tree)
                theirs = parse_config(found.config_class, tree, path)
                clips = read_clip_form(folder, found, theirs, conversation.clip, preprocess)
                preprocess = preprocess.model_copy(update={"clips": clips})
        _check_limit(folder, preprocess, conversation)
        return ModelConfig(
            name=name,
            trained=True,
            embedding_dim=tower.pooled_dim,
            vision_projection="none",
            text_projection="none",
            vision=vision,
            text=text,
            preprocess=_with_prompts(preprocess, conversation),
        )
    except ValidationError as error:
        raise ModelError(f"{path}: {describe(error)}") from None


_PARTS = ("before", "between", "after")


def _read_tower(folder: Path) -> VisionTower | TextTower:
    """Read the vision tower with its decoder, or only a text tower; raises a ModelError for what can't be mapped."""
    path = folder / CONFIG_FILE
    tree = read_json(path, "give the folder of a model that transformers saved")
    found = _importer(tree)
    tower: VisionTower | TextTower = found.read(parse_config(found.config_class, tree, path), path)
    return tower


def _check_limit(folder: Path, preprocess: PreprocessConfig, conversation: Conversation | None) -> None:
    """Raise a ModelError for a limit of captions that the conversation around them fills."""
    around = 0 if conversation is None else len(conversation.before) + len(conversation.after)
    if preprocess.max_caption_tokens <= around:
        raise ModelError(
            f"{folder}: captions are cut at {preprocess.max_caption_tokens} tokens, and the conversation around one "
            f"has {around}, so that all would be alike; raise model_max_length or max_seq_length"
        )


def _importer(tree: Mapping[str, Any]) -> OneTowerImport:
    return ONE_TOWERS[str(tree.get("model_type"))]


def _with_prompts(preprocess: PreprocessConfig, conversation: Conversation | None) -> PreprocessConfig:
    if conversation is None:
        return preprocess
    prompts = {key: getattr(conversation, key) for key in ("caption_prompt", "query_prompt", "instruction_form")}
    return preprocess.model_copy(update=prompts)


def _check_modules(sentence: SentenceModel | None, text: TextTower) -> None:
    """Raise a ModelError unless sentence-transformers' modules, if any, pool as the model does, and no more."""
    own = text.pool  # type: ignore[attr-defined]
    if sentence is not None and (sentence.pools != (own,) or sentence.dense is not None or sentence.lowers_case):
        wanted = {"last": "the last token's vector"}.get(own, f"the {own} of the tokens")
        raise ModelError(
            f"{sentence.root / MODULES_FILE}: sentence-transformers' modules around a {text.label} are "
            f"{' + '.join(sentence.pools) or 'none'} of the tokens{' and Dense' if sentence.dense else ''}; only "
            f"{wanted}, without a change of case, can be imported"
        )


def _budget(folder: Path, vision: VisionTower, *, is_complete: bool) -> dict[str, int]:
    """Read how many patches an image may have from the image processor; raises a ModelError if it doesn't fit."""
    found = read_image_settings(folder, is_required=is_complete)
    if found is None:
        return {}
    path, settings = found
    side = vision.patch_px or 1
    fills = not vision.fewest_patches
    expected = {"patch_size": side, "pooling_kernel_size" if fills else "merge_size": vision.merge_size}
    expected["temporal_patch_size"] = getattr(vision, "temporal_patch_size", 1)
    for key, value in expected.items():
        if settings.get(key, value) != value:
            raise ModelError(f"{path}: {key} = {settings[key]!r}: the model has {value}; save its own image processor")
    if fills:
        most = settings.get("max_soft_tokens")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ModelError(f"{path}: max_soft_tokens = {most!r}: expected a number of tokens, from 1 up")
        return {"max_patches": most * vision.merge_size**2}
    size = settings.get("size") or {}
    limits = {
        "min_patches": settings.get("min_pixels") or size.get("shortest_edge"),
        "max_patches": settings.get("max_pixels") or size.get("longest_edge"),
    }
    pixels = side**2
    for key, limit in limits.items():
        if not isinstance(limit, int) or limit < pixels or limit % pixels:
            raise ModelError(
                f"{path}: size = {size}: expected shortest_edge and longest_edge in pixels of an image, multiples of a "
                f"patch's {pixels}; {key} would be {limit!r} / {pixels}"
            )
    most = MAX_TOKENS * vision.merge_size**2
    return {key: min(int(limit or 0) // pixels, most) for key, limit in limits.items()}


def read_conversation(folder: Path, pair: tuple[str, str] | None = None) -> Conversation:
    """Read the conversation around an item from tokeniser and chat template.

    `pair` is that of a re-ranker: the system's message, and what the user's begins with in front of the item. Raises a
    ModelError if there is none, or it isn't the same around a text and a picture.
    """
    tree = read_json(folder / CONFIG_FILE, "give the folder of a model that transformers saved")
    tokenizer = load_fast_tokenizer(folder)
    if not _importer(tree).is_chat:
        return _read_frame(folder, tokenizer, tree)
    is_new = (folder / NEW_CHAT_FILE).is_file()  # it is the tokeniser's, too; else the older processor's file wins
    template = tokenizer.chat_template if is_new else _old_template(folder) or tokenizer.chat_template
    picture_id = tree.get("image_token_id")
    picture = tokenizer.convert_ids_to_tokens(picture_id) if isinstance(picture_id, int) else None
    if not isinstance(template, str) or not picture:
        raise ModelError(f"{folder}: found no chat template, or no token of image_token_id; {_CURE}")
    sentence = find_sentence_model(folder)
    captions, queries = (sentence.caption_prompt, sentence.query_prompt) if sentence is not None else ("", "")
    if pair is not None:
        captions = queries = pair[0]
    front = "" if pair is None else pair[1]
    forms = [_forms(folder, tokenizer, template, picture, each or INSTRUCTION, front) for each in (captions, queries)]
    (caption_prompt, between, end), (query_prompt, *others) = forms
    if others != [between, end]:
        raise ModelError(f"{folder}: the chat template ends a query otherwise than a caption; {_CURE}")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    whole = backend.encode(f"{caption_prompt}{between}{end}").ids
    place = whole.index(picture_id) if whole.count(picture_id) == 1 else -1
    inner = _ids(backend, between.rpartition(picture)[2])
    rest = whole[place + 1 :]
    if place < 0 or rest[: len(inner)] != inner:
        raise ModelError(f"{folder}: the tokeniser joins {picture!r} with what stands next to it; {_CURE}")
    after = tuple(rest[len(inner) :])
    content = _with_end(backend, after, caption_prompt, end, folder)
    prompts = {captions: caption_prompt, queries: query_prompt}
    form = _instruction_form(folder, tokenizer, template, prompts) if pair is None else ""
    clip = ("", "") if pair is not None else _clip(folder, tokenizer, template, tree, (captions, caption_prompt, end))
    return Conversation(caption_prompt, query_prompt, form, tuple(whole[:place]), tuple(inner), after, content, clip)


def _clip(
    folder: Path, tokenizer: Any, template: str, tree: Mapping[str, Any], around: tuple[str, str, str]
) -> tuple[str, str]:
    """Return what a template writes for a video, and the token that stands for its frames; empty if it writes none.

    `around` has the instruction, and what is written in front of an item and behind it.
    """
    instruction, start, end = around
    number = tree.get("video_token_id")
    place = tokenizer.convert_ids_to_tokens(number) if isinstance(number, int) else None
    whole = _render(folder, tokenizer, template, instruction or INSTRUCTION, [{"type": "video", "video": ""}])
    inner = whole.removeprefix(start).removesuffix(end)
    return (inner, place) if place and whole == start + inner + end and inner.count(place) == 1 else ("", "")


def _read_frame(folder: Path, tokenizer: Any, tree: Mapping[str, Any]) -> Conversation:
    """Read what stands around an item without a chat template: the tokeniser's own tokens, and those of a picture.

    Prompts stand only before texts. Source: transformers 5.23, `EmbeddingGemma2Processor.replace_image_token`.
    """
    sentence, backend = find_sentence_model(folder), tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    before: tuple[int, ...] = ()
    between, after = before, before
    if tree.get("vision_config") is not None:
        marks = [str(getattr(tokenizer, f"{key}_token", None)) for key in ("boi", "image", "eoi")]
        whole, frame = backend.encode("".join(marks)).ids, [backend.token_to_id(mark) for mark in marks]
        picture = tree.get("image_token_id", frame[1])
        place = whole.index(picture) if whole.count(picture) == 1 else -1
        if place < 1 or whole[place - 1 : place + 2] != frame:
            raise ModelError(
                f"{folder}: the tokeniser has {', '.join(marks)} around a picture, and image_token_id is {picture}; "
                "save the model's own tokeniser next to it"
            )
        before, between, after = tuple(whole[:place]), (frame[2],), tuple(whole[place + 2 :])
    captions, queries = (sentence.caption_prompt, sentence.query_prompt) if sentence is not None else ("", "")
    place = (
        tokenizer.convert_ids_to_tokens(tree["video_token_id"]) if isinstance(tree.get("video_token_id"), int) else ""
    )
    clip = (f"{tokenizer.boi_token}{place}{tokenizer.eoi_token}", place) if between and place else ("", "")
    return Conversation(captions, queries, "", before, between, after, backend.to_str(), clip)


def _instruction_form(folder: Path, tokenizer: Any, template: str, prompts: Mapping[str, str]) -> str:
    """Return the prompts, given by instruction, with a mark in its place; empty if the template writes it otherwise."""
    content = [{"type": "text", "text": _MARK}]
    form = _render(folder, tokenizer, template, INSTRUCTION_PLACE, content).partition(_MARK)[0]
    fits = all(form.replace(INSTRUCTION_PLACE, given or INSTRUCTION) == made for given, made in prompts.items())
    return form if fits and form.count(INSTRUCTION_PLACE) == 1 else ""


def _forms(
    folder: Path, tokenizer: Any, template: str, picture: str, instruction: str, front: str
) -> tuple[str, str, str]:
    """Return what the template writes in front of an item, for a picture, and behind the item."""
    text, image = {"type": "text", "text": _MARK}, {"type": "image", "image": ""}
    lead = [{"type": "text", "text": front}] if front else []
    of_text = _render(folder, tokenizer, template, instruction, [*lead, text])
    start, mark, end = of_text.partition(_MARK)
    of_both = _render(folder, tokenizer, template, instruction, [*lead, image, text])
    inner = of_both.removeprefix(start).removesuffix(mark + end)
    of_picture = _render(folder, tokenizer, template, instruction, [*lead, image])
    is_same = of_picture == start + inner + end and of_both == f"{start}{inner}{mark}{end}"
    if not mark or inner.count(picture) != 1 or not is_same:
        raise ModelError(
            f"{folder}: the chat template writes {of_text[:80]!r} around a text and {of_both[:120]!r} with a picture; "
            f"expected the same with {picture!r} in front of the text; {_CURE}"
        )
    return start, inner, end


def _render(folder: Path, tokenizer: Any, template: str, instruction: str, content: list[dict[str, str]]) -> str:
    """Render a conversation; transformers does so in a sandbox of Jinja."""
    messages = [
        {"role": "system", "content": [{"type": "text", "text": instruction}]},
        {"role": "user", "content": content},
    ]
    from jinja2 import TemplateError

    try:
        found: str = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{folder}: the chat template can't be used ({reason}); {_CURE}") from None
    return found


def _has_template(folder: Path) -> bool:
    path = folder / TOKENIZER_CONFIG_FILE
    in_settings = path.is_file() and "chat_template" in read_json(path, "fetch it again")
    return in_settings or any((folder / name).is_file() for name in (CHAT_FILE, NEW_CHAT_FILE))


def _old_template(folder: Path) -> Any:
    path = folder / CHAT_FILE
    return read_json(path, "fetch it again").get("chat_template") if path.is_file() else None


def _ids(backend: Any, text: str) -> list[int]:
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


def _with_end(backend: Any, after: tuple[int, ...], prompt: str, end: str, folder: Path) -> str:
    """Return the tokenizer.json that ends each text with the conversation's last tokens; raises a ModelError."""
    from tokenizers import Tokenizer, processors

    sample = f"{prompt}{INSTRUCTION}"
    expected = backend.encode(sample + end).ids
    tokenizer = Tokenizer.from_str(backend.to_str())
    special = {"id": "<end>", "ids": list(after), "tokens": [str(backend.id_to_token(each)) for each in after]}
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[special])
    if tokenizer.encode(sample).ids != expected:
        raise ModelError(
            f"{folder}: the tokeniser joins a text with what ends the conversation ({end!r}), or begins it with "
            f"its own token; {_CURE}"
        )
    content: str = tokenizer.to_str()
    return content


def _tensors(files: Mapping[str, Path], config: ModelConfig, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's tensors in order."""
    tree = read_json(folder / CONFIG_FILE, "")
    found, shapes = _importer(tree), model_shapes(config)
    prefixes, depth = found.prefixes_in(files), config.num_layers["text"]
    places = {name: found.place_of(name, depth) for name in shapes}
    theirs = {name: prefixes[place.prefix] + place.name for name, place in places.items()}
    unused = () if config.vision is not None else tuple(each for key, each in prefixes.items() if key != "text")
    check_all_used(files, set(theirs.values()), (*found.ignored, *unused), {"vision": str(tree.get("model_type"))})
    for name, shape in shapes.items():
        yield name, joined_tensor(files, (theirs[name],), shape, places[name].rows)
