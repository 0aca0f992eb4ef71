"""Conversion of SigLIP's tokeniser, a SentencePiece model behind Python code, to a tokenizer.json with the same ids.

Source: transformers 5.23, `SiglipTokenizer.canonicalize_text` and `_tokenize`; SentencePiece 0.2, `Normalizer` and
`unigram::Model`.
"""

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shards.file_schema import read_json
from shards.model_config import CONFIG_FILE
from shards.model_errors import ModelError

SPIECE_FILE = "spiece.model"
TOKENIZER_CLASS = "SiglipTokenizer"

# SentencePiece's kinds of models and pieces.
_UNIGRAM = 1
_USER_DEFINED, _UNUSED = 4, 5

_SPACE = "▁"
_PUNCTUATION = f"[{re.escape(string.punctuation)}]"
_WHITESPACE = r"[\s\x{1c}-\x{1f}]+"  # as Python defines it
# Python lower-cases a capital sigma at the end of a word to a final one; points and apostrophes don't end a word.
_CASED, _IGNORED = r"[\p{Lowercase}\p{Uppercase}\p{Lt}]", r"[\p{M}\p{Cf}\p{Lm}\p{Sk}.:'\x{2019}\x{b7}\x{2027}]"
FINAL_SIGMA = rf"(?<={_CASED}|{_CASED}{_IGNORED})Σ(?!{_IGNORED}*{_CASED})"


def is_siglip_tokenizer(folder: Path, settings: Mapping[str, object]) -> bool:
    """Whether transformers would open a checkpoint's tokeniser as SiglipTokenizer.

    `settings` is the content of its tokenizer_config.json; empty if there is none.
    """
    found = settings.get("tokenizer_class")
    if found is not None:
        return str(found).removesuffix("Fast") == TOKENIZER_CLASS
    has_files = (folder / SPIECE_FILE).is_file() and (folder / CONFIG_FILE).is_file()
    return has_files and read_json(folder / CONFIG_FILE, "").get("model_type") == "siglip"


def convert_siglip_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tuple[Any, str]:
    """Convert spiece.model to a tokeniser of tokenizers, and its padding token, or raise a ModelError."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    path = folder / SPIECE_FILE
    proto = _read_proto(path)
    _check_pieces(proto, path)
    eos, unk, pad = (
        _content(settings.get(f"{key}_token"), default)
        for key, default in (("eos", "</s>"), ("unk", "<unk>"), ("pad", "</s>"))
    )
    tokenizer = Tokenizer(
        models.Unigram(
            [(piece.piece, piece.score) for piece in proto.pieces],
            unk_id=proto.trainer_spec.unk_id,
            byte_fallback=proto.trainer_spec.byte_fallback,
        )
    )
    tokenizer.normalizer = _normaliser(proto, lower_case=bool(settings.get("do_lower_case", True)))
    tokenizer.decoder = decoders.Metaspace(_SPACE, prepend_scheme="always", split=False)
    flags = {name: {"lstrip": True, "rstrip": True} for name in (eos, unk, pad)}
    for added in settings.get("added_tokens_decoder", {}).values():
        flags[added["content"]] = {key: bool(added.get(key)) for key in ("lstrip", "rstrip", "single_word")}
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, **each) for name, each in flags.items()])
    end = (eos, tokenizer.token_to_id(eos))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {eos}", special_tokens=[end])
    return tokenizer, pad


def _normaliser(proto: Any, *, lower_case: bool) -> Any:
    """Convert SiglipTokenizer's steps to canonical text, then SentencePiece's own.

    Unlike the library, it adds no space after a special token that the caption itself contains ("a</s>b").
    """
    from tokenizers import Regex, normalizers

    steps = [normalizers.Replace(_SPACE, " "), normalizers.Prepend(_SPACE)]
    if lower_case:
        steps += [normalizers.Replace(Regex(FINAL_SIGMA), "ς"), normalizers.Lowercase()]
    steps += [
        normalizers.Replace(Regex(_PUNCTUATION), ""),
        normalizers.Replace(Regex(_WHITESPACE), " "),
        normalizers.Strip(left=False, right=True),
    ]
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    return normalizers.Sequence(
        [
            *steps,
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Replace(" ", _SPACE),
            normalizers.Replace(Regex(f"{_SPACE}+\\z"), ""),
        ]
    )


def _read_proto(path: Path) -> Any:
    from transformers.convert_slow_tokenizer import import_protobuf

    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; a {TOKENIZER_CLASS} needs it, fetch it again") from None
    try:
        protobuf = import_protobuf()
    except ImportError:
        raise ModelError(f"{path}: SentencePiece models are read with protobuf; pip install protobuf") from None
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    proto = protobuf.ModelProto()
    try:
        proto.ParseFromString(content)
    except DecodeError:
        proto.Clear()
    if not proto.pieces:
        raise ModelError(f"{path}: this is no SentencePiece model; fetch it again")
    return proto


def _check_pieces(proto: Any, path: Path) -> None:
    """Raise a ModelError unless a Unigram of the tokenizers library would find the same pieces."""
    if proto.trainer_spec.model_type != _UNIGRAM or not proto.normalizer_spec.remove_extra_whitespaces:
        raise ModelError(
            f"{path}: only a Unigram model that removes extra whitespace can be converted; save a tokenizer.json "
            "next to it, without tokenizer_config.json"
        )
    for piece in proto.pieces:
        # Canonical text has no punctuation, so pieces with some, like <extra_id_0>, are never found.
        if piece.type in (_USER_DEFINED, _UNUSED) and not re.search(_PUNCTUATION, piece.piece):
            raise ModelError(
                f"{path}: the piece {piece.piece!r} is user-defined or unused, which can't be converted; save a "
                "tokenizer.json next to it, without tokenizer_config.json"
            )


def _content(token: Any, default: str) -> str:
    """Return the text of a token, which tokenizer_config.json has as such or in an object."""
    if isinstance(token, dict):
        return str(token["content"])
    return default if token is None else str(token)
