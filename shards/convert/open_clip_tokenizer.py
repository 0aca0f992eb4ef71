"""Tokenisers of open_clip's checkpoints: those of transformers, cleaned as open_clip cleans, and open_clip's own.

Source: open_clip 3.3, tokenizer.py, and ftfy 6.3, chardata.py. Wrongly decoded text and rare HTML entities, which these
repair, stay as they are: no tokenizer.json can express that.
"""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unicodedata import normalize

from shards.convert.open_clip_config import TextSection
from shards.convert.preprocessing import TOKENIZER_CONFIG_FILE, import_tokenizer
from shards.convert.siglip_tokenizer import FINAL_SIGMA
from shards.file_schema import read_json
from shards.model_config import TOKENIZER_FILE
from shards.model_errors import ModelError
from shards.tokenizer import check_tokenizer, parse_tokenizer
from shards.towers.tower_kinds import TextTower

VOCABULARY_FILE, MERGES_FILE = "vocab.json", "merges.txt"
_OWN_VOCABULARY_FILE = "bpe_simple_vocab_16e6.txt.gz"
_START, _END = "<|startoftext|>", "<|endoftext|>"
_OWN_NAMES = {_START: "<start_of_text>", _END: "<end_of_text>"}
# What ftfy removes, or replaces by plain letters and quotes; and the HTML entities of ASCII and the space.
_CONTROLS = r"[\x{0}-\x{8}\x{b}\x{e}-\x{1f}\x{7f}\x{206a}-\x{206f}\x{feff}\x{fff9}-\x{fffc}]"
_SINGLE_QUOTES, _DOUBLE_QUOTES = r"[\x{2bc}\x{2018}-\x{201b}]", r"[\x{201c}-\x{201f}]"
_LIGATURES = (0x132, 0x133, *range(0x1C4, 0x1CD), *range(0x1F1, 0x1F4), *range(0xFB00, 0xFB05), 0xFB06)
_FULL_WIDTH = (0x3000, *range(0xFF01, 0xFF5F))
_PLAIN = {chr(code): normalize("NFKC", chr(code)) for code in (*_LIGATURES, *_FULL_WIDTH)}
_ENTITIES = {"&amp;amp;": "&", "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#39;": "'", "&nbsp;": " "}
# Of the 49,408 tokens, 256 are bytes, 256 bytes at a word's end, two start and end; the others are merges.
_NUM_MERGES = 49152 - 256 - 2


def import_open_clip_tokenizer(folder: Path, section: TextSection, text: TextTower) -> tuple[str, TextTower]:
    """Read a checkpoint's tokenizer.json, and complete the tower, which pools where that tokeniser's captions end.

    `section` is `text_cfg`; `text` is the tower as far as that describes it. Raises a ModelError if there is no
    tokeniser, or it doesn't fit the tower.
    """
    if any((folder / name).is_file() for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE)):
        tokenizer = parse_tokenizer(import_tokenizer(folder, text), str(folder))
    elif section.hf_tokenizer_name:
        raise ModelError(
            f"{folder}: found no {TOKENIZER_FILE}, and text_cfg.hf_tokenizer_name = {section.hf_tokenizer_name!r}; "
            "save that tokeniser next to the model"
        )
    else:
        tokenizer = _own_tokenizer(folder)
    if not section.hf_tokenizer_name:
        tokenizer = _with_own_names(tokenizer)
    if text.has_fixed_length and not section.hf_tokenizer_name:  # open_clip's own pads with zeros
        tokenizer.enable_padding(length=section.context_length, pad_id=0, pad_token=tokenizer.id_to_token(0))
    check_tokenizer(tokenizer, text, str(folder))
    _clean(tokenizer, section, folder)
    text = _with_ids(tokenizer, section, text, folder)
    content: str = tokenizer.to_str()
    return content, text


def _with_ids(tokenizer: Any, section: TextSection, text: TextTower, folder: Path) -> TextTower:
    """Set the ids of padding and of the end token.

    open_clip pools at the first occurrence of the highest id, or of the id that it names.
    """
    is_padded = text.has_fixed_length
    if is_padded:
        text = text.model_copy(update={"pad_token_id": tokenizer.padding["pad_id"]})
    if text.end_id is None and not (is_padded and section.pool_type == "argmax"):
        return text
    ids = tokenizer.encode("").ids
    end = max(ids) if is_padded else ids[-1]
    expected = section.eos_id if section.pool_type == "eos" else max(tokenizer.get_vocab().values())
    if end != expected:
        raise ModelError(
            f"{folder}: captions end with the token {end}, and text_cfg.pool_type {section.pool_type!r} pools at "
            f"{expected}; bring the tokeniser that this model was trained with"
        )
    return text if is_padded else text.model_copy(update={"eos_token_id": end, "pad_token_id": end})


