"""Which texts a tokeniser knows a word of: for each kind of tokeniser that models have."""

from pathlib import Path

import pytest
import tiny_tokenizers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

import embedder
from shards.tokenizer import find_unread_script, knows_a_word, parse_tokenizer

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


FOREIGN = ["снег", "שלג", "ሰላም", "снег идёт", "ሰላም - снег"]
CATS = ["cat", "снег cat", "ሰላም cat שלג"]
ALL = ["cat", "снег", "שלג", "ሰላም", "猫", "🐱", "£ 5"]
# By tokeniser: texts of which it knows no word, and others.
TOKENIZERS = {
    # Punctuation is no word next to what is not known; all but a letter of a word is enough.
    "the demo's": (
        unigram_of_the_demo,
        [*FOREIGN, "猫!", "«猫»", "🫨 ?", "( 猫 ) - ..."],
        [*CATS, "!?", "猫 2", "Häuser"],
    ),
    "BERT's": (lambda: backend(tiny_tokenizers.wordpiece()), [*FOREIGN, "\u200b"], CATS),  # nothing is left of it
    "XLM-RoBERTa's": (lambda: backend(tiny_tokenizers.unigram()), FOREIGN, CATS),
    "SigLIP's": (fixed_length, [*FOREIGN, "猫"], CATS),  # padding and the end are no words
    "words": (of_words, [*FOREIGN, "unknownword"], CATS),
    # Those of bytes know every word.
    "CLIP's": (clip, [], ALL),
    "RoBERTa's": (lambda: backend(tiny_tokenizers.byte_level_bpe()), [], ALL),
    "Gemma's": (bytes_for_the_rest, [], ALL),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_of_which_no_word_is_known_is_recognised(name):
    make, unknown, known = TOKENIZERS[name]
    tokenizer = make()
    assert {text: knows_a_word(tokenizer, text) for text in unknown} == dict.fromkeys(unknown, False)
    assert {text: knows_a_word(tokenizer, text) for text in known} == dict.fromkeys(known, True)


@pytest.fixture(scope="module")
def real_clip():
    """OpenAI's own vocabulary, which open_clip brings."""
    open_clip = pytest.importorskip("open_clip")
    from transformers import CLIPTokenizer

    own = open_clip.SimpleTokenizer()
    return backend(CLIPTokenizer(vocab=own.encoder, merges=list(own.bpe_ranks)))


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("красная машина на дороге", "Cyrillic"),
        ("κόκκινο αυτοκίνητο στο δρόμο", "Greek"),
        ("红色的汽车在路上", "Chinese characters"),
        ("猫", "Chinese characters"),
        ("赤い車が道路にある", "Hiragana"),
        ("도로 위의 빨간 자동차", "Hangul"),
        ("سيارة حمراء على الطريق", "Arabic"),
        ("सड़क पर लाल कार", "Devanagari"),
        ("รถสีแดงบนถนน", "Thai"),
        ("a red car on the road", None),
        ("a red car 猫", None),
        ("ein rotes Auto auf der Straße, Öl, Müll", None),
        ("czerwony samochód na drodze", None),
        ("naïve α-helix", None),
        ("xyz 123 !?", None),
        ("🙂🐈", None),
        ("❤️ ☀️", None),
        ("ｃａｔ ª", None),
        ("", None),
    ],
)
def test_the_script_that_clips_own_vocabulary_only_spells_out_is_named(real_clip, text, script):
    assert find_unread_script(real_clip, text) == script


def test_a_tokeniser_of_the_language_reads_its_script():
    chinese = backend(tiny_tokenizers.wordpiece())  # has a token for each of these
    assert find_unread_script(chinese, "红色的汽车") is None
    assert find_unread_script(chinese, "黑猫") == "Chinese characters"  # it has only a token for the unknown
    assert find_unread_script(unigram_of_the_demo(), "снег и дождь") == "Cyrillic"
