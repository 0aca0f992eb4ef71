"""Which texts a tokeniser knows a word of: for each kind of tokeniser that models have."""

from pathlib import Path

import pytest
import tiny_tokenizers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import embedder
from shards.tokenizer import knows_a_word, parse_tokenizer

DEMO = Path(embedder.__file__).parent / "demo_model" / "tokenizer.json"


def unigram_of_the_demo() -> Tokenizer:
    return parse_tokenizer(DEMO.read_text(encoding="utf-8"), "demo")


def clip() -> Tokenizer:
    """Byte-level BPE whose token for what it doesn't know is the one that ends a text, as CLIP's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{character}</w>" for character in alphabet), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    end, start = vocabulary["<|endoftext|>"], vocabulary["<|startoftext|>"]
    tokenizer = Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.RobertaProcessing(("<|endoftext|>", end), ("<|startoftext|>", start))
    return tokenizer


def fixed_length() -> Tokenizer:
    """Unigrams that pad to one length with a token of their own and end each text, as SigLIP's."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0), ("\u2581cat", -3.0), ("!", -4.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, 2, False))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="<pad>")
    return tokenizer


def bytes_for_the_rest() -> Tokenizer:
    """BPE that writes what it doesn't know as bytes, as Gemma's."""
    pieces = ["<unk>", "\u2581", "a", *(f"<0x{number:02X}>" for number in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "cat": 1, "!": 2, "?": 3, "-": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def backend(tokenizer) -> Tokenizer:
    return tokenizer.backend_tokenizer


TOKENIZERS = {
    "the demo's": unigram_of_the_demo,
    "BERT's": lambda: backend(tiny_tokenizers.wordpiece()),
    "XLM-RoBERTa's": lambda: backend(tiny_tokenizers.unigram()),
    "SigLIP's": fixed_length,
    "words": of_words,
}
KNOWS_ALL = {
    "CLIP's": clip,
    "RoBERTa's": lambda: backend(tiny_tokenizers.byte_level_bpe()),
    "Gemma's": bytes_for_the_rest,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_of_which_no_word_is_known_is_recognised(name):
    tokenizer = TOKENIZERS[name]()
    for text in ("снег", "שלג", "ሰላም", "снег идёт", "ሰላም - снег"):
        assert not knows_a_word(tokenizer, text), text
    for text in ("cat", "снег cat", "ሰላም cat שלג"):
        assert knows_a_word(tokenizer, text), text


@pytest.mark.parametrize("name", KNOWS_ALL)
def test_a_tokeniser_of_bytes_knows_every_word(name):
    tokenizer = KNOWS_ALL[name]()
    for text in ("cat", "снег", "שלג", "ሰላም", "猫", "🐱", "£ 5"):
        assert knows_a_word(tokenizer, text), text


def test_punctuation_is_no_word_beside_what_is_not_known():
    tokenizer = unigram_of_the_demo()
    for text in ("猫!", "«猫»", "🫨 ?", "( 猫 ) - ..."):
        assert not knows_a_word(tokenizer, text), text
    assert knows_a_word(tokenizer, "!?"), "there is no word that it doesn't know"
    assert knows_a_word(tokenizer, "猫 2")


def test_pieces_of_words_and_special_tokens():
    tokenizer = unigram_of_the_demo()
    assert knows_a_word(tokenizer, "Häuser"), "all but a letter"
    assert not knows_a_word(of_words(), "unknownword")
    assert not knows_a_word(fixed_length(), "猫"), "padding and the end are no words"
    assert not knows_a_word(backend(tiny_tokenizers.wordpiece()), "\u200b"), "nothing is left of it"