def _clean(tokenizer: Any, section: TextSection, folder: Path) -> None:
    """Put open_clip's cleaning before a tokeniser's own normaliser, and replace [SEP] by [PAD] where open_clip does.

    Source: open_clip 3.3, `get_clean_fn` and `HFTokenizer`.
    """
    from tokenizers import Regex, normalizers

    settings = dict(section.tokenizer_kwargs or {})
    clean = settings.pop("clean", "whitespace" if section.hf_tokenizer_name else "lower")
    if settings.pop("strip_sep_token", False):
        _end_with_padding(tokenizer)
    if settings or clean not in ("whitespace", "lower", "canonicalize"):
        raise ModelError(
            f"{folder}: text_cfg.tokenizer_kwargs = {section.tokenizer_kwargs}; can be imported: strip_sep_token, and "
            "clean = 'whitespace', 'lower' or 'canonicalize'"
        )
    steps: list[Any] = [normalizers.Replace(*pair) for pair in (_ENTITIES | _PLAIN).items()]
    steps += [
        normalizers.Replace(Regex(_SINGLE_QUOTES), "'"),
        normalizers.Replace(Regex(_DOUBLE_QUOTES), '"'),
        normalizers.Replace(Regex(_CONTROLS), ""),
        normalizers.NFC(),
    ]
    if clean == "canonicalize":
        steps += [normalizers.Replace("_", " "), normalizers.Replace(Regex(r"[!-/:-@\[-`{-~]"), "")]
    if clean != "whitespace":
        steps += [normalizers.Replace(Regex(FINAL_SIGMA), "ς"), normalizers.Lowercase()]
    steps += [normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
    own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
    tokenizer.normalizer = normalizers.Sequence([*steps, *own])


def _end_with_padding(tokenizer: Any) -> None:
    """End captions with the token 0, where open_clip replaces [SEP] by it."""
    from tokenizers.processors import TemplateProcessing

    start, zero = tokenizer.encode("").tokens[0], tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(
        single=f"{start} $A {zero}", special_tokens=[(start, tokenizer.token_to_id(start)), (zero, 0)]
    )


def _with_own_names(tokenizer: Any) -> Any:
    """Name start and end as open_clip's own tokeniser does, to which CLIP's names in a caption are text like other."""
    content: str = tokenizer.to_str()
    for name, own in _OWN_NAMES.items():  # also in the pattern by which a caption is split
        content = content.replace(name, own).replace(name.replace("|", r"\\|"), own)
    return parse_tokenizer(content, TOKENIZER_FILE)


def _own_tokenizer(folder: Path) -> Any:
    """Build CLIP's tokeniser from the folder's vocabulary, or from that of an installed open_clip."""
    from transformers import CLIPTokenizer

    files = folder / VOCABULARY_FILE, folder / MERGES_FILE
    if all(path.is_file() for path in files):
        vocabulary: Any = read_json(files[0], "save CLIP's vocabulary next to the model")
        lines = files[1].read_text(encoding="utf-8").splitlines()[1:]
        merges = [tuple(line.split()) for line in lines if line]
    else:
        vocabulary, merges = _own_vocabulary(folder)
    return CLIPTokenizer(vocab=vocabulary, merges=merges).backend_tokenizer


def _own_vocabulary(folder: Path) -> tuple[dict[str, int], list[tuple[str, ...]]]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    package = find_spec("open_clip")
    if package is None or package.origin is None:
        raise ModelError(
            f"{folder}: found no tokeniser ({TOKENIZER_FILE}, or {VOCABULARY_FILE} with {MERGES_FILE}); save CLIP's "
            "next to the model, or install open_clip_torch, which comes with its vocabulary"
        )
    with gzip.open(Path(package.origin).parent / _OWN_VOCABULARY_FILE, "rt", encoding="utf-8") as file:
        merges = [tuple(line.split()) for line in file.read().split("\n")[1 : _NUM_MERGES + 1]]
    letters = list(bytes_to_unicode().values())
    tokens = [*letters, *(f"{each}</w>" for each in letters), *("".join(pair) for pair in merges), _START, _END]
    return {token: number for number, token in enumerate(tokens)}, merges
